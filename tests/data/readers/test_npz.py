"""A set of images in one file of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data.readers import npz_images

PIXELS = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)
LABELS = np.asarray([2, 0, 1, 2], dtype=np.uint8)


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path / "signs.npz", **arrays)
    return path / "signs.npz"


def test_colour_images_are_turned_to_planes(tmp_path: Path) -> None:
    file = written(tmp_path, images=PIXELS, fine=LABELS, names=np.asarray(["a", "b", "c"]))
    found = npz_images(file, label="fine", names="names", train=3)
    assert found.images.shape == (4, 3, 2, 3)
    assert found.images[1, 2, 1, 0] == PIXELS[1, 1, 0, 2]
    assert found.labels.tolist() == [2, 0, 1, 2]
    assert (found.train, found.name, found.label_names) == (3, "signs", ("a", "b", "c"))
    assert set(found.source) == {"signs.npz"}
    assert len(found.source["signs.npz"]) == 64


def test_grey_images_and_classes_without_names(tmp_path: Path) -> None:
    found = npz_images(written(tmp_path, images=PIXELS[..., 0], label=LABELS))
    assert found.images.shape == (4, 1, 2, 3)
    assert found.label_names == ("class 0", "class 1", "class 2")
    assert found.train == 4


@pytest.mark.parametrize(
    ("arrays", "options", "fault"),
    [
        (
            {"images": PIXELS.astype(float), "label": LABELS},
            {},
            "wanted 'images' as uint8 (n, height, width, 1 or 3 channels); got float64",
        ),
        ({"images": PIXELS[..., :2], "label": LABELS}, {}, "got uint8, shape (4, 2, 3, 2)."),
        (
            {"images": PIXELS, "label": LABELS[:2]},
            {},
            "wanted 'label' with a whole number for each of 4 images, at least one; got uint8, shape (2,).",
        ),
        ({"images": PIXELS, "label": LABELS.astype(float)}, {}, "got float64, shape (4,)."),
        ({"images": PIXELS}, {}, "wanted the arrays 'images' and 'label'; 'label' is not among ['images']."),
        (
            {"images": PIXELS, "label": LABELS, "n": np.asarray(["a"])},
            {"names": "n"},
            "wanted labels 0 to 0; got 2 at image 0 and 2 more out of range",
        ),
        (
            {"images": PIXELS, "label": LABELS, "n": np.arange(3)},
            {"names": "n"},
            "wanted 'n' with a text for each class; got int64.",
        ),
        (
            {"images": PIXELS, "label": LABELS},
            {"train": 5},
            "Wanted 1 to 4 training images, the number of all; got 5.",
        ),
        ({"images": PIXELS, "label": LABELS.astype(np.int64) - 1}, {}, "out of range"),
    ],
)
def test_what_is_refused(arrays: dict[str, Any], options: dict[str, Any], fault: str, tmp_path: Path) -> None:
    file = written(tmp_path, **arrays)
    with pytest.raises(DataError) as error:
        npz_images(file, **options)
    assert fault in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which does not exist"):
        npz_images(tmp_path / "none.npz")
