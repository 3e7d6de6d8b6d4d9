"""Files are whole or absent."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import RunError
from fedkeep.core.files import (
    AS_IT_WAS,
    ROUND_KEPT,
    private_folder,
    read_tensors,
    remove_leftovers,
    write_of_run,
    write_tensors,
    write_whole,
)
from tests.refusals import raises
from tests.tiny import fill_disk


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "state"
    write_whole(path, b"old")
    fill_disk(monkeypatch, call)
    with raises(RunError, file=path, error="No space left on device", what_now=AS_IT_WAS):
        write_whole(path, b"new")
    with raises(RunError, file=path, error="No space left on device", what_now=ROUND_KEPT):
        write_of_run(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def outgrow(path: Path) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    with pytest.raises(RunError, match=f"^Cannot write {re.escape(str(path))}: File too large"):
        write_whole(path, b"x" * 1_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGXFSZ")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_file_that_outgrows_the_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The system itself refuses the write here, in a process that may write no file over 64 KiB."""
    path = tmp_path / "state"
    write_whole(path, b"old")
    child = multiprocessing.get_context("fork").Process(target=outgrow, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_the_content_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        calls.append("fsync")
        sync(handle)

    def rename(a: Path, b: Path) -> None:
        assert a.read_bytes() == b"new"
        calls.append("replace")
        replace(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    write_whole(tmp_path / "state", b"new")
    assert calls == ["fsync", "replace", "fsync"]  # content, rename, then the folder's entry


def test_tensors_survive_the_file(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "a": whole,
        "view": whole.T,
        "n": torch.tensor(3),
        "b": torch.tensor([True]),
        "e": torch.zeros(0, 2),
    }
    write_tensors(tmp_path / "t", tensors)
    found = read_tensors(tmp_path / "t")
    assert {n: (v.dtype, v.tolist()) for n, v in found.items()} == {
        n: (v.dtype, v.tolist()) for n, v in tensors.items()
    }


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"\x10" + b"\0" * 7 + b"{}"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunError, match="missing or damaged; restore it from a copy") as error:
        read_tensors(path)
    assert str(error.value).startswith(f"Cannot read {path}: ")


@pytest.mark.parametrize("name", ["page.html", "page.html.part"])
def test_what_others_put_beside_a_file_stays(tmp_path: Path, name: str) -> None:
    """A link or a file under a name that could be foreseen is neither written through nor removed."""
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / f"{name}.part").symlink_to(tmp_path / "precious")
    write_whole(tmp_path / name, b"new")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / f"{name}.part").is_symlink()
    assert (tmp_path / name).read_bytes() == b"new"


def test_a_file_takes_the_place_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "state").symlink_to(tmp_path / "precious")
    write_whole(tmp_path / "state", b"new")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "state").is_symlink()


def test_a_name_that_is_taken_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123456789abcdef")
    (tmp_path / "precious").write_bytes(b"precious")
    taken = tmp_path / "state.0123456789abcdef.part"
    taken.symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="File exists"):
        write_whole(tmp_path / "state", b"new")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert taken.is_symlink()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine = [
        "page.part",
        "a.0123456789abcdef",
        ".0123456789abcdef.part",
        "a.0123456789ABCDEF.part",
        "a.01.part",
    ]
    for name in [*mine, "state.0123456789abcdef.part"]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.0123456789abcdef.part").symlink_to(tmp_path / "page.part")
    (tmp_path / "folder.0123456789abcdef.part").mkdir()
    remove_leftovers(tmp_path)
    kept = [*mine, "link.0123456789abcdef.part", "folder.0123456789abcdef.part"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_file_has_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    write_whole(tmp_path / "state", b"new")
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_private_folder_is_its_owners_though_it_was_there(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for name in ("open", "new"):
        private_folder(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_a_long_name(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), b"new")
    assert os.listdir(tmp_path) == ["n" * 255]


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(RunError, match="Is a directory"):
        write_whole(tmp_path / "state", b"new")
    assert os.listdir(tmp_path) == ["state"]
