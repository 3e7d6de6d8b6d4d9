"""Claim: a round takes at most 1.05 × the processor time that it took in another version, and no more memory.

    python -m benchmarks.versions FOLDER [--turns N] [--only W1,small]

FOLDER is a checkout of the other version with its kernels built. W1 (cohorts of 10 and 40), W1 ragged, W2, W3 and W4
run with ``sequential``; small clients (``benchmarks.small``, 64 hidden units) with ``sequential`` in cohorts of 40 and
with ``auto`` in cohorts of 160; models as users bring them (``benchmarks.own_models``) with ``auto`` and one worker.
``--only`` renews rows of the file. Each version has a process of its own with one thread, from the workload's initial
values; they take turns, round by round, in changing order. Measured are the process's own processor time within a
round, and the most memory it ever held. ``low`` to ``high`` is an interval for the median of the ratios that holds at
95 %, from the order of the turns alone: of 15 the 4th to the 12th.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, write
from benchmarks.processes import ROOT

CASES = {
    "W1, 10": ("W1", 10),
    "W1, 40": ("W1", 40),
    "W1 ragged": ("W1 ragged", 6),
    "W2": ("W2", 16),
    "W3": ("W3", 5),
    "W4": ("W4", 5),
    "small, sequential, 40": ("sequential", 40),
    "small, auto, 160": ("auto", 160),
    **{
        f"own, {name}": (f"own {name}", 0)
        for name in (
            "nn.GRU, packed",
            "matrix factorisation",
            "logistic regression",
            "MLP, 0.2 M",
            "small ResNet, BatchNorm",
            "ResNet-18, GroupNorm",
            "transformer, 0.7 M",
            "frozen backbone and head",
            "embedding bag",
        )
    },
}
CLAIMED = 1.05
MEMORY_CLAIMED = 1.01

# Runs in either version: uses what both have. One line in, a turn's number; one line out.
SERVE = """
import json, resource, sys, time
import numpy as np, torch
name, cohort = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
from fedkeep.core.allocator import tune_allocator
tune_allocator()
if name in ("sequential", "auto"):
    from benchmarks import small
    from fedkeep import data
    from fedkeep.experiments.simulate import make_engine
    federation = data.toy(users=small.USERS, examples=small.EXAMPLES, features=small.FEATURES, classes=small.CLASSES)
    torch.manual_seed(0)
    step = small.federated(small.Model(64), federation, make_engine(name, None, "cpu", cohort, 1000)[0])
    repeats = 8
    draw = lambda turn: sorted(np.random.default_rng(turn).choice(small.USERS, cohort, replace=False).tolist())
    run = lambda turn: [step(draw(turn)) for _ in range(repeats)]
elif name.startswith("own "):
    from benchmarks.own_models import CASES, contender
    case = CASES[name[4:]]
    federation = case.data()
    ours = contender("fedkeep", case, federation)
    draw = lambda turn: sorted(np.random.default_rng(turn).choice(len(federation), case.cohort, replace=False).tolist())
    run = lambda turn: ours.round(turn, draw(turn))
else:
    from dataclasses import replace
    from benchmarks.contenders.ours import Ours, model_of
    from benchmarks.workloads import WORKLOADS
    from fedkeep.engines import Sequential
    of = replace(WORKLOADS[name], cohort=cohort)
    ours = Ours(of, model_of(of, of.initial()), Sequential())
    run = lambda turn: ours.round(turn, of.cohort_of(turn))
print("ready", flush=True)
for line in sys.stdin:
    began = time.process_time()
    run(int(line))
    seconds = time.process_time() - began
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]), flush=True)
"""


class Version:
    """A process of one version.

    Args:
        folder: its checkout.
        case: what it runs.
    """

    def __init__(self, folder: Path, case: tuple[str, int]) -> None:
        here = {"PYTHONPATH": os.pathsep.join([str(folder / "src"), str(folder)]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *map(str, case)],
            cwd=folder,
            env={**os.environ, **here},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("A version's process ended; what it said is above.")
        return line

    def round(self, turn: int) -> tuple[float, int]:
        """Run a round; return its seconds of processor time, and the most memory so far in the system's unit."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{turn}\n")
        self.process.stdin.flush()
        seconds, memory = json.loads(self._line())
        return seconds, memory

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def interval(values: list[float]) -> tuple[float, float]:
    """Return bounds of the median that hold with at least 95 %, from order statistics."""
    ordered, n = sorted(values), len(values)
    outside, rank, term = 0.0, 0, 0.5**n
    while outside + term <= 0.025:  # rank values lie below the lower bound
        outside += term
        term *= (n - rank) / (rank + 1)
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[n - rank]


def compared(case: tuple[str, int], other: Path, turns: int) -> dict[str, Any]:
    """Return how this version's rounds compare with the other's."""
    versions = {"old": Version(other, case), "new": Version(ROOT, case)}
    seconds: dict[str, list[float]] = {"old": [], "new": []}
    memory = {}
    for turn in range(turns + 2):
        for name in ["old", "new"] if turn % 2 else ["new", "old"]:
            spent, memory[name] = versions[name].round(turn)
            if turn >= 2:
                seconds[name].append(spent)
    for version in versions.values():
        version.close()
    ratios = [new / old for new, old in zip(seconds["new"], seconds["old"], strict=True)]
    low, high = interval(ratios)
    return {
        "median": statistics.median(ratios),
        "low": low,
        "high": high,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "memory": memory["new"] / memory["old"],
        "turns": turns,
    }


def commit(folder: Path) -> str:
    """Return a checkout's commit."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    """Measure, write ``results/versions.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--only", default="", help="parts of names, by commas")
    options = parser.parse_args()
    wanted = options.only.split(",")
    found = {}
    for name, case in CASES.items():
        if any(part in name for part in wanted):
            found[name] = one = compared(case, options.folder.resolve(), options.turns)
            print(
                f"{name}: {one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f}), memory {one['memory']:.3f}",
                flush=True,
            )
            found[name] |= {"old": commit(options.folder)[:12], "new": commit(ROOT)[:12]}
    path = RESULTS / "versions.json"
    before = json.loads(path.read_text(encoding="utf-8"))["cases"] if options.only and path.exists() else {}
    write("versions", {"cases": {n: {**before, **found}[n] for n in CASES if n in {**before, **found}}})
    for name, one in found.items():
        assert one["high"] <= CLAIMED, f"{name}: up to {one['high']:.3f} x the time; claimed {CLAIMED}"
        assert one["memory"] <= MEMORY_CLAIMED, f"{name}: {one['memory']:.3f} x the memory"


if __name__ == "__main__":
    main()
