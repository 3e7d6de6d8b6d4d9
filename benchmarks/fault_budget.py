"""Claim: a run with differential privacy that is killed at any instant has charged at least what it released.

    python -m benchmarks.fault_budget [--kills 200] [--tries 500] [--seed 0]

Runs are killed (SIGKILL) at random instants, gone on with, killed again, and at last brought to their end; half of
them have a budget that ends them first. A witness of its own notes every round that was released. After every kill the
ledger must be whole and hold at least as many charges as the witness; at the end ε is within the budget. Then the
ledgers of runs that were stopped between a charge and its commit are cut, changed, swapped and replayed: each is refused,
or counts all. Writes ``results/fault-budget.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep.core.errors import BudgetError, RunError
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.engines.round import RoundReport
from fedkeep.experiments import drive
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import Config
from fedkeep.privacy import BudgetLedger, epsilon
from fedkeep.privacy.budget_ledger import FILE, marks

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
    return len(BudgetLedger.read(path, read_info(out)["run"]).rounds), released


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
        ledger = BudgetLedger.read(out / "budget.jsonl", read_info(out)["run"])
        ends["charges"] += charged
        ends["releases"] += released
        ends["charged again"] += ledger.repeated
        ends["runs"] += 1
        ends["over the budget"] += ledger.terms.budget is not None and ledger.spent() > ledger.terms.budget
        ends["ended wrongly"] += charged != AFFORDED if bounded else set(ledger.rounds) != set(range(ROUNDS))
    return dict(ends)


def stopped(folder: Path, number: int) -> list[bytes]:
    """Make a run that is stopped thrice between a charge and its commit; return its ledger after each stop."""
    found, made, committed = list[bytes](), config(bounded=False), drive.Drive._commit
    short = made.model_copy(update={"run": replace(made.run, rounds=number % 2 + 3)})
    for stop in range(3):
        left = itertools.count()

        def commit_or_stop(
            self: drive.Drive, *given: Any, stop: int = stop, left: Iterator[int] = left
        ) -> None:
            if next(left) == stop % 2:
                raise KeyboardInterrupt
            committed(self, *given)

        with patch.object(drive.Drive, "_commit", commit_or_stop), contextlib.suppress(KeyboardInterrupt):
            run_config(short, out=folder, resume=bool(found), progress=False)
        found.append((folder / FILE).read_bytes())
    return found


def chained(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a ledger's content whose every line follows from the one before."""
    lines, head = list[bytes](), ""
    for entry in entries:
        lines.append((json.dumps({**entry, "before": head}) + "\n").encode())
        head = hashlib.sha256(lines[-1]).hexdigest()
    return b"".join(lines)


def tampered(draw: random.Random, own: Sequence[bytes], other: Sequence[bytes]) -> tuple[str, bytes]:
    """Return how a ledger was tampered with, and what it is then.

    Args:
        draw: chance.
        own: its content after each stop.
        other: likewise of another run.
    """
    content = own[-1]
    lines = content.splitlines(keepends=True)
    entries = [json.loads(line) for line in lines]
    place, left_out = draw.randrange(len(content)), draw.randrange(1, len(entries))
    how = draw.choice(("cut at a line", "cut", "changed", "swapped", "renamed", "replayed", "line left out"))
    made = {
        "cut at a line": lambda: b"".join(lines[: draw.randrange(len(lines))]),
        "cut": lambda: content[:place],
        "changed": lambda: content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :],
        "swapped": lambda: draw.choice(other),
        "renamed": lambda: chained(
            [entries[0], *(json.loads(line) for line in draw.choice(other).splitlines()[1:])]
        ),
        "replayed": lambda: draw.choice(own[:-1]),
        "line left out": lambda: chained(entries[:left_out] + entries[left_out + 1 :]),
    }
    return how, made[how]()


def fuzz(tries: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return what became of so many ledgers that were tampered with: none may count too little."""
    draw = random.Random(seed)  # noqa: S311
    ends = Counter(dict.fromkeys(("refused", "counted in full", "under-counts"), 0))
    runs = [folder / f"stopped-{number}" for number in range(4)]
    known = [stopped(run, number) for number, run in enumerate(runs)]
    for number in range(tries):
        which = number % len(runs)
        out, path = runs[which], runs[which] / FILE
        how, content = tampered(draw, known[which], known[which - 1])
        info = read_info(out)
        said = marks(info, read_commit(out, info).extra)
        charged = known[which][-1].count(b"\n") - 1
        terms = BudgetLedger.read(path, info["run"], said).terms
        for open_again in (False, True):
            path.write_bytes(content)
            try:
                if open_again:
                    found = BudgetLedger.open(path, info["run"], terms, said)
                else:
                    found = BudgetLedger.read(path, info["run"], said)
            except RunError:
                ends["refused"] += 1
            else:
                ends["under-counts" if len(found.rounds) < charged else "counted in full"] += 1
        path.write_bytes(known[which][-1])
        ends[how] += 1
    return {"tries": tries, **ends}


def main() -> None:
    """Run the campaign, write its counts, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--tries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(given.kills, given.seed, Path(folder))
        found["ledgers tampered with"] = fuzz(given.tries, given.seed, Path(folder))
    write("fault-budget", {**found, "seed": given.seed, "commit": commit()})
    for fault in ("under", "over the budget", "ended wrongly"):
        assert not found[fault], found
    assert not found["ledgers tampered with"]["under-counts"], found


if __name__ == "__main__":
    main()
