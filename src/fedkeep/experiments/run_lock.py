"""A run's folder is one process's at a time."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from fedkeep.core.errors import RunError


def is_lockable(folder: Path) -> bool:
    """Whether a folder that is only read can be locked: a copy on a read-only disk cannot."""
    path = folder / "lock"
    return path.exists() and os.access(path, os.W_OK)


def locked(folder: Path) -> FileLock:
    """Return a folder's lock, held.

    Raises:
        RunError: another process has it, or it can't be taken.
    """
    lock = FileLock(str(folder / "lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"{folder} is in use by another process. Wait for it, or name another folder."
        ) from error
    except OSError as error:
        raise RunError(
            f"Cannot lock {folder}: {error.strerror or error}. A run must be writable to go on with it."
        ) from error
    return lock
