"""CIFAR-10 and CIFAR-100: the original binary files, Parquet files of JPEG or PNG images, a lossless npz file.

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", technical report, University of Toronto, 2009.
The pickled Python version is not read: unpickling runs code of whoever wrote the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_choice, raising
from fedkeep.core.files import expanded
from fedkeep.data.arrays import read_npz
from fedkeep.data.images import ImageSet, Pixels, check_range, joined
from fedkeep.data.readers.image_files import npz_images
from fedkeep.data.readers.opened_files import existing, readable, sha256
from fedkeep.data.readers.pictures import read_pictures

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_TEST = "cifar100_test.npz"
FORMS10 = {
    "jpeg": "*train*.parquet",
    "binary": "data_batch_1.bin",
    "lossless": "cifar10_train4000_lossless.npz",
}
FORMS100 = {"binary": "train.bin", "parquet": "*train*.parquet", "test": CIFAR100_TEST}
"""By which file each form is found, the first of those that are there."""
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
Part = tuple[Pixels, NDArray[np.int64]]


def cifar10(
    folder: str | Path, form: Literal["jpeg", "lossless", "binary"] | None = None, whole: bool = True
) -> ImageSet:
    """Read CIFAR-10: 32 × 32 colour images of 10 classes, shape (3, 32, 32).

    Args:
        folder: of the files, or of the folder ``cifar-10-batches-bin`` of the binary version.
        form: "jpeg": Parquet files ``*train*.parquet`` and ``*test*.parquet`` of encoded images; "lossless": ``cifar10_train4000_lossless.npz``, 4,000 training images and no test image;
            "binary": ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``; None: the first of jpeg,
            binary and lossless whose files are there.
        whole: of binary files, whose lengths nothing states: refuse other numbers of images than the official.

    Raises:
        DataError: a file is missing, truncated or malformed, an image has another size, or a label is out of range;
            the message names the file.
    """
    place, found = _found(folder, "cifar-10-batches-bin", FORMS10, form)
    source = dict[str, str]()
    if found == "jpeg":
        train, test = (
            read_pictures(place, part, ("label",), SHAPE, len(CIFAR10), source) for part in ("train", "test")
        )
        return joined(train, test, CIFAR10, "cifar10", source)
    if found == "lossless":
        only = _lossless(place / FORMS10["lossless"], "labels", len(CIFAR10), source)
        return joined(only, None, CIFAR10, "cifar10_lossless", source)
    batches = [_records(place / f"data_batch_{i}.bin", (10,), 0, whole, 10_000, source) for i in range(1, 6)]
    train = np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches])
    test = _records(place / "test_batch.bin", (10,), 0, whole, 10_000, source)
    return joined(train, test, CIFAR10, "cifar10", source)


def cifar100(
    folder: str | Path,
    form: Literal["binary", "parquet", "test"] | None = None,
    labels: Literal["fine", "coarse"] = "fine",
    whole: bool = True,
) -> ImageSet:
    """Read CIFAR-100: 32 × 32 colour images of 100 classes in 20 groups, shape (3, 32, 32).

    Args:
        folder: of the files, or of the folder ``cifar-100-binary`` of the binary version.
        form: "binary": ``train.bin`` and ``test.bin`` of the binary version, with ``fine_label_names.txt`` and
            ``coarse_label_names.txt`` where they are there; "parquet": files ``*train*.parquet`` and
            ``*test*.parquet`` of encoded images, with columns ``fine_label`` and ``coarse_label``; "test": ``cifar100_test.npz``, the official test images alone, as the set's training images;
            None: the first of binary, parquet and test whose files are there.
        labels: "fine", the 100 classes, or "coarse", the 20 groups.
        whole: of binary files, whose lengths nothing states: refuse other numbers of images than the official.

    Raises:
        DataError: as for :func:`cifar10`.
    """
    check_choice("Wanted labels", labels, ("fine", "coarse"), DataError)
    place, found = _found(folder, "cifar-100-binary", FORMS100, form)
    source = dict[str, str]()
    classes = {"coarse": 20, "fine": 100}
    if found == "test":
        path = place / CIFAR100_TEST
        only = _lossless(path, f"{labels}_label", classes[labels], source)
        (names,) = read_npz(path, (f"{labels}_names",))
        return joined(only, None, _right_number(path, names.tolist(), classes[labels]), "cifar100", source)
    if found == "parquet":
        train, test = (
            read_pictures(place, part, (f"{labels}_label",), SHAPE, classes[labels], source)
            for part in ("train", "test")
        )
    else:
        limits, which = tuple(classes.values()), list(classes).index(labels)
        train = _records(place / "train.bin", limits, which, whole, 50_000, source)
        test = _records(place / "test.bin", limits, which, whole, 10_000, source)
    return joined(train, test, _names(place, labels, classes[labels]), "cifar100", source)


def _found(folder: str | Path, inner: str, forms: Mapping[str, str], form: str | None) -> tuple[Path, str]:
    """Return where a set's files are, in a folder or in its ``inner`` one, and of which form: the first that is there."""
    place, names = expanded(folder), tuple(forms)
    if form is not None:
        check_choice("Wanted form", form, names, DataError)
        names = (form,)
    for within in (place, place / inner):
        for name in names:
            if any(within.glob(forms[name])):
                return within, name
    raise DataError(
        "{folder} has none of the files {wanted}, nor has a folder {inner} in it. Unpack a tar file. Of the two versions "
        "of the authors take the binary one: the pickled Python version is not read.",
        folder=place,
        wanted=", ".join(forms[name] for name in names),
        inner=inner,
    )


def _records(
    path: Path, limits: Sequence[int], which: int, whole: bool, official: int, source: dict[str, str]
) -> Part:
    """Read records of one byte a label and 3,072 bytes of pixels, colour plane after colour plane."""
    length = len(limits) + PIXELS
    with readable(path):
        content = np.frombuffer(existing(path).read_bytes(), np.uint8)
    entries, rest = divmod(len(content), length)
    if rest:
        raise DataError(
            "{file} is truncated or another kind of file: wanted a multiple of {length:,} bytes, one "
            "record an image; got {got:,}, of which the last {rest:,} are no whole record. Fetch it "
            "again.",
            file=path,
            length=length,
            got=len(content),
            rest=rest,
        )
    if whole and entries != official:
        raise DataError(
            "{file} holds {entries:,} images; wanted {wanted:,}. Fetch it again, or say whole=False to "
            "take what is there.",
            file=path,
            entries=entries,
            wanted=official,
        )
    records = content.reshape(entries, length)
    for column, limit in enumerate(limits):
        check_range(records[:, column].astype(np.int64), limit, path)
    source[path.name] = sha256(path)
    return records[:, len(limits) :].reshape(-1, *SHAPE), records[:, which].astype(np.int64)


def _lossless(path: Path, label: str, classes: int, source: dict[str, str]) -> Part:
    found = npz_images(path, label=label)
    if found.images.shape[1:] != SHAPE:
        raise DataError(
            "{file}: wanted images of shape (32, 32, 3); got {shape}.",
            file=path,
            shape=found.images.shape[1:],
        )
    check_range(found.labels, classes, path)
    source |= found.source
    return found.images, found.labels


def _names(folder: Path, labels: str, classes: int) -> Sequence[str]:
    path = folder / f"{labels}_label_names.txt"
    if not path.is_file():
        return [f"{labels} {number}" for number in range(classes)]
    with readable(path), raising(DataError, "{file}: not utf-8 text ({why}).", UnicodeDecodeError, file=path):
        names = path.read_text(encoding="utf-8").split()
    return _right_number(path, names, classes, ", one a line")


def _right_number(path: Path, names: Sequence[str], classes: int, form: str = "") -> Sequence[str]:
    if len(names) != classes:
        raise DataError(
            "{file}: wanted {wanted} names{form}; got {got}. Fetch it again.",
            file=path,
            wanted=classes,
            form=form,
            got=len(names),
        )
    return names
