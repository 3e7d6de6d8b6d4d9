"""Claim: a run with differential privacy that is killed at any instant has charged at least what it released.

    python -m benchmarks.fault_budget [--kills 200] [--seed 0]

Runs are killed (SIGKILL) at random instants, gone on with, killed again, and at last brought to their end; half of
them have a budget that ends them first. A witness of its own notes every round that was released. After every kill the
ledger must be whole and hold at least as many charges as the witness; at the end ε is within the budget. Writes
``results/fault-budget.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep.core.errors import BudgetError
from fedkeep.core.run_files import read_info
from fedkeep.engines.round import RoundReport
from fedkeep.experiments import drive
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import Config
from fedkeep.privacy import Ledger, epsilon

ROUNDS, AFFORDED, A_RUN = 40, 30, 4
"""Rounds of a run, those that a budget allows, and how often a run is killed."""


def config(bounded: bool) -> Config:
    """Return a small run; with a budget for ``AFFORDED`` rounds where it is bounded."""
    privacy: dict[str, Any] = {"noise": 2.0, "clip": 0.1, "delta": 1e-2, "accountant": "rdp"}
    made = Config.model_validate(
        {
            "data": {"reader": "toy", "users": 20, "seed": 1},
            "model": {"kind": "linear"},
            "method": {"kind": "furl", "weighting": "uniform"},
            "run": {
                "rounds": ROUNDS,
                "cohort": 5,
                "sampling": "poisson",
                "evaluate_every": 0,
                "engine": "sequential",
            },
            "privacy": privacy,
        }
    )
    if not bounded:
        return made
    assert made.privacy is not None
    budget = epsilon({made.privacy.release(5 / 20): AFFORDED}, 1e-2, "rdp") + 1e-9
    return made.model_copy(update={"privacy": replace(made.privacy, budget=budget)})


def go_on(made: Config, out: str, witness: str) -> None:
    """Begin a run or go on with it, and note each round with a byte as soon as it may be released."""
    torch.set_num_threads(1)
    ended = drive.Drive._round

    def released(self: drive.Drive) -> RoundReport:
        found = ended(self)
        note = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(note, b".")
        os.close(note)
        return found

    with patch.object(drive.Drive, "_round", released), contextlib.suppress(BudgetError):
        run_config(made, out=Path(out), resume=(Path(out) / "run.json").exists(), progress=False)


def counts(out: Path, witness: Path) -> tuple[int, int]:
    """Return how many rounds were charged and released; RunError: the ledger is damaged."""
    path = out / "budget.jsonl"
    if not path.exists() or b"\n" not in path.read_bytes():
        return 0, witness.stat().st_size if witness.exists() else 0
    released = witness.stat().st_size if witness.exists() else 0
    return len(Ledger.read(path, read_info(out)["run"]).rounds), released


def campaign(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return what came of so many kills."""
    draw = random.Random(seed)  # noqa: S311
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedkeep.experiments.build", "dp_accounting", "dp_accounting.rdp"])
    ends: Counter[str] = Counter()
    ends.update(dict.fromkeys(("under", "over the budget", "ended wrongly"), 0))
    made, seconds = {}, {}
    for bounded in (False, True):
        made[bounded], began = config(bounded), time.monotonic()
        child = context.Process(
            target=go_on, args=(made[bounded], str(folder / f"{bounded}"), str(folder / "w"))
        )
        child.start()
        child.join()
        seconds[bounded] = time.monotonic() - began
    for number in range(-(-kills // A_RUN)):
        bounded, out, witness = bool(number % 2), folder / f"run-{number}", folder / f"witness-{number}"
        for last in (*[False] * A_RUN, True):
            child = context.Process(target=go_on, args=(made[bounded], str(out), str(witness)))
            child.start()
            child.join(None if last else draw.uniform(0, seconds[bounded] / 2))
            if not last:
                child.kill()
                child.join()
                ends["kills"] += 1
            charged, released = counts(out, witness)
            ends["under"] += charged < released
            ends["a charge without a release"] += not last and charged > released
            ends["killed between the first and the last release"] += not last and released > 0
        ledger = Ledger.read(out / "budget.jsonl", read_info(out)["run"])
        ends["charges"] += charged
        ends["releases"] += released
        ends["charged again"] += ledger.repeated
        ends["runs"] += 1
        ends["over the budget"] += ledger.terms.budget is not None and ledger.spent() > ledger.terms.budget
        ends["ended wrongly"] += charged != AFFORDED if bounded else set(ledger.rounds) != set(range(ROUNDS))
    return dict(ends)


def main() -> None:
    """Run the campaign, write its counts, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(given.kills, given.seed, Path(folder))
    write("fault-budget", {**found, "seed": given.seed, "commit": commit()})
    for fault in ("under", "over the budget", "ended wrongly"):
        assert not found[fault], found


if __name__ == "__main__":
    main()
