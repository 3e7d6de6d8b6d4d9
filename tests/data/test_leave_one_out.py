from __future__ import annotations

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from tests.refusals import raises


def rated(clients: list[str], items: list[int], times: list[int]) -> FederatedData:
    return FederatedData.from_columns(
        client=clients,
        columns={"item": np.array(items), "label": np.ones(len(items), np.float32), "time": np.array(times)},
        meta={"items": 20, "task": "regression"},
    )


ANNA = (["anna"] * 5, [7, 3, 0, 9, 4], [50, 10, 40, 20, 40])  # by time, then number: 3, 9, 0, 4, 7
BO = (["bo"] * 2, [1, 2], [2, 1])


def test_the_last_rating_is_tested_and_the_one_before_validates() -> None:
    data = leave_one_out(rated(*(a + b for a, b in zip(ANNA, BO, strict=True))), against=11, seed=3)
    item, label = np.asarray(data.columns["item"]), np.asarray(data.columns["label"])
    right = {
        split: [int(item[r, label[r]]) for r in data.split_rows(split)]
        for split in ("train", "valid", "test")
    }
    assert right == {"train": [3, 9, 0, 2, 1], "valid": [4], "test": [7]}
    assert (data.meta["task"], data.meta["classes"], data.meta["items"]) == ("ranking", 12, 20)
    assert item.shape == (7, 12)
    trained = {"anna": {3, 9, 0}, "bo": {1, 2}}  # a training example knows of no others
    for row in range(7):
        others, who = np.delete(item[row], label[row]), data.ids[int(data.clients_of([row])[0])]
        own = trained[who] if row in data.split_rows("train") else set(ANNA[1] if who == "anna" else BO[1])
        assert not set(others.tolist()) & own
    for split in ("valid", "test"):
        (row,) = data.split_rows(split)
        assert len(set(item[row].tolist())) == 12  # no item twice


def test_nobody_trains_on_an_item_that_is_asked_though_it_was_rated_before() -> None:
    """By time anna rated 3, 7, 5, 5, 4, 7, 4, 7: 7 is tested, 4 validates, and what she did with both before goes."""
    items, times = [3, 7, 5, 5, 4, 7, 4, 7], list(range(8))
    ratings = rated(
        ["anna"] * 8 + ["bo"] * 3, [*items, 1, 1, 2], [*times, 0, 1, 2]
    )  # of bo there are two items
    inside = np.array([True, True, False, True, True, True, False, False, True, False, True])
    columns = {**ratings.columns, "opted_in": inside}
    data = leave_one_out(
        FederatedData(columns, ratings.offsets, ratings.ids, ratings.bounds, ratings.meta), against=11
    )
    item, label, opted = (np.asarray(data.columns[name]) for name in ("item", "label", "opted_in"))
    asked = {
        (who, split): [(int(item[r, label[r]]), bool(opted[r])) for r in data.rows(who, split)]
        for who in (0, 1)
        for split in ("train", "valid", "test")
    }
    assert asked == {
        (0, "train"): [(3, True), (5, False), (5, True)],
        (0, "valid"): [(4, False)],
        (0, "test"): [(7, False)],
        (1, "train"): [(1, True), (1, False), (2, True)],
        (1, "valid"): [],
        (1, "test"): [],
    }
    for split in ("valid", "test"):
        (row,) = data.rows(0, split)
        assert not set(np.delete(item[row], label[row]).tolist()) & set(items)


def test_what_is_left_out_is_drawn_against_training_as_often_as_any_other_item() -> None:
    """Else a user's own vector would learn which item was never a wrong answer, and that is the test's."""
    users, items = 400, 30
    rng = np.random.default_rng(0)
    taken = np.concatenate([rng.permutation(items)[:10] for _ in range(users)])
    ratings = FederatedData.from_columns(
        client=[str(u) for u in range(users) for _ in range(10)],
        columns={
            "item": taken,
            "label": np.ones(len(taken), np.float32),
            "time": np.tile(np.arange(10), users),
        },
        meta={"items": items, "task": "regression"},
    )
    data = leave_one_out(ratings, against=10)
    item, label = np.asarray(data.columns["item"]), np.asarray(data.columns["label"])
    held = other = 0
    for client in range(users):
        (test,), train = data.rows(client, "test"), item[list(data.rows(client, "train"))]
        right, shown = int(item[test, label[test]]), label[list(data.rows(client, "train"))]
        wrong = np.concatenate([np.delete(row, place) for row, place in zip(train, shown, strict=True)])
        held += int((wrong == right).sum())
        other += len(wrong)
    # 80 draws a user from 22 items without a training rating
    assert other == users * 80
    assert held / users == pytest.approx(80 / 22, rel=0.05)
    assert not set(item[list(data.split_rows("test"))].ravel()) - set(range(items))


def test_the_questions_are_part_of_what_the_data_are() -> None:
    ratings = rated(*ANNA)
    made = {seed: leave_one_out(ratings, 10, seed).meta["source"] for seed in (0, 0, 1)}
    assert made[0] == leave_one_out(ratings, 10).meta["source"]
    assert made[0].keys() == {"questions"}
    assert made[0] != made[1]


def test_a_users_questions_take_no_list_of_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is of the questions as they were drawn from such a list."""
    rng = np.random.default_rng(0)
    number = rng.integers(1, 30, 40)
    ratings = FederatedData.from_columns(
        client=[f"u{user}" for user, times in enumerate(number) for _ in range(times)],
        columns={
            "item": rng.integers(0, 5000, number.sum()),
            "label": np.ones(number.sum(), np.float32),
            "time": rng.integers(0, 5, number.sum()),
        },
        meta={"items": 5000, "task": "regression"},
    )
    sizes: list[int] = []
    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda *given: sizes.append(given[-1]) or arange(*given))
    made = leave_one_out(ratings, 99)
    assert made.meta["source"]["questions"] == (
        "af229cc53ca5bd4e42dd79b0496b4a1be40676ab3a6ea3f0611ded839c43298b"
    )
    assert max(sizes) < 5000


def test_places_are_random_and_draws_are_a_users_own() -> None:
    many = (["anna"] * 3 + ["bo"] * 3) * 1, [0, 1, 2, 3, 4, 5], [1, 2, 3, 1, 2, 3]
    both = leave_one_out(rated(*many), against=10)
    alone = leave_one_out(rated(*(column[3:] for column in many)), against=10)
    for name in ("item", "label"):
        assert np.array_equal(np.asarray(both.columns[name])[3:], np.asarray(alone.columns[name]))
    labels = leave_one_out(rated(["anna"] * 6 + ["bo"] * 6, [*range(6)] * 2, [*range(6)] * 2), against=10)
    assert len(set(np.asarray(labels.columns["label"]).tolist())) > 2
    other = leave_one_out(rated(*many), against=10, seed=1)
    assert not np.array_equal(np.asarray(both.columns["item"]), np.asarray(other.columns["item"]))


def test_refusals() -> None:
    with pytest.raises(DataError, match="'anna' left 15 of 20 items, too few to draw 16"):
        leave_one_out(rated(*ANNA), against=16)
    bare = FederatedData.from_columns(["a"], {"label": np.zeros(1, np.float32)})
    with pytest.raises(DataError, match=r"the columns \['item', 'time'\] are missing"):
        leave_one_out(bare)
    ratings = rated(*ANNA)
    unknown = FederatedData(ratings.columns, ratings.offsets, ratings.ids, ratings.bounds, {})
    with pytest.raises(DataError, match=r"meta\['items'\] is None\.$"):
        leave_one_out(unknown)
    for item in (-1, 20):
        with pytest.raises(DataError, match=r"^Wanted items from 0 to 19; got "):
            leave_one_out(rated(["anna"] * 2, [3, item], [1, 2]), against=10)
    for against in (-1, 9):
        with raises(DataError, said="against must be", least=10, got=against):
            leave_one_out(ratings, against)


def test_what_was_opted_out_stays_so() -> None:
    ratings = rated(*(a + b for a, b in zip(ANNA, BO, strict=True)))
    inside = np.array([True, False, True, True, False, True, False])
    columns = {**ratings.columns, "opted_in": inside}
    data = leave_one_out(
        FederatedData(columns, ratings.offsets, ratings.ids, ratings.bounds, ratings.meta), 10
    )
    item, label = np.asarray(data.columns["item"]), np.asarray(data.columns["label"])
    out = np.flatnonzero(~np.asarray(data.columns["opted_in"]))
    assert [int(item[r, label[r]]) for r in out] == [3, 4, 2]
