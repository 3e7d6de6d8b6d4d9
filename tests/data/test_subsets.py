"""Fewer clients and fewer examples, of encoded data and of a source alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Labels, Plain, Raw, prepared
from fedkeep.data.subsets import subset
from tests.refusals import raises

CLIENTS = np.repeat([f"c{n}" for n in range(10)], 20)
SPLIT = np.tile(["train"] * 14 + ["valid"] * 4 + ["test"] * 2, 10)
X = np.arange(200)


def encoded(split: bool = True) -> FederatedData:
    columns: dict[str, Any] = {"x": X[:, None].astype("f4"), "label": X % 3}
    return FederatedData.from_columns(CLIENTS, columns, SPLIT if split else None)


def source(split: bool = True) -> Raw:
    return Raw(
        client=CLIENTS.tolist(),
        split=SPLIT.tolist() if split else None,
        columns={"x": Plain(values=X[:, None].astype("f4")), "label": Labels(values=list(map(str, X % 3)))},
    )


def numbers(data: FederatedData) -> list[int]:
    return [int(n) for n in np.asarray(data.columns["x"])[:, 0]]


@pytest.mark.parametrize("split", [True, False])
def test_some_clients_and_some_examples_of_each(split: bool) -> None:
    data = subset(encoded(split), clients=3, examples=10)
    assert data.counts().tolist() == [10, 10, 10]
    if split:
        assert [data.count(0, part) for part in ("train", "valid", "test")] == [7, 2, 1]
    else:
        assert data.bounds is None
    rows = numbers(data)
    assert len(set(rows)) == 30
    assert [str(CLIENTS[n]) for n in rows] == [c for c in data.ids for _ in range(10)]
    assert np.asarray(data.columns["label"]).tolist() == [n % 3 for n in rows]
    assert numbers(prepared(subset(source(split), clients=3, examples=10))) == rows


def test_a_client_trains_on_one_example_at_least() -> None:
    data = FederatedData.from_columns(["a"] * 20, {"label": X[:20] % 2}, ["train"] + ["test"] * 19)
    assert [subset(data, examples=2).count(0, part) for part in ("train", "test")] == [1, 1]
    assert subset(data, examples=50).examples == 20


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"clients": 11}, {"wanted": 11, "there": 10}),
        ({"clients": 0}, {"got": 0}),
        ({"examples": 0}, {"got": 0}),
    ],
)
def test_numbers_that_cannot_be(options: dict[str, int], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        subset(source(), **options)
