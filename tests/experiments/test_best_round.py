"""A run's answer is of its best round on ``valid``: on every engine, in memory and in a folder, killed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedkeep
from fedkeep import Run
from fedkeep.core.errors import RunError
from fedkeep.core.run_files import read_info
from fedkeep.experiments.learned import summarize
from tests.methods.table import DATA, ROWS, trained
from tests.tiny import classes, same_bits

ROUNDS = 8
EVERYONE = range(len(DATA))
GIVEN = {"model": ROWS["furl"][0]().double(), "method": ROWS["furl"][1], "data": DATA}


def furl(rounds: int = ROUNDS, **options: Any) -> Run:
    return trained("furl", rounds, **{"evaluate_every": 1, "progress": False, **options})


def assert_same(one: Run, two: Run) -> None:
    assert one.round == two.round
    assert same_bits(one.server, two.server)
    assert same_bits(one.private.read(EVERYONE), two.private.read(EVERYONE))
    assert one.private.seen(EVERYONE) == two.private.seen(EVERYONE)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "sequential"},
        {"engine": "vectorised"},
        {"engine": "workers", "workers": 2},
        {"centralised": True},
    ],
    ids=str,
)
def test_it_is_that_of_a_run_that_ended_there(options: dict[str, Any], tmp_path: Path) -> None:
    run = furl(**options)
    best = summarize(run.history, "accuracy")
    assert run.round == best.round < run.last.round == ROUNDS
    assert_same(run, furl(run.round, **options).last)
    assert_same(run.last, furl(**options, evaluate_every=0))
    kept = furl(**options, out=tmp_path / "run")
    run.save(tmp_path / "saved")
    for folder in ("run", "saved"):
        again = fedkeep.load_run(tmp_path / folder, **GIVEN)
        assert_same(again, run)
        assert_same(again.last, run.last)
    assert_same(kept, run)
    assert read_info(tmp_path / "run")["chosen_round"] == run.round


@pytest.mark.parametrize("stop", [3, 7])
def test_resumed_it_is_the_same(stop: int, tmp_path: Path) -> None:
    furl(stop, out=tmp_path / "run")
    more, whole = furl(out=tmp_path / "run", resume=True), furl()
    assert_same(more, whole)
    assert_same(more.last, whole.last)


@pytest.mark.parametrize(
    "options", [{"evaluate_every": 0}, {"data": classes(valid=0)}], ids=["never", "no valid"]
)
def test_without_valid_it_is_the_last(options: dict[str, Any]) -> None:
    given = {**GIVEN, "rounds": 3, "cohort": 4, "seed": 3, "progress": False, "evaluate_every": 1, **options}
    run = fedkeep.simulate(**given)
    assert run.round == 3
    assert run.last is run
    assert run.moment == "round 3"


def test_a_last_step_starts_from_it_and_stays_with_it(tmp_path: Path) -> None:
    run = trained("fine_tuned", 4, evaluate_every=1, out=tmp_path / "run")
    assert run.round < run.last.round
    run.fit()
    judged = run.evaluate()
    assert judged == trained("fine_tuned", run.round, evaluate_every=1).last.evaluate()
    run.last.fit()
    assert run.last.evaluate() != judged
    given = {"model": ROWS["fine_tuned"][0]().double(), "method": ROWS["fine_tuned"][1], "data": DATA}
    assert fedkeep.load_run(tmp_path / "run", **given).fitted.keys() == set(DATA.ids)
    assert fedkeep.load_run(tmp_path / "run", **given).evaluate() == judged


def test_its_file_is_missed_by_name(tmp_path: Path) -> None:
    run = furl(out=tmp_path / "run")
    (tmp_path / "run" / f"server-{run.round}.safetensors").unlink()
    with pytest.raises(RunError, match=rf"server-{run.round}\.safetensors"):
        fedkeep.load_run(tmp_path / "run", **GIVEN)
