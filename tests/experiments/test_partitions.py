"""A run keeps how images were divided, as numbers that a report draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedkeep import methods, simulate
from fedkeep.data import ImageSet, class_counts, majority, opt_out
from fedkeep.experiments.simulate import partition_counts
from fedkeep.models import CNN
from tests.tiny import classes, pairs

IMAGES = ImageSet(
    np.random.default_rng(0).integers(0, 256, (80, 1, 16, 16), dtype=np.uint8),
    np.arange(80) % 4,
    60,
    ["a", "b", "c", "d"],
    "squares",
)


def test_a_run_says_how_many_images_of_each_class_a_client_has(tmp_path: Path) -> None:
    data = opt_out(majority(IMAGES, 2, 0.5, 20, 8, seed=3), 0.5)
    model = CNN(4, 1, 16, widths=(2, 2), hidden=(4, 4))
    simulate(model, methods.fedavg(), data, rounds=1, cohort=2, out=tmp_path / "run")
    info = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    out = [c for c in range(2) if not np.asarray(data.columns["opted_in"])[data.rows(c).start]]
    assert info["partition_counts"] == {
        "clients": ["client-0", "client-1"],
        "classes": ["a", "b", "c", "d"],
        "counts": class_counts(data, "train").tolist(),
        "opted_out": out,
    }
    assert len(out) == 1


def test_data_that_came_with_their_clients_are_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data = classes()
    found = partition_counts(data)
    assert found["counts"] == class_counts(data, "train").tolist()
    assert (found["clients"], found["opted_out"]) == (list(data.ids), [])
    monkeypatch.setattr("fedkeep.experiments.simulate.MOST_OWN", np.size(found["counts"]) - 1)
    assert partition_counts(data) is None


def test_labels_that_are_no_single_class_are_not_drawn() -> None:
    assert partition_counts(pairs({"a": [(1.0, 2.0), (2.0, 1.0)]})) is None


def test_more_than_a_plot_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = majority(IMAGES, 2, 0.5, 20, 8)
    assert partition_counts(data) is not None
    assert partition_counts(data)["opted_out"] == []  # type: ignore[index]
    monkeypatch.setattr("fedkeep.experiments.simulate.MOST", 7)
    assert partition_counts(data) is None
