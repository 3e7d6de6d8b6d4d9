"""The SQLite file of a private store: made whole, opened without a touch, then written in flushed transactions."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
TABLES = """
CREATE TABLE about (content TEXT NOT NULL);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE kept (
    version INTEGER PRIMARY KEY,
    client INTEGER NOT NULL,
    round INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    row BLOB NOT NULL
);
"""
# Commits are flushed, the removal of the journal too; on macOS by F_FULLFSYNC. Nothing in the file is run as code.
PRAGMAS = ("synchronous = EXTRA", "fullfsync = ON", "secure_delete = OFF", "cache_size = -16384",
           "cell_size_check = ON", "trusted_schema = OFF")  # fmt: skip
_HEAD = b"SQLite format 3\0"
_JOURNALED = b"\1\1"  # at 18; with 2 for 1, SQLite would make a write-ahead log


class Database:
    """A file that is there, at first to be read only: nothing on the disk is touched.

    SQLite keeps a journal beside the file while it writes. Where one was left by a kill, reading the file would change
    it, so both are copied and the copy is read; where the system lets open files be removed, the copy goes at once.

    Raises:
        OSError, ValueError, sqlite3.Error: it can't be read, or is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            head = file.read(20)
        if head[:16] != _HEAD or head[18:] != _JOURNALED:
            raise ValueError(f"{path.name} does not begin as a private store does")
        journal = journal_of(path)
        if not journal.exists():
            self._use(_connected(path, "ro"))
            return
        copy = tempfile.TemporaryDirectory(prefix="fedkeep-", ignore_cleanup_errors=True)
        try:
            for each in (path, journal):
                shutil.copyfile(each, Path(copy.name, each.name))
            self._use(_connected(Path(copy.name, path.name), "rw"), copy)
        except BaseException:
            copy.cleanup()
            raise

    def _use(self, sql: sqlite3.Connection, copy: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self._sql = sql
        self._close = weakref.finalize(self, _closed, sql, copy)
        self.query("SELECT count(*) FROM sqlite_master").fetchone()  # now a journal takes effect
        if copy is not None and os.name == "posix":
            copy.cleanup()

    def begin_to_write(self) -> None:
        """Open the file itself, to be written too; what a kill has left of a transaction is rolled back.

        Raises:
            sqlite3.Error: it can't be.
        """
        self._close()
        self._use(_connected(self.path, "rw"))

    def query(self, text: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run a statement."""
        return self._sql.execute(text, values)

    def for_each(self, text: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement for each of the values."""
        self._sql.executemany(text, values)

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


def journal_of(path: Path) -> Path:
    """Return where SQLite keeps a file's journal."""
    return path.with_name(f"{path.name}-journal")


def new_file(about: str, digest: str) -> bytes:
    """Return the bytes of a store without any version: what it says of itself, and the digest of nothing."""
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as folder:
        path = Path(folder, "new")
        sql = sqlite3.connect(path, isolation_level=None)
        try:
            sql.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            sql.executescript(TABLES)
            sql.execute("INSERT INTO about VALUES (?)", (about,))
            sql.execute("INSERT INTO rounds VALUES (0, ?)", (digest,))
        finally:
            sql.close()
        return path.read_bytes()


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    """Open a file that is there, to read (``"ro"``) or to write (``"rw"``); transactions are begun by name."""
    sql = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    try:
        for pragma in PRAGMAS:
            sql.execute(f"PRAGMA {pragma}")
    except BaseException:
        sql.close()
        raise
    return sql


def _closed(sql: sqlite3.Connection, copy: tempfile.TemporaryDirectory[str] | None) -> None:
    sql.close()
    if copy is not None:
        copy.cleanup()
