"""Private state of many clients in one memory-mapped table with a journal.

A row is an 8-byte header (0: never written) and the client's values one after the other. The file is sparse: clients
that were never sampled take no space. A commit appends the changed rows to ``journal`` and flushes that to the disk
(``prepare``); then, once the round is committed elsewhere, they go into the table (``apply``), which the system writes
back in its own time. When the journal has grown to ``JOURNAL_BYTES``, the table is flushed and the journal begins anew.
Killed or without power at any instant, ``recover`` repeats the journal's rounds and drops what was never committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.files import whole_or_error, write_whole
from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default

_HEADER = 8
_POSIX = hasattr(os, "pwrite")
_RECORD = struct.Struct(
    "<8sqqq32s"
)  # of the journal: magic, round, rows, row bytes, checksum of what follows
_MAGIC = b"fedkeep2"  # with crc32, which finds half-written records as well as sha256 and in half the time
_OLD_MAGIC = b"fedkeep1"  # with sha256
JOURNAL_BYTES = 32 << 20


class _Round(NamedTuple):
    """A round in the journal: whose rows changed, the rows, and where its record ends."""

    round: int
    clients: np.ndarray
    rows: np.ndarray
    end: int


class TableStore:
    """A folder with ``table.bin``, its ``schema.json`` and, during a commit, a ``journal``.

    Args:
        folder: where the table is or will be.
        default: gives the values, names, shapes and dtypes of a client that was never seen.
        clients: the number of clients; indices are 0 .. clients − 1.

    Raises:
        StoreError: the folder holds a table of other names, shapes, dtypes or size.
    """

    def __init__(self, folder: Path, default: Default, clients: int) -> None:
        self.folder, self.default, self.clients = folder, default, clients
        self._table_path, self._journal_path = folder / "table.bin", folder / "journal"
        self._layout: list[tuple[str, int, int, torch.dtype, tuple[int, ...]]] = []
        offset = _HEADER
        for name, value in default.initial.items():
            size = value.numel() * value.element_size()
            self._layout.append((name, offset, size, value.dtype, tuple(value.shape)))
            offset += -(-size // 8) * 8
        self.row_bytes = offset
        self._staged: dict[int, np.ndarray] = {}
        self._end: int | None = None  # of the journal's last record; None: the next one begins a new journal
        self._open()

    def _open(self) -> None:
        schema = {
            "version": 1,
            "clients": self.clients,
            "row_bytes": self.row_bytes,
            "columns": [[n, str(d), list(shape)] for n, _, _, d, shape in self._layout],
        }
        path, table = self.folder / "schema.json", self._table_path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                if found != schema:
                    raise StoreError(
                        f"The private store {self.folder} was made for other private parameters or clients: "
                        f"wanted {schema}, found {found}. Use the model and data that it was made with."
                    )
                if table.stat().st_size != self.clients * self.row_bytes:
                    raise StoreError(
                        f"The private store's {table} has been truncated; restore it from a copy."
                    )
            else:
                with open(table, "wb") as file:
                    file.truncate(self.clients * self.row_bytes)
                write_whole(path, json.dumps(schema).encode())
            self._table = self._map()
        except (OSError, ValueError) as error:
            raise StoreError(f"Cannot open the private store {self.folder}: {error}.") from error

    def _map(self) -> np.ndarray:
        shape = (self.clients, self.row_bytes)
        return (
            np.memmap(self._table_path, np.uint8, "r", shape=shape).view(np.ndarray)
            if self.clients
            else np.zeros(shape, np.uint8)
        )

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape)."""
        index = self._check(clients)
        if not len(index):
            return {n: torch.empty((0, *shape), dtype=dtype) for n, _, _, dtype, shape in self._layout}
        rows = self._table[index]  # a copy
        if self._staged:
            for position, client in enumerate(index):
                if (staged := self._staged.get(int(client))) is not None:
                    rows[position] = staged
        out: Params = {}
        for name, start, size, dtype, shape in self._layout:
            if not size:
                out[name] = torch.empty((len(index), *shape), dtype=dtype)
                continue
            part = np.ascontiguousarray(rows[:, start : start + size])
            out[name] = torch.from_numpy(part).view(dtype).reshape(len(index), *shape)
        for position in np.flatnonzero(~self._written(rows)).tolist():
            values = self.default(int(index[position]))
            for name, *_ in self._layout:
                out[name][position] = values[name]
        return out

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Stage new values, each (clients, *shape)."""
        index = self._check(clients)
        if not len(index):
            return
        rows = np.zeros((len(index), self.row_bytes), np.uint8)
        rows[:, 0] = 1
        for name, start, size, dtype, shape in self._layout:
            value = params[name].detach().cpu()
            if value.dtype != dtype or tuple(value.shape) != (len(index), *shape):
                raise StoreError(
                    f"Private {name!r} should be {(len(index), *shape)} {dtype}; got {tuple(value.shape)} "
                    f"{value.dtype}."
                )
            if not size:
                continue
            flat = value.contiguous().reshape(len(index), -1).view(torch.uint8)
            rows[:, start : start + size] = flat.numpy()
        for position, client in enumerate(index):
            self._staged[int(client)] = rows[position]

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it was ever written."""
        index = self._check(clients)
        written = self._written(self._table[index])
        return [bool(w) or int(c) in self._staged for w, c in zip(written, index, strict=True)]

    def prepare(self, round: int) -> None:
        """Write the staged rows to the journal and flush it to the disk.

        Raises:
            RunError: the disk is full or can't be written; the last committed round is kept.
        """
        index = np.fromiter(self._staged, np.int64, len(self._staged))
        parts = [index.data, *(row.data for row in self._staged.values())]
        head = _RECORD.pack(_MAGIC, round, len(index), self.row_bytes, _checksum(_MAGIC, parts))
        record, end = b"".join([head, *parts]), self._end
        self._end = None  # if this fails, half a record may stand there
        path = self._journal_path
        if end is None or end + len(record) > JOURNAL_BYTES:
            self._flush_table()
            write_whole(path, record)
            end = 0
        else:
            with whole_or_error(path), _writing(path) as handle:
                _write_at(handle, memoryview(record), end)
                os.fsync(handle)
        self._end = end + len(record)

    def _flush_table(self) -> None:
        with whole_or_error(self._table_path), _writing(self._table_path) as handle:
            os.fsync(handle)

    def apply(self) -> None:
        """Write the staged rows into the table; the journal holds them until the table has been flushed."""
        if self._staged:
            path = self._table_path
            try:  # not through the map: on a full disk that would end the process, not raise
                with _writing(path) as handle:
                    for client in sorted(self._staged):
                        _write_at(handle, self._staged[client].data, client * self.row_bytes)
            except OSError as error:
                raise StoreError(
                    f"Cannot write {path}: {error.strerror or error}. Nothing was lost: the journal holds the last "
                    f"round. Free some space or check the rights, then resume."
                ) from error
            if os.name == "nt":
                self._table = self._map()
        self._staged = {}

    def recover(self, round: int) -> None:
        """Repeat the journal's rounds up to ``round``; drop what was never committed.

        Raises:
            StoreError: the journal is damaged, or belongs to another round than the one asked for.
        """
        self._staged, self._end = {}, None
        path = self._journal_path
        if not path.exists():
            if round > 0:
                raise StoreError(
                    f"The private store {self.folder} lacks its journal of round {round}; restore it."
                )
            return
        content = path.read_bytes()
        found = list(self._rounds(content))
        if not found or (round > found[-1].round and found[-1].end < len(content)):
            raise StoreError(f"The private store's journal {path} is damaged; restore it from a copy.")
        # The last record may be of a round that was never committed; it may also be the only one.
        committed = [r for r in found if r.round <= round]
        if found[-1].round not in (round, round + 1) or len(found) > len(committed) + 1:
            raise StoreError(
                f"The private store {self.folder} stands at round {found[-1].round}, the run at round {round}; "
                f"restore both from the same copy."
            )
        for each in committed:
            self._staged |= {int(c): each.rows[i] for i, c in enumerate(each.clients)}
        self.apply()
        if committed:
            self._end = committed[-1].end
            os.truncate(path, self._end)

    def _rounds(self, content: bytes) -> Iterator[_Round]:
        """Yield the journal's records up to the first that is not whole."""
        start, last = 0, -1
        while len(content) >= start + _RECORD.size:
            magic, round, count, row_bytes, digest = _RECORD.unpack_from(content, start)
            body = start + _RECORD.size
            end = body + count * (8 + row_bytes)
            known = magic in (_MAGIC, _OLD_MAGIC) and row_bytes == self.row_bytes
            if not known or count < 0 or end > len(content) or round <= last:
                return
            if _checksum(magic, [memoryview(content)[body:end]]) != digest:
                return
            index = np.frombuffer(content, np.int64, count, body)
            rows = np.frombuffer(content, np.uint8, count * row_bytes, body + 8 * count)
            yield _Round(round, index, rows.reshape(count, row_bytes), end)
            start, last = end, round

    @staticmethod
    def _written(rows: np.ndarray) -> np.ndarray:
        written: np.ndarray = rows[:, 0] != 0
        return written

    def _check(self, clients: ClientIndices) -> np.ndarray:
        index = np.asarray(clients, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= self.clients):
            raise StoreError(
                f"Client indices must be in 0 .. {self.clients - 1}; got {int(index.min())} .. {int(index.max())}."
            )
        return index


def _checksum(magic: bytes, parts: Iterable[memoryview]) -> bytes:
    """Return the 32 bytes that vouch for a record."""
    if magic == _OLD_MAGIC:
        return hashlib.sha256(b"".join(parts)).digest()
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found.to_bytes(32, "little")


@contextmanager
def _writing(path: Path) -> Iterator[int]:
    """Open a file to write into it, by the system's own calls: they take a fifth of the time of ``open``."""
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        yield handle
    finally:
        os.close(handle)


def _write_at(handle: int, content: memoryview, place: int) -> None:
    """Write all of ``content``; the system may take it in pieces."""
    while content:
        if _POSIX:
            done = os.pwrite(handle, content, place)
        else:
            os.lseek(handle, place, os.SEEK_SET)
            done = os.write(handle, content)
        content, place = content[done:], place + done
