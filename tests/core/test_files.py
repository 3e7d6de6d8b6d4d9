"""Files are whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import RunError
from fedkeep.core.files import read_tensors, write_tensors, write_whole
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
    with pytest.raises(RunError) as error:
        write_whole(path, b"new")
    assert str(error.value) == (
        f"Cannot write {path}: No space left on device. Nothing was lost: the last finished round is kept. "
        f"Free some space or check the rights, then resume."
    )
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_file_that_outgrows_the_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The system itself refuses the write here, in a process that may write no file over 64 KiB."""
    code = """
import resource, signal, sys
from pathlib import Path
from fedkeep.core.errors import RunError
from fedkeep.core.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
path = Path(sys.argv[1])
write_whole(path, b"old")
try:
    write_whole(path, b"x" * 1_000_000)
except RunError as error:
    print(error)
"""
    path = tmp_path / "state"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith(f"Cannot write {path}: File too large.")
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
