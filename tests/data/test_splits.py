from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data import SPLITS, FederatedData, RangeIds, hold_out
from fedkeep.data.columns import offsets_of
from fedkeep.data.splits import bounds_of, divide
from tests.refusals import raises


def made(counts: list[int], time: list[float] | None = None) -> FederatedData:
    rows = int(sum(counts))
    columns = {"row": np.arange(rows)} | ({} if time is None else {"time": np.array(time)})
    return FederatedData(columns, offsets_of(np.array(counts)), [f"c{i}" for i in range(len(counts))])


def rows_of(data: FederatedData, client: int, split: str) -> list[int]:
    return [int(row) for row in np.asarray(data.columns["row"])[data.rows(client, split)]]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [1, 0, 1]),
        (3, [2, 0, 1]),
        (4, [3, 0, 1]),
        (5, [3, 1, 1]),  # 0.5 rounds up
        (10, [8, 1, 1]),
        (14, [12, 1, 1]),
        (15, [11, 2, 2]),
        (100, [80, 10, 10]),
    ],
)
def test_the_rule_by_hand(n: int, expected: list[int]) -> None:
    assert divide(np.array([n]), (0.8, 0.1, 0.1)).tolist() == [expected]


@pytest.mark.parametrize(
    ("n", "fractions", "expected"),
    [
        (1, (0.1, 0.45, 0.45), [1, 0, 0]),
        (2, (0.1, 0.45, 0.45), [1, 0, 1]),  # train takes valid's row first
        (2, (0.1, 0.0, 0.9), [1, 0, 1]),  # and then test's
        (3, (0.1, 0.9, 0.0), [1, 2, 0]),
        (7, (1.0, 0.0, 0.0), [7, 0, 0]),
        (2, (0.5, 0.5, 0.0), [1, 1, 0]),
        (5, (0.7, 0.1, 0.2), [3, 1, 1]),
        (90, (0.3, 0.35, 0.35), [26, 32, 32]),  # 31.5 rounds up; as floats 90 · 0.35 is a bit less
    ],
)
def test_other_fractions(n: int, fractions: tuple[float, float, float], expected: list[int]) -> None:
    assert divide(np.array([n]), fractions).tolist() == [expected]


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    fractions=st.sampled_from([(0.8, 0.1, 0.1), (0.2, 0.4, 0.4), (0.05, 0.9, 0.05), (0.34, 0.33, 0.33)]),
    order=st.sampled_from(["random", "chronological"]),
    seed=st.integers(0, 3),
)
def test_splits_are_disjoint_complete_and_inside_each_user(
    counts: list[int], fractions: tuple[float, float, float], order: str, seed: int
) -> None:
    data = made(counts, time=np.random.default_rng(0).permutation(sum(counts)).tolist())
    split = data.split_per_user(fractions, order, seed)
    assert split.offsets.tolist() == data.offsets.tolist()
    for client, n in enumerate(counts):
        rows = [row for part in SPLITS for row in rows_of(split, client, part)]
        assert sorted(rows) == list(data.rows(client))
        assert split.count(client, "train") >= 1
        assert split.count(client, "test") >= (n >= 2)


def test_a_random_split_depends_on_its_seed() -> None:
    data = made([50, 50])
    first = data.split_per_user(seed=1)
    assert first.fingerprint() == data.split_per_user(seed=1).fingerprint()
    assert rows_of(first, 0, "test") != rows_of(data.split_per_user(seed=2), 0, "test")
    assert [r + 50 for r in rows_of(first, 0, "test")] != rows_of(first, 1, "test")


def test_a_users_random_split_does_not_depend_on_the_others() -> None:
    data = made([30, 40, 50])
    before = data.split_per_user(seed=3).select([2, 0])
    after = data.select([2, 0]).split_per_user(seed=3)
    assert before.fingerprint() == after.fingerprint()


def test_a_random_split_takes_every_row_equally_often() -> None:
    data = FederatedData({"row": np.arange(4000) % 10}, offsets_of(np.full(400, 10)), RangeIds(400))
    split = data.split_per_user()
    tested = np.bincount(np.asarray(split.columns["row"])[split.split_rows("test")], minlength=10)
    assert tested.sum() == 400
    assert abs(tested - 40).max() < 4 * np.sqrt(400 * 0.1 * 0.9)


def test_a_chronological_split_keeps_the_latest_for_test() -> None:
    data = made([10, 2], time=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 5.5, 5.25])
    split = data.split_per_user(order="chronological")
    assert rows_of(split, 0, "train") == [9, 8, 7, 6, 5, 4, 3, 2]
    assert rows_of(split, 0, "valid") == [1]
    assert rows_of(split, 0, "test") == [0]
    assert rows_of(split, 1, "train") == [11]
    assert rows_of(split, 1, "test") == [10]


def test_equal_times_keep_their_order() -> None:
    split = made([4], time=[1, 1, 1, 1]).split_per_user((0.5, 0.25, 0.25), "chronological")
    assert [rows_of(split, 0, part) for part in SPLITS] == [[0, 1], [2], [3]]


def test_what_splitting_refuses() -> None:
    data = made([4])
    with raises(DataError, said="with a number per example, and there is"):
        data.split_per_user(order="chronological")
    with raises(DataError, got="randon"):
        data.split_per_user(order="randon")


@pytest.mark.parametrize(
    "fractions",
    [(0.8, 0.1), (0.8, 0.1, 0.2), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"), 0.1, 0.1), 0.8],
)
def test_fractions_that_are_none(fractions: tuple[float, ...]) -> None:
    with raises(DataError, said="Wanted three fractions", got=fractions):
        divide(np.array([4]), fractions)


def test_bounds_by_hand() -> None:
    assert bounds_of(np.array([[2, 1, 0], [0, 0, 3]])).tolist() == [[0, 2, 3, 3], [3, 3, 3, 6]]


@given(
    clients=st.integers(1, 40), fraction=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99]), seed=st.integers(0, 3)
)
def test_held_out_clients_are_disjoint_and_complete(clients: int, fraction: float, seed: int) -> None:
    inside, outside = hold_out(made([1] * clients), fraction, seed)
    assert sorted([*inside, *outside]) == list(range(clients))
    assert inside.tolist() == sorted(inside)
    assert outside.tolist() == sorted(outside)
    rounded = int(np.floor(fraction * clients + 0.5))
    assert len(outside) == min(max(rounded, fraction > 0), clients - 1)


def test_who_is_held_out_depends_on_seed_and_id_alone() -> None:
    data = made([1] * 30)
    turned = data.select(np.arange(30)[::-1])
    held = {data.ids[c] for c in hold_out(data, 0.2, 1)[1]}
    assert {turned.ids[c] for c in hold_out(turned, 0.2, 1)[1]} == held
    assert {data.ids[c] for c in hold_out(data, 0.2, 2)[1]} != held


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_that_is_none(fraction: float) -> None:
    with raises(DataError, said="Wanted a fraction of clients to hold out", got=fraction):
        hold_out(made([1, 1]), fraction)


@pytest.mark.parametrize("order", ["random", "chronological"])
def test_how_clients_rows_are_mixed_changes_nothing(order: str) -> None:
    """The order of a client's own rows does: places are drawn, and of equal times the first rows train."""
    client, row = np.array([1, 1, 1, 1, 0, 0, 0, 0]), np.arange(8)
    columns = {"row": row, "time": np.array([5, 5, 5, 5, 1, 3, 2, 2]), "label": row % 2}
    mixed = np.array([4, 0, 5, 1, 2, 6, 3, 7])
    data, other = (
        FederatedData.from_columns(
            client[rows], {name: own[rows] for name, own in columns.items()}
        ).split_per_user((0.5, 0.25, 0.25), order=order)
        for rows in (row, mixed)
    )
    for name in SPLITS:
        assert [rows_of(data, c, name) for c in (0, 1)] == [rows_of(other, c, name) for c in (0, 1)]
    if order == "chronological":
        assert rows_of(data, 1, "train") == [0, 1]
        assert rows_of(data, 0, "train") == [4, 6]
        assert rows_of(data, 0, "test") == [5]
