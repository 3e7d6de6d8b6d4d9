"""A run that is killed while its clients adapt goes on with those that have, and ends with the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedkeep import Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import RunError
from fedkeep.engines import Job
from fedkeep.engines.adapt import Adapted, Fitting, one_by_one
from fedkeep.experiments.personalize import kept
from fedkeep.experiments.personalize.kept import ADAPTING, kept_in, share_adapted
from fedkeep.methods import Adapt
from fedkeep.methods.phase import EarlyStopping
from tests.refusals import raises
from tests.tiny import Logits, classes, lasting, one_run_id

DATA = classes(counts=(5, 9, 3, 7, 6, 8), valid=2, kind="f4")


class Stopped(Exception):
    """What ends the process in these tests."""


class Counted:
    """Fits clients one after the other, and breaks off before one of them."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.fitted = most, list[int]()

    def __call__(self, job: Job, adapt: Adapt, fittings: Sequence[Fitting]) -> Iterator[Adapted]:
        for each in fittings:
            if len(self.fitted) == self.most:
                raise Stopped
            self.fitted.append(each.client)
            yield from one_by_one(job, adapt, [each])


def run(monkeypatch: pytest.MonkeyPatch, out: Path, fits: Counted, seed: int = 3, **more: Any) -> Run:
    """Run two rounds, after which all adapt; each client's result is kept at once."""
    monkeypatch.setattr("fedkeep.experiments.simulate.kept_in", lambda folder: kept_in(folder, fits, every=0))
    local = Phase(batch_size=4, optimizer=sgd(0.5))
    tuned = methods.fine_tuned(local=local, tune_epochs=3)
    stops = EarlyStopping(every=1, patience=1)
    method = tuned.adapting(phases=tuple(phase.but(early_stopping=stops) for phase in tuned.adapt.phases))
    with one_run_id():
        return simulate(
            Logits(),
            method,
            DATA,
            rounds=2,
            evaluate_every=2,
            seed=seed,
            evaluate_adapted=True,
            out=out,
            progress=False,
            **more,
        )


def test_only_those_who_are_left_adapt_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first, second = Counted(), Counted(4), Counted()
    run(monkeypatch, tmp_path / "whole", whole)
    with pytest.raises(Stopped):
        run(monkeypatch, tmp_path / "killed", first)
    assert share_adapted(tmp_path / "killed") == pytest.approx(4 / 6)
    run(monkeypatch, tmp_path / "killed", second, resume=True)
    assert first.fitted + second.fitted == whole.fitted == [0, 1, 2, 3, 4, 5]
    assert lasting(tmp_path / "killed") == lasting(tmp_path / "whole")
    assert not (tmp_path / "killed" / ADAPTING).exists()


def test_what_began_with_other_values_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in ((3, "one"), (4, "other")):
        with pytest.raises(Stopped):
            run(monkeypatch, tmp_path / name, Counted(2), seed=seed)
    (tmp_path / "one" / ADAPTING).rename(tmp_path / "gone")
    (tmp_path / "other" / ADAPTING).rename(tmp_path / "one" / ADAPTING)
    anew = Counted()
    run(monkeypatch, tmp_path / "one", anew, resume=True)
    assert anew.fitted == [0, 1, 2, 3, 4, 5]


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        run(monkeypatch, tmp_path / "run", Counted(2))
    path = min((tmp_path / "run" / ADAPTING).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with raises(RunError, file=path):
        run(monkeypatch, tmp_path / "run", Counted(), resume=True)


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_only_the_owner_reads_what_clients_adapted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        run(monkeypatch, tmp_path / "run", Counted(2))
    part = tmp_path / "run" / ADAPTING
    assert part.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o077 for path in part.iterdir()} == {0}


def test_quick_adaptations_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(kept, "_write", lambda part, *_: written.append(part))
    method = methods.fine_tuned(local=Phase(batch_size=4, optimizer=sgd(0.5)), tune_epochs=1)
    simulate(Logits(), method, DATA, rounds=1, evaluate_adapted=True, out=tmp_path / "run", progress=False)
    assert not written
