"""Folders of images: what folders and tables say of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, ImageSet
from fedkeep.data.readers import image_folder
from tests.refusals import raises

SHAPE = (4, 6)


def drawn(folder: Path, *names: str, shape: tuple[int, ...] = SHAPE) -> Path:
    """Write an image for each name, all of whose pixels are its place among the names."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(shape, number, np.uint8)).save(folder / name)
    return folder


def order(data: FederatedData | ImageSet) -> list[int]:
    """Return which image each row is."""
    images = data.images if isinstance(data, ImageSet) else data.columns["image"]
    assert isinstance(images, np.ndarray)
    return [int(n) for n in images[:, 0, 0, 0]]


def test_a_folder_a_class_belongs_to_nobody_yet(tmp_path: Path) -> None:
    found = image_folder(drawn(tmp_path, "10/a.png", "9/b.png", "9/c.BMP", ".hidden/d.png"))
    assert (found.images.shape, found.images.dtype, found.train) == ((3, 1, *SHAPE), np.uint8, 3)
    assert found.label_names == ("9", "10")  # numbers in their order
    assert dict(zip(order(found), found.labels.tolist(), strict=True)) == {0: 1, 1: 0, 2: 0}


def test_folders_of_splits_are_known_by_their_names(tmp_path: Path) -> None:
    found = image_folder(drawn(tmp_path, "test/cat/a.png", "train/dog/b.png", "val/cat/c.png"))
    assert (found.train, order(found)) == (2, [1, 2, 0])


@pytest.mark.parametrize("levels", ["client/class", "class/client"])
def test_a_folder_a_client(levels: str, tmp_path: Path) -> None:
    names = ["ann/cat/1.png", "ann/dog/2.png", "bo/dog/3.png"]
    if levels == "class/client":
        names = ["/".join([*reversed(name.split("/")[:2]), name[-5:]]) for name in names]
    data = image_folder(drawn(tmp_path, *names, shape=(*SHAPE, 3)), levels=levels)
    assert isinstance(data, FederatedData)
    assert list(data.ids) == ["ann", "bo"]
    assert (order(data), data.columns["label"].tolist()) == ([0, 1, 2], [0, 1, 1])
    assert (data.columns["image"].shape, data.meta["label_names"]) == ((3, 3, *SHAPE), ["cat", "dog"])
    assert data.bounds is None


def test_splits_of_clients_and_levels_that_say_nothing(tmp_path: Path) -> None:
    folder = drawn(tmp_path, "train/x/ann/cat/1.png", "test/y/ann/cat/2.png")
    data = image_folder(folder, levels="split/*/client/class")
    assert [data.counts(part).tolist() for part in ("train", "valid", "test")] == [[1], [0], [1]]


@pytest.mark.parametrize("says", ["all", "client", "label"])
def test_a_table_says_what_folders_do_not(says: str, tmp_path: Path) -> None:
    drawn(tmp_path, "cat/1.png", "dog/2.png", "dog/left.png")
    rows = {
        "all": "image,client,label,split\ndog/2.png,bo,7,test\ncat/1.png,bo,3,train",
        "client": "image,client\ndog/2.png,bo\ncat/1.png,bo",
        "label": "image,label\ndog/2.png,dog\ncat/1.png,cat",
    }[says]
    (tmp_path / "who.csv").write_text(rows + "\n")
    with pytest.warns(UserWarning, match=r"1 of 3 images .* dog/left.png"):
        found = image_folder(tmp_path, table="who.csv")
    if isinstance(found, ImageSet):
        assert says == "label"
        assert found.label_names == ("cat", "dog")
    else:
        assert list(found.ids) == ["bo"]
        assert found.columns["label"].tolist() == ([3, 7] if says == "all" else [1, 0])


def test_sizes_that_differ_are_refused_or_brought_to_one(tmp_path: Path) -> None:
    drawn(tmp_path, "a/1.png")
    drawn(tmp_path, "a/2.png", shape=(8, 8))
    with raises(DataError, file=tmp_path / "a/2.png", other=tmp_path / "a/1.png", got=8, width=6):
        image_folder(tmp_path)
    for size, shape in ((5, (5, 5)), ([5, 7], (5, 7))):
        found = image_folder(tmp_path, size=size)
        assert found.images.shape == (2, 1, *shape)


@pytest.mark.parametrize("size", [0, [3], [3, 4, 5], 2.5, True])
def test_sizes_that_are_none(size: Any, tmp_path: Path) -> None:
    with raises(DataError, got=size):
        image_folder(drawn(tmp_path, "a/1.png"), size=size)


def test_an_image_that_cannot_be_decoded_or_would_lose_bits(tmp_path: Path) -> None:
    file = drawn(tmp_path, "a/1.png") / "a/1.png"
    file.write_bytes(file.read_bytes()[:-20])
    with raises(DataError, where=file):
        image_folder(tmp_path)
    Image.fromarray(np.full(SHAPE, 40_000, np.uint16)).save(file)
    with raises(DataError, file=file, mode="I;16"):
        image_folder(tmp_path)


@pytest.mark.parametrize(
    ("names", "options", "facts"),
    [
        (["1.png"], {}, {"place": "1.png"}),
        (["ann/cat/1.png"], {}, {"deep": 2, "example": "client/class"}),
        (["train/ann/cat/1.png"], {}, {"deep": 3, "example": "split/client/class"}),
        (["cat/1.png", "cat/x/2.png"], {}, {"place": "cat/x/2.png", "got": "cat/x"}),
        (["cat/1.png"], {"levels": "klass"}, {"got": "klass"}),
        (["cat/1.png"], {"levels": "client"}, {"got": "client"}),
        (["cat/1/1.png"], {"levels": "class/class"}, {"got": "class/class"}),
        (["some/cat/1.png"], {"levels": "split/class"}, {"got": "some", "column": "split"}),
        (["cat/1.txt.gif"], {"levels": "class", "table": "no.csv"}, {}),
        ([], {}, {}),
    ],
)
def test_what_is_refused(
    names: list[str], options: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    if "place" in facts:
        facts["place"] = tmp_path / facts["place"]
    with raises(DataError, **facts):
        image_folder(drawn(tmp_path, *names), **options)


def test_rows_and_folders_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "who.csv").write_text("image,label\nno.png,1\n")
    with raises(DataError, file="no.png"):
        image_folder(tmp_path, table="who.csv")
    with raises(DataError, column="who"):
        image_folder(tmp_path, table="who.csv", client="who")
    for folder, why in ((tmp_path / "no", "does not exist"), (tmp_path / "who.csv", "is a file")):
        with raises(DataError, folder=folder, why=why):
            image_folder(folder)
