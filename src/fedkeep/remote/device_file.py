"""One run's private states on a device as they lie on its disk: one SQLite file, of its owner alone.

Its versions are those of ``store.version_file``, by the clients' ids. A row of ``examples`` tells in which part,
train, valid or test, each of a client's examples is. Rows of ``words`` say which of a client's versions counted after
the best round and after the last one that the server has spoken of. A row of ``adapted`` is what a client adapted to last, from the
version that it names: nothing of it has left, so no word of a server is awaited. ``asked`` has a row of each message
that was served, with what clients' models came to here, ``counts`` how often each client was asked for what, and ``sums`` whose examples were in sums that left,
each client by a hash.

What is deleted is overwritten with zeros (``secure_delete``).

In the folder all files of a run go together::

    RUN.db                  the file of a run's states, this one
    RUN.db-wal              its log
    RUN.<client>.sum        secrets of secure sums, see ``masking``
    RUN.….part              what is being written, or was when the process was killed
    RUN.lock                held by the process that serves a message of the run

A kill may leave any of them. So what was being written goes when the run is opened next, and a run is listed as long as
one of its files is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from filelock import Timeout
from safetensors import SafetensorError
from safetensors.torch import load

from fedkeep.core.errors import BusyError, RunError, StoreError, raising
from fedkeep.core.files import (
    NEW_FILE,
    PRIVATE_FILE,
    beside,
    leftovers,
    overwrite,
    private_folder,
    sync_folder,
    tensor_file,
    wipe,
    wipe_leftovers,
)
from fedkeep.core.locks import Lock, take_lock
from fedkeep.core.params import Params, difference_of_names, nonfinite
from fedkeep.core.sealed import check_format
from fedkeep.store.database import Database, check_row, logs_of, new_file
from fedkeep.store.rows import RowFormat
from fedkeep.store.version_file import INSERT, TABLE, Version, VersionFile, inserted
from fedkeep.store.versions import Named

ENDING, SUM = ".db", ".sum"
RUN_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
OURS = re.compile(rf"({RUN_ID.pattern})\.(db|db-wal|db-journal|[0-9a-f]{{32}}\.sum)")
PATIENCE = 30.0
"""Seconds to wait for another process that serves a message of the same run."""

FORMAT = 7
TABLES = f"""
{TABLE}
CREATE TABLE about (content TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE UNIQUE INDEX named ON kept (client, attempt);
CREATE TABLE examples (client TEXT PRIMARY KEY NOT NULL, crc INTEGER NOT NULL, parts BLOB NOT NULL);
CREATE TABLE words (
    client TEXT NOT NULL,
    which TEXT NOT NULL,
    round INTEGER NOT NULL,
    version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    message INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (client, which)
) WITHOUT ROWID;
CREATE TABLE adapted (
    client TEXT PRIMARY KEY NOT NULL,
    version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    round INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    content BLOB NOT NULL
);
CREATE TABLE asked (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    time REAL NOT NULL,
    round INTEGER NOT NULL,
    trainings INTEGER NOT NULL,
    judgings INTEGER NOT NULL,
    adaptations INTEGER NOT NULL,
    splits TEXT NOT NULL,
    scores TEXT NOT NULL,
    uploads INTEGER,
    examples INTEGER,
    bytes INTEGER
);
CREATE TABLE counts (
    client TEXT PRIMARY KEY NOT NULL,
    trainings INTEGER NOT NULL,
    judgings INTEGER NOT NULL,
    adaptations INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE sums (split TEXT NOT NULL, examples TEXT NOT NULL);
"""
Which = Literal["best", "last"]
HASH = 8
"""Bytes of the hash of an example."""
EXAMPLE = HASH + 1
"""Bytes of an example: its hash, and its part."""
_HASH = re.compile(r"[0-9a-f]{32}")
_DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """What a file says of itself.

    Attributes:
        owner: whose device it is, as configured there.
        run: the run's id.
        columns: name, dtype and shape of each private value.
        agreed: what server and device agreed on, which a process that starts later goes on with.
        began_from: the id of the run whose last states this one began with, or empty.
        began: the clients that began so: their version 0 is a row of the file, and no default. One that was forgotten
            since stands there as the hash of its id, so that it does not begin anew by itself.
        opted_out: names of what they began with that opted-out examples may have made before.
    """

    owner: str
    run: str
    columns: list[list[Any]]
    agreed: Mapping[str, Any] = field(default_factory=dict)
    began_from: str = ""
    began: Sequence[str] = ()
    opted_out: Sequence[str] = ()

    def has_begun(self, client: str) -> bool:
        """Return whether a client began so, also one that was forgotten since."""
        return client in self.began or hashed(client) in self.began


class AdaptedRow(NamedTuple):
    """A row of what a client adapted to, without its values: from which version, and which order asked for it.

    Attributes:
        client: whose.
        version, parent: the version that it adapted from, and the attempt that had made that one.
        attempt: of the order to adapt.
        round: the server's last finished round when it gave the order.
    """

    client: str
    version: int
    attempt: int
    parent: int
    round: int


class Word(NamedTuple):
    """Which of a client's versions a server has named, and by which message.

    Attributes:
        named: after which round, and the version.
        message: the attempt of the message; later ones have larger numbers.
    """

    named: Named
    message: int


class Counts(NamedTuple):
    """How often a client has trained, was judged and has adapted in a run."""

    trainings: int = 0
    judgings: int = 0
    adaptations: int = 0


class Score(NamedTuple):
    """How clients' models did on this device, all of its clients together.

    Attributes:
        split: on which examples: ``"train"`` of a loss while training, else as they were judged.
        model: whose model: ``"own"``, ``"shared"``, …; empty while training.
        metric: the task's headline, or ``"loss"``.
        value: the metric; a loss while training is the mean over clients.
        of: how many examples, or clients that trained.
    """

    split: str
    model: str
    metric: str
    value: float
    of: int


@dataclass
class ServedMessage:
    """A message that is served: whom it asks for what.

    Attributes:
        name: of the message, by its content.
        time: when it was served, in seconds since 1970.
        round: the round's number.
        trainings, judgings, adaptations: the clients.
        splits: of which parts examples are judged.
        sums: by part, how many examples of each client were judged in a sum that leaves; clients by their hash.
        scores: how models did; they stay here, whatever leaves.
    """

    name: str
    time: float
    round: int
    trainings: Sequence[str]
    judgings: Sequence[str]
    adaptations: Sequence[str]
    splits: Sequence[str]
    sums: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)


class LogLine(NamedTuple):
    """A message that was served, as the file has noted it.

    Attributes:
        time: seconds since 1970.
        round: the round's number.
        trainings, judgings, adaptations: how many clients it asked.
        splits: of which parts examples were judged, e.g. ``"test valid"``.
        scores: how clients' models did here; of judging as they were before the message.
        uploads: of how many clients an upload left; None: the answer was not finished.
        examples: how many examples the results of judging tell of, added up.
        bytes: of the answer.
    """

    time: float
    round: int
    trainings: int
    judgings: int
    adaptations: int
    splits: str
    scores: tuple[Score, ...]
    uploads: int | None
    examples: int | None
    bytes: int | None


class DeviceFile(VersionFile):
    """The file of one run, of this process alone until ``close``.

    Args:
        path: the file, which must be there.
        owner: whose it must be; None: anybody's, to look at it.
        patience: how many seconds to wait for another process that has it.

    Raises:
        StoreError: it is missing, damaged, of another owner or fedkeep, in use, or can't be written.
    """

    def __init__(self, path: Path, owner: str | None, patience: float = PATIENCE) -> None:
        self.path, self.run = path, path.stem
        self._check_there()
        self._lock = locked(path, patience)
        try:
            with suppress(StoreError):  # what stays harms no state that is served
                wipe_rest(path)
            with self.whole():
                self._file = Database(path, log=False)
                try:
                    self._refuse_others(owner)
                    self._file.begin_to_write()
                    self.about = self._read_about(owner)
                    super().__init__(self._file, self.run, RowFormat(first_values(self.about.columns)))
                    self._file.query("PRAGMA secure_delete = ON")
                except BaseException:
                    self._file.close()
                    raise
        except BaseException:
            self._lock.release()
            raise

    def _check_there(self) -> None:
        if self.path.exists():
            return
        check_no_log(self.path)
        raise StoreError("The run {run!r} has no private state on this device.", run=self.run)

    def _refuse_others(self, owner: str | None) -> None:
        """Refuse a file of another owner or run while nothing on the disk is touched; its log may mend other faults."""
        try:
            self._read_about(owner)
        except (ValueError, TypeError, KeyError, sqlite3.Error):
            if not logs_of(self.path):
                raise

    def _read_about(self, owner: str | None) -> FileHeader:
        ((content, crc),) = self._file.query("SELECT content, crc FROM about").fetchall()
        if zlib.crc32(str(content).encode()) != crc:
            raise ValueError("what it says of itself does not fit its checksum")
        found = json.loads(content)
        what = f"The private state of the run {self.run!r}"
        check_format(what, found.pop("format", None), FORMAT, StoreError, anew="forget it")
        about = FileHeader(**found)
        if about.run != self.run:
            raise StoreError(
                "The private state of the run {run!r} belongs to the run {got!r}: somebody renamed it. "
                "Restore this run's own from a copy.",
                run=self.run,
                got=about.run,
            )
        if owner is not None and about.owner != owner:
            raise StoreError(
                "The private state of the run {run!r} belongs to {got!r}, and this device to {owner!r}. "
                "Restore this device's own from a copy.",
                run=self.run,
                got=about.owner,
                owner=owner,
            )
        return about

    def write_about(self, about: FileHeader) -> None:
        """Replace what the file says of itself.

        Raises:
            StoreError: it can't be written; nothing has changed.
        """
        content = _about_text(about)
        with self.writing():
            self._file.query("UPDATE about SET content = ?, crc = ?", (content, zlib.crc32(content.encode())))
        self.about = about

    def versions(self, client: str | None = None) -> list[Version]:
        """Return what there is of a client, or of all, in the order in which it was written.

        Raises:
            StoreError: the file is damaged.
        """
        with self.whole():
            return self.found(client)

    def values(self, version: Version) -> Params:
        """Return a version's values.

        Raises:
            StoreError: they are damaged; names the client.
        """
        with self.whole():
            row = self.row(version.number, version.client, version.attempt)
        if row is None:
            raise StoreError(
                "Version {version} of what client {client!r} keeps in the run {run!r} does not "
                "fit its checksum: it is damaged. Restore it from a copy, or forget the client.",
                version=version.version,
                client=version.client,
                run=self.run,
            )
        return unpacked(self.format, row)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Flush all that is done inside to the disk at the end, or nothing of it.

        Raises:
            StoreError: the disk is full or can't be written.
        """
        with (
            raising(
                StoreError,
                "The private state of the run {run!r} cannot be written: {why}. Nothing was lost: it is as it "
                "was before. Free some space or check the rights.",
                sqlite3.Error,
                run=self.run,
            ),
            self._file.transaction("BEGIN IMMEDIATE"),
        ):
            yield

    def put(self, version: Version, row: bytes) -> None:
        """Write a row, in the place of one of the same name; its number is the next."""
        name = (version.client, version.attempt)
        self._file.query("DELETE FROM kept WHERE client = ? AND attempt = ?", name)
        self.add([(version._replace(number=0), row)])

    def named(self, client: str) -> dict[Which, Word]:
        """Return which of a client's versions the server has named: of the best round, and of the last.

        Raises:
            StoreError: the file is damaged.
        """
        found: dict[Which, Word] = {}
        with self.whole():
            for row in self._rows(f"SELECT {_NAMED} FROM words WHERE client = ?", client):
                which, *numbers, message, crc = row
                if which not in get_args(Which) or crc != _crc_of_named(self.run, client, row[:-1]):
                    raise ValueError("which versions count does not fit its checksum")
                found[which] = Word(Named(*numbers), message)
        return found

    def put_named(self, client: str, which: Which, word: Word) -> None:
        """Write which of a client's versions the server has named, in the place of what was there."""
        row = which, *word.named, word.message
        crc = _crc_of_named(self.run, client, row)
        self._file.query(
            f"INSERT OR REPLACE INTO words (client, {_NAMED}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (client, *row, crc),
        )

    def adapted(self) -> dict[str, AdaptedRow]:
        """Return by client what it adapted to last, without the values.

        Raises:
            StoreError: the file is damaged.
        """
        with self.whole():
            rows = self._file.query(f"SELECT {', '.join(AdaptedRow._fields)} FROM adapted").fetchall()
            if any(tuple(map(type, row)) != (str, int, int, int, int) for row in rows):
                raise ValueError("what names an adapted row makes no sense")
            return {row[0]: AdaptedRow._make(row) for row in rows}

    def adapted_values(self, adapted: AdaptedRow) -> Params:
        """Return what a client adapted to.

        Raises:
            StoreError: it is damaged; names the client.
        """
        with raising(
            StoreError,
            "What client {client!r} adapted to in the run {run!r} is damaged: {why}. Restore it from a "
            "copy, or let the client adapt again.",
            sqlite3.Error,
            ValueError,
            TypeError,
            SafetensorError,
            client=adapted.client,
            run=self.run,
        ):
            crc, content = self._file.query(
                "SELECT crc, content FROM adapted WHERE client = ?", adapted[:1]
            ).fetchone()
            if crc != _crc_of_adapted(self.run, adapted, content):
                raise ValueError("it does not fit its checksum")
            return load(content)

    def put_adapted(self, adapted: AdaptedRow, content: bytes) -> None:
        """Write what a client adapted to, in the place of what was there; see ``adapted_content``."""
        crc = _crc_of_adapted(self.run, adapted, content)
        self._file.query(
            "INSERT OR REPLACE INTO adapted VALUES (?, ?, ?, ?, ?, ?, ?)", (*adapted, crc, content)
        )

    def has_asked(self, name: str) -> bool:
        """Tell whether a message was served before."""
        return self._file.query("SELECT 1 FROM asked WHERE name = ?", (name,)).fetchone() is not None

    def put_asked(self, asked: ServedMessage) -> None:
        """Note a message and count it, once however often it comes."""
        if self.has_asked(asked.name):
            return
        numbers = [len(getattr(asked, kind)) for kind in Counts._fields]
        self._file.query(
            "INSERT INTO asked VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
            (asked.name, asked.time, asked.round, *numbers, " ".join(asked.splits), json.dumps(asked.scores)),
        )
        for kind in Counts._fields:
            self._file.for_each(
                "INSERT OR IGNORE INTO counts VALUES (?, 0, 0, 0)",
                ((client,) for client in getattr(asked, kind)),
            )
            self._file.for_each(
                f"UPDATE counts SET {kind} = {kind} + 1 WHERE client = ?",
                ((client,) for client in getattr(asked, kind)),
            )
        rows = ((split, json.dumps(examples, sort_keys=True)) for split, examples in asked.sums)
        self._file.for_each("INSERT INTO sums VALUES (?, ?)", rows)

    def put_left(self, name: str, uploads: int, examples: int, bytes: int) -> None:
        """Note what leaves in answer to a message, before it leaves.

        Raises:
            StoreError: it can't be written.
        """
        with self.writing():
            self._file.query(
                "UPDATE asked SET uploads = ?, examples = ?, bytes = ? WHERE name = ?",
                (uploads, examples, bytes, name),
            )

    def log(self) -> list[LogLine]:
        """Return the messages that were served, in their order.

        Raises:
            StoreError: the file is damaged.
        """
        with self.whole():
            return [
                LogLine._make(row)._replace(scores=tuple(Score(*one) for one in json.loads(scores)))
                for scores, *row in self._rows(f"SELECT scores, {', '.join(LogLine._fields)} FROM asked")
            ]

    def counts(self) -> dict[str, Counts]:
        """Return by client how often it was asked for what.

        Raises:
            StoreError: the file is damaged.
        """
        rows = self._rows(f"SELECT client, {', '.join(Counts._fields)} FROM counts")
        return {row[0]: Counts._make(row[1:]) for row in rows}

    def sums(self, split: str) -> list[dict[str, int]]:
        """Return whose examples of a part were in sums that left, and how many; clients by their hash.

        Raises:
            StoreError: the file is damaged.
        """
        with self.whole():
            return [
                json.loads(row[0]) for row in self._rows("SELECT examples FROM sums WHERE split = ?", split)
            ]

    def _rows(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.whole():
            return self._file.query(text, values).fetchall()

    def parts(self) -> dict[str, dict[bytes, int]]:
        """Return by client in which part each example is, by its hash; see ``remote.parts``.

        Raises:
            StoreError: they are damaged.
        """
        found = dict[str, dict[bytes, int]]()
        with self.whole():
            for client, crc, content in self._file.query(
                "SELECT client, crc, parts FROM examples"
            ).fetchall():
                if crc != zlib.crc32(content, zlib.crc32(client.encode())) or len(content) % EXAMPLE:
                    raise ValueError(f"the parts of the examples of {client!r} do not fit their checksum")
                each = (content[k : k + EXAMPLE] for k in range(0, len(content), EXAMPLE))
                found[client] = {one[:-1]: one[-1] for one in each}
        return found

    def clients(self) -> set[str]:
        """Return of whom anything is kept: values, examples, or that they began with another run's states.

        Raises:
            StoreError: the file is damaged.
        """
        began = {client for client in self.about.began if not _HASH.fullmatch(client)}
        kept = {str(version.client) for version in self.versions()} | self.adapted().keys()
        return kept | self.parts().keys() | began

    def put_parts(self, parts: Mapping[str, Mapping[bytes, int]]) -> None:
        """Write in which part each example of some clients is.

        Raises:
            StoreError: it can't be written; nothing has changed.
        """
        with self.writing():
            self._file.for_each(INSERT_PARTS, list(_rows_of(parts)))

    def forget(self, clients: Collection[str]) -> int:
        """Remove all of these clients, from the log too, and their secrets of sums; return how many versions that were.

        Raises:
            StoreError: it can't be written to the end.
        """
        wipe_rest(self.path, [sum_of(self.path, client) for client in clients])
        gone = [version.number for version in self.versions() if version.client in clients]
        with self.writing():
            self.drop(gone)
            for table in ("examples", "words", "adapted", "counts"):
                self._file.for_each(
                    f"DELETE FROM {table} WHERE client = ?", ((client,) for client in clients)
                )
        if some := [client for client in self.about.began if client in clients]:
            began = [hashed(client) if client in some else client for client in self.about.began]
            self.write_about(replace(self.about, began=began))
        self._empty_log()
        return len(gone)

    def copy_to(self, path: Path) -> None:
        """Write a whole copy of the file, in the place of what is there; every value is looked at before.

        The secrets of secure sums are not in it: they are to be used once.

        Raises:
            StoreError: a value is damaged, or the copy can't be written; what was at its place is as it was.
        """
        for version in self.versions():
            self.values(version)
        for adapted in self.adapted().values():
            self.adapted_values(adapted)
        part = beside(path)
        try:
            self._empty_log()
            private_folder(path.parent)
            with open(os.open(part, NEW_FILE, PRIVATE_FILE), "wb") as copy, open(self.path, "rb") as file:
                shutil.copyfileobj(file, copy)
                copy.flush()
                os.fsync(copy.fileno())
            os.replace(part, path)
            sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                wipe(part)
            raise StoreError(
                "The copy {path} cannot be written: {why}. Free some space or check the rights.",
                path=path,
                why=error.strerror or error,
            ) from error

    def _empty_log(self) -> None:
        """Move all that was committed into the file itself.

        Raises:
            StoreError: it can't be.
        """
        with raising(
            StoreError,
            "The log of the run {run!r} cannot be emptied: {why}. Try again.",
            sqlite3.Error,
            run=self.run,
        ):
            (busy, *_) = self._file.query("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise StoreError(
                "The log of the run {run!r} cannot be emptied: it is in use. Try again.", run=self.run
            )

    def whole(self) -> AbstractContextManager[None]:
        """Say that the file can't be read where it is damaged. The error may leave the device, so it does not say where."""
        return raising(
            StoreError,
            "The private state of the run {run!r} cannot be read: {why}. Restore it from a copy, or forget it.",
            OSError,
            sqlite3.Error,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            run=self.run,
        )

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._lock.release()


def packed(format: RowFormat, values: Mapping[str, torch.Tensor], client: str) -> bytes:
    """Return values, each (*shape), as a row.

    Raises:
        StoreError: names, shapes or dtypes differ, or one is not finite.
    """
    if fault := difference_of_names((str(column[0]) for column in format.columns()), values):
        raise StoreError(
            "The private values of client {client!r} have other names than are kept: {fault}.",
            client=client,
            fault=fault,
        )
    rows = format.pack({name: value.unsqueeze(0) for name, value in values.items()}, 1)
    if (bad := format.nonfinite(rows)) is not None:
        raise StoreError(
            "Private {name!r} of client {client!r} holds a NaN or an infinity; only finite values are kept.",
            name=bad[1],
            client=client,
        )
    return rows.tobytes()


def unpacked(format: RowFormat, row: bytes) -> Params:
    """Return the values of a row, each (*shape)."""
    stacked = format.unpack(np.frombuffer(row, np.uint8).reshape(1, -1))
    return {name: value[0] for name, value in stacked.items()}


def adapted_content(values: Mapping[str, torch.Tensor], client: str) -> bytes:
    """Return what a client adapted to, as its row holds it.

    Raises:
        StoreError: a value is not finite, or they are more than a row holds.
    """
    if (name := nonfinite(dict(values))) is not None:
        raise StoreError(
            "{name!r} of client {client!r}, which adapts, holds a NaN or an infinity.",
            name=name,
            client=client,
        )
    content, _ = tensor_file(values)
    check_row(len(content))
    return content


_NAMED = "which, round, version, attempt, message, crc"


def _crc_of_named(run: str, client: str, row: Sequence[Any]) -> int:
    return zlib.crc32(json.dumps([run, client, *row]).encode())


def _crc_of_adapted(run: str, adapted: AdaptedRow, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(json.dumps([run, *adapted]).encode()))


INSERT_PARTS = "INSERT OR REPLACE INTO examples VALUES (?, ?, ?)"


def _rows_of(parts: Mapping[str, Mapping[bytes, int]]) -> Iterator[tuple[str, int, bytes]]:
    for client, each in parts.items():
        content = b"".join(name + bytes([part]) for name, part in each.items())
        yield client, zlib.crc32(content, zlib.crc32(client.encode())), content


def create(
    path: Path,
    about: FileHeader,
    rows: Iterable[tuple[Version, bytes]] = (),
    parts: Mapping[str, Mapping[bytes, int]] = {},
) -> None:
    """Make a file, whole or not at all, with its first rows; only its owner can read it, and enter its folder.

    Args:
        path: of the file.
        about: what it is of.
        rows: versions, each with its values.
        parts: by client, in which part its examples are.

    Raises:
        StoreError: it is there, or can't be written, or a client's values are more than a row holds.
    """
    if path.exists():
        raise StoreError("The run {run!r} has private states on this device already.", run=path.stem)
    check_no_log(path)
    check_row(row_bytes := RowFormat(first_values(about.columns)).bytes)
    content = _about_text(about)
    first = ("INSERT INTO about VALUES (?, ?)", (content, zlib.crc32(content.encode())))
    statements = chain(
        ((INSERT, inserted(about.run, version, row)) for version, row in rows),
        ((INSERT_PARTS, one) for one in _rows_of(parts)),
    )
    try:
        private_folder(path.parent)
        new_file(path, TABLES, row_bytes, chain([first], statements))
    except (OSError, RunError) as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "strerror", None) or cause
        raise StoreError(
            "The private state of the run {run!r} cannot be made: {why}. Free some space or check the rights.",
            run=path.stem,
            why=reason,
        ) from error


def _about_text(about: FileHeader) -> str:
    return json.dumps({"format": FORMAT, **asdict(about)})


def first_values(columns: Sequence[Sequence[Any]]) -> Params:
    """Return values of these names, types and shapes, and of no numbers."""
    return {
        name: torch.empty(tuple(shape), dtype=_DTYPES[kind], device="meta") for name, kind, shape in columns
    }


def file_of(folder: Path, run: str) -> Path:
    """Return where the states of a run lie.

    Raises:
        StoreError: the id could name another place.
    """
    if not RUN_ID.fullmatch(run):
        raise StoreError("A run's id is 1 to 64 letters, digits, '-' and '_'; got {run!r}.", run=run)
    return folder / f"{run}{ENDING}"


def sum_of(path: Path, client: str) -> Path:
    """Return where a client's secrets of secure sums lie, beside the states of a run."""
    return path.with_name(f"{path.stem}.{hashed(client)}{SUM}")


def hashed(client: str) -> str:
    """Return the hash that stands for a client where its id is not to be read: 32 hexadecimal digits."""
    return hashlib.sha256(client.encode()).hexdigest()[:32]


def runs_in(folder: Path) -> list[str]:
    """Return the ids of the runs that have states in a folder, or of which anything is left."""
    found = {match[1] for path in folder.iterdir() if (match := OURS.fullmatch(path.name))}
    begun = {path.name.partition(".")[0] for path in leftovers(folder)}
    return sorted(found | {run for run in begun if RUN_ID.fullmatch(run)})


def files_of(path: Path) -> list[Path]:
    """Return what is there of a run: its file first."""
    sums = sorted(path.parent.glob(f"{path.stem}.*{SUM}"))
    parts = leftovers(path.parent, _begin(path))
    return [*([path] if path.exists() else []), *logs_of(path), *sums, *parts]


def remove(path: Path, patience: float = PATIENCE) -> list[Path]:
    """Remove a run's states with all that lies beside them, also damaged ones; return what was removed.

    The file loses its values first and goes last, so that after a kill the run is still listed, and is served no more.

    Raises:
        StoreError: another process has them, or they can't be removed.
    """
    with locked(path, patience) as lock:
        gone = files_of(path)
        rest = [one for one in gone if one != path]
        if path in gone:
            _try(overwrite, path)
        wipe_rest(path, rest)
        if path in gone:
            _try(Path.unlink, path)
    Path(lock.lock_file).unlink(missing_ok=True)
    return gone


def forget_rest(path: Path, clients: Collection[str], patience: float = PATIENCE) -> None:
    """Remove what is left of clients of a run whose file is gone.

    Raises:
        StoreError: its log is there, which may hold values of all clients; another process has it, or a file can't be
            removed.
    """
    if logs_of(path):
        raise StoreError(
            "The log of the run {run!r} is there without its file, and may hold values of any client. Restore "
            "the file from a copy, or forget the run: --run {run}",
            run=path.stem,
        )
    with locked(path, patience) as lock:
        wipe_rest(path, [sum_of(path, client) for client in clients])
    Path(lock.lock_file).unlink(missing_ok=True)


def wipe_rest(path: Path, files: Iterable[Path] = ()) -> None:
    """Remove what a kill has left of a run's files that were being written, and these files too; under its lock.

    Raises:
        StoreError: one can't be removed.
    """
    _try(lambda one: wipe_leftovers(one.parent, _begin(one)), path)
    for one in files:
        if one.exists():
            _try(wipe, one)


def check_no_log(path: Path) -> None:
    """Raise StoreError if a log is there without its file."""
    if logs_of(path):
        raise StoreError(
            "The private state of the run {run!r} is missing, and its log is there. Restore it from a copy, or "
            "forget it.",
            run=path.stem,
        )


def locked(path: Path, patience: float) -> Lock:
    """Return a run's lock, held.

    Raises:
        BusyError: another process has it.
        StoreError: it can't be taken.
    """
    with (
        raising(
            StoreError,
            "The private state of the run {stem!r} cannot be locked: {why}.",
            OSError,
            stem=path.stem,
        ),
        raising(
            BusyError,
            "The private state of the run {stem!r} is in use by another process. Wait for it.",
            Timeout,
            stem=path.stem,
        ),
    ):
        return take_lock(path.with_suffix(".lock"), patience, PRIVATE_FILE)


def _begin(path: Path) -> str:
    """Return what the names of a run's files begin with."""
    return f"{path.stem}."


def _try(act: Callable[[Path], None], path: Path) -> None:
    try:
        act(path)
    except OSError as error:
        raise StoreError(
            "{file} cannot be removed: {why}. Check the rights, and try again.",
            file=error.filename or path,
            why=error.strerror,
        ) from error
