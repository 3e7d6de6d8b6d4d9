"""Readings of KTEPS: each is a cell of its own, whose settings say it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkeep.experiments.build import build_method, build_model
from fedkeep.experiments.reproductions import reproduce
from fedkeep.methods.kteps import BranchLoss
from fedkeep.models import TextClassifier
from fedkeep.privacy import GaussianNoise
from fedkeep.report.results import read_results
from fedkeep_papers.kteps import book, readings
from fedkeep_papers.kteps.cells import Task
from tests.papers.kteps.runs import read_numbers, request


@pytest.fixture
def asked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    found: list[Task] = []
    monkeypatch.setattr(book, "run_tasks", lambda tasks, *_, **__: found.extend(tasks))
    monkeypatch.setattr(readings, "HELD_OUT", 4)
    reproduce("kteps-readings", request(data, tmp_path, seeds=[0]))
    return {
        task.cell.name.removeprefix("fdu-reading-").removesuffix("-held-out-full-0"): task for task in found
    }


def test_every_reading_is_asked_for_once(asked: dict[str, Task]) -> None:
    assert len(asked) == 8 + 6
    assert len({task.slot.file.name.rpartition("-")[2] for task in asked.values()}) == len(asked)
    for task in asked.values():
        config = task.cell.resolved()
        assert (config.data.options["valid"], task.cell.split) == (4, "valid")


def test_what_the_readings_set(asked: dict[str, Task], data: Path) -> None:
    def loss(name: str) -> BranchLoss:
        found = build_method(asked[name].cell.resolved().method).client.phases[0].loss
        assert isinstance(found, BranchLoss)
        return found

    assert (loss("kteps-as-configured").share, loss("kteps-halved-losses").share) == (1, 0.5)
    assert loss("kteps-hsic-by-the-median").unit == "median"
    assert loss("kteps-normalised-hsic").normalised
    noisy = build_method(asked["fedavg-noise-of-0.01-for-all"].cell.resolved().method)
    assert noisy.upload == (GaussianNoise(0.01),)
    assert build_method(asked["kteps-noise-of-0.01-for-all"].cell.resolved().method).upload == (
        GaussianNoise(0.01),
    )
    even = build_method(asked["fedavg-simple-averaging"].cell.resolved().method)
    assert even.server.reduce.by == "uniform"  # type: ignore[attr-defined]
    config = asked["fedavg-mean-over-padding"].cell.resolved()
    model = build_model(config, book.build_data(config, data), data)
    assert isinstance(model, TextClassifier)
    assert model.mean_over == 200


def test_a_reading_is_judged_on_held_out_reviews(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "HELD_OUT", 4)
    reproduce("kteps-readings", request(data, tmp_path, seeds=[0], only=["*-kteps-halved-*"]))
    (file,) = (tmp_path / "kteps").iterdir()
    numbers = read_numbers(file)
    found = {(r.scene, r.method): r.value for r in read_results(tmp_path / "kteps-readings.json")}
    name = "KTEPS, halved losses"
    held = np.mean(list(numbers.curves["0.01"]["own"].values()))
    assert found["FDU, held-out training reviews", name] == pytest.approx(held, abs=1e-6)
    assert found["FDU, test reviews", name] == pytest.approx(np.mean(list(numbers.shared.values())), abs=1e-6)
    assert found["FDU, test reviews", "KTEPS, dropout"] is None
