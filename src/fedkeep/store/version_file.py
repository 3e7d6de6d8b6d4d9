"""The versions of what clients keep, as they lie in a SQLite file: one table, for simulations and devices alike.

A row of ``kept`` is a version of what one client keeps. ``(client, attempt)`` names it: the attempt is the training that
made it. ``client`` is its place among a simulation's clients, or its id on a device, whose clients come and go. A row
that is not ``accepted`` is staged: its upload has left, the server's word is awaited. Each row has a checksum of its
values and of all that names them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedkeep.store.database import Database
from fedkeep.store.rows import RowFormat

TABLE = """
CREATE TABLE kept (
    number INTEGER PRIMARY KEY,
    client NOT NULL,
    version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    round INTEGER NOT NULL,
    accepted INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    row BLOB NOT NULL
);
"""
_SCANNED = 4096


class Version(NamedTuple):
    """A row without its values.

    Attributes:
        number: ascends in the order in which rows were written; 0: the next one.
        client: its place, or on a device its id.
        version: how many of the client's rounds count with it.
        attempt: that made it.
        parent: the attempt of the version that it was trained from.
        round: in which it was trained.
        accepted: whether the server has taken what was sent beside it.
    """

    number: int
    client: int | str
    version: int
    attempt: int
    parent: int
    round: int
    accepted: bool


_NAMES = ", ".join(Version._fields)


class VersionFile:
    """The table of versions in a file. What SQLite cannot do is raised as its own error.

    Args:
        database: the file.
        run: the id of its run, which the checksums know.
        format: of the values.
    """

    def __init__(self, database: Database, run: str, format: RowFormat) -> None:
        self.database, self.run, self.format = database, run, format

    def found(self, client: str | None = None) -> list[Version]:
        """Return what there is of a client, or of all, in the order in which it was written.

        Raises:
            ValueError: a row's name makes no sense.
        """
        where, given = ("", ()) if client is None else (" WHERE client = ?", (client,))
        rows = self.database.query(f"SELECT {_NAMES} FROM kept{where} ORDER BY number", given).fetchall()
        if any(not isinstance(row[1], str) or set(map(type, row[2:])) != {int} for row in rows):
            raise ValueError("a row's name makes no sense")
        return [Version._make((*row[:6], bool(row[6]))) for row in rows]

    def scan(self) -> tuple[np.ndarray, ...]:
        """Return the number, the client's place and the attempt of all versions, in the order of their numbers."""
        rows = self.database.query("SELECT number, client, attempt FROM kept ORDER BY number")
        blocks = [np.zeros((0, 3), np.int64)]
        while some := rows.fetchmany(_SCANNED):
            blocks.append(np.array(some, np.int64))
        return tuple(np.concatenate(blocks).T)

    def row(self, number: int, client: int | str, attempt: int) -> bytes | None:
        """Return the values of a version; None: they are damaged, or another's, or gone."""
        found = self.database.query(
            f"SELECT {_NAMES}, crc, row FROM kept WHERE number = ?", (number,)
        ).fetchone()
        *name, crc, row = found or (*Version(0, "", 0, 0, 0, 0, accepted=False), 0, None)
        version = Version._make(name)
        if (version.client, version.attempt) != (client, attempt):
            return None
        whole = isinstance(row, bytes) and len(row) == self.format.bytes
        return row if whole and crc == crc_of(self.run, version, row) else None

    def add(self, rows: Iterable[tuple[Version, Any]]) -> None:
        """Write versions and their values."""
        self.database.for_each(INSERT, (inserted(self.run, version, row) for version, row in rows))

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove rows."""
        self.database.for_each("DELETE FROM kept WHERE number = ?", ((number,) for number in numbers))


INSERT = "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def inserted(run: str, version: Version, row: Any) -> Sequence[Any]:
    """Return what ``INSERT`` takes."""
    return (version.number or None, *version[1:6], int(version.accepted), crc_of(run, version, row), row)


def crc_of(run: str, version: Version, row: Any) -> int:
    """Return the checksum of a row's values and of all that names them but its number."""
    name = repr((run, *version[1:6], int(version.accepted)))
    return zlib.crc32(row, zlib.crc32(name.encode(errors="surrogatepass")))
