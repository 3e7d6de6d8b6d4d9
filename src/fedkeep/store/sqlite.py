"""Private states of many clients in one SQLite file, written and flushed once a round.

Its rows are those of ``version_file``. A flush adds the versions that count since the last, in one transaction.
Those that they follow stay beside them until the round after is flushed, so whoever was killed before the server had
committed goes on from the older ones, and the last round can be taken back. Those that counted at the last mark stay
until the round after the next mark is flushed.

Nothing in the file says which versions count: the server's ledger does. ``begin`` of a file that was there before names
all of them; a version that is not found, or found with other bytes, is an error and never a client that was never seen.
What the ledger does not name is of a round that was never committed: it goes with the next flush.

While a run writes, the last flushes are in SQLite's write-ahead log beside the file, so each is one flush of the disk.
SQLite drops in silence what is damaged in a log; the ledger then misses it. At rest there is the file alone, and reading
it changes nothing on the disk. What a kill has left is looked at in a copy, so that nothing is touched before ``begin``
found it right.
"""

from __future__ import annotations

import copy
import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.core.errors import RunError, StoreError
from fedkeep.core.files import ROUND_KEPT, private_folder
from fedkeep.core.params import Params
from fedkeep.core.sealed import check_format
from fedkeep.store.database import Database, check_row, logs_of, new_file
from fedkeep.store.private_store import Default, PrivateStore, Staged
from fedkeep.store.rows import RowFormat, hash_of_ids
from fedkeep.store.version_file import TABLE, Version, VersionFile
from fedkeep.store.versions import ClientIndices, LedgerLines

FORMAT = 5
FILE = "store.db"
TABLES = f"CREATE TABLE about (content TEXT NOT NULL); {TABLE}"


class SqliteStore(PrivateStore):
    """A folder with ``store.db``; while it is written, or after a kill, its log ``store.db-wal`` too.

    Args:
        folder: where the file is or will be.
        default: gives the values, names, shapes and dtypes of a client that was never seen.
        ids: the clients' ids; a client's index is its position.
        run: the id of the run whose states these are.
        write: False to read only: nothing in the folder is touched.
        create: False where there must be a store already.

    A store that was there before must ``begin`` before it is used. A store is of the process that opened it.

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
        super().__init__(default, ids)
        self.folder, self.run, self.writable = folder, run, write
        self.path, self.clients = folder / FILE, len(ids)
        self._format = RowFormat(default.initial)
        check_row(self._format.bytes)
        self._process = os.getpid()
        self._number = np.zeros(self.clients, np.int64)  # of the versions that count and are in the file
        self._written: dict[int, tuple[Version, np.ndarray]] = {}  # that count and are not in the file yet
        self._followed: list[
            int
        ] = []  # numbers of versions that the last flush has followed, or the next will
        self._older: dict[int, tuple[int, int]] | None = None
        """Number and attempt of what clients had at the mark who have other values since; None: nothing was marked."""
        self._obsolete: list[int] = []  # numbers of versions that the next flush removes
        self._flushed = False  # since a version last began to count
        self._next = 1
        self._file: VersionFile | None = None
        try:
            self._ready = self._open(create)
        except (OSError, TypeError, ValueError, RecursionError, sqlite3.Error) as error:
            raise StoreError(
                "Cannot open the private store {folder}: {why}. Restore it from a copy.",
                folder=folder,
                why=error,
            ) from error

    @classmethod
    def there(cls, folder: Path, ids: Sequence[str], run: str) -> SqliteStore:
        """Open a store to be read, where the model that it was made for is not known: by the columns that it names.

        Raises:
            StoreError: as for the constructor; or it is missing.
        """
        path = folder / FILE
        if not path.exists():
            raise StoreError("The private store {folder} is missing. Restore it from a copy.", folder=folder)
        try:
            database = Database(path)
            (content,) = database.query("SELECT content FROM about").fetchone() or ("",)
            columns = json.loads(content)["columns"]
            initial = {
                name: torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                for name, dtype, shape in columns
            }
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, sqlite3.Error) as error:
            raise _damaged(path, error) from error
        return cls(folder, Default(initial), ids, run=run, write=False)

    def _open(self, create: bool) -> bool:
        """Open or make the file; return whether it is new."""
        new = not self.path.exists()
        if new and logs_of(self.path):
            raise StoreError("The private store's {path} is missing; restore it from a copy.", path=self.path)
        if new and not create:
            raise StoreError(
                "The private store {folder} is missing, but the run has finished rounds. Restore it from a copy.",
                folder=self.folder,
            )
        if new and not self.writable:
            return True
        if new:
            private_folder(self.folder)
            about = ("INSERT INTO about VALUES (?)", (json.dumps(self._about()),))
            new_file(self.path, TABLES, self._format.bytes, [about])
        database = Database(self.path)
        if new:
            database.begin_to_write()
        else:
            self._check_about(database)
        self._file = VersionFile(database, self.run, self._format)
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
        check_format(f"The private store {self.folder}", found.get("format"), FORMAT, StoreError)
        if found.get("run") != self.run:
            raise StoreError(
                "The private store {folder} belongs to the run {got!r}, not to {run!r}. "
                "Restore this run's own store from a copy.",
                folder=self.folder,
                got=found.get("run"),
                run=self.run,
            )
        if found != wanted:
            raise StoreError(
                "The private store {folder} was made for other private parameters or clients: "
                "wanted {wanted}, found {found}. Use the model and data that it was made with.",
                folder=self.folder,
                wanted=wanted,
                found=found,
            )

    def mark(self) -> None:
        """Keep what counts now; what the mark before kept goes once this round is committed."""
        self._followed += [number for number, _ in (self._older or {}).values() if number]
        self._older = {}

    def marked(self) -> SqliteStore:
        """Return what counted at the last mark, as it is in the file."""
        found = copy.copy(self)
        found._number, found._attempt = self._number.copy(), self._attempt.copy()
        for client, (number, attempt) in (self._older or {}).items():
            found._number[client], found._attempt[client] = number, attempt
        found._older, found._written, found._staged, found.writable = None, {}, {}, False
        return found

    def begin(self, lines: LedgerLines, marked: LedgerLines | None = None) -> None:
        """Let the versions that the server's ledger names count; of a file that was there before, these and no others.

        Args:
            lines: of the ledger.
            marked: of a file that was there before, what the ledger said at the last mark; None: there was none.

        Raises:
            StoreError: the file is damaged, or of another time than the ledger; nothing is changed.
            RunError: it can't be written.
        """
        if self._ready:
            super().begin(lines)
            return
        if self._file is not None:
            try:
                self._take_over(self._file, lines, marked)
            except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
                raise _damaged(self.path, error) from error
            try:
                if self.writable:
                    self._file.database.begin_to_write()
            except sqlite3.Error as error:
                raise RunError(
                    "Cannot write {path}: {why}. A run must be writable to go on with it.",
                    path=self.path,
                    why=error,
                ) from error
        self._ready = True

    def _take_over(self, file: VersionFile, lines: LedgerLines, marked: LedgerLines | None) -> None:
        """Find the versions that a ledger names, now and at the mark; all others are of rounds that do not count."""
        number, client, attempt = file.scan()
        if not ((client >= 0) & (client < self.clients) & (attempt > 0)).all():
            raise ValueError("a version is of nobody")
        found, named = [], np.zeros(len(number), bool)
        for some in (lines, lines if marked is None else marked):
            wanted, numbers = np.zeros(self.clients, np.int64), np.zeros_like(self._number)
            wanted[some.clients] = some.attempt
            these = attempt == wanted[client]
            if len(np.unique(client[these])) < np.count_nonzero(these):
                raise ValueError("two versions of a client have one name")
            numbers[client[these]] = number[these]
            lost = some.clients[numbers[some.clients] == 0]
            if len(lost):
                raise self._missing(int(lost[0]), int(wanted[lost[0]]))
            found.append((numbers, wanted))
            named |= these
        (self._number, self._attempt), (numbers, attempts) = found
        if marked is not None:
            changed = np.flatnonzero(attempts != self._attempt).tolist()
            self._older = {c: (int(numbers[c]), int(attempts[c])) for c in changed}
        self._obsolete = number[~named].tolist()
        self._next = int(number.max(initial=0)) + 1

    def _keep(self, lines: LedgerLines, staged: Sequence[Staged]) -> None:
        self._check_writable()
        clients = lines.clients.tolist()
        stacked = {name: torch.stack([one.params[name] for one in staged]) for name in self.default.initial}
        rows = self._format.pack(stacked, len(clients))
        self._check_finite(clients, rows)
        if self._flushed:  # a new round counts, so the server has committed the one that was flushed
            self._obsolete, self._followed, self._flushed = self._obsolete + self._followed, [], False
        before, parents, counted = (
            self._number[clients],
            self._attempt[clients].tolist(),
            lines.version.tolist(),
        )
        for client, number, attempt in zip(clients, before.tolist(), parents, strict=True):
            if self._older is not None and client not in self._older:
                self._older[client] = number, attempt
            elif number:
                self._followed.append(number)
        self._number[clients] = 0
        for client, version, parent, one, row in zip(clients, counted, parents, staged, rows, strict=True):
            made = Version(0, client, version, one.attempt, parent, one.round, accepted=True)
            self._written[client] = made, row

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape).

        Raises:
            StoreError: a row is damaged; names the client.
        """
        index = self._check(clients)
        rows = np.zeros((len(index), self._format.bytes), np.uint8)
        unseen, kept = [], []
        for place, (client, number) in enumerate(
            zip(index.tolist(), self._number[index].tolist(), strict=True)
        ):
            if number:
                kept.append((place, client))
            elif (written := self._written.get(client)) is not None:
                rows[place] = written[1]
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

    def _fetch(self, kept: Sequence[tuple[int, int]], rows: np.ndarray) -> None:
        """Read versions that count from the file: into which row, whose."""
        file = self._opened()
        try:
            with file.database.transaction():
                for place, client in kept:
                    attempt = int(self._attempt[client])
                    row = file.row(int(self._number[client]), client, attempt)
                    if row is None:
                        raise StoreError(
                            "The private values of client {client!r} in {file} are damaged: their checksum is not the "
                            "one kept of attempt {attempt}. Restore the store from a copy.",
                            client=str(self.ids[client]),
                            file=self.path,
                            attempt=attempt,
                        )
                    rows[place] = np.frombuffer(row, np.uint8)
        except sqlite3.Error as error:
            raise _damaged(self.path, error) from error

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it was ever written."""
        found: list[bool] = (self._attempt[self._check(clients)] > 0).tolist()
        return found

    def flush(self) -> None:
        """Make all that counts durable in one transaction, or nothing of it.

        Raises:
            RunError: the disk is full or can't be written; what was flushed before is kept.
        """
        self._check(())
        if not self._written and not self._obsolete:
            return
        self._check_writable()
        clients = list(self._written)
        numbers = range(self._next, self._next + len(clients))
        added = [
            (made._replace(number=number), row)
            for number, (made, row) in zip(numbers, self._written.values(), strict=True)
        ]
        file = self._opened()
        try:
            with file.database.transaction("BEGIN IMMEDIATE"):
                file.drop(self._obsolete)
                file.add(added)
        except sqlite3.Error as error:
            raise RunError(
                "Cannot write {path}: {why}. {what_now}", path=self.path, why=error, what_now=ROUND_KEPT
            ) from error
        self._number[clients] = numbers
        self._next, self._written, self._obsolete, self._flushed = numbers.stop, {}, [], True

    def rest(self) -> None:
        """Write no more: from now on there is one file, which is only read."""
        if self._file is not None and self.writable and self._ready:
            self.drop()
            self.writable = False
            with suppress(OSError, ValueError, sqlite3.Error):  # on a full disk the log stays, and is as good
                self._file.database.rest()

    def _opened(self) -> VersionFile:
        if self._file is None:
            raise StoreError(
                "The private store {folder} was opened to be read, and is not there.", folder=self.folder
            )
        return self._file

    def _check_writable(self) -> None:
        if not self.writable:
            raise StoreError(
                "The private store {folder} was opened to be read; nothing is written to it.",
                folder=self.folder,
            )

    def _check(self, clients: ClientIndices) -> np.ndarray:
        if not self._ready:
            raise StoreError(
                "The private store {folder} was there before: call begin(lines) before it is used.",
                folder=self.folder,
            )
        if os.getpid() != self._process:
            raise StoreError(
                "The private store {folder} is of the process {process}; open it anew in this one.",
                folder=self.folder,
                process=self._process,
            )
        index = np.asarray(clients, np.int64).reshape(-1)
        if len(index) and (index.min() < 0 or index.max() >= self.clients):
            raise StoreError(
                "Client indices must be in 0 .. {last}; got {low} .. {high}.",
                last=self.clients - 1,
                low=int(index.min()),
                high=int(index.max()),
            )
        return index

    def _check_finite(self, clients: ClientIndices | np.ndarray, rows: np.ndarray) -> None:
        if (fault := self._format.nonfinite(rows)) is not None:
            place, name = fault
            raise StoreError(
                "Private {name!r} of client {client!r} holds a NaN or an infinity; the store {folder} keeps finite values "
                "only.",
                name=name,
                client=str(self.ids[int(clients[place])]),
                folder=self.folder,
            )


def _damaged(path: Path, error: Exception) -> StoreError:
    return StoreError(
        "The private store's {path} is damaged: {why}. Restore it from a copy.", path=path, why=error
    )
