"""Federated data: the order of rows, batches, selections, and what they cost."""

from __future__ import annotations

import timeit
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data import SPLITS, FederatedData, Ragged, RangeIds
from fedkeep.data.columns import offsets_of
from tests.data.small import small, tiny
from tests.refusals import raises


def test_rows_are_sorted_by_client_then_split_then_as_given() -> None:
    data = small()
    assert list(data.ids) == ["a", "b"]
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    assert np.asarray(data.columns["x"]).tolist() == [1, 4, 2, 5, 3, 0]
    assert np.asarray(data.columns["label"]).tolist() == [1, 0, 2, 2, 1, 0]
    assert [row.tolist() for row in text] == [[3, 4], [6, 7, 8], [], [9], [5], [2]]
    assert data.offsets.tolist() == [0, 2, 6]
    assert data.bounds.tolist() == [[0, 2, 2, 2], [2, 4, 5, 6]]


def test_rows_counts_and_owners() -> None:
    data = small()
    assert len(data) == 2
    assert data.examples == 6
    assert data.rows(0, "train") == range(2)
    assert data.rows(1, "train") == range(2, 4)
    assert data.rows(1, "valid") == range(4, 5)
    assert data.rows(1, "test") == range(5, 6)
    assert data.rows(1) == range(2, 6)
    assert data.count(0, "test") == 0
    assert data.counts("train").tolist() == [2, 2]
    assert data.counts("test").tolist() == [0, 1]
    assert data.counts().tolist() == [2, 4]
    assert data.split_rows("train").tolist() == [0, 1, 2, 3]
    assert data.split_rows("test").tolist() == [5]
    assert data.split_rows("all", [1]).tolist() == [2, 3, 4, 5]
    assert data.split_rows("train", [1, 0]).tolist() == [2, 3, 0, 1]
    assert data.clients_of(np.array([5, 0, 2])).tolist() == [1, 0, 1]


def test_integer_ids_are_ordered_by_value() -> None:
    data = FederatedData.from_columns(np.array([10, 9, 10]), {"label": np.array([1, 0, 2])})
    assert list(data.ids) == ["9", "10"]
    assert np.asarray(data.columns["label"]).tolist() == [0, 1, 2]


def test_a_batch_by_hand() -> None:
    batch = small().batch(np.array([2, 1]))
    assert set(batch) == {"x", "text", "text_length", "label"}
    assert batch["text"].tolist() == [[0, 0, 0], [6, 7, 8]]
    assert batch["text_length"].tolist() == [1, 3]
    assert batch["x"].tolist() == [2.0, 4.0]
    assert batch["x"].dtype == torch.float32
    assert batch["label"].tolist() == [2, 0]
    assert {batch[name].dtype for name in ("text", "text_length", "label")} == {torch.int64}


def test_a_batch_of_a_range_and_a_list() -> None:
    data = small()
    for rows in (range(2, 4), [2, 3]):
        assert data.batch(rows)["label"].tolist() == [2, 2]


def test_a_batch_is_a_copy() -> None:
    data = small()
    data.batch([0])["x"].fill_(9.0)
    assert float(np.asarray(data.columns["x"])[0]) == 1.0


def test_columns_outside_of_batches() -> None:
    data = tiny(columns={"_truth": np.zeros(3), "label": np.array([0, 1, 0])})
    assert set(data.batch([0])) == {"label"}


@pytest.mark.parametrize(
    ("given_as", "becomes"),
    [("uint16", "int64"), (">f4", "float32"), ("bool", "bool"), ("uint8", "uint8"), ("float64", "float64")],
)
def test_types_become_those_of_torch(given_as: str, becomes: str) -> None:
    data = tiny(columns={"x": np.array([0, 1, 0], dtype=given_as)})
    assert data.batch([0, 1, 2])["x"].dtype == getattr(torch, becomes)
    assert data.batch([0, 1, 2])["x"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("label", "meta", "task", "classes"),
    [
        ([0, 1, 0], {}, "binary", 2),
        ([0, 0, 0], {}, "binary", 2),
        ([0, 2, 1], {}, "multiclass", 3),
        ([0, 2, 1], {"classes": 5}, "multiclass", 5),
        ([0, 1, 1], {"task": "multiclass"}, "multiclass", 2),
        ([True, False, True], {}, "binary", 2),
        ([0.5, 2.0, -1.0], {}, "regression", 1),
    ],
)
def test_task_and_classes_are_inferred(
    label: list[Any], meta: dict[str, Any], task: str, classes: int
) -> None:
    data = tiny(columns={"label": np.array(label)}, meta=meta)
    assert (data.meta["task"], data.meta["classes"]) == (task, classes)


def test_integer_labels_of_a_regression_become_numbers() -> None:
    data = tiny(columns={"label": np.array([1, 2, 3])}, meta={"task": "regression"})
    assert data.batch([1])["label"].dtype == torch.float32


def test_data_without_labels() -> None:
    assert tiny(columns={"x": np.zeros(3)}).meta == {}


def test_index_finds_and_suggests() -> None:
    data = tiny(ids=["anna", "bert"])
    assert data.index("bert") == 1
    with raises(DataError, wanted="bret", clients=2):
        data.index("bret")


def test_select_keeps_order_and_traits() -> None:
    data = small()
    data.meta["traits"] = {"colour": ["red", "blue"]}
    chosen = data.select([1])
    assert list(chosen.ids) == ["b"]
    assert chosen.meta["traits"] == {"colour": ["blue"]}
    assert data.meta["traits"] == {"colour": ["red", "blue"]}
    assert chosen.bounds.tolist() == [[0, 2, 3, 4]]
    assert np.asarray(chosen.columns["x"]).tolist() == [2, 5, 3, 0]
    turned = data.select(np.array([1, 0]))
    assert list(turned.ids) == ["b", "a"]
    assert np.asarray(turned.columns["x"]).tolist() == [2, 5, 3, 0, 1, 4]
    assert data.select([0, 1]).ids is data.ids


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(SPLITS)), min_size=1, max_size=40))
def test_the_partition_is_disjoint_complete_and_per_client(rows: list[tuple[int, str]]) -> None:
    client = np.array([c for c, _ in rows])
    split = np.array([s for _, s in rows])
    data = FederatedData.from_columns(client, {"row": np.arange(len(rows))}, split)
    seen: list[int] = []
    for number, client_id in enumerate(data.ids):
        for part in SPLITS:
            kept = np.asarray(data.columns["row"])[data.rows(number, part)].tolist()
            assert kept == [r for r in range(len(rows)) if str(client[r]) == client_id and split[r] == part]
            seen.extend(kept)
    assert sorted(seen) == list(range(len(rows)))


def test_summary_and_repr() -> None:
    data = small()
    assert data.summary() == {
        "name": "small",
        "task": "multiclass",
        "classes": 3,
        "clients": 2,
        "examples": {"train": 4, "valid": 1, "test": 1, "total": 6},
        "per_client": {"min": 2, "median": 3.0, "max": 4},
        "best": None,
    }
    assert repr(data) == "FederatedData('small', 2 clients, 6 examples, columns ['label', 'text', 'x'])"
    assert tiny().summary()["examples"] == {"total": 3}


def test_fingerprint_sees_every_part() -> None:
    plain = small().fingerprint()
    assert plain == small().fingerprint()
    assert plain["clients"] == 2
    assert plain["examples"] == {"train": 4, "valid": 1, "test": 1, "total": 6}
    assert set(plain["columns"]) == {"label", "text", "x"}

    changed = small()
    np.asarray(changed.columns["x"])[3] += 1
    other = changed.fingerprint()
    assert {name for name in plain["columns"] if plain["columns"][name] != other["columns"][name]} == {"x"}
    assert other["partition"] == plain["partition"]

    # The same tokens in rows of other lengths, the same rows in other splits, other names: each is seen.
    assert (
        tiny(columns={"t": Ragged.from_rows([[1], [2], [3]])}).fingerprint()["columns"]
        != (tiny(columns={"t": Ragged.from_rows([[1, 2], [], [3]])}).fingerprint()["columns"])
    )
    assert tiny().fingerprint()["partition"] != tiny(ids=["a", "c"]).fingerprint()["partition"]
    assert tiny().fingerprint()["partition"] != tiny(offsets=[0, 1, 3]).fingerprint()["partition"]
    bounds = np.array([[0, 2, 2, 2], [2, 3, 3, 3]])
    assert tiny(bounds=bounds).fingerprint()["partition"] != tiny().fingerprint()["partition"]


def test_client_ids_with_path_characters_are_data() -> None:
    data = FederatedData.from_columns(["../x", "a/b"], {"label": np.array([0, 1])})
    assert data.index("../x") == 0


def test_clients_without_rows() -> None:
    data = tiny(offsets=[0, 0, 3])
    assert data.count(0) == 0
    assert data.clients_of(np.array([0])).tolist() == [1]


def million() -> FederatedData:
    clients = 1_000_000
    offsets = offsets_of(np.full(clients, 2))
    bounds = np.stack([offsets[:-1], offsets[:-1] + 1, offsets[:-1] + 1, offsets[1:]], axis=1)
    columns = {"item": np.arange(2 * clients), "label": np.zeros(2 * clients, np.int64)}
    return FederatedData(columns, offsets, RangeIds(clients), bounds)


def test_a_client_of_a_million_costs_nothing_to_reach() -> None:
    data = million()
    tracemalloc.start()
    try:
        for client in (0, 500_000, 999_999):
            assert data.rows(client, "test") == range(2 * client + 1, 2 * client + 2)
            assert data.batch(data.rows(client, "train"))["item"].tolist() == [2 * client]
            assert data.index(data.ids[client]) == client
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000  # bytes: far below one object, or even one pointer, per client

    few = tiny(bounds=np.array([[0, 1, 1, 2], [2, 3, 3, 3]]))

    def cost(of: FederatedData, client: int) -> float:
        return min(timeit.repeat(lambda: of.batch(of.rows(client, "train")), number=200, repeat=7))

    assert cost(data, 999_999) < 4 * cost(few, 1)


def test_gathering_a_batch_of_texts_needs_no_loop() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 99, size=size) for size in draw.integers(1, 160, size=2000)]
    data = FederatedData.from_columns(np.zeros(2000, np.int64), {"text": Ragged.from_rows(rows, "uint8")})
    chosen = draw.permutation(2000)[:32].astype(np.int64)
    tokens = int(data.batch(chosen)["text_length"].sum())
    seconds = min(timeit.repeat(lambda: data.batch(chosen), number=50, repeat=7)) / 50
    copied = np.zeros(tokens, np.int64)

    def loop() -> None:
        for place in range(tokens):
            copied[place] = 1

    assert seconds < min(timeit.repeat(loop, number=1, repeat=7)) / 2


def test_labels_may_be_sparse_where_it_is_said(tmp_path: Path) -> None:
    columns = {"label": [5, 20231231]}
    assert (
        FederatedData.from_columns(["a", "b"], columns, meta={"classes": 20231232}).meta["classes"]
        == 20231232
    )
    regression = FederatedData.from_columns(["a", "b"], columns, meta={"task": "regression"})
    assert regression.columns["label"].tolist() == [5.0, 20231232.0]  # float32
    assert FederatedData.from_columns(["a", "b"], {"label": [0, 999]}).meta["classes"] == 1000
    dense = np.arange(0, 50_000, 9)
    assert (
        FederatedData.from_columns(np.arange(len(dense)), {"label": dense}).meta["classes"] == dense[-1] + 1
    )
