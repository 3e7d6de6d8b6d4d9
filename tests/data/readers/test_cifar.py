"""CIFAR's layouts, generated small; every fault is named with its file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.readers import cifar10, cifar100, pictures

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra images")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra images")
Image = pytest.importorskip("PIL.Image", reason="needs the extra images")

DRAWN = np.random.default_rng(0)


def pixels(n: int) -> NDArray[np.uint8]:
    return DRAWN.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def encoded(image: NDArray[np.uint8], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, kind)
    return file.getvalue()


def table(path: Path, columns: dict[str, Any]) -> None:
    parquet.write_table(pyarrow.table(columns), path)


def refused(path: Path, read: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        read(path, *arguments, **options)
    return str(error.value).replace(str(path), "F")


# --- Parquet


def test_jpeg_in_parquet(tmp_path: Path) -> None:
    plain = np.zeros((4, 3, 32, 32), np.uint8)
    plain[0, 0], plain[1, 1], plain[2, 2], plain[3] = 250, 250, 250, 100  # red, green, blue, grey
    jpegs = [encoded(image, "JPEG") for image in plain]
    table(
        tmp_path / "cifar10_train_jpeg.parquet", {"jpeg": jpegs[:3], "label": [9, 0, 3], "other": [1, 1, 1]}
    )
    table(tmp_path / "cifar10_test_jpeg.parquet", {"jpeg": jpegs[3:], "label": [5]})
    got = cifar10(tmp_path)
    assert got.images.shape == (4, 3, 32, 32)
    assert np.abs(got.images.astype(int) - plain).max() <= 3  # JPEG is lossy, even on plain colours
    assert (got.labels.tolist(), got.train, got.label_names[9]) == ([9, 0, 3, 5], 3, "truck")
    assert sorted(got.source) == ["cifar10_test_jpeg.parquet", "cifar10_train_jpeg.parquet"]


def test_a_file_is_decoded_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []
    real = pictures._planes
    monkeypatch.setattr(pictures, "_planes", lambda *given: (decoded.append(given), real(*given))[1])
    shown = pixels(4)
    train, test = tmp_path / "train.parquet", tmp_path / "test.parquet"
    table(train, {"png": [encoded(i) for i in shown[:3]], "label": [9, 0, 3]})
    table(test, {"png": [encoded(shown[3])], "label": [5]})
    first, second = cifar10(tmp_path), cifar10(tmp_path)
    assert len(decoded) == 4
    assert (first.images == shown).all()
    assert (second.images == shown).all()
    second.images[:] = 0  # a set of its own
    table(test, {"png": [encoded(shown[2])], "label": [5]})
    third = cifar10(tmp_path)
    assert len(decoded) == 5
    assert (third.images == shown[[0, 1, 2, 2]]).all()
    assert first.source["test.parquet"] != third.source["test.parquet"]
    with pytest.raises(DataError, match="has no column 'fine_label'"):
        cifar100(tmp_path, "parquet")  # other columns, whatever was kept
    assert pictures._decoded.cache_info().currsize <= pictures.MOST_KEPT


def test_png_in_parquet_as_datasets_writes_it(tmp_path: Path) -> None:
    images = pixels(3)
    cells = [{"bytes": encoded(image), "path": None} for image in images]
    columns = {"img": cells, "fine_label": [99, 1, 2], "coarse_label": [19, 0, 1]}
    for n, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        table(tmp_path / f"{name}.parquet", {key: values[n : n + 1] for key, values in columns.items()})
    fine = cifar100(tmp_path, "parquet")
    assert (fine.images == images).all()
    assert (fine.labels.tolist(), fine.train, fine.classes, fine.label_names[99]) == (
        [99, 1, 2],
        2,
        100,
        "fine 99",
    )
    coarse = cifar100(tmp_path, "parquet", "coarse")
    assert (coarse.labels.tolist(), coarse.classes) == ([19, 0, 1], 20)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"jpg": [b""], "label": [1]},
            "F/train.parquet has no column 'jpeg' or 'png' or 'image' or 'img'; it has ['jpg', 'label']. Did you mean 'jpg'?",
        ),
        (
            {"img": [b""], "labels": [1]},
            "F/train.parquet has no column 'label'; it has ['img', 'labels']. Did you mean 'labels'?",
        ),
        (
            {"img": [b"no image"], "label": [1]},
            "F/train.parquet, row 0: the image cannot be decoded (none of JPEG, PNG, BMP, GIF, PPM, TIFF, WEBP). Fetch the file again.",
        ),
        (
            {"img": [encoded(pixels(1)[0, :, :, :31])], "label": [1]},
            "F/train.parquet: wanted images of 32 × 32 pixels; got 32 × 31.",
        ),
        (
            {"img": [None], "label": [1]},
            "F/train.parquet, row 0: wanted an image; got NoneType.",
        ),
        (
            {"img": [encoded(pixels(1)[0])] * 2, "label": [1, None]},
            "F/train.parquet, row 1: wanted an integer in column 'label'; got None.",
        ),
        (
            {"img": [encoded(pixels(1)[0])] * 2, "label": [1, 10]},
            "F/train.parquet: wanted labels 0 to 9; got 10 at image 1 and 0 more out of range. Fetch the file again.",
        ),
    ],
)
def test_faults_of_parquet(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    table(tmp_path / "train.parquet", columns)
    assert refused(tmp_path, cifar10) == message


@pytest.mark.parametrize("missing", [10, 300])
def test_an_image_that_breaks_off(missing: int, tmp_path: Path) -> None:
    image = encoded(pixels(1)[0], "JPEG")
    table(tmp_path / "train.parquet", {"img": [image[:-missing]], "label": [1]})
    message = refused(tmp_path, cifar10)
    assert message.startswith("F/train.parquet, row 0: the image cannot be decoded (")
    assert message.endswith("Fetch the file again.")


def test_a_parquet_file_that_breaks_off_or_is_missing(tmp_path: Path) -> None:
    assert "F has none of the files *train*.parquet, data_batch_1.bin" in refused(tmp_path, cifar10)
    file = tmp_path / "train.parquet"
    table(file, {"img": pyarrow.array([], pyarrow.binary()), "label": pyarrow.array([], pyarrow.int64())})
    assert (
        refused(tmp_path, cifar10)
        == "The data file F/train.parquet holds no example, only a header. Fetch it again."
    )
    table(file, {"img": [encoded(pixels(1)[0])], "label": [1]})
    file.write_bytes(file.read_bytes()[:-20])
    assert refused(tmp_path, cifar10).startswith("F/train.parquet is truncated or no Parquet file: ")


# --- binary


def records(labels: list[list[int]], images: NDArray[np.uint8]) -> bytes:
    return b"".join(bytes(own) + image.tobytes() for own, image in zip(labels, images, strict=True))


def test_binary_cifar100(tmp_path: Path) -> None:
    images = pixels(3)
    (tmp_path / "train.bin").write_bytes(records([[0, 5], [19, 99]], images[:2]))
    (tmp_path / "test.bin").write_bytes(records([[7, 0]], images[2:]))
    fine = cifar100(tmp_path, whole=False)
    assert (fine.images == images).all()
    assert (fine.labels.tolist(), fine.train) == ([5, 99, 0], 2)
    (tmp_path / "coarse_label_names.txt").write_text("\n".join(f"group{i}" for i in range(20)) + "\n")
    coarse = cifar100(tmp_path, labels="coarse", whole=False)
    assert (coarse.labels.tolist(), coarse.label_names[19]) == ([0, 19, 7], "group19")


def test_binary_cifar10(tmp_path: Path) -> None:
    images, inner = pixels(6), tmp_path / "cifar-10-batches-bin"  # as the authors' tar file has it
    inner.mkdir()
    for n, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (inner / f"{name}.bin").write_bytes(records([[n]], images[n : n + 1]))
    for place in (tmp_path, inner):
        got = cifar10(place, whole=False)
        assert (got.images == images).all()
        assert (got.labels.tolist(), got.train) == ([0, 1, 2, 3, 4, 5], 5)
    table(tmp_path / "train.parquet", {"img": [encoded(images[0])], "label": [9]})
    table(tmp_path / "test.parquet", {"img": [encoded(images[1])], "label": [8]})
    assert cifar10(tmp_path).labels.tolist() == [9, 8]  # as ever where there are such files
    assert len(cifar10(tmp_path, "binary", whole=False).labels) == 6


@pytest.mark.parametrize(
    ("content", "whole", "message"),
    [
        (
            records([[0, 5]], pixels(1))[:-1],
            False,
            (
                "F/train.bin is truncated or another kind of file: wanted a multiple of 3,074 bytes, one record an image; got "
                "3,073, of which the last 3,073 are no whole record. Fetch it again."
            ),
        ),
        (
            records([[0, 5]], pixels(1)),
            True,
            "F/train.bin holds 1 images; wanted 50,000. Fetch it again, or say whole=False to take what is there.",
        ),
        (
            records([[0, 100]], pixels(1)),
            False,
            "F/train.bin: wanted labels 0 to 99; got 100 at image 0 and 0 more out of range. Fetch the file again.",
        ),
        (
            records([[20, 0]], pixels(1)),
            False,
            "F/train.bin: wanted labels 0 to 19; got 20 at image 0 and 0 more out of range. Fetch the file again.",
        ),
        (b"", False, "The data file F/train.bin is empty. Fetch it again."),
    ],
)
def test_faults_of_binary_files(content: bytes, whole: bool, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(content)
    assert refused(tmp_path, cifar100, whole=whole) == message


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(records([[0, 5]], pixels(1)))
    (tmp_path / "fine_label_names.txt").write_text("apple\nbear\n")
    assert refused(tmp_path, cifar100, whole=False) == (
        "F/fine_label_names.txt: wanted 100 names, one a line; got 2. Fetch it again."
    )


@pytest.mark.parametrize(("read", "file"), [(cifar10, "data_batch_1"), (cifar100, "train")])
@pytest.mark.parametrize("form", [None, "binary"])
def test_the_pickled_version_is_not_read(read: Any, file: str, form: str | None, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"\x80\x02}")
    told = refused(tmp_path, read, form)
    assert f"{file}.bin" in told
    assert "take the binary one: the pickled Python version is not read" in told
    assert ("*train*.parquet" in told) == (form is None)


def test_unknown_forms(tmp_path: Path) -> None:
    assert refused(tmp_path, cifar10, "png") == "Wanted form 'jpeg', 'binary' or 'lossless'; got 'png'."
    assert refused(tmp_path, cifar100, "jpeg") == "Wanted form 'binary', 'parquet' or 'test'; got 'jpeg'."
    assert refused(tmp_path, cifar100, labels="corse") == (
        "Wanted labels 'fine' or 'coarse'; got 'corse'. Did you mean 'coarse'?"
    )


# --- lossless


def test_lossless(tmp_path: Path) -> None:
    images = pixels(5)
    np.savez(
        tmp_path / "cifar10_train4000_lossless.npz",
        images=images.transpose(0, 2, 3, 1),
        labels=np.arange(5, dtype=np.uint8),
    )
    got = cifar10(tmp_path)
    assert (got.images == images).all()
    assert (got.labels.tolist(), got.train, len(got)) == ([0, 1, 2, 3, 4], 5, 5)


IMAGES = np.zeros((2, 32, 32, 3), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"images": IMAGES}, {}),
        ({"images": IMAGES[:, :28, :28], "labels": np.zeros(2, np.uint8)}, {"shape": (3, 28, 28)}),
        ({"images": IMAGES.astype("f4"), "labels": np.zeros(2, np.uint8)}, {"got": np.float32}),
        ({"images": IMAGES, "labels": np.zeros(3, np.uint8)}, {"images": 2, "shape": (3,)}),
        ({"images": IMAGES[:1], "labels": np.array([10])}, {"largest": 9, "got": 10, "row": 0}),
    ],
)
def test_faults_of_the_lossless_file(arrays: dict[str, Any], facts: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "cifar10_train4000_lossless.npz"
    np.savez(file, **arrays)
    with pytest.raises(DataError, match=file.name) as error:
        cifar10(tmp_path, "lossless")
    assert error.value.facts | facts == error.value.facts


def test_objects_and_broken_archives_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "cifar10_train4000_lossless.npz"
    np.savez(file, images=np.array([{}], dtype=object), labels=np.zeros(1, np.uint8), allow_pickle=True)
    begins = "F/cifar10_train4000_lossless.npz is damaged or no .npz file of plain arrays ("
    assert refused(tmp_path, cifar10, "lossless").startswith(
        f"{begins}it holds Python objects). Fetch it again."
    )
    file.write_bytes(file.read_bytes()[:-30])
    assert refused(tmp_path, cifar10, "lossless").startswith(begins)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_damaged_archive(tmp_path: Path, at: float) -> None:
    """A flipped byte in a compressed member raised ``zlib.error``."""
    file = tmp_path / "cifar10_train4000_lossless.npz"
    images = np.random.default_rng(0).integers(0, 40, (5, 32, 32, 3), np.uint8)
    np.savez_compressed(file, images=images, labels=np.arange(5))
    content = bytearray(file.read_bytes())
    for place in range(int(at * len(content)), int(at * len(content)) + 20):
        content[place] ^= 0xFF
    file.write_bytes(bytes(content))
    begins = "F/cifar10_train4000_lossless.npz is damaged or no .npz file of plain arrays ("
    assert refused(tmp_path, cifar10, "lossless").startswith(begins)


def test_cifar100_of_test_images_alone(tmp_path: Path) -> None:
    images, file = pixels(3), tmp_path / "cifar100_test.npz"
    named = {"fine_names": [f"f{i}" for i in range(100)], "coarse_names": [f"c{i}" for i in range(20)]}
    arrays = {"images": images.transpose(0, 2, 3, 1), "fine_label": [99, 0, 7], "coarse_label": [3, 19, 0]}
    np.savez(file, **arrays, **named)
    fine = cifar100(tmp_path)
    assert (fine.images == images).all()
    assert (fine.labels.tolist(), fine.train, len(fine)) == ([99, 0, 7], 3, 3)
    assert (fine.label_names[99], list(fine.source)) == ("f99", ["cifar100_test.npz"])
    coarse = cifar100(tmp_path, labels="coarse")
    assert (coarse.labels.tolist(), coarse.label_names[19]) == ([3, 19, 0], "c19")
    np.savez(file, **arrays, **{**named, "fine_names": ["f0", "f1"]})
    assert refused(tmp_path, cifar100) == "F/cifar100_test.npz: wanted 100 names; got 2. Fetch it again."
    np.savez(file, **{**arrays, "fine_label": [100, 0, 7]}, **named)
    assert refused(tmp_path, cifar100) == (
        "F/cifar100_test.npz: wanted labels 0 to 99; got 100 at image 0 and 0 more out of range. Fetch the file again."
    )
    (tmp_path / "train.bin").write_bytes(b"")  # the official training images come first
    assert refused(tmp_path, cifar100) == "The data file F/train.bin is empty. Fetch it again."


# --- the real files

DATA = os.environ.get("FEDKEEP_DATA", "")


@pytest.mark.skipif(
    not (DATA and Path(DATA, "cifar10").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds cifar10/ to test the real data",
)
def test_the_real_images() -> None:
    folder = Path(DATA, "cifar10")
    lossy, exact = cifar10(folder), cifar10(folder, "lossless")
    assert np.bincount(lossy.labels[:50_000]).tolist() == [5_000] * 10
    assert np.bincount(lossy.labels[50_000:]).tolist() == [1_000] * 10
    assert (exact.train, np.bincount(exact.labels).min(), np.bincount(exact.labels).max()) == (
        4_000,
        366,
        422,
    )
    column = parquet.read_table(folder / "cifar10_train_jpeg.parquet", columns=["lossless_row"])
    place = column["lossless_row"].to_numpy()
    both = np.flatnonzero(place >= 0)
    assert (lossy.labels[both] == exact.labels[place[both]]).all()
    error = ((lossy.images[both].astype(float) - exact.images[place[both]]) ** 2).mean((1, 2, 3))
    assert np.median(10 * np.log10(255**2 / error)) == pytest.approx(
        30.5, abs=0.05
    )  # as the data's description says


@pytest.mark.skipif(
    not (DATA and Path(DATA, "cifar100", "cifar100_test.npz").is_file()),
    reason="set FEDKEEP_DATA to a folder that holds cifar100/cifar100_test.npz to test the real data",
)
def test_the_real_images_of_cifar100() -> None:
    found = cifar100(Path(DATA, "cifar100"))
    counts = np.bincount(found.labels, minlength=100)
    assert (len(found), found.train, found.label_names[counts.argmin()]) == (9_999, 9_999, "baby")
    assert np.bincount(counts).nonzero()[0].tolist() == [99, 100]
