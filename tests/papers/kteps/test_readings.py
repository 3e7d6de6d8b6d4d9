"""Readings of KTEPS: each is a cell of its own, whose settings say it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.build import build_method, build_model
from fedkeep.experiments.reproductions import reproduce
from fedkeep.models import TextClassifier
from fedkeep.privacy import GaussianNoise
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.kteps import book, readings
from fedkeep_papers.kteps.cells import CellJob
from fedkeep_papers.kteps.methods import BranchLoss
from tests.papers.kteps.runs import read_numbers, request, rows

HELD, TESTED = "FDU, held-out training reviews", "FDU, test reviews"


@pytest.fixture
def asked(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, CellJob]:
    found: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, **__: found.extend(tasks))
    monkeypatch.setattr(readings, "HELD_OUT", 4)
    reproduce("kteps-readings", request(data, tmp_path, seeds=[0]))
    return {
        task.cell.name.removeprefix("fdu-reading-").removesuffix("-held-out-full-0"): task for task in found
    }


@pytest.mark.slow
def test_every_reading_is_asked_for_once(asked: dict[str, CellJob]) -> None:
    assert len(asked) == 8 + 6
    assert len({task.slot.file.name.rpartition("-")[2] for task in asked.values()}) == len(asked)
    for task in asked.values():
        config = task.cell.resolved()
        assert (config.data.options["valid"], task.cell.split) == (4, "valid")


@pytest.mark.slow
def test_what_the_readings_set(asked: dict[str, CellJob], data: Path) -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_best_reading_is_trained_on_all_reviews_and_tested(
    finished: Path, data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = ("mean over padding", "halved losses", "as configured")  # of equal ones the first is chosen
    monkeypatch.setattr(readings, "HELD_OUT", 3)
    monkeypatch.setattr(readings, "READINGS", {name: readings.READINGS[name] for name in tried})
    shutil.copytree(finished / "kteps", tmp_path / "kteps")
    names = [f"{m}-{name.replace(' ', '-')}" for name in tried for m in ("kteps", "fedavg")]
    names.remove("fedavg-halved-losses")
    both = request(data, tmp_path, seeds=[0, 1])

    reproduce("kteps-readings", replace(both, only=["*-fedavg-*", "*-kteps-mean-*", "*-kteps-halved-*"]))
    first = [f"fdu-reading-{name}-held-out-full-0" for name in names]
    usual = first.pop(names.index("kteps-as-configured"))
    assert computed == first  # nothing is chosen while a reading of KTEPS is not there
    assert {r.scene for r in read_results(tmp_path / "kteps-readings.json")} == {HELD, TESTED}

    reproduce("kteps-readings", both)
    held = {r.method: r.value for r in read_results(tmp_path / "kteps-readings.json") if r.scene == HELD}
    best = max(tried, key=lambda name: held[f"KTEPS, {name}"])
    asked = [name for name in names if name.endswith(best.replace(" ", "-")) and best != "as configured"]
    others = [f"fdu-reading-{name}-full" for name in asked]
    assert computed[len(first) :] == [usual, *(f"{name}-{seed}" for name in others for seed in (0, 1))]

    def values(method: str, metric: str) -> float | None:
        scene = "FDU, trained on all training reviews"
        found = read_results(tmp_path / "kteps-readings.json")
        return next(r.value for r in found if (r.scene, r.method, r.metric) == (scene, method, metric))

    text = (tmp_path / "kteps-readings.md").read_text(encoding="utf-8")
    assert f"The best of KTEPS's is '{best}'." in text
    for method in ("KTEPS", "FedAvg"):  # as configured they are the cells of the tables
        known = rows(finished, "kteps-table3")[method, "accuracy_ap"].value
        assert values(f"{method}, as configured", "accuracy_ap") == known
    if best != "as configured":
        gaps = [
            100 * (values(f"KTEPS, {best}", m) - values("FedAvg, as configured", m))  # type: ignore[operator]
            for m in ("accuracy_ap", "accuracy_ag")
        ]
        (row,) = (line for line in text.splitlines() if re.match(r"\| FedAvg, as configured \| [+-]", line))
        assert [float(cell.split("±")[0]) for cell in row.split("|")[2:4]] == pytest.approx(gaps, abs=0.0051)
    computed.clear()
    reproduce("kteps-readings", both)
    assert computed == []
    cell = next((tmp_path / "kteps").glob(f"{others[0]}-1-*")) if others else None
    assert cell is None or len(read_numbers(cell).curves["0.01"]["own"]) == 16


@pytest.mark.slow
def test_a_reading_that_waits_may_be_named(
    data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "HELD_OUT", 3)
    reproduce("kteps-readings", request(data, tmp_path, only=["fdu-reading-kteps-dropout-full-*"]))
    assert computed == []
    text = (tmp_path / "kteps-readings.md").read_text(encoding="utf-8")
    assert "Once all of KTEPS's are finished the best is trained" in text
    with pytest.raises(ConfigError, match="No run matches"):
        reproduce("kteps-readings", request(data, tmp_path, only=["fdu-reading-kteps-else-*"]))
