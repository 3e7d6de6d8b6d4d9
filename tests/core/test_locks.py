"""A file system without locks, as some shared ones: said at once, never taken for a lock of another process."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from fedkeep.core.errors import RunError, StoreError
from fedkeep.core.locks import take_lock
from fedkeep.experiments.run_directory import locked
from fedkeep.remote import device_file


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot lock files\. Use a local disk, or NFS 4\.$"):
        locked(tmp_path)
    with pytest.raises(StoreError, match="cannot lock files"):
        device_file.locked(tmp_path / "run.db", 0.0)


def test_what_a_killed_process_held_is_free(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        take_lock(tmp_path / "lock")
        os.write(writing, b"x")
        os.kill(os.getpid(), 9)
    os.read(reading, 1)
    os.waitpid(child, 0)
    take_lock(tmp_path / "lock").release()
