"""Names that are two though one may be meant, and classes that nothing is trained on, are said once before training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedkeep import FederatedData, methods, simulate
from fedkeep.core.errors import DataError
from fedkeep.data import Ragged
from fedkeep.data import alike as odd
from fedkeep.data.alike import alike, check_codes, label_warnings, oddities
from fedkeep.data.federated import take
from fedkeep.data.readers import read_table

ROWS = ("a,1,yes,train", "a,2, yes,train", "a,3,no,train", "b,4,no,train", "b,5,No,train", "b,8,yes.,test")


def table(folder: Path, rows: tuple[str, ...]) -> FederatedData:
    (folder / "rows.csv").write_text("\n".join(("user,x,label,split", *rows)) + "\n")
    return read_table(folder / "rows.csv", user="user", features=["x"], label="label")


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["yes", " yes", "Yes ", "no"], [[0, 1, 2]]),
        (["1", "1.0", "01", "1."], [[0, 1, 3]]),
        (["a", "A", "b"], []),  # characters are told apart by their case
        (["a", "a "], [[0, 1]]),
        (["1.5", "1.50", "x.0", "x"], []),
        (["new  york", "New York"], [[0, 1]]),
        (["12345678901234567890", "12345678901234567891"], []),
    ],
)
def test_which_names_are_alike(names: list[str], groups: list[list[int]]) -> None:
    assert alike(names) == groups


def test_labels_that_are_alike_and_classes_only_in_test_are_said_before_training(tmp_path: Path) -> None:
    data = table(tmp_path, ROWS)
    spelled, unseen = label_warnings(data)
    for part in ("' yes' (1 examples)", "'yes' (1 examples)", "'no' (2 examples)", "'No' (1 examples)"):
        assert part in spelled
    assert "'yes.' (1 examples)" in unseen
    assert "'no'" not in unseen
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulate(nn.Linear(1, 5), methods.fedavg(), data, rounds=1)
    assert [str(w.message) for w in said if str(w.message) in (spelled, unseen)] == [spelled, unseen]


def test_numbers_of_classes_only_in_test_are_said_too() -> None:
    def said(trained: int) -> list[str]:
        columns = {"x": np.ones((trained + 2, 1), "f4"), "label": [n % 2 for n in range(trained)] + [7, 1]}
        split = ["train"] * trained + ["test"] * 2
        return list(label_warnings(FederatedData.from_columns(["a"] * (trained + 2), columns, split)))

    (unseen,) = said(20)
    assert "test split alone" in unseen
    assert "7 (1 examples)" in unseen
    assert said(19) == []  # so few lack classes by chance


def test_what_was_mended_as_advised_is_not_said_again(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = table(
            tmp_path, tuple(row.replace(" ", "").replace("No", "no").replace("yes.", "yes") for row in ROWS)
        )
        assert list(label_warnings(data)) == []
        assert data.meta["label_names"] == ["no", "yes"]


def test_client_ids_that_are_alike_are_said_where_they_are_read() -> None:
    columns = {"x": np.zeros((5, 2)), "label": np.array([0, 1, 0, 1, 0])}
    with pytest.warns(UserWarning, match="client ids") as said:
        data = FederatedData.from_columns(["a", "a ", "1", "1.0", "1"], columns)
    assert list(data.ids) == ["1", "1.0", "a", "a "]
    (text,) = (str(w.message) for w in said)
    for part in ("'1' (2 examples)", "'1.0' (1 examples)", "'a' (1 examples)", "'a ' (1 examples)"):
        assert part in text


ODD = {
    "constant": ({"x": np.ones((40, 2), np.float32)}, "every feature is the same"),
    "one class": ({"label": np.full(40, 1)}, "has the label 1"),
    "an id": ({"x": np.stack([np.arange(40), np.arange(40) % 7], 1).astype(np.float32)}, "'first'"),
    "by its name": (
        {"x": np.stack([np.arange(40) % 7, np.arange(40) ** 2], 1).astype(np.float32)},
        "'row_id'",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_data_that_nothing_can_be_learned_from_are_said_before_training(name: str) -> None:
    columns, part = ODD[name]
    usual = {"x": (np.arange(80).reshape(40, 2) ** 2 % 13).astype(np.float32), "label": np.arange(40) % 2}
    meta = {"task": "binary", "classes": 2, "features": ["first", "row_id"]}

    def said(more: dict[str, np.ndarray]) -> list[str]:
        data = FederatedData.from_columns(["a", "b"] * 20, usual | more, ["train"] * 36 + ["test"] * 4, meta)
        return list(oddities(data))

    (line,) = said(columns)
    assert part in line or part.capitalize() in line
    assert said({}) == []


def test_clients_of_one_example_each_are_said_before_training() -> None:
    columns = {"x": np.arange(60, dtype=np.float32).reshape(30, 2) ** 2 % 13, "label": np.arange(30) % 2}
    splits = ["train", "test"] * 15
    lone = FederatedData.from_columns([f"u{n}" for n in range(30)], columns, splits)
    assert any("30 of 30 clients" in line for line in oddities(lone))
    assert not any(
        "clients" in line for line in oddities(FederatedData.from_columns(["a"] * 30, columns, splits))
    )


def shared_with_train(columns: dict[str, Any], twice: int) -> list[str]:
    """What is said of 40 examples of two clients, the last ten of which are tested, ``twice`` of them on trained inputs."""
    rows = np.arange(40)
    rows[30 : 30 + twice] = np.arange(twice)
    meta = {"task": "binary", "classes": 2}
    taken = take(columns, rows) | {"label": np.arange(40) % 2}
    split = ["train"] * 30 + ["test"] * 10
    found = oddities(FederatedData.from_columns(["a", "b"] * 20, taken, split, meta))
    return [line for line in found if "test examples" in line]


DRAWN = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
INPUTS = {
    "features": {"x": DRAWN},
    "images": {"x": DRAWN.reshape(40, 1, 2, 3)},
    "texts": {"text": Ragged.from_rows([[n, 7, n + 1][: 2 + n % 2] for n in range(40)])},
    "texts beside numbers": {"text": Ragged.from_rows([[7, 1 + n % 5] for n in range(40)]), "x": DRAWN},
}


@pytest.mark.parametrize("name", INPUTS)
def test_examples_that_are_tested_and_trained_on_are_counted(name: str) -> None:
    (line,) = shared_with_train(INPUTS[name], 3)
    assert "3 of 10 test examples" in line
    assert shared_with_train(INPUTS[name], 0) == []


def test_rows_of_few_possible_values_are_equal_by_chance_and_nothing_is_said() -> None:
    assert shared_with_train({"x": (np.arange(80).reshape(40, 2) % 3).astype(np.float32)}, 5) == []
    assert shared_with_train({"item": np.arange(40) % 3}, 5) == []


def test_inputs_of_many_bytes_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd, "MOST_BYTES", DRAWN.nbytes - 1)
    assert shared_with_train({"x": DRAWN}, 3) == []


def test_what_was_added_to_labels_and_words_is_no_other_numbering() -> None:
    was = {"label_names": ["a", "b"], "vocabulary": {"symbols": ["x"], "size": 9}}
    check_codes(was, {"label_names": ("a", "b", "c"), "vocabulary": {"symbols": ["x", "y"], "size": 10}})
    check_codes(was, {})
    for changed in ({"label_names": ["b", "a"]}, {"vocabulary": {"symbols": ["y", "x"], "size": 9}}):
        with pytest.raises(DataError, match=next(iter(changed))):
            check_codes(was, changed)
