"""Stores of private states that ``benchmarks.stores`` compares, each with the promises that it can keep.

All have a checksum for each row, looked at when the row is read, and a digest of all rows, brought forward with each
round. fedkeep's store (SQLite) and LMDB keep two versions of a row until the round is committed
elsewhere, so that a round can be taken back; of the table, its journal does. The table is the least that a store of
our own would be: without recovery, and without checks of whose it is.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkeep.store import Default, SqliteStore, VersionLedger

try:
    import lmdb
except ImportError:
    lmdb = None

Params = dict[str, Tensor]
MAP_BYTES = 1 << 36
JOURNAL_BYTES = 32 << 20
VERSION = struct.Struct("<qQ")  # of LMDB's values: round, crc32


class Store(Protocol):
    """What is compared: values stacked as in fedkeep's stores, and a commit after a round."""

    def read(self, clients: list[int]) -> Params: ...

    def write(self, clients: list[int], params: Params) -> None: ...

    def commit(self, round: int) -> None: ...


class Fedkeep:
    """fedkeep's store: SQLite with a write-ahead log."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        self.store, self.ledger = SqliteStore(folder, Default(default), ids), VersionLedger(len(ids))
        self.round = 1
        file = self.store._file
        assert file is not None
        if not flush:
            file.database.query("PRAGMA synchronous = OFF")

    def read(self, clients: list[int]) -> Params:
        return self.store.read(clients)

    def write(self, clients: list[int], params: Params) -> None:
        for k, client in enumerate(clients):
            self.store.stage(client, {n: v[k] for n, v in params.items()}, self.round)
        self.store.begin(self.ledger.accept(clients, [self.round] * len(clients)))

    def commit(self, round: int) -> None:
        self.store.flush()
        self.ledger.committed()
        self.round = round + 1


class Journal(Fedkeep):
    """The same with a rollback journal, which takes four flushes or more for one."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        super().__init__(folder, default, ids, flush)
        assert self.store._file is not None
        self.store._file.database.query("PRAGMA journal_mode = TRUNCATE").fetchall()


def entries_of(round: int, rows: Iterable[np.ndarray], count: int) -> np.ndarray:
    """Return what stands for each row, ``round << 32 | crc32``: uint64 (count,)."""
    return np.fromiter((round << 32 | zlib.crc32(row.data) for row in rows), np.uint64, count)


def digest_of(clients: np.ndarray, entries: np.ndarray) -> int:
    """Return the sum modulo 2⁶⁴ of one well-mixed number for each written client: the same in any order."""
    written = entries != 0
    z = entries[written] + clients[written].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))


class Rows:
    """What the others share: rows as bytes, staged until the commit, and the digest of all rows."""

    def __init__(self, default: Params) -> None:
        self.default = default
        self.missing = b"".join(v.numpy().tobytes() for v in default.values())
        self.staged: dict[int, memoryview] = {}
        self.entries: dict[int, int] = {}
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

    def advance(self, round: int) -> None:
        """Bring the digest forward by the staged rows."""
        count = len(self.staged)
        index = np.fromiter(self.staged, np.int64, count)
        old = np.fromiter((self.entries.get(c, 0) for c in self.staged), np.uint64, count)
        new = entries_of(round, map(np.asarray, self.staged.values()), count)
        self.digest = (self.digest - digest_of(index, old) + digest_of(index, new)) % 2**64
        self.entries.update(zip(self.staged, new.tolist(), strict=True))


class Table(Rows):
    """A sparse table, mapped into memory; rows are appended to a journal and flushed before they go into the table."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        super().__init__(default)
        self.size, self.flush = len(self.missing), flush
        path = folder / "table"
        with open(path, "xb") as file:
            file.truncate(len(ids) * self.size)
        self.table, self.journal = (
            os.open(path, os.O_RDWR),
            os.open(folder / "journal", os.O_RDWR | os.O_CREAT),
        )
        self.rows = np.memmap(path, np.uint8, "r", shape=(len(ids), self.size)).view(np.ndarray)
        self.end = 0

    def read(self, clients: list[int]) -> Params:
        found: list[Any] = []
        for client in clients:
            entry = self.entries.get(client)
            found.append(self.missing if entry is None else self.rows[client])
            if entry is not None:
                check(self.rows[client].data, entry & 0xFFFFFFFF)
        return self.stacked(found)

    def commit(self, round: int) -> None:
        self.advance(round)
        index = np.fromiter(self.staged, np.int64, len(self.staged))
        entries = np.fromiter((self.entries[c] for c in self.staged), np.uint64, len(self.staged))
        head = struct.pack("<qqQ", round, len(index), self.digest)
        record = b"".join((head, index.tobytes(), entries.tobytes(), *self.staged.values()))
        if self.end > JOURNAL_BYTES:
            if self.flush:
                os.fsync(self.table)
            self.end = 0
        self.end += os.pwrite(self.journal, record, self.end)
        if self.flush:
            os.fsync(self.journal)
        for client in sorted(self.staged):
            os.pwrite(self.table, self.staged[client], client * self.size)
        self.staged = {}


class Lmdb(Rows):
    """LMDB, one transaction a round."""

    def __init__(self, folder: Path, default: Params, ids: Sequence[str], flush: bool) -> None:
        super().__init__(default)
        self.env = lmdb.open(str(folder), map_size=MAP_BYTES, sync=flush)
        self.superseded: list[int] = []

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
        before = {c: self.entries[c] for c in self.staged if c in self.entries}
        self.advance(round)
        with self.env.begin(write=True, buffers=True) as txn:
            for place in self.superseded:
                txn.delete(key(place))
            self.superseded = []
            for client in sorted(self.staged):
                places = (2 * client, 2 * client + 1)
                used = [p for p in places if client in before and txn.get(key(p)) is not None]
                self.superseded += used[:1]
                place = places[1] if used[:1] == [places[0]] else places[0]
                crc = self.entries[client] & 0xFFFFFFFF
                txn.put(key(place), VERSION.pack(round, crc) + bytes(self.staged[client]))
            txn.put(b"commit", f"{round} {self.digest:x}".encode())
        self.staged = {}


def key(place: int) -> bytes:
    """Return LMDB's key of a version."""
    return place.to_bytes(8, "big")


def check(value: Any, crc: int) -> None:
    """Raise ValueError if a row is not as it was written."""
    if zlib.crc32(value) != crc:
        raise ValueError("a row is damaged")


STORES: dict[str, Callable[[Path, Params, Sequence[str], bool], Store]] = {
    "fedkeep": Fedkeep,
    "journal": Journal,
    "table": Table,
    **({"lmdb": Lmdb} if lmdb else {}),
}
