"""What federated data refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, Ragged
from tests.data.small import message, small, tiny
from tests.refusals import raises


@pytest.mark.parametrize(
    ("clients", "got"), [([], "none"), ([0, 2], "client 2"), ([-1], "client -1"), ([1, 1], "a client twice")]
)
def test_select_of_clients_that_are_none(clients: list[int], got: str) -> None:
    with pytest.raises(DataError) as error:
        small().select(clients)
    assert message(error) == f"Wanted different clients between 0 and 1; got {got}."


@pytest.mark.parametrize(
    ("call", "got"),
    [
        (lambda data: data.rows("a"), "'a'"),
        (lambda data: data.count(0.0), "0.0"),
        (lambda data: data.select(["a", "b"]), "['a', 'b']"),
        (lambda data: data.select(1), "1"),
        (lambda data: data.split_rows("all", [0.0, 1.0]), "[0.0, 1.0]"),
    ],
)
def test_clients_that_are_given_by_no_number(call: Callable[[FederatedData], Any], got: str) -> None:
    with pytest.raises(DataError) as error:
        call(small())
    assert message(error) == (
        f"These data number their clients 0 to 1; got {got}. data.index('ID') returns the number of an id."
    )


@pytest.mark.parametrize("client", [2, -1])
def test_rows_of_clients_that_are_not_there(client: int) -> None:
    for call in (lambda: small().rows(client), lambda: small().split_rows("all", [0, client])):
        with pytest.raises(DataError) as error:
            call()
        assert message(error) == f"There is no client {client}: clients are numbered 0 to 1."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"columns": {}},
            "Wanted at least one column; got none. Give for example {'x': features, 'label': labels}.",
        ),
        (
            {"columns": {"x": np.zeros((0, 2))}, "offsets": [0, 0, 0]},
            "Wanted at least one example; got an empty data set. Check the source and its filters.",
        ),
        (
            {"columns": {"x": np.zeros(3), "label": np.zeros(2, np.int64)}},
            "Wanted 3 rows in column 'label', as in column 'x'; got 2.",
        ),
        (
            {"columns": {3: np.zeros(3)}},
            "A column's name must be a valid argument name, as a model's forward takes it; got 3.",
        ),
        (
            {"columns": {"x y": np.zeros(3)}},
            "A column's name must be a valid argument name, as a model's forward takes it; got 'x y'.",
        ),
        (
            {"columns": {"client": np.zeros(3)}},
            "The column name 'client' is reserved: pooled training puts the client's number there. Rename the column.",
        ),
        (
            {"columns": {"weight": np.zeros(3)}},
            "The column name 'weight' is reserved: engines put the padding's weights there. Rename the column.",
        ),
        (
            {"columns": {"text": Ragged.from_rows([[1], [2], [3]]), "text_length": np.ones(3)}},
            "Column 'text_length' clashes with the lengths of the ragged column 'text'. Rename it.",
        ),
        (
            {"columns": {"text": ["a", "b", "c"]}},
            (
                "Column 'text' holds <U1 values, but a model takes numbers. Encode text with CharVocabulary or "
                "WordVocabulary, map labels to 0..classes-1."
            ),
        ),
        (
            {"columns": {"x": [[1], [2, 3], [4]]}},
            "Column 'x' has rows of unequal size. Use Ragged.from_rows for token ids, or pad the rows.",
        ),
        (
            {"columns": {"x": np.zeros(3, complex)}},
            "Column 'x' must be an array of numbers or booleans; got complex128, shape (3,).",
        ),
        (
            {"columns": {"time": np.array(["2026-01-02"] * 3, "datetime64[ns]")}},
            (
                "Column 'time' must be an array of numbers or booleans; got datetime64[ns], shape (3,). Write dates as "
                "numbers: column.astype('datetime64[s]').astype('int64') gives seconds."
            ),
        ),
        (
            {"columns": {"x": np.array([[0, 1], [2, np.nan], [np.inf, 0]])}},
            "Column 'x' holds nan in row 1 (client 'a') and in 1 more rows. Drop these rows or fill in a number.",
        ),
        (
            {"columns": {"label": np.array([0.0, 1.0, -np.inf])}},
            "Column 'label' holds -inf in row 2 (client 'b') and in 0 more rows. Drop these rows or fill in a number.",
        ),
        (
            {"columns": {"label": np.array([0, 1, 5])}, "meta": {"classes": 3}},
            (
                "Wanted labels 0 to 2 (3 classes); got 5 in row 2 (client 'b') and 0 more out of range. Correct the "
                "labels or meta['classes']."
            ),
        ),
        (
            {"columns": {"label": np.array([0, -1, -2])}},
            (
                "Wanted labels 0 to 1 (2 classes); got -1 in row 1 (client 'a') and 1 more out of range. Correct the "
                "labels or meta['classes']."
            ),
        ),
        (
            {"columns": {"label": np.array([0, 1, 2])}, "meta": {"task": "binary"}},
            "A binary task has the labels 0 and 1; got 3 classes. Say meta['task'] = 'multiclass', or task='multiclass' where a reader reads the data.",
        ),
        (
            {"columns": {"x": torch.ones(3, dtype=torch.bfloat16), "label": np.arange(3)}},
            "Column 'x' is no array that numpy can hold: Got unsupported ScalarType BFloat16. Give tensors as column.detach().float().",
        ),
        (
            {"columns": {"x": np.ma.masked_equal([-999, 1, -999], -999)}},
            (
                "Column 'x' is a masked array, whose 2 masked values are not to be used. Drop these rows or fill in a "
                "number, column.filled(...)."
            ),
        ),
        (
            {"columns": {"label": np.array([0.0, np.nan, 1.0])}, "meta": {"task": "binary"}},
            "Wanted integer labels for a binary task; got float64. Use integers, or say meta['task'] = 'regression'.",
        ),
        (
            {"columns": {"label": np.zeros((3, 2), np.int64)}},
            (
                "Wanted one label per example, shape (examples,); got shape (3, 2). Name it otherwise, or say "
                "meta['task'] = 'tokens' where each token has a label, 'next_token' where it is the token that follows. "
                "Several labels are a column and a task each: meta['tasks'], with the loss terms.multi_task."
            ),
        ),
        (
            {"meta": {"task": "multclass"}},
            "meta['task'] must be 'multiclass', 'binary', 'regression', 'ranking', 'tokens' or 'next_token'; got 'multclass'. Did you mean 'multiclass'?",
        ),
        (
            {"meta": {"traits": {"colour": ["red"]}}},
            "Wanted 2 values of trait 'colour', one per client; got 1.",
        ),
        (
            {"offsets": [0, 3]},
            "Wanted 3 offsets for 2 client ids (one more than clients); got 2.",
        ),
        (
            {"offsets": [0, 2, 4]},
            "Wanted the clients' offsets to rise from 0 to 3, the number of examples; got a fall, or 0 to 4.",
        ),
        (
            {"bounds": np.zeros((2, 3), np.int64)},
            "Wanted bounds of shape (2, 4), a row per client; got (2, 3).",
        ),
        (
            {"bounds": np.array([[0, 1, 1, 2], [2, 1, 3, 3]])},
            "Wanted the bounds of client 'b' to rise from 2 to 3; got [2, 1, 3, 3].",
        ),
        (
            {"bounds": np.array([[0, 1, 1, 1], [2, 2, 3, 3]])},
            "Wanted the bounds of client 'a' to rise from 0 to 2; got [0, 1, 1, 1].",
        ),
        (
            {"ids": ["a", "a"]},
            "Client ids must be unique; 'a' occurs more than once. Merge its rows or rename it.",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as error:
        tiny(**changes)
    assert message(error) == expected


@pytest.mark.parametrize(
    ("client", "columns", "split", "expected"),
    [
        (["a"], {"label": [0, 1]}, None, "Wanted 1 rows in column 'label', as in the client ids; got 2."),
        (
            [0.5, 1.0],
            {"label": [0, 1]},
            None,
            "Row 0: A client id is a text of 1 to 200 printable characters, or an integer; got 0.5, a float. Use str(...) or .decode().",
        ),
        (
            ["a", "b"],
            {"label": [0, 1]},
            ["train", "tset"],
            "Row 1: wanted the split 'train', 'valid' or 'test'; got 'tset'. Did you mean 'test'?",
        ),
        (["a", "b"], {"label": [0, 1]}, ["train"], "Wanted 2 split names, one per row; got shape (1,)."),
        (
            ["b", "a"],
            {"x": [0.0, np.nan]},
            None,
            "Column 'x' holds nan in row 1 (client 'a') and in 0 more rows. Drop these rows or fill in a number.",
        ),
        (
            ["a", ""],
            {"label": [0, 1]},
            None,
            (
                "Row 1: A client id is a text of 1 to 200 printable characters, or an integer; got an empty text. "
                "Name every client."
            ),
        ),
        (
            ["a", "a\0"],
            {"label": [0, 1]},
            None,
            (
                "Row 1: A client id is a text of 1 to 200 printable characters, or an integer; got 'a\\x00', with the "
                "character U+0000. Remove it."
            ),
        ),
        (
            [],
            {"label": []},
            None,
            "Wanted at least one example; got an empty data set. Check the source and its filters.",
        ),
        (
            ["a", "b"],
            {"label": [5, 20231231]},
            None,
            (
                "Row 1 (client 'b'): the label 20231231 would make 20,231,232 classes, "
                "of which 2 occur. Number labels 0, 1, 2, …, or give meta['classes'] = the number, or task 'regression' where "
                "labels are numbers."
            ),
        ),
        (
            ["a", "b"],
            {"x": np.array([1, 2**63], np.uint64)},
            None,
            "Column 'x' holds 9223372036854775808; wanted integers below 2^63.",
        ),
    ],
)
def test_what_from_columns_refuses(client: Any, columns: Any, split: Any, expected: str) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_columns(client, columns, split)
    assert message(error) == expected


def test_splits_and_clients_that_are_none() -> None:
    data = small()
    with raises(DataError, got="vaild"):
        data.rows(0, "vaild")

    for client in (2, -1):
        with pytest.raises(DataError) as error:
            data.rows(client, "train")
        assert message(error) == f"There is no client {client}: clients are numbered 0 to 1."
    with raises(DataError, split="train"):
        tiny().counts("train")


@pytest.mark.parametrize("classes", [0, True, "three", 2.5])
def test_a_number_of_classes_that_is_none(classes: Any) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_columns(["a", "b"], {"label": [0, 1]}, meta={"classes": classes})
    assert message(error) == f"Wanted meta['classes'] as a whole number of at least 1; got {classes!r}."
