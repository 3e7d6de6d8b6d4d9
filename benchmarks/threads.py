"""Claims: a round of the engine ``sequential`` on two cores, with a thread for each, takes at most 0.8 of its time with
one thread on W1 and W2, and 0.9 on W3.

    python -m benchmarks.threads [--turns N] [--quick]

The kernels compute on the threads of PyTorch's OpenMP. ``own`` says what a round would take if they had threads of
their own, which share their cores with PyTorch's while these busily wait for their next operation. Writes
``results/threads.json``; ``--quick`` runs tiny sizes, writes into ``runs/benchmarks`` and asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.contenders.ours import Ours, model_of
from benchmarks.measure import interleaved, ratio, write
from benchmarks.processes import ROOT
from benchmarks.workloads import workload
from fedkeep.core.allocator import tune_allocator
from fedkeep.engines import Sequential
from fedkeep.engines.workers.workers import available_cores
from fedkeep.kernels import native

CLIENTS = {"W1": 10, "W2": 4, "W3": 2}  # of a round: a few, where each takes long
CLAIMED = {"W1": 0.8, "W2": 0.8, "W3": 0.9}


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write ``threads.json``; fail if a claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    cores, before = available_cores(), torch.get_num_threads()
    if not native.available() or cores < 2:
        print(f"nothing to measure: {native.status()}; cores: {cores}")
        return 0
    tune_allocator()  # as the command line does
    found = {name: measure(name, cores, options.turns, options.quick) for name in CLIENTS}
    torch.set_num_threads(before)
    folder = options.out or (ROOT / "runs" / "benchmarks" if options.quick else None)
    write("threads", {"turns": options.turns, "over_one_thread": found}, folder=folder)
    slow = {
        name: median
        for name in found
        if (median := found[name]["all"]["median"]) > CLAIMED[name] and not options.quick
    }
    for name, median in slow.items():
        print(f"claim failed: {name}: {median:.2f} of one thread's time; claimed {CLAIMED[name]}")
    return int(bool(slow))


def measure(name: str, cores: int, turns: int, quick: bool) -> dict[str, dict[str, float]]:
    """Return the time of a round over one thread's, with PyTorch's threads (``all``) and with the kernels' own."""
    of = workload(name, quick=quick)
    ours = Ours(of, model_of(of, of.initial(torch.float32)), Sequential())
    clients, turn = list(range(min(CLIENTS[name], of.clients))), iter(range(10**6))
    contenders = {
        "one": partial(run, ours, clients, turn, 1, native.team()),
        "all": partial(run, ours, clients, turn, cores, native.team()),
        "own": partial(run, ours, clients, turn, cores, None),
    }
    seconds = interleaved(contenders, turns)
    return {contender: ratio(seconds, contender, "one") for contender in ("all", "own")}


def run(ours: Ours, clients: list[int], turn: Iterator[int], threads: int, team: int | None) -> None:
    """Run a round with a number of threads, and with the kernels' tasks on a team's."""
    torch.set_num_threads(threads)
    use_team(team)
    try:
        ours.round(next(turn), clients)
    finally:
        use_team(native.team())


def use_team(team: int | None) -> None:
    """Let the kernels compute on a team of threads; None: on threads of their own."""
    library = native.load().library
    assert library is not None
    library.fk_team(team)


if __name__ == "__main__":
    sys.exit(main())
