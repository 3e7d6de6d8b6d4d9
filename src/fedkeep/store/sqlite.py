"""Private states of many clients in one SQLite file, written and flushed once a round.

A row of ``kept`` is a version of what a client keeps: its number, the client, the round, a checksum, the values. A
commit adds the versions of its round in one transaction (``prepare``); the versions that they follow stay beside them
until the next one. Which versions are accepted follows from the round that the run is at, so ``apply`` and ``recover``
write nothing, and the last round can be taken back.

The file is believed as far as the digest goes. ``recover`` reads the rounds and checksums of all versions; their digest
must be the run's. From then on they are in memory, and each row that is read must be that very version: a row that is
not found, or found with other bytes, is an error and never a client that was never seen.

While a run writes, the last commits are in SQLite's write-ahead log beside the file, so a commit is one flush. SQLite
drops in silence what is damaged in a log; the digest then says so. At rest there is the file alone, and reading it
changes nothing on the disk. What a kill has left is looked at in a copy, so that nothing is touched before ``recover``
found it right.
"""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedkeep.core.errors import RunError, StoreError
from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default
from fedkeep.store.database import TABLES, Database, check_row, logs_of, new_file
from fedkeep.store.rows import CRC, RowFormat, digest_of, entries_of, hash_of_ids
from fedkeep.store.staging import Staging

FORMAT = 3
FILE = "store.db"
MOST_ROUNDS = MOST_VERSIONS = CRC
_SCANNED = 4096


class Prepared(NamedTuple):
    """Versions that are durable and not yet accepted: round, clients, entries, numbers, digest, and rows by client."""

    round: int
    clients: np.ndarray
    entries: np.ndarray
    versions: np.ndarray
    digest: int
    rows: dict[int, np.ndarray]


class SqliteStore(Staging):
    """A folder with ``store.db``; while it is written, or after a kill, its log ``store.db-wal`` too.

    Args:
        folder: where the file is or will be.
        default: gives the values, names, shapes and dtypes of a client that was never seen.
        ids: the clients' ids; a client's index is its position.
        run: the id of the run whose states these are.
        write: False to read only: nothing in the folder is touched.
        create: False where there must be a store already.

    A store that was there before must be recovered before it is used. A store is of the process that opened it.

    Raises:
        StoreError: the folder holds a store of other names, shapes, dtypes, clients, or of another run, or none that
            can be read; or a client's values are more than SQLite takes in a row.
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
        super().__init__()
        self.folder, self.default, self.ids, self.run, self.writable = folder, default, ids, run, write
        self.path, self.clients = folder / FILE, len(ids)
        self._format = RowFormat(default.initial)
        check_row(self._format.bytes)
        self._process = os.getpid()
        self._file: Database | None = None
        self._begin()
        try:
            self._ready = self._open(create)
        except (OSError, TypeError, ValueError, RecursionError, sqlite3.Error) as error:
            raise StoreError(
                f"Cannot open the private store {folder}: {error}. Restore it from a copy."
            ) from error

    def _begin(self) -> None:
        """Know of no version at all. The arrays take memory only where something is written."""
        self._entries = np.zeros(self.clients, np.uint64)  # of accepted versions, see ``entries_of``
        self._versions = np.zeros(self.clients, np.uint32)  # their numbers
        self._next, self._round, self._digest = 1, 0, 0
        self._written: dict[int, np.ndarray] = {}
        self._prepared: Prepared | None = None
        self._obsolete: list[int] = []  # versions that the next commit removes

    def _open(self, create: bool) -> bool:
        """Open or make the file; return whether it is new."""
        new = not self.path.exists()
        if new and logs_of(self.path):
            raise StoreError(f"The private store's {self.path} is missing; restore it from a copy.")
        if new and not create:
            raise StoreError(
                f"The private store {self.folder} is missing, but the run has finished rounds. Restore it from a copy."
            )
        if new and not self.writable:
            return True
        if new:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = ("INSERT INTO about VALUES (?)", (json.dumps(self._about()),))
            nothing = ("INSERT INTO rounds VALUES (0, ?)", (self.digest,))
            new_file(self.path, TABLES, self._format.bytes, (about, nothing))
        self._file = Database(self.path)
        if new:
            self._file.begin_to_write()
        else:
            self._check_about(self._file)
        return new

    def _about(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            "clients": self.clients,
            "ids_sha256": hash_of_ids(self.ids),
            "columns": self._format.columns(),
        }

    def _check_about(self, file: Database) -> None:
        (content,) = file.query("SELECT content FROM about").fetchone() or ("",)
        found, wanted = json.loads(content), self._about()
        if not isinstance(found, dict):
            raise ValueError(f"{FILE} should say what it holds; got {type(found).__name__}")
        if found.get("format") != FORMAT:
            raise StoreError(
                f"The private store {self.folder} is of another fedkeep: wanted the format {FORMAT}, found "
                f"{found.get('format')!r}. Run it again, or read it with that fedkeep."
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

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape).

        Raises:
            StoreError: a row is damaged; names the client.
        """
        index = self._check(clients)
        rows = np.zeros((len(index), self._format.bytes), np.uint8)
        unseen, kept = [], []
        for place, (client, entry) in enumerate(
            zip(index.tolist(), self._entries[index].tolist(), strict=True)
        ):
            if (written := self._written.get(client)) is not None:
                rows[place] = written
            elif entry:
                kept.append((place, client, entry))
            else:
                unseen.append(place)
        if kept:
            self._fetch(kept, rows)
        self._check_finite(index, rows)
        out = self._format.unpack(rows)
        for place in unseen:
            for name, value in self.default(self.ids[int(index[place])]).items():
                out[name][place] = value
        return out

    def _fetch(self, kept: Sequence[tuple[int, int, int]], rows: np.ndarray) -> None:
        """Read accepted versions: at which place, whose, with which entry."""
        file = self._opened()
        try:
            with file.transaction():
                for place, client, entry in kept:
                    number = (int(self._versions[client]),)
                    row = file.query("SELECT row FROM kept WHERE version = ?", number).fetchone()
                    if row is None or not _is_whole(row[0], entry, rows.shape[1]):
                        raise StoreError(
                            f"The private values of client {self.ids[client]!r} in {self.path} are damaged: their "
                            f"checksum is not the one kept of round {entry >> 32}. Restore the store from a copy."
                        )
                    rows[place] = np.frombuffer(row[0], np.uint8)
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Write new values, each (clients, *shape): read at once, durable with the next ``prepare``.

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
        rows = self._format.pack(params, len(index))
        self._check_finite(index, rows)
        self._written.update(zip(index.tolist(), rows, strict=True))

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it was ever written."""
        index = self._check(clients)
        kept = (self._entries[index] != 0).tolist()
        return [k or c in self._written for k, c in zip(kept, index.tolist(), strict=True)]

    @property
    def digest(self) -> str:
        """A digest of all states as last applied or recovered: whose, of which round, which bytes."""
        return f"{self._digest:016x}"

    def prepare(self, round: int) -> str:
        """Add what was written as versions of this round, flushed to the disk; return the digest of all states then.

        Raises:
            RunError: the disk is full or can't be written; the last committed round is kept.
        """
        if not 0 < round <= MOST_ROUNDS:
            raise StoreError(f"A round's number must be in 1 .. {MOST_ROUNDS}; got {round}.")
        self._check(())
        rows, count = self._written, len(self._written)
        if self._next + count > MOST_VERSIONS:
            raise StoreError(
                f"The private store {self.folder} has had {MOST_VERSIONS} versions; begin a new run."
            )
        clients, entries = np.fromiter(rows, np.int64, count), entries_of(round, rows.values(), count)
        left = self._digest - digest_of(clients, self._entries[clients])
        digest = (left + digest_of(clients, entries)) % 2**64
        versions = np.arange(self._next, self._next + count)
        crcs = (entries & np.uint64(CRC)).tolist()
        added = zip(versions.tolist(), rows, [round] * count, crcs, rows.values(), strict=True)
        again = [] if self._prepared is None else self._prepared.versions.tolist()
        file = self._opened()
        try:
            with file.transaction("BEGIN IMMEDIATE"):
                file.for_each("DELETE FROM kept WHERE version = ?", ((v,) for v in (*self._obsolete, *again)))
                file.for_each("INSERT INTO kept VALUES (?, ?, ?, ?, ?)", added)
                file.query("DELETE FROM rounds WHERE round <> ?", (self._round,))
                file.query("INSERT INTO rounds VALUES (?, ?)", (round, f"{digest:016x}"))
        except sqlite3.Error as error:
            raise RunError(
                f"Cannot write {self.path}: {error}. Nothing was lost: the last finished round is kept. Free some "
                f"space or check the rights, then resume."
            ) from error
        self._next += count
        self._obsolete, self._prepared = [], Prepared(round, clients, entries, versions, digest, dict(rows))
        return f"{digest:016x}"

    def apply(self) -> None:
        """Make the prepared versions the accepted ones; those that they follow go with the next commit."""
        if self._prepared is None:
            return
        made = self._prepared
        self._obsolete += [version for version in self._versions[made.clients].tolist() if version]
        self._entries[made.clients], self._versions[made.clients] = made.entries, made.versions
        self._round, self._digest = made.round, made.digest
        since = {c: row for c, row in self._written.items() if row is not made.rows.get(c)}
        self._written, self._prepared = since, None

    def recover(self, round: int, digest: str | None = None) -> None:
        """Return to the versions accepted after ``round``; later ones are dropped with the next commit.

        Raises:
            StoreError: the file is damaged, or of another run or round than the one asked for.
        """
        self.accept(())
        self._begin()
        self._ready = False
        wanted = digest or self.digest
        file = self._file
        if file is not None:
            try:
                known = dict(file.query("SELECT round, digest FROM rounds").fetchall())
                if round not in known:
                    raise StoreError(
                        f"The private store {self.folder} stands at round {max(known, default=0)}, the run at round "
                        f"{round}; restore both from the same copy."
                    )
                wanted = digest or known[round]
                self._scan(file, round)
            except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
                raise self._unreadable(error) from error
        held = np.flatnonzero(self._entries)
        self._digest = digest_of(held, self._entries[held])
        if self.digest != wanted:
            raise StoreError(
                f"The private store's {self.path} does not hold the states after round {round}: a row was lost, "
                f"damaged or is of another time. Restore the whole run from one copy."
            )
        self._round = round
        if self.writable and file is not None:
            try:
                file.begin_to_write()
            except sqlite3.Error as error:
                raise RunError(
                    f"Cannot write {self.path}: {error}. A run must be writable to go on with it."
                ) from error
        self._ready = True

    def copy(self, path: Path) -> None:
        """Write a copy of what was committed to another place; RunError where that can't be written."""
        try:
            self._opened().query("VACUUM INTO ?", (str(path),))
            with closing(sqlite3.connect(path)) as copy:
                copy.execute("PRAGMA journal_mode = WAL")  # as every store begins
        except sqlite3.Error as error:
            raise RunError(f"Cannot write {path}: {error}. Free some space or check the rights.") from error

    def rest(self) -> None:
        """Write no more: from now on there is one file, which is only read."""
        if self._file is not None and self.writable and self._ready:
            self._written, self._prepared, self.writable = {}, None, False
            with suppress(OSError, ValueError, sqlite3.Error):  # on a full disk the log stays, and is as good
                self._file.rest()

    def _scan(self, file: Database, round: int) -> None:
        """Read which versions there are; keep the last of each client up to ``round``."""
        found = file.query("SELECT version, client, round, crc FROM kept ORDER BY version")
        blocks = [np.zeros((1, 4), np.int64)]
        while some := found.fetchmany(_SCANNED):
            blocks.append(np.array(some, np.int64))
        version, client, of, crc = np.concatenate(blocks).T
        if (np.diff(version) <= 0).any() or (np.diff(of) < 0).any() or max(of[-1], version[-1]) > CRC:
            raise ValueError("its versions are not in order")
        version, client, of, crc = version[1:], client[1:], of[1:], crc[1:]
        if not ((client >= 0) & (client < self.clients) & (of > 0) & (crc >= 0) & (crc <= CRC)).all():
            raise ValueError("a version is of nobody")
        taken = of <= round
        entries = of.astype(np.uint64) << np.uint64(32) | crc.astype(np.uint64)
        self._entries[client[taken]], self._versions[client[taken]] = entries[taken], version[taken]
        self._obsolete = version[self._versions[client] != version].tolist()
        self._next = int(version[-1]) + 1 if len(version) else 1

    def _opened(self) -> Database:
        if self._file is None:
            raise StoreError(f"The private store {self.folder} was opened to be read, and is not there.")
        return self._file

    def _unreadable(self, error: Exception) -> StoreError:
        return StoreError(f"The private store's {self.path} is damaged: {error}. Restore it from a copy.")

    def _check(self, clients: ClientIndices) -> np.ndarray:
        if not self._ready:
            raise StoreError(
                f"The private store {self.folder} was there before: call recover(round) before it is used."
            )
        if os.getpid() != self._process:
            raise StoreError(
                f"The private store {self.folder} is of the process {self._process}; open it anew in this one."
            )
        index = np.asarray(clients, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= self.clients):
            raise StoreError(
                f"Client indices must be in 0 .. {self.clients - 1}; got {int(index.min())} .. {int(index.max())}."
            )
        return index

    def _check_finite(self, index: np.ndarray, rows: np.ndarray) -> None:
        if (fault := self._format.nonfinite(rows)) is not None:
            place, name = fault
            raise StoreError(
                f"Private {name!r} of client {self.ids[int(index[place])]!r} holds a NaN or an infinity; the store "
                f"{self.folder} keeps finite values only."
            )


def _is_whole(row: Any, entry: int, size: int) -> bool:
    return isinstance(row, bytes) and len(row) == size and zlib.crc32(row) == entry & CRC
