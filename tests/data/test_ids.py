"""What a client's id is, the same everywhere."""

from __future__ import annotations

import time
import tracemalloc
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkeep import FederatedData, Phase, methods, sgd, simulate
from fedkeep.core.errors import DataError
from fedkeep.data.ids import PackedIds, RangeIds, SomeIds, as_id, check_ids, group_rows
from fedkeep.experiments.analyses import user_vectors
from fedkeep.experiments.personalize import adapt_clients, cold_start
from fedkeep.models import Linear
from tests.refusals import raises

RULE = "A client id is a text of 1 to 200 printable characters, or an integer"
COMPOSED, DECOMPOSED = "\u00e9", "e\u0301"
texts = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9).map(
    lambda text: unicodedata.normalize("NFC", text)
)


def columns(rows: int) -> dict[str, Any]:
    return {"x": np.arange(2.0 * rows).reshape(rows, 2), "label": np.arange(rows) % 2}


# --- one id


REFUSED = [
    *(
        7.0,
        True,
        None,
        b"ann",
        "",
        "a\0b",
        "a\nb",
        "\x1b[31m",
        "a\x85",
        "a\u00a0b",
        "a\u2028",
        "\u202eeve",
        "\ud800",
    ),
    *("x" * 201, 10**200),
]


@pytest.mark.parametrize("given_id", REFUSED)
def test_ids_that_are_refused(given_id: object) -> None:
    """The row or client that has one is named."""
    with raises(DataError, where="", got=given_id):
        as_id(given_id)
    with raises(DataError, where="Row 2: ", got=given_id):
        FederatedData.from_columns(["ann", "bo", given_id, given_id], columns(4))
    with raises(DataError, where="Client 1: ", got=given_id):
        check_ids(["ann", given_id])


def test_what_is_said_of_an_id_that_is_refused() -> None:
    with raises(DataError, got="\u202eeve", text=f"{RULE}; got '\\u202eeve': remove the character U+202E."):
        as_id("\u202eeve")


@pytest.mark.parametrize(
    "given_id", ["../../etc/passwd", "a/b\\c", "C:", ".", "名前", "a b", "x" * 200, "007"]
)
def test_ids_that_are_allowed(given_id: str) -> None:
    assert as_id(given_id) == given_id


@pytest.mark.parametrize(
    ("given_id", "wanted"),
    [
        (7, "7"),
        (-3, "-3"),
        (np.int64(12), "12"),
        (np.uint8(1), "1"),
        (DECOMPOSED, COMPOSED),
        (np.str_("a"), "a"),
    ],
)
def test_ids_have_one_form(given_id: object, wanted: str) -> None:
    found = as_id(given_id)
    assert found == wanted
    assert type(found) is str


# --- rows of many clients


def test_a_letter_written_in_two_ways_is_one_client() -> None:
    data = FederatedData.from_columns([COMPOSED, DECOMPOSED, "b"], columns(3))
    assert list(data.ids) == ["b", COMPOSED]
    assert data.counts().tolist() == [1, 2]
    assert data.index(DECOMPOSED) == data.index(COMPOSED) == 1


@pytest.mark.parametrize(
    "given_ids",
    [[10, 9, 10], np.array([10, 9, 10]), (10, 9, np.int32(10)), np.array([10, 9, 10], dtype=object)],
)
def test_integers_are_ordered_by_value(given_ids: Any) -> None:
    names, number = group_rows(given_ids)
    assert names == ["9", "10"]
    assert number.tolist() == [1, 0, 1]


def test_an_integer_is_its_digits() -> None:
    assert FederatedData.from_columns([1, "1", "a"], columns(3)).counts().tolist() == [2, 1]
    assert list(check_ids([2, "a", np.int64(1)])) == ["2", "a", "1"]


def test_integers_of_any_size() -> None:
    names, _ = group_rows([2**63, -1, 10**30])
    assert names == ["-1", str(2**63), str(10**30)]


@pytest.mark.parametrize("given_ids", [np.zeros(3), np.zeros((3, 1), int), np.array([b"a"] * 3), "abc"])
def test_no_ids_at_all(given_ids: Any) -> None:
    with raises(DataError, said="Wanted one client id per row"):
        FederatedData.from_columns(given_ids, columns(3))


@given(st.lists(st.one_of(texts, st.integers()), min_size=1, max_size=12))
def test_rows_find_their_clients(given_ids: list[Any]) -> None:
    names, number = group_rows(given_ids)
    assert [names[place] for place in number] == [as_id(one) for one in given_ids]
    assert len(set(names)) == len(names)
    again, _ = group_rows(given_ids[::-1])
    assert again == names


def test_many_rows_are_cheap() -> None:
    """A million rows of 100,000 users, and those users' ids, within seconds: no Python call for each row."""
    users = [f"user-{n:06d}" for n in range(100_000)]
    began = time.process_time()
    names, _ = group_rows(users * 10)
    packed = check_ids(names)
    assert isinstance(packed, PackedIds)
    packed.check()
    assert time.process_time() - began < 4


# --- sequences of ids


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


@given(st.lists(texts, unique=True, min_size=1))
def test_packed_ids_find_each_of_any(ids: list[str]) -> None:
    packed = check_ids(ids)
    assert isinstance(packed, PackedIds)
    packed.check()
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


@pytest.mark.parametrize("ids", [["a", "b", "a"], ["a", 7, "a"], ["7", 7]])
def test_an_id_twice(ids: list[Any]) -> None:
    with raises(DataError, said="must be unique", name=str(ids[-1])):
        check_ids(ids)


@pytest.mark.parametrize("pattern", ["user", "{}{}", "{0}", "{", "{}{a}"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with raises(DataError, said="A pattern of client ids", got=pattern):
        RangeIds(3, pattern)


def test_a_pattern_that_is_not_normal() -> None:
    with raises(DataError, pattern="é{}"):
        RangeIds(3, DECOMPOSED + "{}")


@pytest.mark.parametrize("number", [-1, 1 << 62])
def test_a_number_of_clients_that_is_none(number: int) -> None:
    with raises(DataError, said="Wanted a number of clients", got=number):
        RangeIds(number)


# --- the same everywhere


def test_integers_name_clients_of_a_run(tmp_path: Path) -> None:
    """The docs use integer ids; they name a client in the data, a run, and cold start alike."""
    data = FederatedData.from_columns(np.repeat([5, 1, 10], 10), columns(30)).split_per_user()
    assert data.index(10) == data.index("10") == data.index(np.int64(10)) == 2
    run = simulate(Linear(2, 2), methods.furl("user"), data, rounds=1, cohort=3, hold_out=0.3)
    for client in (1, 5, 10):
        mine, same = run.parameters(client), run.parameters(str(client))
        assert {n: v.tolist() for n, v in mine.items()} == {n: v.tolist() for n, v in same.items()}
    one, other = (adapt_clients(run, [c], begin="default", examples=2) for c in (5, "5"))
    assert one.evaluate() == other.evaluate()
    data.save(tmp_path / "data")
    assert FederatedData.load(tmp_path / "data").index(5) == 1


def test_an_id_that_nobody_has() -> None:
    data = FederatedData.from_columns([5, 12], columns(2))
    with raises(DataError, wanted="0", clients=2):
        data.index(0)

    with raises(DataError, got=True):
        data.index(True)


# --- some clients of a run


def numbered_run() -> Any:
    """Return a run whose clients' ids are integers that are other clients' positions, too."""
    data = FederatedData.from_columns(
        np.repeat([1, 2, 3], 4),
        columns(12),
        split=["train", "train", "test", "test"] * 3,
        meta={"classes": 2},
    )
    return simulate(Linear(2, 2), methods.furl("user"), data, rounds=4, cohort=2, hold_out=0.34, seed=1)


def test_an_integer_is_an_id_wherever_a_run_is_asked_for_clients() -> None:
    """And never a position, which in data with ids of their own would be another client's."""
    run = numbered_run()
    judged = {name: run.evaluate("test", clients=[name])["loss"] for name in "123"}
    assert len(set(judged.values())) == 3
    for name, loss in judged.items():
        for number in (int(name), np.int64(name)):
            assert run.evaluate("test", clients=[number])["loss"] == loss
            assert run.evaluate("test", clients=np.array([number]))["loss"] == loss
            assert adapt_clients(run, [number]).evaluate() == adapt_clients(run, [name]).evaluate()
            assert cold_start(run, [number], (1,)) == cold_start(run, [name], (1,))
            assert user_vectors(run, [number])[0].tolist() == run.parameters(number)["user"].tolist()
        assert [order.client for order in run.orders([int(name)])] == [name]
        still = (Phase(trains="private", optimizer=sgd(0.0)),)
        given = {int(name): {"user": torch.full((2,), 9.0)}}
        found = adapt_clients(replace(run, method=run.method.adapting(phases=still)), [name], start=given)
        assert found.own(name)["user"].tolist() == [9.0, 9.0]
    with raises(DataError, wanted="0", clients=3, some="'1', '2', '3'"):
        run.evaluate("test", clients=[0])
    with pytest.raises(DataError, match="^Wanted different clients; '2' is named more than once.$"):
        run.evaluate("test", clients=[3, "2", 2])


def test_who_takes_part_and_who_is_held_out_are_ids_with_positions() -> None:
    run = numbered_run()
    assert sorted([*run.clients, *run.held_out]) == ["1", "2", "3"]
    assert [run.data.ids[c] for c in run.clients.positions] == list(run.clients)
    assert run.clients[-1] == list(run.clients)[-1]
    assert run.clients[1:] == [run.clients[1]]
    assert run.evaluate("test", clients=run.held_out) == run.evaluate("test", clients=list(run.held_out))
    assert repr(SomeIds(RangeIds(9), np.arange(2, 7))) == (
        "SomeIds(['user-2', 'user-3', 'user-4'], … 5 of 9 clients)"
    )


def test_ids_of_one_data_set_are_looked_up_in_another() -> None:
    run = numbered_run()
    other = replace(run, data=run.data.select([2, 0, 1]))
    assert other.members().positions.tolist() == other.members(list(run.clients)).positions.tolist()
    assert other.members(run.clients).positions.tolist() == [other.data.index(name) for name in run.clients]
    assert other.members(run.clients).positions.tolist() != run.clients.positions.tolist()


def test_ids_show_the_first_and_their_number() -> None:
    ids = FederatedData.from_columns(["b", "a", "d", "c"], {"label": [0, 1, 0, 1]}).ids
    assert repr(ids) == "PackedIds(['a', 'b', 'c'], … 4 ids)"
    assert repr(RangeIds(2)) == "RangeIds(['user-0', 'user-1'] 2 ids)"
