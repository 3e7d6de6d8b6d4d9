"""Private state of many clients in one memory-mapped table with a journal.

A row is an 8-byte header (0: never written) and the client's values one after the other. The file is sparse: clients
that were never sampled take no space. A commit writes the changed rows to ``journal`` first (``prepare``), then, once
the round is committed elsewhere, into the table (``apply``). Killed in between, ``recover`` repeats or drops it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.files import write_whole
from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default

_HEADER = 8
_JOURNAL = struct.Struct("<8sqqq32s")  # magic, round, rows, row bytes, sha256 of what follows
_MAGIC = b"fedkeep1"


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
        self._layout: list[tuple[str, int, int, torch.dtype, tuple[int, ...]]] = []
        offset = _HEADER
        for name, value in default.initial.items():
            size = value.numel() * value.element_size()
            self._layout.append((name, offset, size, value.dtype, tuple(value.shape)))
            offset += -(-size // 8) * 8
        self.row_bytes = offset
        self._staged: dict[int, np.ndarray] = {}
        self._open()

    def _open(self) -> None:
        schema = {
            "version": 1,
            "clients": self.clients,
            "row_bytes": self.row_bytes,
            "columns": [[n, str(d), list(shape)] for n, _, _, d, shape in self._layout],
        }
        path, table = self.folder / "schema.json", self.folder / "table.bin"
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
            np.memmap(self.folder / "table.bin", np.uint8, "r", shape=shape)
            if self.clients
            else np.zeros(shape, np.uint8)
        )

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape)."""
        index = self._check(clients)
        if not len(index):
            return {n: torch.empty((0, *shape), dtype=dtype) for n, _, _, dtype, shape in self._layout}
        rows = np.array(self._table[index])
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
        """Write the staged rows to the journal and flush it to the disk."""
        index = np.fromiter(self._staged, np.int64, len(self._staged))
        rows = (
            np.stack(list(self._staged.values())) if len(index) else np.zeros((0, self.row_bytes), np.uint8)
        )
        body = index.tobytes() + rows.tobytes()
        head = _JOURNAL.pack(_MAGIC, round, len(index), self.row_bytes, hashlib.sha256(body).digest())
        write_whole(self.folder / "journal", head + body)

    def apply(self) -> None:
        """Write the staged rows into the table; the journal stays until the next commit replaces it."""
        if self._staged:
            path = self.folder / "table.bin"
            try:  # not through the map: on a full disk that would end the process, not raise
                with open(path, "r+b") as file:
                    for client in sorted(self._staged):
                        file.seek(client * self.row_bytes)
                        file.write(self._staged[client].tobytes())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise StoreError(
                    f"Cannot write {path}: {error.strerror or error}. Nothing was lost: the journal holds the last "
                    f"round. Free some space or check the rights, then resume."
                ) from error
            if os.name == "nt":
                self._table = self._map()
        self._staged = {}

    def recover(self, round: int) -> None:
        """Repeat the journal's rows if they belong to ``round``; drop what was never committed.

        Raises:
            StoreError: the journal is damaged, or belongs to an earlier round than the one asked for.
        """
        self._staged = {}
        path = self.folder / "journal"
        if not path.exists():
            if round > 0:
                raise StoreError(
                    f"The private store {self.folder} lacks its journal of round {round}; restore it."
                )
            return
        content = path.read_bytes()
        if len(content) < _JOURNAL.size:
            raise StoreError(f"The private store's journal {path} is damaged; restore it from a copy.")
        magic, found, count, row_bytes, digest = _JOURNAL.unpack_from(content)
        body = content[_JOURNAL.size :]
        whole = magic == _MAGIC and row_bytes == self.row_bytes and len(body) == count * (8 + row_bytes)
        if not whole or hashlib.sha256(body).digest() != digest:
            raise StoreError(f"The private store's journal {path} is damaged; restore it from a copy.")
        if not round <= found <= round + 1:
            raise StoreError(
                f"The private store {self.folder} stands at round {found}, the run at round {round}; "
                f"restore both from the same copy."
            )
        if found == round:
            index = np.frombuffer(body, np.int64, count)
            rows = np.frombuffer(body, np.uint8, offset=8 * count).reshape(count, row_bytes)
            self._staged = {int(c): rows[i] for i, c in enumerate(index)}
            self.apply()

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
