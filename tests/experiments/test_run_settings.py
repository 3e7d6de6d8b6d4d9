"""Settings of a run: each is marked by whether results depend on it, is an argument of ``simulate``, and is of the identity."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from fedkeep import load_run, methods, simulate
from fedkeep.core.errors import RunError
from fedkeep.data import toy
from fedkeep.experiments.run_settings import Counts, RunSettings
from fedkeep.models import Linear

DATA = toy(users=6)
MODEL, METHOD = Linear(4, 3), methods.fine_tuned()
BASE: dict[str, Any] = {"rounds": 1, "cohort": 3, "engine": "sequential", "progress": False}
OTHER: dict[str, Any] = {
    "cohort": 2,
    "sampling": "independent",
    "centralised": True,
    "evaluate_every": 0,
    "evaluate_shared": True,
    "evaluate_adapted": True,
    "hold_out": 0.4,
    "on_nonfinite": "skip",
    "min_clients": 2,
    "metrics": ("macro_f1",),
}
"""Another value of each setting that results depend on, but for the number of rounds, which a run may change."""
FREE = ["epochs", "engine", "workers", "device", "accelerate", "trackers"]


def test_each_setting_is_marked_by_whether_results_depend_on_it() -> None:
    marks = {one.name: one.metadata.get("counts") for one in fields(RunSettings)}
    assert [name for name, mark in marks.items() if mark not in get_args(Counts)] == []
    assert [name for name, mark in marks.items() if mark == "never"] == FREE
    assert marks.keys() == {"rounds", *OTHER, *FREE}, "a setting that counts is to be tried here"


def test_each_is_an_argument_of_simulate_with_the_same_default() -> None:
    known = inspect.signature(simulate).parameters
    assert {one.name: known[one.name].default for one in fields(RunSettings)} == {
        one.name: one.default for one in fields(RunSettings)
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    simulate(MODEL, METHOD, DATA, out=folder, **BASE)
    return folder


@pytest.mark.parametrize("name", OTHER)
def test_a_run_does_not_go_on_with_another_value(name: str, run: Path) -> None:
    with pytest.raises(RunError, match=rf"\n  {name}: .* now\n"):
        simulate(MODEL, METHOD, DATA, out=run, resume=True, **{**BASE, name: OTHER[name]})


@pytest.mark.parametrize("name", OTHER)
def test_a_run_is_read_again_with_its_own_value(name: str, tmp_path: Path) -> None:
    made = simulate(MODEL, METHOD, DATA, out=tmp_path / "run", **{**BASE, name: OTHER[name]})
    again = load_run(tmp_path / "run", model=MODEL, method=METHOD, data=DATA)
    assert again.evaluate("test") == made.evaluate("test")
