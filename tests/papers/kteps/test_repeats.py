"""Test reviews that stand in training are told from others by their words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkeep import FederatedData
from fedkeep.data import Ragged
from fedkeep.engines import Judged, Judgement
from fedkeep.experiments.reproductions import reproduce
from fedkeep.tasks import MULTICLASS, Task
from fedkeep_papers.kteps.cells import by_repeats, repeated
from tests.papers.kteps.runs import read_numbers, request

TRAIN = [("a", [1, 2, 3]), ("a", [4]), ("b", [5, 6]), ("b", [])]
TEST = [
    ("a", [5, 6]),  # another client's
    ("a", [1, 2]),  # the beginning of one
    ("a", [1, 2, 3]),
    ("b", [6, 5]),
    ("b", [1, 2, 3, 4]),  # two, one behind the other
]


def reviews() -> FederatedData:
    lines = [*TRAIN, *TEST]
    columns = {
        "text": Ragged.from_rows([np.array(words, np.int64) for _, words in lines]),
        "label": np.zeros(len(lines), np.int64),
    }
    owners = [client for client, _ in lines]
    return FederatedData.from_columns(
        owners, columns, ["train"] * len(TRAIN) + ["test"] * len(TEST), {"classes": 2}
    )


def judged(data: FederatedData, right: dict[str, list[float]]) -> Judged:
    """Return the answers for test reviews in the order above."""
    rows = [(c, row) for c in range(len(data)) for row in data.rows(c, "test")]
    client, row = (np.array(part) for part in zip(*rows, strict=True))
    zeros = np.zeros(len(rows))
    return Judged(
        task=Task(MULTICLASS),
        models=tuple(right),
        leaves="examples",
        examples=tuple(
            Judgement(Task(MULTICLASS), client, zeros, np.array(r), zeros, row) for r in right.values()
        ),
    )


def test_words_tell_repeats() -> None:
    """No part of a review and no other order is one; a training review itself is none."""
    data = reviews()
    again = repeated(data)
    found = {str(data.ids[c]): [bool(again[r]) for r in data.rows(c, "test")] for c in range(len(data))}
    assert found == {"a": [True, False, True], "b": [False, False]}
    assert int(again.sum()) == 2


def test_accuracy_on_repeats_and_others() -> None:
    data = reviews()
    found = by_repeats(data, judged(data, {"own": [1, 0, 1, 1, 0], "shared": [1, 1, 0, 0, 0]}))
    assert found == {
        "repeats": {"a": 2},
        "again": {"own": {"a": 1.0}, "shared": {"a": 0.5}},
        "rest": {"own": {"a": 0.0, "b": 0.5}, "shared": {"a": 1.0, "b": 0.0}},
    }


@pytest.mark.slow
def test_cells_keep_both(data: Path, tmp_path: Path) -> None:
    reproduce("kteps-table2", request(data, tmp_path, only=["*fedavg*", "*indiv*"]))
    for path in (tmp_path / "kteps").iterdir():
        numbers = read_numbers(path)
        assert numbers.repeats == {"books": 2}
        for model, whole in (("own", numbers.test), ("shared", numbers.shared)):
            if not whole:
                assert model not in numbers.rest
                continue
            for client, value in whole.items():  # of 5 test reviews each
                again, count = numbers.again[model].get(client, 0.0), numbers.repeats.get(client, 0)
                rest = numbers.rest[model].get(client, 0.0)
                assert 5 * value == pytest.approx(count * again + (5 - count) * rest)
    assert "Test reviews that stand in training" in (tmp_path / "kteps-table2.md").read_text(encoding="utf-8")
