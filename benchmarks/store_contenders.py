"""Stores of private states that ``benchmarks.stores`` compares, each with the promises that it can keep.

SQLite and LMDB keep what fedkeep's table does: a checksum for each row, looked at when the row is read; two versions of
a row until the round is committed elsewhere, so that a round can be taken back; and a digest of all rows, brought
forward with each round.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkeep.store import Default, TableStore

try:
    import lmdb
except ImportError:
    lmdb = None

Params = dict[str, Tensor]
MAP_BYTES = 1 << 36
VERSION = struct.Struct("<qQ")  # of LMDB's values: round, crc32


class Store(Protocol):
    """What is compared: values stacked as in fedkeep's stores, and a commit after a round."""

    def read(self, clients: list[int]) -> Params: ...

    def write(self, clients: list[int], params: Params) -> None: ...

    def commit(self, round: int) -> None: ...


class Table:
    """fedkeep's table."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        self.store, self.flush = TableStore(folder, Default(default), ids), flush

    def read(self, clients: list[int]) -> Params:
        return self.store.read(clients)

    def write(self, clients: list[int], params: Params) -> None:
        self.store.write(clients, params)

    def commit(self, round: int) -> None:
        with flushing(self.flush):
            self.store.prepare(round)
            self.store.apply()


@contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Leave flushes out, unless they are wanted."""
    sync = os.fsync
    if not wanted:
        os.fsync = lambda handle: None
    try:
        yield
    finally:
        os.fsync = sync


class Rows:
    """What SQLite and LMDB share: rows as bytes, staged until the commit, and the digest of all rows."""

    def __init__(self, default: Params) -> None:
        self.default = default
        self.missing = b"".join(v.numpy().tobytes() for v in default.values())
        self.staged: dict[int, memoryview] = {}
        self.superseded: list[int] = []
        self.digest = 0

    def write(self, clients: list[int], params: Params) -> None:
        parts = [params[n].reshape(len(clients), -1).view(torch.uint8).numpy() for n in self.default]
        self.staged.update(zip(clients, (row.data for row in np.concatenate(parts, 1)), strict=True))

    def stacked(self, rows: Sequence[Any]) -> Params:
        """Return tensors of the bytes of rows."""
        whole = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
        out, start = {}, 0
        for name, value in self.default.items():
            part = whole[:, start : start + value.nbytes].copy()
            out[name], start = (
                torch.from_numpy(part).view(value.dtype).reshape(-1, *value.shape),
                start + value.nbytes,
            )
        return out

    def placed(self, client: int, round: int, crc: int, before: tuple[int, int, int] | None) -> int:
        """Return where a client's new version goes: beside the old one, which is dropped with the next commit."""
        self.digest += mark(client, round, crc)
        if before is None:
            return 2 * client
        place, old_round, old_crc = before
        self.digest -= mark(client, old_round, old_crc)
        self.superseded.append(place)
        return place ^ 1


def mark(client: int, round: int, crc: int) -> int:
    """Return a row's part of the digest."""
    packed = struct.pack("<qqQ", client, round, crc)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class Sqlite(Rows):
    """A table of SQLite with a write-ahead log, one transaction a round."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        super().__init__(default)
        self.sql = sqlite3.connect(folder / "states.sqlite", isolation_level=None)
        for pragma in (
            "locking_mode = EXCLUSIVE", "journal_mode = WAL", f"synchronous = {'FULL' if flush else 'OFF'}",
            "cache_size = -65536",
        ):  # fmt: skip
            self.sql.execute(f"PRAGMA {pragma}")
        columns = "place INTEGER PRIMARY KEY, round INTEGER, crc INTEGER, value BLOB"
        self.sql.execute(f"CREATE TABLE IF NOT EXISTS states ({columns})")
        self.sql.execute("CREATE TABLE IF NOT EXISTS commits (round INTEGER PRIMARY KEY, digest TEXT)")

    def read(self, clients: list[int]) -> Params:
        found = {}
        query = f"SELECT place, crc, value FROM states WHERE place IN ({places(clients)}) ORDER BY round"
        for place, crc, value in self.sql.execute(query):
            check(value, crc)
            found[place >> 1] = value
        return self.stacked([found.get(c, self.missing) for c in clients])

    def commit(self, round: int) -> None:
        self.sql.execute("BEGIN IMMEDIATE")
        if self.superseded:
            self.sql.execute(f"DELETE FROM states WHERE place IN ({','.join(map(str, self.superseded))})")
        self.superseded = []
        query = f"SELECT place, round, crc FROM states WHERE place IN ({places(self.staged)})"
        before = {row[0] >> 1: row for row in self.sql.execute(query)}
        rows = []
        for client, value in self.staged.items():
            crc = zlib.crc32(value)
            rows.append((self.placed(client, round, crc, before.get(client)), round, crc, value))
        self.sql.executemany("INSERT INTO states VALUES (?, ?, ?, ?)", rows)
        self.sql.execute("DELETE FROM commits WHERE round < ?", (round - 1,))
        self.sql.execute("INSERT INTO commits VALUES (?, ?)", (round, f"{self.digest:x}"))
        self.sql.execute("COMMIT")
        self.staged = {}


class Lmdb(Rows):
    """LMDB, one transaction a round."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        super().__init__(default)
        self.env = lmdb.open(str(folder), map_size=MAP_BYTES, sync=flush)

    def read(self, clients: list[int]) -> Params:
        with self.env.begin(buffers=True) as txn:
            rows: list[Any] = []
            for client in clients:
                versions = [txn.get(key(2 * client + k)) for k in (0, 1)]
                held = [v for v in versions if v is not None]
                if not held:
                    rows.append(self.missing)
                    continue
                latest = max(held, key=lambda v: VERSION.unpack_from(v)[0])
                check(latest[VERSION.size :], VERSION.unpack_from(latest)[1])
                rows.append(latest[VERSION.size :])
            return self.stacked(rows)

    def commit(self, round: int) -> None:
        with self.env.begin(write=True, buffers=True) as txn:
            for place in self.superseded:
                txn.delete(key(place))
            self.superseded = []
            for client in sorted(self.staged):
                value, before = self.staged[client], None
                for place in (2 * client, 2 * client + 1):
                    if (old := txn.get(key(place))) is not None:
                        before = (place, *VERSION.unpack_from(old))
                crc = zlib.crc32(value)
                place = self.placed(client, round, crc, before)
                txn.put(key(place), VERSION.pack(round, crc) + bytes(value))
            txn.put(b"commit", f"{round} {self.digest:x}".encode())
        self.staged = {}


def key(place: int) -> bytes:
    """Return LMDB's key of a version."""
    return place.to_bytes(8, "big")


def places(clients: Any) -> str:
    """Return SQLite's list of both versions of clients."""
    return ",".join(f"{2 * c},{2 * c + 1}" for c in clients)


def check(value: Any, crc: int) -> None:
    """Raise ValueError if a row is not as it was written."""
    if zlib.crc32(value) != crc:
        raise ValueError("a row is damaged")


STORES: dict[str, Callable[[Path, Params, Sequence[str], bool], Store]] = {
    "fedkeep": Table, "sqlite": Sqlite, **({"lmdb": Lmdb} if lmdb else {}),
}  # fmt: skip
