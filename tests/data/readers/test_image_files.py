"""Images in IDX and npz files."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data.readers import fashion_mnist, npz_images
from fedkeep.data.readers.image_files import read_idx
from tests.refusals import raises

DRAWN = np.random.default_rng(0)
IMAGES = {
    part: DRAWN.integers(0, 256, (n, 28, 28), dtype=np.uint8) for part, n in (("train", 7), ("t10k", 3))
}
LABELS = {
    "train": np.array([9, 0, 1, 2, 3, 4, 5], np.uint8),
    "t10k": np.array([8, 7, 6], np.uint8),
}


def idx(magic: int, sizes: tuple[int, ...], body: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + body


def images(part: str) -> bytes:
    return idx(2051, IMAGES[part].shape, IMAGES[part].tobytes())


def labels(part: str) -> bytes:
    return idx(2049, LABELS[part].shape, LABELS[part].tobytes())


HEADER = "F/train-images-idx3-ubyte.gz: wanted images, at least one, a header of 2051 n 28 28; got "


def folder(path: Path, **replaced: bytes | None) -> Path:
    """Write the four files; ``train_images=...`` replaces what is compressed, None leaves the file out."""
    for part in ("train", "t10k"):
        for kind, content in (("images-idx3", images(part)), ("labels-idx1", labels(part))):
            given = replaced.get(f"{part}_{kind[:6]}", content)
            if given is not None:
                (path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(given))
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        fashion_mnist(path)
    return str(error.value).replace(str(path), "F")


def test_images_and_labels(tmp_path: Path) -> None:
    got = fashion_mnist(folder(tmp_path))
    assert got.images.shape == (10, 1, 28, 28)
    assert got.images.dtype == np.uint8
    assert (got.images[:7, 0] == IMAGES["train"]).all()
    assert (got.images[7:, 0] == IMAGES["t10k"]).all()
    assert got.labels.tolist() == [9, 0, 1, 2, 3, 4, 5, 8, 7, 6]
    assert (got.train, got.classes, got.label_names[9]) == (7, 10, "Ankle boot")
    assert sorted(got.source) == sorted(file.name for file in tmp_path.iterdir())
    assert repr(got) == "ImageSet('fashion_mnist', 7 train, 3 test, 1 × 28 × 28, 10 classes)"


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"t10k_labels": None},
            "Wanted the data file F/t10k-labels-idx1-ubyte.gz, which does not exist. Check the path.",
        ),
        ({"train_images": labels("train")}, f"{HEADER}2049 7 150995202. Fetch it again."),
        (
            {"train_labels": b"not an IDX file at all"},
            (
                "F/train-labels-idx1-ubyte.gz: wanted labels, at least one, a header of 2049 n; got 1852797984 1634607177. "
                "Fetch it again."
            ),
        ),
        ({"train_images": b"ab"}, f"{HEADER}fewer than 4 bytes. Fetch it again."),
        ({"train_images": images("train")[:10]}, f"{HEADER}2051 7. Fetch it again."),
        ({"train_images": idx(2051, (2, 32, 32), bytes(2048))}, f"{HEADER}2051 2 32 32. Fetch it again."),
        ({"train_images": idx(2051, (0, 28, 28), b"")}, f"{HEADER}2051 0 28 28. Fetch it again."),
        (
            {"train_images": images("train")[:-1]},
            "F/train-images-idx3-ubyte.gz: the header promises 7 images, 5,488 bytes; only 5,487 follow. Fetch it again.",
        ),
        (
            {"t10k_images": images("t10k") + b"\0"},
            "F/t10k-images-idx3-ubyte.gz: the header promises 3 images, 2,352 bytes; more follow. Fetch it again.",
        ),
        (
            {"train_labels": idx(2049, (6,), bytes(6))},
            "F/train-labels-idx1-ubyte.gz holds 6 labels, but train-images-idx3-ubyte.gz 7 images. Fetch both again.",
        ),
        (
            {"train_labels": idx(2049, (7,), bytes([0, 1, 10, 3, 200, 5, 6]))},
            (
                "F/train-labels-idx1-ubyte.gz: wanted labels 0 to 9; got 10 at image 2 and 1 more out of range. "
                "Fetch the file again."
            ),
        ),
    ],
)
def test_faults(replaced: dict[str, bytes | None], message: str, tmp_path: Path) -> None:
    assert refused(folder(tmp_path, **replaced)) == message


def test_a_download_that_broke_off(tmp_path: Path) -> None:
    file = folder(tmp_path) / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert refused(tmp_path).startswith("F/train-images-idx3-ubyte.gz is truncated or no gzip file (")
    file.write_bytes(gzip.decompress(whole))  # not compressed
    assert refused(tmp_path).startswith(
        "F/train-images-idx3-ubyte.gz is truncated or no gzip file (Not a gzipped"
    )
    file.write_bytes(b"")
    assert refused(tmp_path) == "The data file F/train-images-idx3-ubyte.gz is empty. Fetch it again."


DATA = os.environ.get("FEDKEEP_DATA", "")


@pytest.mark.skipif(
    not (DATA and Path(DATA, "fashion_mnist").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds fashion_mnist/ to test the real data",
)
def test_the_real_images() -> None:
    got = fashion_mnist(Path(DATA, "fashion_mnist"))
    assert (len(got), got.train) == (70_000, 60_000)
    assert np.bincount(got.labels[:60_000]).tolist() == [6_000] * 10
    assert np.bincount(got.labels[60_000:]).tolist() == [1_000] * 10
    assert got.source["train-images-idx3-ubyte.gz"].startswith("3aede38d61863908")
    # Published mean and standard deviation of the training pixels: 0.2860 and 0.3530.
    assert got.images[:60_000].mean() / 255 == pytest.approx(0.2860, abs=5e-5)
    assert got.images[:60_000].std() / 255 == pytest.approx(0.3530, abs=5e-5)


def test_a_header_that_asks_for_terabytes(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(np.array([2051, 2**32 - 1, 28, 28], ">u4").tobytes() + bytes(784)))
    with pytest.raises(DataError) as error:
        read_idx(path, (28, 28))
    most = 1040 * path.stat().st_size
    assert str(error.value) == (
        f"{path}: the header promises 3,367,254,359,280 bytes; a gzip file of this length holds at most {most:,}. Fetch "
        f"it again."
    )


PIXELS = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
CLASSES = np.asarray([2, 0, 1, 2], dtype=np.uint8)


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path / "signs.npz", **arrays)
    return path / "signs.npz"


def test_colour_images_are_turned_to_planes(tmp_path: Path) -> None:
    file = written(tmp_path, images=PIXELS, fine=CLASSES, names=np.asarray(["a", "b", "c"]))
    found = npz_images(file, label="fine", names="names", train=3)
    assert found.images.shape == (4, 3, 2, 3)
    assert found.images[1, 2, 1, 0] == PIXELS[1, 1, 0, 2]
    assert found.labels.tolist() == [2, 0, 1, 2]
    assert (found.train, found.name, found.label_names) == (3, "signs", ("a", "b", "c"))
    assert set(found.source) == {"signs.npz"}
    assert len(found.source["signs.npz"]) == 64


def test_grey_images_and_classes_without_names(tmp_path: Path) -> None:
    found = npz_images(written(tmp_path, images=PIXELS[..., 0], label=CLASSES))
    assert found.images.shape == (4, 1, 2, 3)
    assert found.label_names == ("class 0", "class 1", "class 2")
    assert found.train == 4


@pytest.mark.parametrize(
    ("parts", "train"), [(("x_train", "y_train", "x_test", "y_test"), 4), (["train", "val", "test"], 8)]
)
def test_arrays_are_named_as_others_name_them(parts: Sequence[str], train: int, tmp_path: Path) -> None:
    arrays = (
        {name: PIXELS if name.startswith("x") else CLASSES for name in parts}
        if len(parts) == 4
        else {f"{part}_images": PIXELS for part in parts}
        | {f"{part}_labels": CLASSES[:, None] for part in parts}
    )
    found = npz_images(written(tmp_path, **arrays))
    assert (found.train, len(found.images) - found.train) == (train, 4)
    assert found.labels.tolist() == CLASSES.tolist() * (len(found.images) // 4)
    only = npz_images(written(tmp_path, x_train=PIXELS, y_train=CLASSES))
    assert (len(only.images), only.train) == (4, 4)
    other = {n: own[:, :1] if n.endswith(("x_test", "test_images")) else own for n, own in arrays.items()}
    with raises(DataError, got=[(3, 1, 3), (3, 2, 3)]):
        npz_images(written(tmp_path, **other))


@pytest.mark.parametrize(
    ("arrays", "options", "facts"),
    [
        (
            {"images": PIXELS.astype(float), "label": CLASSES},
            {},
            {"wanted": "images", "shape": (4, 2, 3, 3)},
        ),
        ({"images": PIXELS[..., :2], "label": CLASSES}, {}, {"wanted": "images", "shape": (4, 2, 3, 2)}),
        (
            {"images": PIXELS, "label": CLASSES[:2]},
            {},
            {"wanted": "label", "images": 4, "shape": (2,)},
        ),
        (
            {"images": PIXELS, "label": CLASSES.astype(float)},
            {},
            {"wanted": "label", "images": 4, "shape": (4,)},
        ),
        ({"images": PIXELS}, {}, {"said": "wanted the arrays 'images' and 'label'; 'label' is not"}),
        (
            {"images": PIXELS, "label": CLASSES, "n": np.asarray(["a"])},
            {"names": "n"},
            {"largest": 0, "got": 2, "row": 0, "more": 2},
        ),
        (
            {"images": PIXELS, "label": CLASSES, "n": np.arange(3)},
            {"names": "n"},
            {"wanted": "n"},
        ),
        (
            {"images": PIXELS, "label": CLASSES},
            {"train": 5},
            {"images": 4, "got": 5},
        ),
        (
            {"images": PIXELS, "label": CLASSES.astype(np.int64) - 1},
            {},
            {"largest": 1, "got": -1, "row": 1, "more": 0},
        ),
    ],
)
def test_what_is_refused(
    arrays: dict[str, Any], options: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    file = written(tmp_path, **arrays)
    with raises(DataError, **facts):
        npz_images(file, **options)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which does not exist"):
        npz_images(tmp_path / "none.npz")
