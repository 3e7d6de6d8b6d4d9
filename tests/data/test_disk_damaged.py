"""A saved data set that was damaged, forged or edited is refused, with a message that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.core.sealed import seal
from fedkeep.data import FederatedData
from fedkeep.data.disk import checksums
from tests.data.small import sample
from tests.refusals import raises


def forged(folder: Path, **changes: Any) -> None:
    """Rewrite the description with changes, and let all checksums fit."""
    path = folder / "data.json"
    path.write_text(json.dumps(seal(json.loads(path.read_text()) | {"crc32": checksums(folder)} | changes)))


def broken(tmp_path: Path, name: str, content: bytes | None) -> str:
    """Save, then replace or remove one file, and return the message of loading."""
    folder = tmp_path / "data"
    sample().save(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
        if name != "data.json":
            forged(folder)
    with pytest.raises(DataError) as error:
        FederatedData.load(folder)
    return str(error.value)


def test_a_folder_that_is_no_data_set(tmp_path: Path) -> None:
    with raises(DataError, name="data.json"):
        FederatedData.load(tmp_path)


def test_a_column_is_missing(tmp_path: Path) -> None:
    assert broken(tmp_path, "column.x.npy", None) == (
        f"{tmp_path / 'data'} is incomplete: column.x.npy is missing. Save the data again."
    )


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"garbage of some length"])
def test_a_column_is_damaged(tmp_path: Path, content: bytes) -> None:
    said = broken(tmp_path, "column.x.npy", content)
    assert said.startswith(f"{tmp_path / 'data' / 'column.x.npy'} is damaged: ")
    assert said.endswith(". Save the data again.")


def test_a_column_is_truncated(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    sample().save(folder)
    said = broken(tmp_path, "column.label.npy", (folder / "column.label.npy").read_bytes()[:-8])
    assert said.startswith(f"{tmp_path / 'data' / 'column.label.npy'} is damaged: ")


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    said = broken(tmp_path, "column.x.npy", (tmp_path / "objects.npy").read_bytes())
    assert said.startswith(f"{tmp_path / 'data' / 'column.x.npy'} is damaged: ")


def test_a_column_of_another_length(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.zeros(4))
    assert broken(tmp_path, "column.x.npy", (tmp_path / "short.npy").read_bytes()) == (
        f"{tmp_path / 'data'} is damaged: Wanted 4 rows in column 'text', as in column 'x'; got 5."
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            b"{",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        (
            json.dumps(seal({"format": 2, "columns": 3})).encode(),
            "AttributeError: 'int' object has no attribute 'items'",
        ),
        (json.dumps(seal({"format": 2, "columns": {}})).encode(), "KeyError: 'ids'"),
    ],
)
def test_the_description_is_damaged(tmp_path: Path, content: bytes, reason: str) -> None:
    assert broken(tmp_path, "data.json", content) == (
        f"{tmp_path / 'data' / 'data.json'} is damaged ({reason}). Save the data again."
    )


def test_an_order_of_ids_that_does_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "order.npy", np.arange(3))
    assert broken(tmp_path, "ids.order.npy", (tmp_path / "order.npy").read_bytes()) == (
        f"{tmp_path / 'data' / 'data.json'} is damaged (ValueError: 2 ids in an order of shape (3,)). Save the data "
        f"again."
    )


@pytest.mark.parametrize(
    "name", ["offsets", "bounds", "column.x", "column.text.values", "column.text.offsets"]
)
@pytest.mark.parametrize("mmap", [True, False])
def test_an_array_without_an_axis(tmp_path: Path, name: str, mmap: bool) -> None:
    sample().save(tmp_path / "data")
    np.save(tmp_path / "data" / f"{name}.npy", np.int64(3))
    forged(tmp_path / "data")
    with pytest.raises(DataError, match=r"data is damaged: "):
        FederatedData.load(tmp_path / "data", mmap=mmap)


@pytest.mark.parametrize("name", ["offsets", "bounds", "ids.order", "ids.values", "ids.offsets"])
def test_numbers_of_another_kind(tmp_path: Path, name: str) -> None:
    sample().save(tmp_path / "data")
    path = tmp_path / "data" / f"{name}.npy"
    np.save(path, np.load(path).astype(np.float64))
    forged(tmp_path / "data")
    with pytest.raises(DataError, match="damaged"):
        FederatedData.load(tmp_path / "data")


def test_a_header_that_asks_for_terabytes(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 8), }"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    assert broken(tmp_path, "column.x.npy", content) == (
        f"{tmp_path / 'data' / 'column.x.npy'} is damaged: its header promises 64,000,000,000,000 bytes of values; "
        f"64 follow. Save the data again."
    )


@pytest.mark.parametrize(
    "header",
    [
        b"{" * 3000,
        b"(" * 200 + b")" * 200,
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }",
        b"'" * 99,
        b"\xff" * 9,
    ],
)
def test_a_header_that_cannot_be_read(tmp_path: Path, header: bytes) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    said = broken(tmp_path, "column.x.npy", content)
    assert said.startswith(f"{tmp_path / 'data' / 'column.x.npy'} is damaged: ")


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    """It is not asked for: 4 GB would be taken before the end of the file is noticed."""
    said = broken(tmp_path, "column.x.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr'")
    assert "its header promises to be 4,294,967,295 bytes long; the file has 20" in said


def test_bytes_behind_an_array(tmp_path: Path) -> None:
    sample().save(tmp_path / "whole")
    content = (tmp_path / "whole" / "column.x.npy").read_bytes()
    assert "its header promises 40 bytes of values; 41 follow" in broken(
        tmp_path, "column.x.npy", content + b"x"
    )


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (["a", "a"], "ValueError: the ids are not all different, or their order does not sort them"),
        (["a", "e\u0301"], "not normal"),
        (["a", "\x1b[2J"], "control"),
        (["", "b"], "empty"),
        (["a", "b" * 201], "long"),
    ],
)
def test_ids_that_no_data_set_has(tmp_path: Path, ids: list[str], reason: str) -> None:
    """Whoever wrote the files did not have to keep the rules."""
    sample(ids=["a", "b"]).save(tmp_path / "data")
    encoded = [one.encode() for one in ids]
    np.save(tmp_path / "data" / "ids.values.npy", np.frombuffer(b"".join(encoded), np.uint8))
    np.save(tmp_path / "data" / "ids.offsets.npy", np.cumsum([0, *map(len, encoded)]))
    np.save(tmp_path / "data" / "ids.order.npy", np.argsort(np.array(encoded), kind="stable"))
    forged(tmp_path / "data")
    with pytest.raises(DataError) as error:
        FederatedData.load(tmp_path / "data")
    assert "is damaged" in str(error.value)
    assert reason in str(error.value) if reason.startswith("ValueError") else "Client " in str(error.value)


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 2], [-1, 0]])
def test_an_order_that_does_not_sort(tmp_path: Path, order: list[int]) -> None:
    sample(ids=["a", "b"]).save(tmp_path / "data")
    np.save(tmp_path / "data" / "ids.order.npy", np.array(order))
    forged(tmp_path / "data")
    with pytest.raises(DataError, match="is damaged"):
        FederatedData.load(tmp_path / "data")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ids", {"pattern": "u{}", "n": 1e300}),
        ("ids", {"pattern": "u{}", "n": 10**30}),
        ("ids", {"pattern": "u{}", "n": -1}),
        ("ids", {"pattern": 3, "n": 2}),
        ("meta", [["classes", 3]]),
        ("meta", {"classes": "three"}),
        ("meta", {"task": ["multiclass"]}),
        ("meta", {"traits": 7}),
        ("columns", {"x": "dense", "../x": "dense"}),
        ("columns", []),
    ],
)
def test_a_description_that_makes_no_sense(tmp_path: Path, key: str, value: Any) -> None:
    sample().save(tmp_path / "data")
    forged(tmp_path / "data", **{key: value})
    with pytest.raises(DataError, match=r"^(?!.*checksum)"):
        FederatedData.load(tmp_path / "data")


def test_a_description_nested_too_deeply(tmp_path: Path) -> None:
    assert "RecursionError" in broken(tmp_path, "data.json", b"[" * 100_000)


@pytest.mark.parametrize("mmap", [True, False])
def test_every_byte_is_looked_at(tmp_path: Path, mmap: bool) -> None:
    """One bit of any value, or of the description: no result may come of it, also where columns stay on disk."""
    folder = tmp_path / "data"
    sample().save(folder)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        places = [len(content) - 1, 128] if path.suffix == ".npy" else [content.index(b"sample"), 20]
        for at in places:
            harmed = bytearray(content)
            harmed[at] ^= 1
            path.write_bytes(harmed)
            with pytest.raises(DataError) as error:
                FederatedData.load(folder, mmap=mmap)
            assert str(folder) in str(error.value)
            assert "damaged" in str(error.value)
        path.write_bytes(content)
    FederatedData.load(folder, mmap=mmap)
    values = folder / "column.x.npy"
    values.write_bytes(values.read_bytes()[:-1] + b"\x11")
    with raises(
        DataError, text=f"{values} is damaged: its checksum is not the saved one. Save the data again."
    ):
        FederatedData.load(folder, mmap=mmap)


def test_an_edited_description_is_refused(tmp_path: Path) -> None:
    sample().save(tmp_path / "data")
    path = tmp_path / "data" / "data.json"
    path.write_text(path.read_text().replace("sample", "simple"))
    with raises(DataError, said="is damaged or was edited: its checksum is"):
        FederatedData.load(tmp_path / "data")


def test_a_label_that_is_no_class(tmp_path: Path) -> None:
    sample().save(tmp_path / "data")
    np.save(tmp_path / "data" / "column.label.npy", np.array([0, 1, 2, 1, 7]))
    forged(tmp_path / "data")
    with pytest.raises(DataError, match=r"Wanted labels 0 to 2 \(3 classes\); got 7 in row 4"):
        FederatedData.load(tmp_path / "data")


def test_a_number_that_is_none(tmp_path: Path) -> None:
    sample().save(tmp_path / "data")
    np.save(tmp_path / "data" / "column.x.npy", np.full((5, 2), np.nan, np.float32))
    forged(tmp_path / "data")
    with pytest.raises(DataError, match="Column 'x' holds nan in row 0"):
        FederatedData.load(tmp_path / "data", mmap=False)
