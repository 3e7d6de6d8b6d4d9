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


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    return str(error.value)


def small() -> FederatedData:
    """Return six rows of two clients, given in disorder; x holds the number of the row as given."""
    return FederatedData.from_columns(
        ["b", "a", "b", "b", "a", "b"],
        {
            "x": np.arange(6, dtype=np.float32),
            "text": Ragged.from_rows([[2], [3, 4], [], [5], [6, 7, 8], [9]], "uint8"),
            "label": np.array([0, 1, 2, 1, 0, 2]),
        },
        ["test", "train", "train", "valid", "train", "train"],
        {"name": "small"},
    )


def tiny(**changes: Any) -> FederatedData:
    settings: dict[str, Any] = {
        "columns": {"x": np.zeros(3), "label": np.array([0, 1, 0])},
        "offsets": [0, 2, 3],
        "ids": ["a", "b"],
    }
    return FederatedData(**(settings | changes))


def test_rows_are_sorted_by_client_then_split_then_as_given() -> None:
    data = small()
    assert list(data.ids) == ["a", "b"]
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    assert np.asarray(data.columns["x"]).tolist() == [1, 4, 2, 5, 3, 0]
    assert np.asarray(data.columns["label"]).tolist() == [1, 0, 2, 2, 1, 0]
    assert [row.tolist() for row in text] == [[3, 4], [6, 7, 8], [], [9], [5], [2]]
    assert data.offsets.tolist() == [0, 2, 6]
    assert data.bounds is not None
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
    with pytest.raises(DataError) as error:
        data.index("bret")
    assert message(error) == "No client of these data has the id 'bret' (2 clients). Did you mean 'bert'?"


def test_select_keeps_order_and_traits() -> None:
    data = small()
    data.meta["traits"] = {"colour": ["red", "blue"]}
    chosen = data.select([1])
    assert list(chosen.ids) == ["b"]
    assert chosen.meta["traits"] == {"colour": ["blue"]}
    assert data.meta["traits"] == {"colour": ["red", "blue"]}
    assert chosen.bounds is not None
    assert chosen.bounds.tolist() == [[0, 2, 3, 4]]
    assert np.asarray(chosen.columns["x"]).tolist() == [2, 5, 3, 0]
    turned = data.select(np.array([1, 0]))
    assert list(turned.ids) == ["b", "a"]
    assert np.asarray(turned.columns["x"]).tolist() == [2, 5, 3, 0, 1, 4]
    assert data.select([0, 1]).ids is data.ids


@pytest.mark.parametrize(
    ("clients", "got"), [([], "none"), ([0, 2], "client 2"), ([-1], "client -1"), ([1, 1], "a client twice")]
)
def test_select_of_clients_that_are_none(clients: list[int], got: str) -> None:
    with pytest.raises(DataError) as error:
        small().select(clients)
    assert message(error) == f"Wanted different clients between 0 and 1; got {got}."


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
            {"columns": {"label": np.array([0.0, np.nan, 1.0])}, "meta": {"task": "binary"}},
            "Wanted integer labels for a binary task; got float64. Use integers, or say meta['task'] = 'regression'.",
        ),
        (
            {"columns": {"label": np.zeros((3, 2), np.int64)}},
            "Wanted one label per example, shape (examples,); got a column with more. Name it otherwise.",
        ),
        (
            {"meta": {"task": "multclass"}},
            "meta['task'] must be one of multiclass, binary, regression; got 'multclass'. Did you mean 'multiclass'?",
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
            ("Row 1: A client id is a text of 1 to 200 printable characters, or an integer; got an empty text. "
            "Name every client."),
        ),
        (
            ["a", "a\0"],
            {"label": [0, 1]},
            None,
            ("Row 1: A client id is a text of 1 to 200 printable characters, or an integer; got 'a\\x00', with the "
            "character U+0000. Remove it."),
        ),
        ([], {"label": []}, None, "Wanted at least one example; got an empty data set. Check the source and its filters."),
        (["a", "b"], {"label": [5, 20231231]}, None, ("Row 1 (client 'b'): the label 20231231 would make 20,231,232 classes, "
         "of which 2 occur. Number labels 0, 1, 2, …, or give meta['classes'] = the number, or task 'regression' where "
         "labels are numbers.")),
        (["a", "b"], {"x": np.array([1, 2**63], np.uint64)}, None,
         "Column 'x' holds 9223372036854775808; wanted integers below 2^63."),
    ],
)  # fmt: skip
def test_what_from_columns_refuses(client: Any, columns: Any, split: Any, expected: str) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_columns(client, columns, split)
    assert message(error) == expected


def test_splits_and_clients_that_are_none() -> None:
    data = small()
    with pytest.raises(DataError) as error:
        data.rows(0, "vaild")
    assert message(error) == (
        "Wanted the split 'train', 'valid', 'test' or 'all'; got 'vaild'. Did you mean 'valid'?"
    )
    for client in (2, -1):
        with pytest.raises(DataError) as error:
            data.rows(client, "train")
        assert message(error) == f"There is no client {client}: clients are numbered 0 to 1."
    with pytest.raises(DataError) as error:
        tiny().counts("train")
    assert message(error) == (
        "Wanted the train examples of data that are not split yet. Call data.split_per_user() first."
    )


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


@pytest.mark.parametrize("classes", [0, True, "three", 2.5])
def test_a_number_of_classes_that_is_none(classes: Any) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_columns(["a", "b"], {"label": [0, 1]}, meta={"classes": classes})
    assert message(error) == f"Wanted meta['classes'] as a whole number of at least 1; got {classes!r}."
