"""What the kill tests run in processes of their own: a small simulation that is killed at a chosen instant."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedkeep import Method, Phase, Run, adam, averaging, methods, sgd, simulate
from fedkeep.core.errors import RunError
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.store.database import Database
from tests.tiny import Noisy, classes, one_run_id, run_by

ENGINES: dict[str, Method] = {
    "sequential": methods.furl(
        "user",
        private_init=("normal", 0.3),
        local=Phase(batch_size=6, optimizer=sgd(0.2, momentum=0.5)),
        server=averaging(adam(0.05)),
    ),
    "centralised": methods.furl("user", local=Phase(batch_size=10, optimizer=adam(0.05))),
}
ENGINES["workers"] = ENGINES["sequential"]


def run(engine: str, out: Path | None, rounds: int, resume: bool = False) -> Run:
    """Run a simulation that uses all that may carry over: dropout, batch statistics, moments of server and centralised training."""
    data = classes(counts=(5, 9, 3, 8, 4, 6), kind="f4")
    with one_run_id():
        return simulate(
            Noisy(dropout=0.3),
            ENGINES[engine],
            data,
            rounds=rounds,
            cohort=2,
            seed=4,
            **run_by(engine),
            out=out,
            resume=resume,
            evaluate_every=2,
            on_nonfinite="stop",
            progress=False,
        )


def go_on(engine: str, out: Path, rounds: int) -> Run:
    """Resume the run, or start it where it was killed before there was anything to resume."""
    if (out / "run.json").exists():
        return run(engine, out, rounds, resume=True)
    return run(engine, out, rounds)


def start(engine: str, out: str, rounds: int) -> None:
    """Run until killed from outside."""
    torch.set_num_threads(1)
    go_on(engine, Path(out), rounds)


def kill_at(engine: str, out: str, rounds: int, instant: int) -> None:
    """Run, and kill this very process with SIGKILL before its ``instant``-th touch of the run's files."""
    torch.set_num_threads(1)
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == instant:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and str(
            arguments[0]
        ).startswith(out):
            tick()

    sync = os.fsync

    def fsync(handle: int) -> None:
        tick()
        sync(handle)

    query = Database.query

    def statement(self: Database, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if text.split()[0] in ("BEGIN", "DELETE", "INSERT", "COMMIT"):
            tick()
        return query(self, text, values)

    sys.addaudithook(watch)
    os.fsync = fsync
    Database.query = statement  # type: ignore[method-assign]
    go_on(engine, Path(out), rounds)


def hold(out: str, ready: Any, done: Any) -> None:
    """Hold the run's folder until told to let go."""
    directory = RunDirectory.open(Path(out))
    ready.set()
    done.wait(60)
    directory.close()


__all__ = ["RunError", "go_on", "hold", "kill_at", "run", "start"]
