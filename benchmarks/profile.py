"""Where a round's time goes, against the roofline: ``python -m benchmarks.profile [--turns N] [--quick]``.

Runs W1, W1 ragged, W2, W3 and W4 with the engine ``sequential`` on one thread, and measures how long each part of a
round takes by wrapping the functions that do it. Operations and bytes are counted by hand (``operations.py``); the
roofline is the time in which they could be done at best: operations at the peak of multiply-adds, bytes at the
bandwidth of copying in memory, whichever takes longer. Writes ``results/profile.json`` and ``results/profile.md``.

A part may be faster than its bytes at memory's bandwidth where they stay in a cache (all of W1's parameters do).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders.ours import Ours, model_of
from benchmarks.measure import write
from benchmarks.operations import bytes_moved, operations
from benchmarks.processes import ROOT
from benchmarks.workloads import WORKLOADS, Workload, workload
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.optim import Optimizer
from fedkeep.engines import Sequential, batches, client_step, lanes
from fedkeep.engines import round as whole_round
from fedkeep.engines.client_step import Job
from fedkeep.engines.tables.lazy_rows import LazyRows
from fedkeep.kernels import native
from fedkeep.methods import Optimize, RunningMean
from fedkeep.store import MemoryStore

PARTS: dict[str, list[tuple[Any, str]]] = {  # who does what; a part inside another counts for itself alone
    "batches": [(batches, "load_batch")],
    "table rows": [
        (lanes, "local_tables"),
        (lanes, "narrow"),
        (LazyRows, "look_up"),
        (LazyRows, "update"),
        (LazyRows, "finish"),
    ],
    "forward": [(lanes.Pass, "loss")],
    "backward": [(torch.autograd, "grad")],
    "optimiser": [(Optimizer, "update")],
    "upload and mean": [
        (client_step, "finish"),
        (whole_round, "decode"),
        (RunningMean, "add"),
        (RunningMean, "value"),
        (Optimize, "__call__"),
        (whole_round, "check_finite"),
    ],
    "store": [(Job, "kept"), (MemoryStore, "begin")],
}


class Clock:
    """Adds up the time inside each part, without that of parts inside it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running: list[tuple[str, float]] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its time added to a part."""

        def call(*arguments: Any, **options: Any) -> Any:
            now = time.thread_time()
            if self._running:
                self._pause(now)
            self._running.append((part, now))
            try:
                return function(*arguments, **options)
            finally:
                now = time.thread_time()
                self._pause(now)
                self._running.pop()
                if self._running:
                    self._running[-1] = (self._running[-1][0], now)

        return call

    def _pause(self, now: float) -> None:
        part, since = self._running[-1]
        self.seconds[part] += now - since

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the functions of all parts."""
        with ExitStack() as undo:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    function = getattr(owner, name)
                    undo.callback(setattr, owner, name, function)
                    setattr(owner, name, self.timed(part, function))
            yield


def bandwidth() -> float:
    """Return the bytes per second that copying in memory reads and writes, on one core."""
    source = torch.ones(64 << 20)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def measure(of: Workload, turns: int, peak: float, memory: float) -> list[dict[str, Any]]:
    """Return a row for each part of a workload's round, and one for the whole."""
    ours = Ours(of, model_of(of, of.initial()), Sequential())
    ours.round(0, of.compared())
    data = of.data()
    rounds: list[dict[str, float]] = []
    for turn in range(1, turns + 1):
        clock, clients = Clock(), of.cohort_of(turn)
        with clock.watching():
            began = time.thread_time()
            ours.round(turn, clients)
            total = time.thread_time() - began
        rounds.append({**clock.seconds, "the rest": total - sum(clock.seconds.values()), "the round": total})
    counted = operations(of, data, of.cohort_of(1), 1)
    moved = bytes_moved(of, data, of.cohort_of(1), 1)
    done = {"forward": counted.needed / 3, "backward": counted.needed * 2 / 3, "the round": counted.needed}
    moved["the round"] = sum(moved.values())
    rows = []
    for part in rounds[0]:
        seconds = statistics.median(r[part] for r in rounds)
        bound = max(done.get(part, 0.0) / peak if peak else 0.0, moved.get(part, 0.0) / memory)
        rows.append(
            {
                "workload": of.name,
                "cohort": of.cohort,
                "part": part,
                "seconds": seconds,
                "share": seconds / statistics.median(r["the round"] for r in rounds),
                "operations": done.get(part, 0.0),
                "bytes": moved.get(part, 0.0),
                "roofline_seconds": bound,
                "operations_dense": counted.dense if part == "the round" else None,
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write ``profile.json`` and ``profile.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tune_allocator()  # as the command line does
    peak = max(native.peak() for _ in range(20)) if native.available() else 0.0
    memory = bandwidth()
    rows = []
    for name in WORKLOADS:
        rows += measure(workload(name, quick=options.quick), options.turns, peak, memory)
    folder = options.out or (ROOT / "runs" / "benchmarks" if options.quick else None)
    facts = {"operations_per_second": peak, "bytes_per_second": memory, "turns": options.turns}
    text = page(rows, peak, memory)
    write("profile", {**facts, "parts": rows}, text, folder)
    print(text)
    return 0


def page(rows: list[dict[str, Any]], peak: float, memory: float) -> str:
    """Return the page of results."""
    lines = [
        "# Where a round's time goes",
        "",
        "Made by `python -m benchmarks.profile`: the engine `sequential` on one thread, processor",
        f"time, medians. The roofline of one core here: {peak / 1e9:.0f} GFLOP/s of multiply-adds,",
        f"{memory / 1e9:.1f} GB/s of copying in memory.",
        "[benchmarks/operations.py](../benchmarks/operations.py) counts operations and bytes. *Of roofline* is the",
        "time in which they could be done at best, as a fraction of the time taken (above 100 %: in a cache).",
    ]
    for name in dict.fromkeys(r["workload"] for r in rows):
        own = [r for r in rows if r["workload"] == name]
        lines += ["", f"## {name}, cohort {own[0]['cohort']}", ""]
        lines += [
            "| part | ms | share | GFLOP | MB | GFLOP/s | of roofline |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [line(r) for r in own]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    """Return a row of a table."""
    done, moved, seconds = row["operations"], row["bytes"], row["seconds"]
    cells = (
        row["part"],
        f"{seconds * 1e3:.1f}",
        f"{row['share']:.0%}",
        f"{done / 1e9:.2f}" if done else "",
        f"{moved / 1e6:.0f}" if moved else "",
        f"{done / seconds / 1e9:.0f}" if done else "",
        f"{row['roofline_seconds'] / seconds:.0%}" if row["roofline_seconds"] and seconds else "",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
