from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedkeep.core.errors import DataError, Spot, installing
from fedkeep.data import huggingface
from tests.refusals import raises


class Rows:
    """What the reader uses of a ``datasets.Dataset``: names, columns, a length, classes and a fingerprint.

    Args:
        classes: names of labels, as a ``ClassLabel`` has them.
        form: turns a column into what a format of the library gives.
    """

    def __init__(
        self,
        columns: dict[str, list[Any]],
        classes: list[str] | None = None,
        form: Callable[[list[Any]], Any] = list,
    ) -> None:
        self.columns, self.form, self.classes = columns, form, classes
        self.features: dict[str, Any] = {"label": None if classes is None else SimpleNamespace(names=classes)}
        self.column_names = list(columns)
        self._fingerprint = "f" + str(len(columns))

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, name: str) -> Any:
        return self.form(self.columns[name])

    def with_format(self, form: None) -> Rows:
        return Rows(self.columns, self.classes)

    def select(self, rows: np.ndarray) -> Rows:
        return Rows({name: [own[row] for row in rows] for name, own in self.columns.items()}, self.classes)


TRAIN = Rows({"who": ["a", "b"], "text": ["ab", "b"], "label": ["x", "y"]})
TEST = Rows({"who": ["a"], "text": ["c"], "label": ["y"]})


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> dict[str, Rows]:
        if name != "some/set":
            raise ConnectionError(f"Couldn't reach {name!r}.")
        return {"train": TRAIN, "validation": TEST}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def refused(source: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as error:
        huggingface(source, **({"user": "who"} | settings))
    return str(error.value)


@pytest.mark.parametrize("source", ["some/set", {"train": TRAIN, "validation": TEST}])
def test_several_splits(source: Any) -> None:
    data = huggingface(source, user="who", tokens="char")
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
        told = refused(rows, **{argument: wrong})
        assert told.startswith(
            f"huggingface has no column {wrong!r}; it has ['agreed', 'label', 'text', 'when', 'who']. "
            f"Did you mean {right!r}?"
        )
        assert f"{argument} = 'COLUMN'" in told
    data = huggingface(rows, user="who", time="when", opted_in="agreed", label_names=["x", "y"])
    assert data.columns["time"].tolist() == [2, 1]  # type: ignore[union-attr]
    assert data.columns["opted_in"].tolist() == [True, False]  # type: ignore[union-attr]


def test_features() -> None:
    rows = Rows({"who": ["a"], "f": [0.5], "label": [0.25]})
    data = huggingface(rows, user="who", features=["f"], task="regression", standardise=False)
    assert data.batch([0])["x"].tolist() == [[0.5]]


def test_names_of_classes_are_kept_with_their_numbers() -> None:
    columns = {"who": ["a", "b"], "text": ["ab", "b"], "label": [2, 1]}
    rows = Rows(columns, ["sad", "glad", "calm"])
    for names in (None, ["sad", "glad", "calm"]):
        data = huggingface({"train": rows, "test": rows}, user="who", label_names=names)
        assert data.meta["label_names"] == ["sad", "glad", "calm"]
        assert data.batch(range(4))["label"].tolist() == [2, 2, 1, 1]
    numbers = huggingface(rows, user="who", task="regression", standardise=False)
    assert numbers.batch([0, 1])["label"].tolist() == [2, 1]
    assert "label '-1' is not one of label_names" in refused(Rows(columns | {"label": [0, -1]}, ["x", "y"]))


def test_a_format_does_not_matter() -> None:
    columns = {"who": [1, 2], "text": ["ab", "b"], "label": [0, 1]}
    data = huggingface(Rows(columns, form=np.array), user="who")
    assert list(data.ids) == ["1", "2"]
    assert data.batch([0, 1])["label"].tolist() == [0, 1]


def test_what_is_refused() -> None:
    assert refused("no/set") == (
        "Cannot load the Hugging Face data set 'no/set': Couldn't reach 'no/set'. Check its name and the network."
    )
    assert refused({"train": iter(())}) == (
        "huggingface: wanted a Dataset or a DatasetDict; got tuple_iterator. Load it without streaming."
    )
    assert refused("some/set", user="whom").startswith(
        "some/set has no column 'whom'; it has ['label', 'text', 'who']. Did you mean 'who'?"
    )
    with raises(DataError, place=Spot("huggingface, holdout", 0, "row"), column="split", got="holdout"):
        huggingface({"train": TRAIN, "holdout": TEST}, user="who")
    with raises(DataError, place=Spot("huggingface", 1, "row"), column="text", got=None):
        huggingface(Rows(TRAIN.columns | {"text": ["a", None]}), user="who")
    assert refused(Rows({"who": [], "text": [], "label": []})) == "huggingface holds no example."
    timed = Rows(TEST.columns | {"time": [1]})
    assert refused({"train": TRAIN, "test": timed}) == (
        "huggingface: the column 'time' is missing from some of the splits ['test', 'train']."
    )


class Partitioner:
    """What the reader uses of a partitioner of ``flwr_datasets``."""

    def __init__(self, *partitions: Rows, names: dict[int, str] | None = None) -> None:
        self.partitions, self.num_partitions = partitions, len(partitions)
        if names:
            self.partition_id_to_natural_id = names

    def load_partition(self, number: int) -> Rows:
        if not len(self.partitions[number]):
            raise ValueError(f"Partition {number} is empty.")
        return self.partitions[number]


def test_partitions_are_clients() -> None:
    data = huggingface(Partitioner(TRAIN, TEST))
    assert (list(data.ids), data.counts().tolist(), data.bounds) == (["0", "1"], [2, 1], None)
    named = huggingface(Partitioner(TRAIN, TEST, names={0: "bo", 1: "al"}))
    assert (list(named.ids), named.counts().tolist()) == (["al", "bo"], [1, 2])
    both = SimpleNamespace(partitioners={"train": Partitioner(TRAIN, TEST), "test": Partitioner(TEST)})
    data = huggingface(both, tokens="char")
    assert [data.counts(part).tolist() for part in ("train", "test")] == [[2, 1], [1, 0]]
    assert huggingface(SimpleNamespace(partitioners={"train": Partitioner(TRAIN)})).bounds is None
    with raises(DataError, user="who"):
        huggingface(Partitioner(TRAIN), user="who")
    with raises(DataError, why="Partition 1 is empty"):
        huggingface(Partitioner(TRAIN, Rows({"who": [], "text": [], "label": []})))
    wrong = Rows({"text": [3], "label": ["x"]})
    with raises(DataError, place=Spot("huggingface, partition 1", 0, "row"), column="text"):
        huggingface(Partitioner(TRAIN, wrong))


def test_images(tmp_path: Path) -> None:
    files = []
    for grey in (7, 9):
        file = io.BytesIO()
        Image.fromarray(np.full((4, 6), grey, np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    (tmp_path / "b.png").write_bytes(files[1])
    cells = [{"bytes": files[0], "path": None}, {"bytes": None, "path": str(tmp_path / "b.png")}]
    rows = Rows({"who": ["a", "b"], "img": cells, "label": [0, 1]}, ["cat", "dog"])
    data = huggingface(rows, user="who", image="img")
    image = np.asarray(data.columns["image"])
    assert (image.shape, image.dtype, image[:, 0, 0, 0].tolist()) == ((2, 1, 4, 6), np.uint8, [7, 9])
    assert data.meta["label_names"] == ["cat", "dog"]
    assert np.asarray(huggingface(rows, user="who", image="img", size=2).columns["image"]).shape == (
        2,
        1,
        2,
        2,
    )
    for cell, facts in (({"bytes": b"no"}, {}), (3, {"got": "int"}), ({"path": str(tmp_path / "no")}, {})):
        with raises(DataError, **facts):
            huggingface(Rows({"who": ["a"], "img": [cell], "label": [0]}), user="who", image="img")
    with raises(DataError, image="img"):
        huggingface(rows, user="who", image="img", text="who")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused("some/set") == (
        f"Reading Hugging Face data sets needs datasets, which is not installed: {installing('datasets')}."
    )


def test_some_clients_alone() -> None:
    data = huggingface({"train": TRAIN, "test": TEST}, user="who", clients=1)
    assert len(data.ids) == 1
    (client,) = data.ids
    rows = [row for part in (TRAIN, TEST) for row in part.columns["who"] if row == client]
    assert data.examples == len(rows)
    with raises(DataError, wanted=5, there=2):
        huggingface({"train": TRAIN, "test": TEST}, user="who", clients=5)
    with raises(DataError):
        huggingface(TRAIN, user=None, clients=1)
