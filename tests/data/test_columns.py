from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged, Repeated, offsets_of, stable_order
from fedkeep.data.ids import group_rows
from tests.refusals import raises

ROWS = [[3, 4, 5], [], [7], [8, 9]]


def test_ragged_rows() -> None:
    ragged = Ragged.from_rows(ROWS, "uint8")
    assert len(ragged) == 4
    assert [row.tolist() for row in ragged] == ROWS
    assert ragged[-1].tolist() == [8, 9]
    assert ragged.values.dtype == np.uint8
    assert ragged.nbytes == 6 + 5 * 8
    assert repr(ragged) == "Ragged(4 rows, 6 values of uint8)"
    with pytest.raises(IndexError, match="row 4 of 4"):
        ragged[4]


def test_offsets_of_lengths() -> None:
    assert offsets_of(np.array([3, 0, 1, 2])).tolist() == [0, 3, 3, 4, 6]
    assert offsets_of(np.array([], dtype=np.int64)).tolist() == [0]


def test_padded_by_hand() -> None:
    ids, length = Ragged.from_rows(ROWS, "uint8").padded(np.array([3, 0, 1]))
    assert ids.tolist() == [[8, 9, 0], [3, 4, 5], [0, 0, 0]]
    assert length.tolist() == [2, 3, 1]  # the empty row holds one pad
    assert ids.dtype == length.dtype == np.int64


def test_padded_of_nothing_but_empty_rows() -> None:
    ids, length = Ragged.from_rows([[], []], "uint8").padded(np.array([1, 0]))
    assert ids.tolist() == [[0], [0]]
    assert length.tolist() == [1, 1]


def test_padded_of_no_row() -> None:
    ids, length = Ragged.from_rows(ROWS).padded(np.zeros(0, np.int64))
    assert ids.shape == (0, 1)
    assert length.shape == (0,)


@given(
    rows=st.lists(st.lists(st.integers(1, 255), max_size=6), min_size=1, max_size=8),
    pick=st.lists(st.integers(0, 7), max_size=10),
)
def test_take_and_padded_equal_a_loop(rows: list[list[int]], pick: list[int]) -> None:
    chosen = np.array([p % len(rows) for p in pick], dtype=np.int64)
    ragged = Ragged.from_rows(rows, "uint8")
    assert [row.tolist() for row in ragged.take(chosen)] == [rows[p] for p in chosen]
    ids, length = ragged.padded(chosen)
    for row, p in enumerate(chosen):
        assert ids[row].tolist() == rows[p] + [0] * (ids.shape[1] - len(rows[p]))
        assert length[row] == max(1, len(rows[p]))


@pytest.mark.parametrize(
    ("offsets", "facts"),
    [
        ([0, 2], {"wanted": "a ragged column's offsets", "end": 3, "got": "a fall, or 0 to 2"}),
        ([1, 3], {"wanted": "a ragged column's offsets", "end": 3, "got": "a fall, or 1 to 3"}),
        ([0, 2, 1, 3], {"wanted": "a ragged column's offsets", "end": 3, "got": "a fall, or 0 to 3"}),
        ([], {"wanted": "a ragged column's offsets", "end": 3, "got": "shape (0,)"}),
        ([[0, 3]], {"wanted": "a ragged column's offsets", "end": 3, "got": "shape (1, 2)"}),
    ],
)
def test_offsets_that_do_not_fit(offsets: list[int], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        Ragged(np.array([1, 2, 3]), np.array(offsets))


def test_values_that_are_no_ids() -> None:
    with raises(DataError, got=(1,)):
        Ragged(np.array([0.5]), np.array([0, 1]))


@pytest.mark.parametrize(
    "offsets", [np.zeros(1), np.zeros(0, complex), np.array([0, 2**64 - 1], np.uint64), np.int64(0)]
)
def test_offsets_that_are_none(offsets: np.ndarray) -> None:
    with pytest.raises(DataError, match="Wanted a ragged column's offsets"):
        Ragged(np.zeros(0, np.int64), offsets)


@pytest.mark.parametrize(
    ("rows", "dtype"), [([[1, 2], [1.7]], "int64"), ([[300]], "uint8"), ([["a"]], "int64")]
)
def test_rows_that_a_type_does_not_hold(rows: list[list[Any]], dtype: str) -> None:
    with raises(DataError, dtype=dtype, got=rows[-1]):
        Ragged.from_rows(rows, dtype)


def test_a_column_of_repeated_values_is_as_its_rows_are() -> None:
    words = ["b", "a", "b", "c", "a", "b"]
    column = Repeated(["b", "a", "c"], np.array([0, 1, 0, 2, 1, 0]))
    assert (list(column), len(column), column[3]) == (words, 6, "c")
    assert np.array_equal(np.asarray(column), np.asarray(words))
    fewer = column.taken(column.number[[0, 1, 5]])
    assert (list(fewer), sorted(fewer.different)) == (["b", "a", "b"], ["a", "b"])
    assert list(column[1:4]) == words[1:4]
    (ids, number), (wanted, of_row) = group_rows(column), group_rows(words)
    assert ids == wanted
    assert np.array_equal(number, of_row)


@pytest.mark.parametrize("most", [1, 100, 1 << 16, (1 << 16) + 1, 1 << 33])
def test_the_order_is_the_stable_one(most: int) -> None:
    keys = np.random.default_rng(0).integers(0, most, 5000)
    assert np.array_equal(stable_order(keys), np.argsort(keys, kind="stable"))
    assert len(stable_order(keys[:0])) == 0
