"""PFL-DA, FedFusion, FedProx, Tables 7 and 8 read in other ways than in the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedkeep import averaging
from fedkeep.experiments.build import build_method
from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import baselines, book
from fedkeep_papers.kteps.cells import Cell, CellJob, Numbers
from tests.papers.kteps.runs import request, rows


def finish(tasks: list[CellJob], **numbers: Any) -> None:
    """Write what some cells are to have left."""
    for task in tasks:
        task.slot.write(Numbers(task.cell.name, {}, {}, **numbers))


@pytest.mark.slow
def test_readings_change_the_method_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, on: asked.extend(tasks))
    monkeypatch.setattr(
        book, "builtin_names", lambda: ["kteps/fedavg", "kteps/fedfusion", "kteps/fedprox", "kteps/pfl-da"]
    )
    monkeypatch.setattr(baselines, "ALONE", ())
    reproduce("kteps-baselines", request(data, tmp_path))
    found = {task.cell.name: task.cell.resolved() for task in asked}
    projected = found.pop("fdu-table-7-3-to-150-3-a-round-full-0")
    usual = found["fdu-fedfusion-full-0"]
    steps = {name: usual.method.options[name] for name in ("epochs", "batch_size")}
    star = Cell("", "kteps/kteps-star").resolved().method.options
    assert projected.method.options == {**star, **steps, "start": 4, "end": 150}
    assert projected.run.rounds == usual.run.rounds + 1
    uncentred = found.pop("fdu-kteps-star-uncentred-full-0")
    assert uncentred.method.options == {**star, **steps, "center": False}
    assert uncentred.run.rounds == usual.run.rounds
    whole = found.pop("fdu-fedfusion-gamma-averaged-whole-full-0")
    assert build_method(whole.method) == build_method(usual.method).but(server=averaging())
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "fdu-pfl-da-gated-full-0": ("pfl_da", {}),
        "fdu-pfl-da-gated-with-a-loss-of-its-own-full-0": ("pfl_da", {"general": 1.0}),
        "fdu-fedprox-mu-0.1-full-0": ("fedprox", {"mu": 0.1}),
    }
    fusions = {"conv": ("conv", True), "single": ("single", True), "never-set-back": ("multi", False)}
    fusions |= {f"never-set-back-{operator}": (operator, False) for operator in ("conv", "single")}
    for way, (operator, reset) in fusions.items():
        options = {"operator": operator, "persistent_local": True, "reset_local": reset}
        methods[f"fdu-fedfusion-{way}-full-0"] = ("fedfusion", options)
    both = {"operator": "multi", "persistent_local": True, "reset_local": False}
    methods["fdu-fedfusion-both-trained-full-0"] = (
        "fedfusion",
        {**both, "train_received": True, "gamma": 0.5},
    )
    assert found.keys() == {*methods, "fdu-fedfusion-full-0", "fdu-pfl-da-full-0"}
    for name, (kind, options) in methods.items():
        method = found[name].method
        where = "" if kind == "fedprox" else "fedkeep_papers.kteps.methods:"
        assert (method.kind, method.options) == (where + kind, {**steps, **options})
        assert method.optimizer == usual.method.optimizer
        for part in ("data", "model", "run", "personalization"):
            assert getattr(found[name], part) == getattr(usual, part), (name, part)
    lines = rows(tmp_path, "kteps-baselines")
    for way in ("as configured", "gated", "gated, with a loss of its own"):
        assert lines[f"PFL-DA, {way}", "accuracy_ap"].published == pytest.approx(0.821)
    for way in (
        "as configured",
        "conv",
        "single",
        *(f"never set back{how}" for how in ("", ", conv", ", single")),
        "both trained",
        "gamma averaged whole",
    ):
        assert lines[f"FedFusion, {way}", "accuracy_ag"].published == pytest.approx(0.838)
    assert lines["FedProx, mu 0.1", "accuracy_ag"].published == pytest.approx(0.846)
    for more in ("", ", 1 more"):
        assert lines[f"Table 7, 3 to 150, 3 a round{more}", "accuracy_ag"].published == pytest.approx(0.616)
    assert lines["Table 7, 3 to 150, 3 a round, 1 more", "accuracy_ap"].published == pytest.approx(0.65)
    assert lines["KTEPS⋆, uncentred", "accuracy_ag"].published == pytest.approx(0.829)
    assert len(lines) == 29


def test_ag_of_the_usual_rounds_and_of_one_more(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = [[k + 1, k / 100] for k in range(51)]
    curves = {"0.01": {"own": {"a": [0.6, 0.8]}}}
    name = "Table 7, 3 to 150, 3 a round"
    monkeypatch.setattr(baselines, "READINGS", {name: baselines.READINGS[name]})
    monkeypatch.setattr(baselines, "ALONE", ())
    monkeypatch.setattr(
        book,
        "run_long_jobs",
        lambda tasks, *_, on: finish(tasks, shared={"a": 0.5}, shared_curve=curve, curves=curves),
    )
    reproduce("kteps-baselines", request(data, tmp_path))
    found = rows(tmp_path, "kteps-baselines")
    assert found[name, "accuracy_ag"].value == pytest.approx(0.49)  # after round 50
    assert found[f"{name}, 1 more", "accuracy_ag"].value == pytest.approx(0.5)
    assert found[f"{name}, 1 more", "accuracy_ap"].value == pytest.approx(0.7)
    assert len(found) == 3


@pytest.mark.slow
def test_branches_of_table_8_predict_alone_on_the_same_models(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = {"0.01": {"own": {"a": [0.7, 0.9]}, "s": {"a": [0.6, 0.8]}, "p": {"a": [0.3, 0.5]}}}
    monkeypatch.setattr(baselines, "READINGS", {})
    asked: list[CellJob] = []
    numbers = {"test": {"a": 0.9}, "shared": {"a": 0.8}, "curves": curves}
    monkeypatch.setattr(
        book, "run_long_jobs", lambda tasks, *_, on: (asked.extend(tasks), finish(tasks, **numbers))
    )
    reproduce("kteps-baselines", request(data, tmp_path))
    about = "diversity-0.0-projections-False-transfer-0.01-full-0"
    assert [t.cell.name for t in asked] == [f"fdu-kteps-architecture-{a}-{about}" for a in "BC"]
    assert {t.cell.inferences for t in asked} == {("s", "p")}
    usual = request(data, tmp_path / "b")
    reproduce("kteps-table8", usual)  # its own cells, whose file is another
    assert len({t.slot.file.name for t in asked}) == len(asked) == 2 + 12
    found = rows(tmp_path, "kteps-baselines")
    for architecture, known in (("B", 0.833), ("C", 0.814)):
        for how, value in (("sp", 0.8), ("s", 0.7), ("p", 0.4)):
            row = found[f"Table 8, {architecture}, λ2 = 0.01, {how}", "accuracy_ap"]
            assert (row.value, row.published) == (pytest.approx(value), pytest.approx(known))


def test_a_table_names_the_cells_that_were_trained_on_a_gpu(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: r for name, r in baselines.READINGS.items() if name.startswith("FedFusion, ")}
    monkeypatch.setattr(baselines, "READINGS", few)
    monkeypatch.setattr(baselines, "ALONE", ())

    def train(tasks: list[CellJob], *_: object, on: object) -> None:
        curves = {"0.01": {"own": {"a": [0.6, 0.8]}}}
        for task in tasks:
            gpu = {"gpu": "a GPU"} if "single" in task.name else {}
            finish([task], shared={"a": 0.5}, curves=curves, environment={"cores": 2, **gpu})

    monkeypatch.setattr(book, "run_long_jobs", train)
    text = reproduce("kteps-baselines", request(data, tmp_path)).read_text(encoding="utf-8")
    (said,) = [line for line in text.splitlines() if "GPU" in line]
    assert said == (
        "**On a GPU.** Trained on one a GPU fdu-fedfusion-single-full-0, "
        "fdu-fedfusion-never-set-back-single-full-0. All others were trained on CPUs."
    )
