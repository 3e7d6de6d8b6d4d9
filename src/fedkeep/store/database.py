"""The SQLite file of a private store: made whole, opened without a touch, then written in flushed transactions."""

from __future__ import annotations

import ctypes
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedkeep.core.errors import StoreError
from fedkeep.core.files import NEW_FILE, beside, sync_folder, whole_or_error, wipe

PAGES = (4096, 16384)
LARGE_ROW = 32_768
LOG_BYTES = 32 << 20
BESIDE = 4096
"""Bytes of a row that are kept free for what stands beside the values, the client's id too."""
# Commits are flushed, on macOS by F_FULLFSYNC. One connection alone: no index of the log in a file of its own. Nothing
# in the file is run as code.
PRAGMAS = (
    "locking_mode = EXCLUSIVE",
    "fullfsync = ON",
    "secure_delete = OFF",
    "cell_size_check = ON",
    "trusted_schema = OFF",
)
LOOKING = ("synchronous = FULL", "cache_size = -16384")  # SQLite reads the file for these
_HEAD = b"SQLite format 3\0"
_LOGGED = b"\2\2"  # at 18


class Database:
    """A file that is there, at first to be read only: nothing on the disk is touched.

    While it is written, its last commits are in a log beside it, until ``rest`` or the end of the process moves them
    into the file. Where a kill has left a log, reading would change both, so they are copied and the copy is read;
    where the system lets open files be removed, the copy goes at once. It is in the system's temporary folder, where
    another kill may leave it.

    Args:
        path: the file.
        log: False: the log is not read until the file is opened to be written, and there is no copy. Until then what
            stands in the file may be older, or in pieces.

    Raises:
        OSError, ValueError, sqlite3.Error: it can't be read, or is no such file.
    """

    def __init__(self, path: Path, *, log: bool = True) -> None:
        self.path = path
        self._process = os.getpid()
        self._read(log)

    def rest(self) -> None:
        """Go back to reading only; what was committed is in the file, if it can be written to the end."""
        self._close()
        self._read(log=True)

    def _read(self, log: bool) -> None:
        with open(self.path, "rb") as file:
            head = file.read(20)
        if head[:16] != _HEAD or head[18:] != _LOGGED:
            raise ValueError(f"{self.path.name} does not begin as a private store does")
        logs = [path for path in logs_of(self.path) if log and path.stat().st_size]
        if not logs:
            self._use(_connected(self.path, "immutable=1", look=log), look=log)
            return
        copy = tempfile.TemporaryDirectory(prefix="fedkeep-", ignore_cleanup_errors=True)
        try:
            for each in (self.path, *logs):
                shutil.copyfile(each, Path(copy.name, each.name))
            self._use(_connected(Path(copy.name, self.path.name), "mode=rw"), copy)
        except BaseException:
            copy.cleanup()
            raise

    def _use(
        self, sql: sqlite3.Connection, copy: tempfile.TemporaryDirectory[str] | None = None, look: bool = True
    ) -> None:
        self._sql = sql
        if copy is not None:
            self.query("PRAGMA synchronous = OFF")
        self._close = weakref.finalize(self, _closed, sql, copy, self._process)
        if look:
            self.query("SELECT count(*) FROM sqlite_master").fetchone()  # now it has looked at the log
        if copy is not None and os.name == "posix":
            copy.cleanup()

    def begin_to_write(self) -> None:
        """Open the file itself, to be written too; what a kill has left of a transaction is dropped.

        Raises:
            sqlite3.Error: it can't be.
        """
        self._close()
        self._use(_connected(self.path, "mode=rw"))

    def query(self, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self._sql.execute(text, values)

    def for_each(self, text: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement for each of the values."""
        self._sql.executemany(text, values)

    def close(self) -> None:
        """Let go of the file; what was committed is in it, if it can be written to the end."""
        self._close()

    @contextmanager
    def transaction(self, begin: str = "BEGIN") -> Iterator[None]:
        """All of what is done inside, or nothing; flushed to the disk at its end."""
        self.query(begin)
        try:
            yield
            self.query("COMMIT")
        except BaseException:  # Ctrl-C too
            with suppress(sqlite3.Error):
                self.query("ROLLBACK")
            raise


def logs_of(path: Path) -> list[Path]:
    """Return what is there of the files that SQLite would take a file's last commits from, or undo them by."""
    return [log for end in ("-wal", "-journal") if (log := path.with_name(path.name + end)).exists()]


def new_file(path: Path, tables: str, row_bytes: int, first: Iterable[tuple[str, Sequence[Any]]]) -> None:
    """Make a file with these tables and the rows that the statements ``first`` put into them, whole or not at all.

    Only its owner can read it, and what SQLite makes beside it.

    It is written beside its place without a log, one row after the other, so a kill leaves one ``.part`` of it at most.

    Measured without a disk: rows of 10 KB are written in 15 µs each to pages of 4 KiB and in 23 µs to 16 KiB, rows of
    100 KB in about 230 and 120.

    Raises:
        RunError: the disk is full or the folder can't be written.
    """
    part = beside(path)
    with whole_or_error(path):
        os.close(os.open(part, NEW_FILE, 0o600))
        try:
            with closing(_connected(part, "mode=rw")) as sql:
                sql.execute("PRAGMA journal_mode = OFF")
                sql.execute(f"PRAGMA page_size = {PAGES[row_bytes > LARGE_ROW]}")
                sql.executescript(f"BEGIN; {tables}")
                for text, values in first:
                    sql.execute(text, values)
                sql.execute("COMMIT")
            with open(part, "r+b") as file:
                file.seek(18)
                file.write(_LOGGED)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException as error:  # Ctrl-C too
            with suppress(OSError):
                wipe(part)
            if isinstance(error, sqlite3.Error):
                raise OSError(str(error)) from error
            raise
        sync_folder(path.parent)


def check_row(values: int) -> None:
    """Raise StoreError if a client's values, in bytes, are more than SQLite takes in a row."""
    with closing(sqlite3.connect(":memory:")) as sql:
        most = sql.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - BESIDE
    if values > most:
        raise StoreError(
            "A client's private values take {values} bytes, and a private store holds at most {most} for each client. "
            "Make fewer parameters private; a simulation may keep them in memory alone instead (without out).",
            values=values,
            most=most,
        )


def _connected(path: Path, how: str, look: bool = True) -> sqlite3.Connection:
    """Open a file that is there, ``"mode=rw"`` or ``"immutable=1"``; transactions are begun by name.

    Without ``look`` the file is not read yet, which may be in pieces.
    """
    sql = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=1,
    )
    try:
        for pragma in (*PRAGMAS, *(LOOKING if look else ())):
            sql.execute(f"PRAGMA {pragma}")
        (page,) = sql.execute("PRAGMA page_size").fetchone()
        sql.execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // page}")
    except BaseException:
        sql.close()
        raise
    return sql


def _closed(sql: sqlite3.Connection, copy: tempfile.TemporaryDirectory[str] | None, process: int) -> None:
    if (
        os.getpid() != process
    ):  # a forked process would remove the log that its parent writes: let it never close
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sql))
        return
    sql.close()
    if copy is not None:
        copy.cleanup()
