"""A data set saved to a folder: the round trip, and what saving never overwrites or leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, RangeIds
from tests.data.small import sample
from tests.refusals import raises
from tests.tiny import interrupt


def backing(array: Any) -> Any:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap) and array.base is not None:
        array = array.base
    return array


@pytest.mark.parametrize("mmap", [True, False])
def test_round_trip(tmp_path: Path, mmap: bool) -> None:
    data = sample()
    data.save(tmp_path / "data")
    again = FederatedData.load(tmp_path / "data", mmap=mmap)
    assert again.fingerprint() == data.fingerprint()
    assert again.meta == data.meta
    assert list(again.ids) == list(data.ids)
    assert again.index("../weird/ä") == 0
    for name, value in data.batch([4, 2]).items():
        assert again.batch([4, 2])[name].equal(value)
    assert isinstance(backing(again.columns["x"]), np.memmap) is mmap
    text = again.columns["text"]
    assert isinstance(backing(text.values), np.memmap) is mmap
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_ids_never_name_a_file(tmp_path: Path) -> None:
    sample().save(tmp_path / "data")
    names = {p.name for p in (tmp_path / "data").iterdir()}
    assert not any("weird" in name for name in names)


def test_range_ids_stay_lazy(tmp_path: Path) -> None:
    sample(ids=RangeIds(2, "u{}")).save(tmp_path / "data")
    ids = FederatedData.load(tmp_path / "data").ids
    assert isinstance(ids, RangeIds)
    assert list(ids) == ["u0", "u1"]


def test_data_that_are_not_split_stay_so(tmp_path: Path) -> None:
    sample(bounds=None).save(tmp_path / "data")
    assert FederatedData.load(tmp_path / "data").bounds is None


def test_selecting_from_a_mapped_set(tmp_path: Path) -> None:
    data = sample()
    data.save(tmp_path / "data")
    chosen = FederatedData.load(tmp_path / "data").select([1])
    assert chosen.fingerprint() == data.select([1]).fingerprint()


def test_a_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with raises(DataError, said="exists already and isn't an empty folder."):
        sample().save(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    sample().save(tmp_path / "data")
    assert len(FederatedData.load(tmp_path / "data")) == 2


def test_an_empty_folder_is_used_where_a_rename_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if Path(target).exists():
            raise PermissionError(errno.EACCES, "Access is denied")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    (tmp_path / "data").mkdir()
    sample().save(tmp_path / "data")
    assert len(FederatedData.load(tmp_path / "data")) == 2


def test_all_that_is_saved_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = dict[int, int](), os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        if not (tmp_path / "data").exists():
            stat = os.fstat(handle)
            flushed[stat.st_ino] = stat.st_mtime_ns

    monkeypatch.setattr(os, "fsync", fsync)
    sample().save(tmp_path / "data")
    for path in (tmp_path / "data").iterdir():
        assert flushed.get(path.stat().st_ino) == path.stat().st_mtime_ns, path.name


@pytest.mark.parametrize("here", [True, False])
def test_the_folder_that_the_program_runs_in_is_not_replaced(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is the folder that the program runs in"):
        sample().save("." if here else tmp_path)
    assert list(Path.cwd().iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with raises(DataError, said="No space left on device. Nothing was kept;"):
        sample().save(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_meta_that_json_cannot_hold(tmp_path: Path) -> None:
    with raises(DataError, said="Cannot save the data: meta holds a set,"):
        sample(meta={"x": {1, 2}}).save(tmp_path / "data")
    sample(meta={"x": np.arange(2)}).save(tmp_path / "data")
    assert FederatedData.load(tmp_path / "data").meta["x"] == [0, 1]


def test_what_others_put_beside_a_data_set_stays(tmp_path: Path) -> None:
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "mine.txt").write_text("precious")
    sample().save(tmp_path / "data")
    assert (tmp_path / "data.partial" / "mine.txt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "data.partial"]


def test_a_name_that_is_taken_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123456789abcdef")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data.0123456789abcdef.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="File exists"):
        sample().save(tmp_path / "data")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "data.0123456789abcdef.partial").is_symlink()


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sample().save(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
