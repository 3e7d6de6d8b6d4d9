"""PFL-DA and FedFusion read in other ways than in the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import book
from fedkeep_papers.kteps.cells import Task
from tests.papers.kteps.runs import request, rows


def test_readings_change_the_method_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []
    monkeypatch.setattr(book, "run_tasks", lambda tasks, *_: asked.extend(tasks))
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/fedfusion", "kteps/pfl-da"])
    reproduce("kteps-baselines", request(data, tmp_path))
    found = {task.cell.name: task.cell.resolved() for task in asked}
    usual = found["fdu-fedfusion-full-0"]
    steps = {name: usual.method.options[name] for name in ("epochs", "batch_size")}
    methods = {
        "fdu-pfl-da-gated-full-0": ("pfl_da", {}),
        "fdu-pfl-da-gated-with-a-loss-of-its-own-full-0": ("pfl_da", {"general": 1.0}),
        "fdu-fedfusion-never-set-back-full-0": (
            "fedfusion",
            {"operator": "multi", "persistent_local": True, "reset_local": False},
        ),
        "fdu-fedfusion-never-set-back-conv-full-0": (
            "fedfusion",
            {"operator": "conv", "persistent_local": True, "reset_local": False},
        ),
    }
    assert found.keys() == {*methods, "fdu-fedfusion-full-0", "fdu-pfl-da-full-0"}
    for name, (kind, options) in methods.items():
        method = found[name].method
        assert (method.kind, method.options) == (kind, {**steps, **options})
        assert method.optimizer == usual.method.optimizer
        for part in ("data", "model", "run", "personalization"):
            assert getattr(found[name], part) == getattr(usual, part), (name, part)
    lines = rows(tmp_path, "kteps-baselines")
    for way in ("as configured", "gated", "gated, with a loss of its own"):
        assert lines[f"PFL-DA, {way}", "accuracy_ap"].published == pytest.approx(0.821)
    for way in ("as configured", "never set back", "never set back, conv"):
        assert lines[f"FedFusion, {way}", "accuracy_ag"].published == pytest.approx(0.838)
    assert len(lines) == 12
