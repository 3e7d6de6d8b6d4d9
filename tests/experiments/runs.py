"""Runs of four clients and four rounds, whole or stopped at a commit, and damage to their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedkeep import Phase, Run, averaging, methods, sgd, simulate
from fedkeep.core.errors import FedkeepError, RunError
from tests.refusals import raises
from tests.tiny import Logits, classes, files

METHOD = methods.furl("user", local=Phase(batch_size=4), server=averaging(sgd(1.0, momentum=0.9)))
DATA = classes(counts=(5, 9, 3, 7), kind="f4")


def run(out: Path | None, *, resume: bool = False, rounds: int = 4, model: Any = None, **changes: Any) -> Run:
    options: dict[str, Any] = {
        "method": METHOD,
        "data": DATA,
        "cohort": 2,
        "seed": 5,
        "evaluate_every": 2,
    } | changes
    return simulate(model or Logits(), rounds=rounds, out=out, resume=resume, **options)


@contextmanager
def with_id(name: str) -> Iterator[None]:
    """Let runs that are begun have the id of this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedkeep.experiments.run_directory.new_run_id", lambda: name)
        yield


class Stop(BaseException):
    """Stops a run between two rounds, as a kill does: a fault would take a run's folder away before its first."""


def stopped(out: Path, after: int, **changes: Any) -> None:
    """Leave a run at its commit of round ``after``."""
    from fedkeep.experiments.run_directory import RunDirectory

    commit = RunDirectory.commit

    def stopping(self: RunDirectory, round: int, *arguments: Any, **options: Any) -> None:
        if round > after:
            raise Stop
        commit(self, round, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "commit", stopping)
        with pytest.raises(Stop):
            run(out, **changes)


@contextmanager
def refused(out: Path, kind: type[FedkeepError] = RunError, said: str = "") -> Iterator[None]:
    """Assert that what is done with a folder is refused, and that nothing in it changes."""
    before = files(out)
    with raises(kind, said=said):
        yield
    assert files(out) == before


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    else:
        path.write_text(how)
