"""Claim: a run of ten million users takes at most 6 GB of memory, one of a million 1.2 GB, building the data included.

    python -m benchmarks.many_users [--users N]

Every user has an id of its own (a text that no pattern makes), three different examples of 4 features, of which one is in
test, and 32 private numbers. Data are built in memory, trained for 5 rounds of 100 users into a folder, and the run is
resumed to 10. Each size has a process of its own; its peak is the kernel's (Linux), that of each stage, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.judging import status
from benchmarks.measure import write
from benchmarks.processes import ROOT
from fedkeep import FederatedData, Phase, Run, methods, sgd, simulate

FEATURES, CLASSES, PRIVATE, EXAMPLES, COHORT = 4, 3, 32, 3, 100
WANTED = {1_000_000: 1.2, 10_000_000: 6.0}  # GB


class Model(nn.Module):
    """One hidden layer, with the user's numbers added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, PRIVATE), nn.Linear(PRIVATE, CLASSES)
        self.user = nn.Parameter(torch.zeros(PRIVATE))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, CLASSES)."""
        out: Tensor = self.last(torch.relu(self.first(x) + self.user))
        return out


def built(users: int) -> FederatedData:
    """Return the data; ids are numbers mixed by Knuth's factor, so they are in no order."""
    rng, rows = np.random.default_rng(0), EXAMPLES * users
    columns = {
        "x": rng.standard_normal((rows, FEATURES), dtype=np.float32),
        "label": rng.integers(0, CLASSES, rows),
    }
    ids = [f"person-{k * 2654435761 % 2**32:08x}" for k in range(users)]
    offsets = np.arange(users + 1) * EXAMPLES
    bounds = offsets[:-1, None] + np.array([0, EXAMPLES - 1, EXAMPLES - 1, EXAMPLES])
    return FederatedData(columns, offsets, ids, bounds, {"task": "multiclass", "classes": CLASSES})


def trained(data: FederatedData, folder: Path, rounds: int, resume: bool) -> Run:
    """Return the run after so many rounds."""
    torch.manual_seed(0)
    method = methods.furl("user", local=Phase(optimizer=sgd(0.1), batch_size=2))
    options: dict[str, Any] = {"engine": "sequential", "evaluate_every": 0, "progress": False}
    return simulate(Model(), method, data, rounds=rounds, cohort=COHORT, out=folder, resume=resume, **options)


def measured(users: int, folder: Path) -> dict[str, Any]:
    """Return the seconds and the peak of memory of each stage, in GB."""
    stages: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # what was most so far counts no more
        began = time.perf_counter()
        yield
        stages[name] = {"seconds": time.perf_counter() - began, "peak_gb": status("VmHWM") * 1024 / 1e9}

    with stage("built"):
        data = built(users)
    with stage("five rounds"):
        trained(data, folder / "run", 5, resume=False)
    with stage("resumed to ten"):
        run = trained(data, folder / "run", 10, resume=True)
    assert run.last.round == 10, f"{run.last.round} rounds"
    assert len(np.unique(data.batch(data.rows(users - 1))["x"], axis=0)) == EXAMPLES, "examples are alike"
    files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "users": users,
        "peak_gb": max(one["peak_gb"] for one in stages.values()),
        "folder_gb": files / 1e9,
        "stages": stages,
    }


def main() -> None:
    """Measure, write ``results/many-users.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, help="measure so many alone, and print it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.users:
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            print(json.dumps(measured(options.users, Path(folder))))
        return
    found = []
    for users in WANTED:
        command = [sys.executable, "-m", "benchmarks.many_users", "--users", str(users)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    write("many-users", {"seed": 0, "cohort": COHORT, "cases": found})
    for case in found:
        assert case["peak_gb"] <= WANTED[case["users"]], (
            f"{case['users']:,} users took {case['peak_gb']:.2f} GB"
        )


if __name__ == "__main__":
    main()
