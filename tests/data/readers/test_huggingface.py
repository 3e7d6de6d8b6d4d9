from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import huggingface


class Rows:
    """What the reader uses of a ``datasets.Dataset``: names, columns, a length and a fingerprint."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self._fingerprint = "f" + str(len(columns))

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


TRAIN = Rows({"who": ["a", "b"], "text": ["ab", "b"], "label": ["x", "y"]})
TEST = Rows({"who": ["a"], "text": ["c"], "label": ["y"]})


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        load_dataset=lambda name: {"train": TRAIN, "validation": TEST} if name == "some/set" else None
    )
    monkeypatch.setitem(sys.modules, "datasets", library)


def refused(source: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        huggingface(source, **({"user": "who"} | settings))
    return str(error.value)


@pytest.mark.parametrize("source", ["some/set", {"train": TRAIN, "validation": TEST}])
def test_several_splits(source: Any) -> None:
    data = huggingface(source, user="who")
    assert list(data.ids) == ["a", "b"]
    assert data.counts("train").tolist() == [1, 1]
    assert data.counts("valid").tolist() == [1, 0]
    assert data.meta["label_names"] == ["x", "y"]
    assert data.batch(range(3))["label"].tolist() == [0, 1, 1]
    assert data.batch(range(3))["text"].tolist() == [[3, 2], [1, 0], [2, 0]]
    name = source if isinstance(source, str) else "huggingface"
    assert data.meta["source"] == {"huggingface": name, "fingerprints": {"train": "f3", "validation": "f3"}}


def test_one_set_is_not_split_unless_it_says_so() -> None:
    assert huggingface(TRAIN, user="who").bounds is None
    with_split = Rows(TRAIN.columns | {"split": ["train", "test"], "time": [1, 2]})
    data = huggingface(with_split, user="who")
    assert data.counts("test").tolist() == [0, 1]
    assert data.batch([0, 1])["time"].tolist() == [1, 2]


def test_a_column_that_somebody_names_must_be_there() -> None:
    rows = Rows(TRAIN.columns | {"when": [2, 1], "agreed": [True, False]})
    for argument, wrong, right in (("time", "whn", "when"), ("opted_in", "aggreed", "agreed")):
        assert refused(rows, **{argument: wrong}) == (
            f"huggingface has no column {wrong!r}; it has ['agreed', 'label', 'text', 'when', 'who']. "
            f"Did you mean {right!r}?"
        )
    data = huggingface(rows, user="who", time="when", opted_in="agreed")
    assert data.columns["time"].tolist() == [2, 1]  # type: ignore[union-attr]
    assert data.columns["opted_in"].tolist() == [True, False]  # type: ignore[union-attr]


def test_features() -> None:
    rows = Rows({"who": ["a"], "f": [0.5], "label": [0.25]})
    data = huggingface(rows, user="who", features=["f"], task="regression")
    assert data.batch([0])["x"].tolist() == [[0.5]]


def test_what_is_refused() -> None:
    assert refused("some/set", user="whom") == (
        "some/set has no column 'whom'; it has ['label', 'text', 'who']. Did you mean 'who'?"
    )
    assert refused({"train": TRAIN, "holdout": TEST}) == (
        "huggingface, holdout, row 0: wanted the split 'train', 'valid' or 'test'; got 'holdout'."
    )
    assert refused(Rows(TRAIN.columns | {"text": ["a", None]})) == (
        "huggingface, row 1: wanted text in column 'text'; got None."
    )
    assert refused(Rows({"who": [], "text": [], "label": []})) == "huggingface holds no example."
    timed = Rows(TEST.columns | {"time": [1]})
    assert refused({"train": TRAIN, "test": timed}) == (
        "huggingface: the column 'time' is missing from some of the splits ['test', 'train']."
    )


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused("some/set") == (
        "Reading Hugging Face data sets needs the package datasets. Install it: pip install 'fedkeep[datasets]'."
    )
