"""One workload, all contenders: each in its own process, one computing at a time, taking turns on the same cohorts."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.operations import operations
from benchmarks.peers import PACKAGES, install, python_of
from benchmarks.processes import ContenderError, Process, own_python
from benchmarks.workloads import Workload, workload
from fedkeep.experiments.simulate import ENGINES
from fedkeep.kernels import native

OURS = "fedkeep_"
WANTED_ENGINES = ("sequential", "workers", "vectorised", "auto")
BASES = ("plain", "plain_padded", "pfl", "flower")  # what ratios are taken over
OTHER = "plain_other_threads"  # the plain loop with the number of threads that was a near second in a trial
TRIES, LONG = 9, 1.0  # of each number of threads; rounds of more seconds than this are tried twice
HOPELESS = 1.5  # times the best: a number of threads that is not tried on


@dataclass(frozen=True)
class Setting:
    """What all races have in common."""

    quick: bool
    device: str
    peers: Path
    install_peers: bool
    patience: float
    chosen: tuple[str, ...] | None

    def contenders(self, of: Workload) -> list[str]:
        """Return the contenders of a workload, those that can't run included."""
        names = ["plain", *[OURS + e for e in WANTED_ENGINES if self.device == "cpu" or e != "workers"]]
        if self.device == "cpu":
            names += ["plain_two_processes", *PACKAGES]
            names += ["plain_padded"] if of.name == "W1 ragged" else []
        return [n for n in names if n == "plain" or self.chosen is None or n in self.chosen]


@dataclass
class Entry:
    """A contender in a race: its process while it runs, and what was measured."""

    name: str
    process: Process | None = None
    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    cpu: float = 0.0
    peak_mb: float = math.nan
    errors: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan
    facts: dict[str, str] = field(default_factory=dict)


class Race:
    """A workload's contenders, started one after the other."""

    def __init__(self, setting: Setting, name: str, cohort: int | None) -> None:
        self.setting, self.of = setting, workload(name, cohort, setting.quick)
        self.cohort = cohort
        self.entries = {n: Entry(n) for n in setting.contenders(self.of)}
        self.threads: int | None = None
        self.other_threads: int | None = None
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        self.peak = 0.0  # operations per second of all cores

    def run(self, turns: int, double: bool) -> None:
        """Compare results, then measure ``turns`` turns."""
        try:
            self.choose_threads()
            for entry in self.entries.values():
                if entry.process is None:
                    self.attempt(entry, self.start)
                self.attempt(entry, self.warm_up)
            for turn in range(1, turns + 1):
                self.turn(turn)
            for entry in self.entries.values():
                self.attempt(entry, self.finish)
        finally:
            for entry in self.entries.values():
                self.stop(entry)
        if double:
            self.compare_double()

    def attempt(self, entry: Entry, action: Any) -> None:
        """Do something with a contender; note why it can't be measured, if that is so."""
        if entry.reason is not None:
            return
        try:
            action(entry)
        except ContenderError as error:
            entry.reason = str(error)
            self.stop(entry)
            print(f"  {entry.name}: not measured: {entry.reason}", flush=True)

    def stop(self, entry: Entry) -> None:
        """End a contender's process."""
        if entry.process is not None:
            entry.process.close()
            entry.process = None

    def launch(self, name: str, threads: int | None, *more: str) -> Process:
        """Start a process of a contender."""
        python = own_python()
        if name in PACKAGES:
            if self.setting.install_peers and (problem := install(name, self.setting.peers)):
                raise ContenderError(f"its environment could not be made: {problem}")
            if not python_of(name, self.setting.peers).exists():
                raise ContenderError(f"no environment in {name}; make it with --install-peers")
            python = str(python_of(name, self.setting.peers))
        elif name.startswith(OURS) and name.removeprefix(OURS) not in [*ENGINES, "auto"]:
            raise ContenderError("there is no such engine yet")
        kind = "plain" if name == OTHER else name
        arguments = [kind, "--workload", self.of.name, "--cohort", str(self.of.cohort), *more]
        arguments += ["--quick"] * self.setting.quick + ["--device", self.setting.device]
        arguments += ["--threads", str(threads or os.cpu_count() or 1)]
        return Process(python, arguments, threads, self.setting.patience, name == "flower")

    def start(self, entry: Entry) -> None:
        """Start a contender: what computes in one process gets the plain loop's threads, the others their own."""
        own = {
            OTHER: self.other_threads,
            "plain_two_processes": 1,
            "flower": 1,
            OURS + "workers": None,
            OURS + "auto": None,
        }
        entry.process = self.launch(entry.name, own.get(entry.name, self.threads))

    def choose_threads(self) -> None:
        """Try the plain loop with one thread and with as many as there are cores; a close second races as well."""
        if self.setting.device != "cpu":
            self.threads = os.cpu_count() or 1
            return
        counts = sorted({1, os.cpu_count() or 1})
        started = {n: self.launch("plain", n) for n in counts}
        few = self.of.cohort_of(0)[: max(1, self.of.few // 2)]
        best = dict.fromkeys(counts, math.inf)
        for process in started.values():
            process.ask(turn=0, clients=few[:1])  # loads modules
        for attempt in range(TRIES):
            for n, process in started.items():
                hopeless = LONG < best[n] < math.inf and best[n] > HOPELESS * min(best.values())
                if not hopeless:
                    best[n] = min(best[n], process.ask(turn=0, clients=few)["seconds"])
            if attempt and max(best.values()) > LONG:
                break
        self.threads, *others = sorted(best, key=lambda n: best[n])
        if others and best[others[0]] < HOPELESS * best[self.threads]:
            self.other_threads = others[0]
            self.entries = {"plain": self.entries["plain"], OTHER: Entry(OTHER), **self.entries}
        print(f"  plain loop: {', '.join(f'{n} threads {s:.3f} s' for n, s in best.items())}", flush=True)
        for process in started.values():
            process.close()

    def warm_up(self, entry: Entry) -> None:
        """Run a round of few clients from the initial values, and compare its result with the plain loop's."""
        assert entry.process is not None
        answer = entry.process.ask(turn=0, clients=self.of.compared())
        entry.loss = answer["loss"]
        self.compare(entry, entry.process)
        entry.process.ask(
            turn=0, clients=self.of.compared()
        )  # what happens but once, e.g. that auto starts workers
        entry.process.forget_peaks()

    def compare(self, entry: Entry, process: Process, kind: str = "") -> None:
        """Note the relative distance of a contender's server state from the plain loop's."""
        path, base = self.folder / f"{entry.name}{kind}.npz", self.folder / f"plain{kind}.npz"
        process.ask(save=str(path))
        if entry.name != "plain":
            whole, worst = state_error(path, base)
            entry.errors |= {f"state_error{kind}": whole, f"state_error_worst_tensor{kind}": worst}
        if entry.name in PACKAGES:
            path.unlink()

    def turn(self, turn: int) -> None:
        """Let each contender run the turn's round, in an order that is reversed at every other turn."""
        clients = self.of.cohort_of(turn)
        entries = list(self.entries.values())
        for entry in entries if turn % 2 else reversed(entries):
            self.attempt(entry, lambda entry: self.measure(entry, turn, clients))
        if self.setting.device == "cpu":
            self.peak = max(self.peak, peak_of_all_cores())
        latest = {e.name: e.seconds[-1] for e in entries if e.reason is None}
        print(f"  turn {turn}: " + ", ".join(f"{n} {s:.3f} s" for n, s in latest.items()), flush=True)

    def measure(self, entry: Entry, turn: int, clients: list[int]) -> None:
        """Measure a round of one contender."""
        assert entry.process is not None
        before = entry.process.cpu_seconds()
        answer = entry.process.ask(turn=turn, clients=clients)
        entry.seconds.append(answer["seconds"])
        entry.facts = answer["facts"]
        entry.cpu += entry.process.cpu_seconds() - before

    def finish(self, entry: Entry) -> None:
        """Note the peak of a contender's memory."""
        assert entry.process is not None
        entry.peak_mb = entry.process.peak_mb()

    def compare_double(self) -> None:
        """Compare the results of our engines with the plain loop's in double precision, in processes of their own."""
        few = self.of.compared()
        for entry in self.entries.values():
            if entry.name != "plain" and (entry.reason or not entry.name.startswith(OURS)):
                continue
            process = self.launch(entry.name, None, "--double")
            try:
                process.ask(turn=0, clients=few)
                self.compare(entry, process, "_double")
                single, double = self.folder / f"{entry.name}.npz", self.folder / "plain_double.npz"
                entry.errors["state_error_to_double"] = state_error(single, double)[0]
            finally:
                process.close()

    def rows(self, commit: str | None, machine: str) -> list[dict[str, Any]]:
        """Return a row of results for each contender."""
        turns = len(self.entries["plain"].seconds)
        data = self.of.data()
        counts = [operations(self.of, data, self.of.cohort_of(t), t) for t in range(1, turns + 1)]
        needed, dense = (statistics.median(c[i] for c in counts) for i in range(2))
        rows = []
        for entry in self.entries.values():
            row: dict[str, Any] = {
                "workload": self.of.name,
                "cohort": self.of.cohort,
                "contender": entry.name,
            }
            if entry.reason is None:
                row |= self.measured(entry, needed, dense)
            else:
                row["not_measured"] = entry.reason
            gpu = {} if self.setting.device == "cpu" else {"device": self.setting.device}
            rows.append({**row, "commit": commit, "machine": machine, **gpu})
        return rows

    def plain(self) -> Entry:
        """Return the plain loop with the number of threads that was faster in the race."""
        both = [self.entries[n] for n in ("plain", OTHER) if n in self.entries]
        return min((e for e in both if e.reason is None), key=lambda e: statistics.median(e.seconds))

    def measured(self, entry: Entry, needed: float, dense: float) -> dict[str, Any]:
        """Return the numbers of a contender that ran."""
        seconds = statistics.median(entry.seconds)
        bases = {b: self.entries[b] for b in BASES if b in self.entries} | {"plain": self.plain()}
        over = {b: ratios(base, entry) for b, base in bases.items()}
        plain = over["plain"]
        row: dict[str, Any] = {
            "seconds": seconds,
            "ratio_to_plain": statistics.median(plain),
            "low": min(plain),
            "high": max(plain),
            "peak_mb": round(entry.peak_mb, 1),
            "cpu_seconds": entry.cpu / len(entry.seconds),
            "fraction_of_peak": needed / seconds / self.peak if self.peak else None,
            "fraction_of_peak_dense": dense / seconds / self.peak if self.peak else None,
            "turns": len(entry.seconds),
            "first_loss": entry.loss,
        }
        row |= {
            f"ratio_to_{b}": statistics.median(found) for b, found in over.items() if found and b != "plain"
        }
        return row | entry.errors | entry.facts


def ratios(base: Entry, entry: Entry) -> list[float]:
    """Return how many times faster than another a contender was, turn by turn."""
    if base.reason is not None:
        return []
    return [a / b for a, b in zip(base.seconds, entry.seconds, strict=True)]


def state_error(path: Path, base: Path) -> tuple[float, float]:
    """Return ‖a − b‖ / ‖b‖ of two saved states: over all tensors together, and of the worst tensor.

    Infinite if names or shapes differ.
    """
    with np.load(path) as ours, np.load(base) as theirs:
        if {n: ours[n].shape for n in ours} != {n: theirs[n].shape for n in theirs}:
            return math.inf, math.inf
        apart = {n: float(np.linalg.norm(ours[n].astype(np.float64) - theirs[n])) for n in theirs}
        size = {n: float(np.linalg.norm(theirs[n].astype(np.float64))) for n in theirs}
    worst = max(apart[n] / size[n] if size[n] else apart[n] for n in apart)
    return math.hypot(*apart.values()) / math.hypot(*size.values()), worst


def peak_of_all_cores() -> float:
    """Return the float32 operations per second of all cores in multiply-adds alone; 0 without native kernels."""
    if not native.available():
        return 0.0
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        return max(sum(pool.map(lambda _: native.peak(), range(cores))) for _ in range(5))
