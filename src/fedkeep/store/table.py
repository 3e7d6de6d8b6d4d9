"""Private state of many clients in one memory-mapped table with a journal.

The table holds an entry of 8 bytes for every client (see ``journal.py``), then every client's row: its values one
after the other. The file is sparse: clients that were never sampled take no space. A commit appends the changed rows to
``journal`` and flushes that to the disk (``prepare``); then, once the round is committed elsewhere, they go into the
table (``apply``), which the system writes back in its own time. When the journal has grown to ``JOURNAL_BYTES``, the
table is flushed and the journal begins anew. Killed or without power at any instant, ``recover`` repeats the journal's
rounds and drops what was never committed. It then adds up all entries: the digest of the table must be the one that
the last round's record holds, so a table, a journal or a row of another time or run is refused. A row's checksum is
looked at whenever the row is read.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.files import whole_or_error, write_whole
from fedkeep.core.params import Params
from fedkeep.store import journal
from fedkeep.store.base import ClientIndices, Default
from fedkeep.store.disk import hash_of_ids, write_at, writing

FORMAT = 2
JOURNAL_BYTES = 32 << 20
_ENTRY = 8


class TableStore:
    """A folder with ``table.bin``, its ``schema.json`` and, after the first commit, a ``journal``.

    Args:
        folder: where the table is or will be.
        default: gives the values, names, shapes and dtypes of a client that was never seen.
        ids: the clients' ids; a client's index, and the place of its row, is its position.
        run: the id of the run whose states these are.
        write: False to read only: nothing on the disk is touched.
        create: False where there must be a table already.

    A table that was there before must be recovered before it is used.

    Raises:
        StoreError: the folder holds a table of other names, shapes, dtypes, clients, or of another run.
    """

    def __init__(
        self,
        folder: Path,
        default: Default,
        ids: Sequence[str],
        *,
        run: str = "",
        write: bool = True,
        create: bool = True,
    ) -> None:
        self.folder, self.default, self.ids, self.run, self.writable = folder, default, ids, run, write
        self.clients, self._key = len(ids), journal.run_key(run)
        self._table_path, self._journal_path = folder / "table.bin", folder / "journal"
        self._layout: list[tuple[str, int, int, torch.dtype, tuple[int, ...]]] = []
        offset = 0
        for name, value in default.initial.items():
            size = value.numel() * value.element_size()
            self._layout.append((name, offset, size, value.dtype, tuple(value.shape)))
            offset += -(-size // 8) * 8
        self.row_bytes = offset
        kinds = {dtype for _, _, size, dtype, _ in self._layout if size}
        known: dict[torch.dtype, str] = {torch.float32: "f4", torch.float64: "f8"}
        self._kind = known.get(next(iter(kinds))) if len(kinds) == 1 else None
        self._staged: dict[int, np.ndarray] = {}
        self._end: int | None = None  # of the journal's last record; None: the next one begins a new journal
        self._entries = np.zeros(self.clients, np.uint64)  # takes memory only where something is written
        self._digest = 0
        self._rows = np.zeros((0, offset), np.uint8)
        try:
            self._ready = self._open(create)
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"Cannot open the private store {folder}: {error}.") from error

    def _open(self, create: bool) -> bool:
        """Open or make the table; return whether it is new."""
        path, table = self.folder / "schema.json", self._table_path
        schema = self._schema()
        there = [p.name for p in (path, table, self._journal_path) if p.exists()]
        if path.name not in there and there:
            raise StoreError(
                f"The private store {self.folder} has {' and '.join(there)}, but no schema.json. Nothing was changed; "
                f"restore it from a copy."
            )
        if not there and not create:
            raise StoreError(
                f"The private store {self.folder} is missing, but the run has finished rounds. Restore it from a copy."
            )
        if path.name in there:
            self._check_schema(json.loads(path.read_text(encoding="utf-8")), schema)
        if table.name in there:
            if table.stat().st_size != self.clients * (_ENTRY + self.row_bytes):
                raise StoreError(f"The private store's {table} has been truncated; restore it from a copy.")
            self._map()
            return False
        if not create or self._journal_path.name in there:
            raise StoreError(f"The private store's {table} is missing; restore it from a copy.")
        if self.writable:
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.name not in there:
                write_whole(path, json.dumps(schema).encode())
            self._make_table()
            self._map()
        return True

    def _make_table(self) -> None:
        part = self.folder / f"table.bin.{secrets.token_hex(8)}.part"
        try:
            with whole_or_error(self._table_path):
                with open(part, "xb") as file:
                    file.truncate(self.clients * (_ENTRY + self.row_bytes))
                os.replace(part, self._table_path)
        finally:
            part.unlink(missing_ok=True)

    def _schema(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            "clients": self.clients,
            "ids_sha256": hash_of_ids(self.ids),
            "row_bytes": self.row_bytes,
            "columns": [[n, str(d), list(shape)] for n, _, _, d, shape in self._layout],
        }

    def _check_schema(self, found: Any, wanted: dict[str, Any]) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"schema.json should hold an object; got {type(found).__name__}")
        if found.get("format") != FORMAT:
            raise StoreError(
                f"The private store {self.folder} is of another fedkeep: wanted the format {FORMAT}, found "
                f"{found.get('format', found.get('version'))!r}. Run it again, or read it with that fedkeep."
            )
        if found.get("run") != self.run:
            raise StoreError(
                f"The private store {self.folder} belongs to the run {found.get('run')!r}, not to {self.run!r}. "
                f"Restore this run's own store from a copy."
            )
        if found != wanted:
            raise StoreError(
                f"The private store {self.folder} was made for other private parameters or clients: "
                f"wanted {wanted}, found {found}. Use the model and data that it was made with."
            )

    def _map(self) -> None:
        """Map the rows, and copy the entries of the clients that have one."""
        if self.clients:
            entries = np.memmap(self._table_path, np.uint64, "r", shape=(self.clients,)).view(np.ndarray)
            written = np.flatnonzero(entries)
            self._entries[written] = entries[written]
        if self.clients and self.row_bytes:
            shape, offset = (self.clients, self.row_bytes), self.clients * _ENTRY
            self._rows = np.memmap(self._table_path, np.uint8, "r", offset, shape).view(np.ndarray)
        else:
            self._rows = np.zeros((self.clients, self.row_bytes), np.uint8)

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape).

        Raises:
            StoreError: a row is damaged; names the client.
        """
        index = self._check(clients)
        if not len(index):
            return {n: torch.empty((0, *shape), dtype=dtype) for n, _, _, dtype, shape in self._layout}
        rows, unseen = self._rows_of(index)
        self._check_finite(index, rows)
        out: Params = {}
        for name, start, size, dtype, shape in self._layout:
            if not size:
                out[name] = torch.empty((len(index), *shape), dtype=dtype)
                continue
            part = np.ascontiguousarray(rows[:, start : start + size])
            out[name] = torch.from_numpy(part).view(dtype).reshape(len(index), *shape)
        for position in unseen:
            values = self.default(self.ids[int(index[position])])
            for name, *_ in self._layout:
                out[name][position] = values[name]
        return out

    def _rows_of(self, index: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return copies of rows, staged ones too, after a look at their checksums; and which have no values yet."""
        unseen = []
        rows = self._rows[index] if len(self._rows) else np.zeros((len(index), self.row_bytes), np.uint8)
        for position, (client, entry) in enumerate(
            zip(index.tolist(), self._entries[index].tolist(), strict=True)
        ):
            if (staged := self._staged.get(client)) is not None:
                rows[position] = staged
            elif not entry:
                unseen.append(position)
            elif zlib.crc32(rows[position].data) != entry & journal.CRC:
                raise StoreError(
                    f"The private values of client {self.ids[client]!r} in {self._table_path} are damaged: their "
                    f"checksum is not the one kept of round {entry >> 32}. Restore the store from a copy."
                )
        return rows, unseen

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Stage new values, each (clients, *shape).

        Raises:
            StoreError: names, shapes or dtypes differ, or a value is not finite.
        """
        index = self._check(clients)
        if not self.writable:
            raise StoreError(
                f"The private store {self.folder} was opened to be read; nothing is written to it."
            )
        if not len(index):
            return
        rows = np.zeros((len(index), self.row_bytes), np.uint8)
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
        self._check_finite(index, rows)
        for position, client in enumerate(index.tolist()):
            self._staged[client] = rows[position]

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it was ever written."""
        index = self._check(clients)
        written = (self._entries[index] != 0).tolist()
        return [w or c in self._staged for w, c in zip(written, index.tolist(), strict=True)]

    @property
    def digest(self) -> str:
        """A digest of all states as last applied or recovered: whose, of which round, which bytes."""
        return f"{self._digest:016x}"

    def prepare(self, round: int) -> str:
        """Write the staged rows to the journal and flush it to the disk; return the digest of all states after it.

        Raises:
            RunError: the disk is full or can't be written; the last committed round is kept.
        """
        if not 0 < round <= journal.MOST_ROUNDS:
            raise StoreError(f"A round's number must be in 1 .. {journal.MOST_ROUNDS}; got {round}.")
        self._check(())
        index = np.fromiter(self._staged, np.int64, len(self._staged))
        crcs = (round << 32 | zlib.crc32(row.data) for row in self._staged.values())
        entries = np.fromiter(crcs, np.uint64, len(index))
        left = self._digest - journal.digest(index, self._entries[index])
        after = (left + journal.digest(index, entries)) % 2**64
        record = journal.record(self._key, round, self._digest, after, self._staged, self.row_bytes, entries)
        self._append(record)
        self._prepared = entries, after
        return f"{after:016x}"

    def _append(self, record: bytes) -> None:
        path, end = self._journal_path, self._end
        self._end = None  # if this fails, half a record may stand there
        if end is None or end + len(record) > JOURNAL_BYTES:
            with whole_or_error(self._table_path), writing(self._table_path) as handle:
                os.fsync(handle)
            write_whole(path, record)
            end = 0
        else:
            with whole_or_error(path), writing(path) as handle:
                write_at(handle, memoryview(record), end)
                os.fsync(handle)
        self._end = end + len(record)

    def apply(self) -> None:
        """Write the prepared rows into the table; the journal holds them until the table has been flushed."""
        if self._staged:
            entries, self._digest = self._prepared
            self._put(entries)

    def _put(self, entries: np.ndarray) -> None:
        index = np.fromiter(self._staged, np.int64, len(self._staged))
        path, start = self._table_path, self.clients * _ENTRY
        try:  # not through the map: on a full disk that would end the process, not raise
            with writing(path) as handle:
                for client, entry in sorted(zip(index.tolist(), entries, strict=True)):
                    write_at(handle, self._staged[client].data, start + client * self.row_bytes)
                    write_at(handle, memoryview(entry.tobytes()), client * _ENTRY)
        except OSError as error:
            raise StoreError(
                f"Cannot write {path}: {error.strerror or error}. Nothing was lost: the journal holds the last "
                f"round. Free some space or check the rights, then resume."
            ) from error
        self._entries[index] = entries
        self._staged = {}
        if os.name == "nt":
            self._map()

    def recover(self, round: int, digest: str | None = None) -> None:
        """Repeat the journal's rounds up to ``round``; drop what was never committed.

        Nothing is written before everything has been looked at, and nothing at all where the store is read only.

        Raises:
            StoreError: the table or the journal is damaged, or of another run or round than the one asked for.
        """
        self._staged, self._end = {}, None
        committed, before = self._journal(round)
        changed: dict[int, int] = {}
        for each in committed:
            self._staged |= {int(c): each.rows[i] for i, c in enumerate(each.clients)}
            changed |= dict(zip(each.clients.tolist(), each.entries.tolist(), strict=True))
        entries = np.fromiter(changed.values(), np.uint64, len(changed))
        self._entries[list(changed)] = entries
        written = np.flatnonzero(self._entries)
        found = journal.digest(written, self._entries[written])
        if found != (committed[-1].after if committed else before) or digest not in (None, f"{found:016x}"):
            self._ready = False
            raise StoreError(
                f"The private store's {self._table_path} does not hold the states after round {round}: a row was "
                f"lost, damaged or is of another time. Restore the whole run from one copy."
            )
        if self.writable and changed:
            self._put(entries)
        self._digest, self._ready = found, True
        if committed:
            self._end = committed[-1].end
        if self.writable and self._end is not None and self._end < self._journal_path.stat().st_size:
            os.truncate(self._journal_path, self._end)

    def _journal(self, round: int) -> tuple[list[journal.Round], int]:
        """Return the journal's committed records, and the table's digest before the first record of all."""
        path = self._journal_path
        if not path.exists():
            if round > 0:
                raise StoreError(
                    f"The private store {self.folder} lacks its journal of round {round}; restore it."
                )
            return [], 0
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"Cannot read {path}: {error.strerror}. Restore it from a copy.") from error
        found = list(journal.rounds(content, self.row_bytes))
        if any(each.run != self._key for each in found):
            raise StoreError(
                f"The private store's journal {path} is of another run than {self.run!r}; restore it from a copy."
            )
        if not found or (round > found[-1].round and found[-1].end < len(content)):
            raise StoreError(f"The private store's journal {path} is damaged; restore it from a copy.")
        # The last record may be of a round that was never committed; it may also be the only one.
        committed = [r for r in found if r.round <= round]
        if found[-1].round not in (round, round + 1) or len(found) > len(committed) + 1:
            raise StoreError(
                f"The private store {self.folder} stands at round {found[-1].round}, the run at round {round}; "
                f"restore both from the same copy."
            )
        for each in found:
            self._in_range(each.clients)
        return committed, found[0].before

    def _check(self, clients: ClientIndices) -> np.ndarray:
        if not self._ready:
            raise StoreError(
                f"The private store {self.folder} was there before: call recover(round) before it is used."
            )
        return self._in_range(np.asarray(clients, np.int64).reshape(-1))

    def _in_range(self, index: np.ndarray) -> np.ndarray:
        if len(index) and (index.min() < 0 or index.max() >= self.clients):
            raise StoreError(
                f"Client indices must be in 0 .. {self.clients - 1}; got {int(index.min())} .. {int(index.max())}."
            )
        return index

    def _check_finite(self, index: np.ndarray, rows: np.ndarray) -> None:
        """Check all values at once where they are of one type: a row's gaps are zeros. It is done in every round."""
        if self._kind is not None and bool(np.isfinite(rows.view(self._kind)).all()):
            return
        for name, start, size, dtype, _ in self._layout:
            if not dtype.is_floating_point or not size:
                continue
            part = torch.from_numpy(np.ascontiguousarray(rows[:, start : start + size])).view(dtype)
            finite = torch.isfinite(part).all(1)
            if not bool(finite.all()):
                client = self.ids[int(index[int(finite.logical_not().nonzero()[0])])]
                raise StoreError(
                    f"Private {name!r} of client {client!r} holds a NaN or an infinity; the store {self.folder} keeps "
                    f"finite values only."
                )
