"""What federated data refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, Ragged
from tests.data.small import small, tiny
from tests.refusals import raises


@pytest.mark.parametrize(
    ("clients", "facts"),
    [
        ([], {"largest": 1, "got": "none"}),
        ([0, 2], {"largest": 1, "got": "client 2"}),
        ([-1], {"largest": 1, "got": "client -1"}),
        ([1, 1], {"largest": 1, "got": "a client twice"}),
    ],
)
def test_select_of_clients_that_are_none(clients: list[int], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        small().select(clients)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda data: data.rows("a"), {"largest": 1, "got": "a"}),
        (lambda data: data.count(0.0), {"largest": 1, "got": 0.0}),
        (lambda data: data.select(["a", "b"]), {"largest": 1, "got": ["a", "b"]}),
        (lambda data: data.select(1), {"largest": 1, "got": 1}),
        (lambda data: data.split_rows("all", [0.0, 1.0]), {"largest": 1, "got": [0.0, 1.0]}),
    ],
)
def test_clients_that_are_given_by_no_number(
    call: Callable[[FederatedData], Any], facts: dict[str, Any]
) -> None:
    with raises(DataError, **facts):
        call(small())


@pytest.mark.parametrize("client", [2, -1])
def test_rows_of_clients_that_are_not_there(client: int) -> None:
    for call in (lambda: small().rows(client), lambda: small().split_rows("all", [0, client])):
        with raises(DataError, text=f"There is no client {client}: clients are numbered 0 to 1."):
            call()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"columns": {}},
            {"said": "Wanted at least one column; got none"},
        ),
        (
            {"columns": {"x": np.zeros((0, 2))}, "offsets": [0, 0, 0]},
            {"said": "Wanted at least one example; got an empty data set"},
        ),
        (
            {"columns": {"x": np.zeros(3), "label": np.zeros(2, np.int64)}},
            {"wanted": 3, "column": "label", "whose": "column 'x'", "got": 2},
        ),
        (
            {"columns": {3: np.zeros(3)}},
            {"got": 3},
        ),
        (
            {"columns": {"x y": np.zeros(3)}},
            {"got": "x y"},
        ),
        (
            {"columns": {"client": np.zeros(3)}},
            {"column": "client"},
        ),
        (
            {"columns": {"weight": np.zeros(3)}},
            {"column": "weight"},
        ),
        (
            {"columns": {"text": Ragged.from_rows([[1], [2], [3]]), "text_length": np.ones(3)}},
            {"column": "text"},
        ),
        (
            {"columns": {"text": ["a", "b", "c"]}},
            ({"column": "text"}),
        ),
        (
            {"columns": {"x": [[1], [2, 3], [4]]}},
            {"column": "x"},
        ),
        (
            {"columns": {"x": np.zeros(3, complex)}},
            {"column": "x", "shape": (3,)},
        ),
        (
            {"columns": {"time": np.array(["2026-01-02"] * 3, "datetime64[ns]")}},
            ({"column": "time", "shape": (3,)}),
        ),
        (
            {"columns": {"x": np.array([[0, 1], [2, np.nan], [np.inf, 0]])}},
            {"column": "x", "row": 1, "client": "a", "more": 1},
        ),
        (
            {"columns": {"label": np.array([0.0, 1.0, -np.inf])}},
            {"column": "label", "row": 2, "client": "b", "more": 0},
        ),
        (
            {"columns": {"label": np.array([0, 1, 5])}, "meta": {"classes": 3}},
            ({"largest": 2, "classes": 3, "ignored": "", "got": 5, "row": 2, "client": "b", "more": 0}),
        ),
        (
            {"columns": {"label": np.array([0, -1, -2])}},
            ({"largest": 1, "classes": 2, "ignored": "", "got": -1, "row": 1, "client": "a", "more": 1}),
        ),
        (
            {"columns": {"label": np.array([0, 1, 2])}, "meta": {"task": "binary"}},
            {"said": "A binary task has the labels 0 and 1; got 3 classes"},
        ),
        (
            {"columns": {"x": torch.ones(3, dtype=torch.bfloat16), "label": np.arange(3)}},
            {"column": "x"},
        ),
        (
            {"columns": {"x": np.ma.masked_equal([-999, 1, -999], -999)}},
            ({"column": "x", "masked": 2}),
        ),
        (
            {"columns": {"label": np.array([0.0, np.nan, 1.0])}, "meta": {"task": "binary"}},
            {"task": "binary"},
        ),
        (
            {"columns": {"label": np.zeros((3, 2), np.int64)}},
            ({"said": "Wanted labels of the shape (examples,)"}),
        ),
        (
            {"meta": {"task": "multclass"}},
            {"what": "meta['task'] must be", "got": "multclass"},
        ),
        (
            {"meta": {"traits": {"colour": ["red"]}}},
            {"wanted": 2, "name": "colour", "got": 1},
        ),
        (
            {"offsets": [0, 3]},
            {"wanted": 3, "got": (2,)},
        ),
        (
            {"offsets": [0, 2, 4]},
            {"wanted": "the clients' offsets", "end": 3, "got": "a fall, or 0 to 4"},
        ),
        (
            {"bounds": np.zeros((2, 3), np.int64)},
            {"clients": 2, "got": (2, 3)},
        ),
        (
            {"bounds": np.array([[0, 1, 1, 2], [2, 1, 3, 3]])},
            {"client": "b", "start": 2, "end": 3, "got": [2, 1, 3, 3]},
        ),
        (
            {"bounds": np.array([[0, 1, 1, 1], [2, 2, 3, 3]])},
            {"client": "a", "start": 0, "end": 2, "got": [0, 1, 1, 1]},
        ),
        (
            {"ids": ["a", "a"]},
            {"name": "a"},
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        tiny(**changes)


@pytest.mark.parametrize(
    ("client", "columns", "split", "facts"),
    [
        (
            ["a"],
            {"label": [0, 1]},
            None,
            {"wanted": 1, "column": "label", "whose": "the client ids", "got": 2},
        ),
        (
            [0.5, 1.0],
            {"label": [0, 1]},
            None,
            {"got": 0.5},
        ),
        (
            ["a", "b"],
            {"label": [0, 1]},
            ["train", "tset"],
            {"what": "Row 1: wanted the split", "got": "tset"},
        ),
        (["a", "b"], {"label": [0, 1]}, ["train"], {"wanted": 2, "got": (1,)}),
        (
            ["b", "a"],
            {"x": [0.0, np.nan]},
            None,
            {"column": "x", "row": 1, "client": "a", "more": 0},
        ),
        (
            ["a", ""],
            {"label": [0, 1]},
            None,
            ({"got": ""}),
        ),
        (
            ["a", "a\0"],
            {"label": [0, 1]},
            None,
            ({"got": "a\x00"}),
        ),
        (
            [],
            {"label": []},
            None,
            {"said": "Wanted at least one example; got an empty data set"},
        ),
        (
            ["a", "b"],
            {"label": [5, 20231231]},
            None,
            ({"place": "Row 1 (client 'b')", "label": 20231231, "classes": 20231232, "occur": 2}),
        ),
        (
            ["a", "b"],
            {"x": np.array([1, 2**63], np.uint64)},
            None,
            {"column": "x", "got": 9223372036854775808},
        ),
    ],
)
def test_what_from_columns_refuses(client: Any, columns: Any, split: Any, facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        FederatedData.from_columns(client, columns, split)


def test_splits_and_clients_that_are_none() -> None:
    data = small()
    with raises(DataError, got="vaild"):
        data.rows(0, "vaild")

    for client in (2, -1):
        with raises(DataError, text=f"There is no client {client}: clients are numbered 0 to 1."):
            data.rows(client, "train")
    with raises(DataError, split="train"):
        tiny().counts("train")


@pytest.mark.parametrize("classes", [0, True, "three", 2.5])
def test_a_number_of_classes_that_is_none(classes: Any) -> None:
    with raises(DataError, said="Wanted meta['classes']", got=classes):
        FederatedData.from_columns(["a", "b"], {"label": [0, 1]}, meta={"classes": classes})


def test_what_a_message_about_missing_values_says_helps() -> None:
    x, nothing = np.zeros((3, 2)), (None, float("nan"))
    for missing in nothing:
        with pytest.raises(DataError, match="^Row 1: .*missing; drop the row"):
            FederatedData.from_columns(["a", missing, "b"], {"x": x})
    with pytest.raises(DataError, match="^Row 1: .*missing; drop the row"):
        FederatedData.from_columns(np.array([1, np.nan, 2]), {"x": x})
    with pytest.raises(DataError, match=r"astype\(int\)"):
        FederatedData.from_columns(np.array([1.0, 3, 2]), {"x": x})
    FederatedData.from_columns(np.array([1.0, 3, 2]).astype(int), {"x": x})
    with pytest.raises(DataError, match="^Row 1 of column 'label'.*Drop such rows"):
        FederatedData.from_columns(["a"] * 3, {"x": x, "label": [0, None, 1]})
    FederatedData.from_columns(["a"] * 2, {"x": x[:2], "label": [0, 1]})
    with pytest.raises(DataError, match=r"np\.array\(column\.tolist\(\)\)"):
        FederatedData.from_columns(["a"] * 3, {"x": np.zeros(3, object)})
    FederatedData.from_columns(["a"] * 3, {"x": np.array(np.zeros(3, object).tolist())})
    labels = ["no", "yes", "no"]
    with pytest.raises(DataError, match=r"np\.unique\(labels, return_inverse=True\)"):
        FederatedData.from_columns(["a"] * 3, {"x": x, "label": labels})
    FederatedData.from_columns(
        ["a"] * 3, {"x": x, "label": np.unique(np.array(labels), return_inverse=True)[1]}
    )
