from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data.columns import PackedIds, Ragged, RangeIds, check_id, check_ids, offsets_of

ROWS = [[3, 4, 5], [], [7], [8, 9]]


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    return str(error.value)


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
    ("offsets", "got"),
    [
        ([0, 2], "a fall, or 0 to 2"),
        ([1, 3], "a fall, or 1 to 3"),
        ([0, 2, 1, 3], "a fall, or 0 to 3"),
        ([], "shape (0,)"),
        ([[0, 3]], "shape (1, 2)"),
    ],
)
def test_offsets_that_do_not_fit(offsets: list[int], got: str) -> None:
    with pytest.raises(DataError) as error:
        Ragged(np.array([1, 2, 3]), np.array(offsets))
    assert message(error) == (
        f"Wanted a ragged column's offsets to rise from 0 to 3, the number of values; got {got}."
    )


def test_values_that_are_no_ids() -> None:
    with pytest.raises(DataError) as error:
        Ragged(np.array([0.5]), np.array([0, 1]))
    assert message(error) == (
        "The values of a ragged column must be one flat array of integers (token ids); got shape (1,) of float64."
    )


@pytest.mark.parametrize(
    "ids", [RangeIds(12, "site {} of many"), check_ids([f"site {i} of many" for i in range(12)])]
)
def test_ids_are_a_sequence_that_finds(ids: RangeIds | PackedIds) -> None:
    assert isinstance(ids, Sequence)
    assert len(ids) == 12
    assert ids[0] == "site 0 of many"
    assert ids[-1] == "site 11 of many"
    assert ids[10:] == ["site 10 of many", "site 11 of many"]
    assert [ids.position(one) for one in ids] == list(range(12))
    wrong = (
        "site 12 of many",
        "site 01 of many",
        "site -1 of many",
        "site  of many",
        "site ١ of many",
        "",
        "\ud800",
    )
    assert [ids.position(one) for one in wrong] == [-1] * len(wrong)
    with pytest.raises(IndexError):
        ids[12]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9), unique=True, min_size=1
    )
)
def test_packed_ids_find_each_of_any(ids: list[str]) -> None:
    packed = check_ids(ids)
    assert list(packed) == ids
    assert [packed.position(one) for one in ids] == list(range(len(ids)))
    assert packed.position("not among them at all") == -1


def test_checked_ids_are_taken_as_they_are() -> None:
    ids = RangeIds(3)
    assert check_ids(ids) is ids


def test_million_range_ids_hold_no_object_per_client() -> None:
    tracemalloc.start()
    try:
        ids = RangeIds(1_000_000)
        assert ids[999_999] == "user-999999"
        assert ids.position("user-123456") == 123_456
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


RULE = "A client id must be a string of 1 to 200 characters without control characters"


@pytest.mark.parametrize(
    ("client_id", "rest"),
    [
        (7, "got 7. Use str(...) on numbers."),
        ("", "got an empty string. Name every client."),
        ("a\0b", "got 'a\\x00b'. Remove them."),
        ("a\nb", "got 'a\\nb'. Remove them."),
        ("a\x7f", "got 'a\\x7f'. Remove them."),
        ("a\x85", "got 'a\\x85'. Remove them."),
        ("a\u2028", "got 'a\\u2028'. Remove them."),
        ("\ud800", "got '\\ud800'. Remove them."),
        ("x" * 201, "got 201 characters starting 'xxxxxxxxxxxxxxxxxxxx'. Use a shorter name."),
    ],
)
def test_ids_that_are_refused(client_id: object, rest: str) -> None:
    with pytest.raises(DataError) as error:
        check_id(client_id)
    assert message(error) == f"{RULE}; {rest}"


@pytest.mark.parametrize(
    "client_id", ["../../etc/passwd", "a/b\\c", "C:", ".", "名前", "a b", "x" * 200, "\u00a0"]
)
def test_ids_that_are_allowed(client_id: str) -> None:
    assert check_id(client_id) == client_id


def test_an_id_twice() -> None:
    with pytest.raises(DataError) as error:
        check_ids(["a", "b", "a"])
    assert (
        message(error) == "Client ids must be unique; 'a' occurs more than once. Merge its rows or rename it."
    )


@pytest.mark.parametrize("pattern", ["user", "{}{}", "{0}", "{", "{}{a}"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with pytest.raises(DataError) as error:
        RangeIds(3, pattern)
    assert message(error) == (
        f"A pattern of client ids needs exactly one '{{}}', as in 'user-{{}}'; got {pattern!r}."
    )
