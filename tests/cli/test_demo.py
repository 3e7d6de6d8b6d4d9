"""``fedkeep demo``: the table, the page, and a second call."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fedkeep.cli import start as demo_module
from fedkeep.experiments.demo import run_demo
from tests.cli.conftest import Command
from tests.commands import succeeded

SMALL = {"data.users": "8", "data.examples": "15", "run.epochs": "1"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.demo.run_demo", partial(run_demo, overrides=SMALL))


@pytest.mark.usefixtures("small")
def test_a_second_time(fedkeep: Command) -> None:
    Path("runs/demo/of-the-first").mkdir(parents=True)
    result = succeeded(fedkeep("demo"))
    page = Path("runs/demo-2/report.html").resolve()
    lines = result.stdout.splitlines()
    assert lines[-1] == f"Page: {page}"
    assert lines[1].split() == ["Method", "Test", "accuracy", "Best", "possible", "Time"]
    names = [line.split("  ")[0] for line in lines[3:6]]
    assert names == ["Global FL", "Personalized Server", "Personalized FL"]
    assert all(line.count(" %") == 2 for line in lines[3:6])
    assert "It has not come near enough; train longer" in result.stdout
    assert "User vectors" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("small")
def test_a_folder_that_holds_something(fedkeep: Command) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work", encoding="utf-8")
    result = fedkeep("demo", "--out", "mine")
    assert result.exit_code == 2
    message = "Error: mine already exists and is not empty. Name another folder, or leave --out away.\n"
    assert result.stderr == message
    assert [p.name for p in Path("mine").iterdir()] == ["thesis.txt"]


def test_above_and_below() -> None:
    assert demo_module._apart(0.657) == "65.7 points above"
    assert demo_module._apart(-0.002) == "0.2 points below"
