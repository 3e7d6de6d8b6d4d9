"""One process at a time: the system's lock on a file, on a disk of this machine or one that several share.

A file of its own, as a node's own process takes a lock and is to load no torch.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Self

from filelock import FileLock

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What the system says of a file system without locks, as NFS 3 without its lock daemon."""


class Lock(FileLock):
    """A lock that is held already where ``with`` begins, which releases it at its end."""

    def __enter__(self) -> Self:
        return self


def take_lock(path: Path, patience: float = 0.0, mode: int = 0o644) -> Lock:
    """Return a file's lock, held until it is released or this process ends, in whatever way.

    Args:
        path: the file, made if it is not there.
        patience: seconds to wait for another process.
        mode: as for ``os.open``.

    Raises:
        filelock.Timeout: another process has it.
        OSError: it can't be taken; its ``strerror`` says why.
    """
    # Without locks of the system's, a file would stand for one, and stay where its process is killed.
    lock = Lock(path, mode=mode, fallback_to_soft=False)
    try:
        lock.acquire(timeout=patience, poll_interval=0.02)
    except OSError as error:
        if error.errno in NO_LOCKS:
            error.strerror = "its file system cannot lock files. Use a local disk, or NFS 4"
        raise
    return lock
