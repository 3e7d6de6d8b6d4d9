"""A device's folder of private states: which runs it has, and all files of one, which go together.

    RUN.db                  the file of a run's states, see ``device_file``
    RUN.db-wal              its log
    RUN.<client>.sum        secrets of secure sums, see ``masking``
    RUN.….part              what is being written, or was when the process was killed
    RUN.lock                held by the process that serves a message of the run

A kill may leave any of them. So what was being written goes when the run is opened next, and a run is listed as long as
one of its files is there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from fedkeep.core.errors import BusyError, StoreError
from fedkeep.core.files import leftovers, overwrite, wipe, wipe_leftovers
from fedkeep.store.database import logs_of

ENDING, SUM = ".db", ".sum"
RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
OURS = re.compile(rf"({RUN_ID.pattern})\.(db|db-wal|db-journal|[0-9a-f]{{32}}\.sum)")
PATIENCE = 30.0
"""Seconds to wait for another process that serves a message of the same run."""


def file_of(folder: Path, run: str) -> Path:
    """Return where the states of a run lie.

    Raises:
        StoreError: the id could name another place.
    """
    if not RUN_ID.fullmatch(run):
        raise StoreError(f"A run's id is 1 to 64 letters, digits, '-' and '_'; got {run[:80]!r}.")
    return folder / f"{run}{ENDING}"


def sum_of(path: Path, client: str) -> Path:
    """Return where a client's secrets of secure sums lie, beside the states of a run."""
    return path.with_name(f"{path.stem}.{hashed(client)}{SUM}")


def hashed(client: str) -> str:
    """Return the hash that stands for a client where its id is not to be read: 32 hexadecimal digits."""
    return hashlib.sha256(client.encode()).hexdigest()[:32]


def runs_in(folder: Path) -> list[str]:
    """Return the ids of the runs that have states in a folder, or of which anything is left."""
    found = {match[1] for path in folder.iterdir() if (match := OURS.fullmatch(path.name))}
    begun = {path.name.partition(".")[0] for path in leftovers(folder)}
    return sorted(found | {run for run in begun if RUN_ID.fullmatch(run)})


def files_of(path: Path) -> list[Path]:
    """Return what is there of a run: its file first."""
    sums = sorted(path.parent.glob(f"{path.stem}.*{SUM}"))
    parts = leftovers(path.parent, _begin(path))
    return [*([path] if path.exists() else []), *logs_of(path), *sums, *parts]


def remove(path: Path, patience: float = PATIENCE) -> list[Path]:
    """Remove a run's states with all that lies beside them, also damaged ones; return what was removed.

    The file loses its values first and goes last, so that after a kill the run is still listed, and is served no more.

    Raises:
        StoreError: another process has them, or they can't be removed.
    """
    lock = locked(path, patience)
    try:
        gone = files_of(path)
        rest = [one for one in gone if one != path]
        if path in gone:
            _try(overwrite, path)
        wipe_rest(path, rest)
        if path in gone:
            _try(Path.unlink, path)
    finally:
        lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)
    return gone


def forget_rest(path: Path, clients: Collection[str], patience: float = PATIENCE) -> None:
    """Remove what is left of clients of a run whose file is gone.

    Raises:
        StoreError: its log is there, which may hold values of all clients; another process has it, or a file can't be
            removed.
    """
    if logs_of(path):
        raise StoreError(
            f"The log of the run {path.stem!r} is there without its file, and may hold values of any client. Restore "
            f"the file from a copy, or forget the run: --run {path.stem}"
        )
    lock = locked(path, patience)
    try:
        wipe_rest(path, [sum_of(path, client) for client in clients])
    finally:
        lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def wipe_rest(path: Path, files: Iterable[Path] = ()) -> None:
    """Remove what a kill has left of a run's files that were being written, and these files too; under its lock.

    Raises:
        StoreError: one can't be removed.
    """
    _try(lambda one: wipe_leftovers(one.parent, _begin(one)), path)
    for one in files:
        if one.exists():
            _try(wipe, one)


def check_no_log(path: Path) -> None:
    """Raise StoreError if a log is there without its file."""
    if logs_of(path):
        raise StoreError(
            f"The private state of the run {path.stem!r} is missing, and its log is there. Restore it from a copy, or "
            f"forget it."
        )


def locked(path: Path, patience: float) -> FileLock:
    """Return a run's lock, held.

    Raises:
        BusyError: another process has it.
        StoreError: it can't be taken.
    """
    lock = FileLock(path.with_suffix(".lock"), mode=0o600)
    try:
        lock.acquire(timeout=patience, poll_interval=0.02)
    except Timeout as error:
        raise BusyError(
            f"The private state of the run {path.stem!r} is in use by another process. Wait for it."
        ) from error
    except OSError as error:
        raise StoreError(
            f"The private state of the run {path.stem!r} cannot be locked: {error.strerror or error}."
        ) from error
    return lock


def _begin(path: Path) -> str:
    """Return what the names of a run's files begin with."""
    return f"{path.stem}."


def _try(act: Callable[[Path], None], path: Path) -> None:
    try:
        act(path)
    except OSError as error:
        raise StoreError(
            f"{error.filename or path} cannot be removed: {error.strerror}. Check the rights, and try again."
        ) from error
