"""What clients keep on their device, in step with the server: staged before an answer leaves, accepted by its word.

The server's order has a line of its ledger, which names a version of a client's state. On the device that very version is

- accepted: the client begins with it;
- staged: the server has taken the upload that was made beside it, so it is accepted now, by the method's rule
  (``Client.accept``; FURL eq. 6 wants the client's share);
- not there: an error, and nothing is reset.

What a message changes, for all clients of a device, is one transaction. Until it is done everything is as before, so a
device that is killed at any instant answers the same order again.

Of each client the device keeps the version accepted last, ``history`` accepted ones before it, so that a server that
goes back to an older round can be followed, and the attempts staged after it: ``STAGED`` at most, as a late repetition
of an old message must not push out the attempt that the server has taken. Clients that no line names are kept as found.

And it keeps the version of the best round. As in a simulation a run is of its best round on ``valid``; which that is the
server knows after judging, so every order names it, with the client's version then (``Named``):

- the device keeps that version, whatever follows it, until a later message names another: one more at most;
- an older message than the last that named one (they ascend) changes nothing; a server that goes back gives new ones;
- a version that is named and is not here is told of once. Nothing is reset, and training goes on;
- ``counted`` finds what counted after a published round: named for the best, else the last, else it says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params
from fedkeep.methods import Kept, newest
from fedkeep.methods.client import accepted
from fedkeep.remote.device_file import (
    PATIENCE,
    AdaptedRow,
    DeviceFile,
    ServedMessage,
    Which,
    Word,
    adapted_content,
    file_of,
    packed,
    unpacked,
)
from fedkeep.store import Default, LedgerLines, Line, MemoryStore, Named
from fedkeep.store.database import check_row
from fedkeep.store.rows import RowFormat
from fedkeep.store.version_file import Version

STAGED = 4
OnMissing = Literal["refuse", "older", "anew"]
Accept = Callable[[Kept, Kept, float], Kept]
RolledBack = Sequence[Sequence[int]]
"""Rounds that a server was rolled back to, each with the first attempt that it could make after it; in that order."""


class MissingError(StoreError):
    """A version that an order names is not on this device.

    Attributes:
        late: the last attempt of which a message that names it is older than what is there.
    """

    def __init__(self, text: str, /, late: int = 0, **facts: Any) -> None:
        super().__init__(text, **facts)
        self.late = late


@dataclass(frozen=True)
class _Begun:
    """What a client begins with.

    Attributes:
        line: that names it.
        values: None: the default's.
        accepted: the version, where it is accepted with this message and not in the file yet.
    """

    line: Line
    values: Params | None = None
    accepted: Version | None = None


class DeviceStore(MemoryStore):
    """Private states of a device's clients in one run: in memory what a message is about, all else in the file.

    ``create`` or ``migrated`` makes the file.

    Args:
        folder: where the file is.
        owner: whose device it is.
        run: the run's id.
        default: gives the values, names, shapes and dtypes of a client without any version.
        ids: of the clients that the device has data of; a client's index is its position.
        history: how many accepted versions are kept beside the last one.
        accept: the method's rule, ``Client.accept``.
        patience: seconds to wait for another process that serves a message of the same run.

    Attributes:
        asked: the message that is served; noted with the next ``flush``.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        run: str,
        default: Default,
        ids: Sequence[str],
        *,
        history: int = 1,
        accept: Accept = newest,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(default, ids)
        self.folder, self.owner, self.run, self.patience = folder, owner, run, patience
        self.history, self.accept = history, accept
        self._format = RowFormat(default.initial)
        self._begun: dict[int, _Begun] = {}
        self._new: dict[int, tuple[Version, bytes]] = {}
        self._words: dict[int, dict[Which, Word]] = {}
        self._adapted: dict[int, tuple[AdaptedRow, bytes]] = {}
        self._file: DeviceFile | None = None
        self.asked: ServedMessage | None = None

    def open(self) -> None:
        """Take hold of the file.

        Raises:
            StoreError: the state is missing, damaged, of another owner, run or model, in use, or can't be written;
                or a client's values are more than a row holds.
        """
        check_row(self._format.bytes)
        file = DeviceFile(file_of(self.folder, self.run), self.owner, self.patience)
        wanted = self._format.columns()
        if file.about.columns != wanted:
            file.close()
            raise StoreError(
                "The private state of the run {run!r} was made for other private values: wanted {wanted}, found "
                "{columns}. Use the model that it was made with.",
                run=self.run,
                wanted=wanted,
                columns=file.about.columns,
            )
        self._file = file

    @property
    def is_open(self) -> bool:
        """Whether it has hold of the file."""
        return self._file is not None

    @property
    def file(self) -> DeviceFile:
        """The file, which must be open."""
        if self._file is None:
            raise StoreError("The private state of the run {run!r} is not open.", run=self.run)
        return self._file

    def begin(self, lines: LedgerLines) -> None:
        """Let the versions that the server's ledger names count; a staged one is accepted with the next ``flush``.

        Raises:
            MissingError: there is no such version; says which there are.
            StoreError: it is damaged; names the client. Nothing is changed.
        """
        late = {client: line for client, line in lines.by_client().items() if not self._counts(client, line)}
        found = {client: self._named(client, line) for client, line in late.items()}
        for client, begun in found.items():
            self._begin(client, begun)

    def name(self, client: int, last: Named | None, best: Named | None, message: int) -> str:
        """Note which of a client's versions count, as a message says: durable with the next ``flush``.

        Args:
            client: who has begun.
            last: after the last round; None: the message says nothing of that.
            best: after the best round so far, which is kept from now on; None: there is none.
            message: its attempt. One that is older than the last that was noted changes nothing.

        Returns:
            What is missing here, for the device's owner; empty: nothing, or it was told before.
        """
        who = self._id(client)
        known = self.file.named(who)
        if message < max((word.message for word in known.values()), default=0):
            return ""
        told: list[tuple[Which, Named | None]] = [("last", last), ("best", best)]
        words = {which: Word(one, message) for which, one in told if one is not None}
        news = {which: word for which, word in words.items() if word != known.get(which)}
        if news:
            self._words[client] = news
        if best is None or ("best" in known and known["best"].named == best) or self._has(client, best):
            return ""
        return (
            f"Version {best.version} of what client {who!r} keeps in the run {self.run!r}, that of the best round "
            f"{best.round}, is not on this device. Until a better round comes it uses its last one."
        )

    def _has(self, client: int, one: Named) -> bool:
        """Tell whether a version can be had from this device: where no round counts that may be the default."""
        who = self._id(client)
        if one.attempt == self._line(client).attempt or not (one.version or self.file.about.has_begun(who)):
            return True
        return _version(self.file.versions(who), one.attempt) is not None

    def begin_anew(self, client: int, line: Line) -> None:
        """Let a new client's values become the version that the server names, with the next ``flush``."""
        self._begin_with(client, line, self.default(self._id(client)), 0)

    def begin_older(self, client: int, line: Line) -> Version | None:
        """Let what was accepted last here become the version that the server names, with the next ``flush``.

        Returns:
            What that was; None: nothing as old is here, and nobody has begun.
        """
        older = last_accepted(self.file.versions(self._id(client)), line.version)
        if older is not None:
            self._begin_with(client, line, self.file.values(older), older.round)
        return older

    def _begin_with(self, client: int, line: Line, values: Params, round: int) -> None:
        made = Version(0, self._id(client), line.version, line.attempt, 0, round, accepted=True)
        self._begin(client, _Begun(line, values, made))

    def _begin(self, client: int, begun: _Begun) -> None:
        self._begun[client] = begun
        self._new.pop(client, None)
        self._rows.pop(client, None)
        if begun.values is not None:
            self._rows[client] = begun.values

    def _counts(self, client: int, line: Line) -> bool:
        """Tell whether a version counts in this message already."""
        return client in self._begun and self._begun[client].line == line

    def _named(self, client: int, line: Line) -> _Begun:
        """Return what a client keeps of the version that a line names."""
        who = self._id(client)
        if line.version == 0 and not self.file.about.has_begun(who):
            return _Begun(line)
        rows = self.file.versions(who)
        fresh = self._new.get(client)
        if fresh is not None and fresh[0].attempt == line.attempt:
            row, values = fresh[0], self._unpacked(fresh[1])
        else:
            there = _version(rows, line.attempt)
            if there is None:
                late = max((made.attempt - (not made.accepted) for made in rows), default=0)
                raise self._not_there(who, line, rows, late)
            row, values = there, self.file.values(there)
        if row.accepted:
            return _Begun(line, values)
        if self.accept is not newest:
            whose = f"{who!r} in round {row.round}"
            values = accepted(self.accept, self._before(client, row, rows), values, line.share, whose)
            self._packed(client, values)  # it can be kept
        return _Begun(line, values, row._replace(accepted=True))

    def _before(self, client: int, row: Version, rows: Sequence[Version]) -> Params:
        """Return what a staged version was trained from."""
        begun = self._begun.get(client)
        if begun is not None and begun.line.attempt == row.parent and row.number == 0:
            return {name: value[0] for name, value in self.read([client]).items()}
        parent = _version(rows, row.parent)
        if parent is None or not parent.accepted:
            raise StoreError(
                "Version {before} of what client {client!r} keeps in the run {run!r} is gone, and "
                "version {version} follows from it. Restore the state from a copy.",
                before=row.version - 1,
                client=row.client,
                run=self.run,
                version=row.version,
            )
        return self.file.values(parent)

    def _not_there(self, client: str, line: Line, rows: Sequence[Version], late: int) -> MissingError:
        def told(version: Version) -> str:
            how = "accepted" if version.accepted else "staged"
            return f"{version.version} (round {version.round}, {how})"

        there = ", ".join(map(told, rows)) if rows else "none"
        same = " of another attempt" if any(row.version == line.version for row in rows) else ""
        mend, start = "Restore its state from a copy", "an older version or default values: 'older' or 'anew'"
        if rows and line.version < min(row.version for row in rows):
            mend = "The server knows less than the device: give it the newer folder of its run again"
            start = "default values: 'anew'"
        return MissingError(
            "The order wants version {version}{same} of what client {client!r} keeps in the run {run!r}; "
            "this device has {there}. {mend}, or let the client start from {start} (on_missing).",
            late,
            version=line.version,
            same=same,
            client=client,
            run=self.run,
            there=there,
            mend=mend,
            start=start,
        )

    def stage(self, client: int, params: Mapping[str, Tensor], attempt: int, round: int = 0) -> None:
        """Note what a client would keep of a round's attempt, each (*shape): durable with the next ``flush``.

        Raises:
            StoreError: names, shapes or dtypes differ, or a value is not finite.
        """
        line = self._line(client)
        made = Version(0, self._id(client), line.version + 1, attempt, line.attempt, round, accepted=False)
        self._new[client] = made, self._packed(client, params)

    def staged(self, client: int) -> Params:
        """Return what a client staged in this message."""
        return self._unpacked(self._new[client][1])

    def adapted(self, client: int) -> AdaptedRow | None:
        """Return from what a client adapted last; None: it has not."""
        return self.file.adapted().get(self._id(client))

    def adapted_values(self, adapted: AdaptedRow) -> Params:
        """Return what it adapted to.

        Raises:
            StoreError: it is damaged; names the client.
        """
        return self.file.adapted_values(adapted)

    def stage_adapted(self, client: int, values: Mapping[str, Tensor], attempt: int, round: int) -> None:
        """Note what a client adapted to: durable with the next ``flush``, in the place of the last.

        Raises:
            StoreError: a value is not finite, or they are more than a row holds.
        """
        line, who = self._line(client), self._id(client)
        made = AdaptedRow(who, line.version, attempt, line.attempt, round)
        self._adapted[client] = made, adapted_content(values, who)

    def flush(self) -> None:
        """Make what ``begin`` accepted, what was staged and what clients adapted to durable, all of it or nothing.

        Raises:
            StoreError: the disk is full or can't be written; everything is as before the message.
        """
        accepted = {client: one.accepted for client, one in self._begun.items() if one.accepted is not None}
        staged, adapted, words = self._new, self._adapted, self._words
        if not accepted and not staged and not adapted and not words and self.asked is None:
            return
        try:
            with self.file.writing():
                if self.asked is not None:
                    self.file.put_asked(self.asked)
                for found in adapted.values():
                    self.file.put_adapted(*found)
                before = dict[int, int]()  # the attempts of those that were the best
                for client, named in words.items():
                    if "best" in named and (old := self.file.named(self._id(client)).get("best")) is not None:
                        before[client] = old.named.attempt
                    for which, word in named.items():
                        self.file.put_named(self._id(client), which, word)
                for client in {**accepted, **staged, **before}:
                    self._write(client, accepted.get(client), staged.get(client), before.get(client))
        except BaseException:
            self.clear()
            raise
        self._begun = {client: _Begun(one.line, one.values) for client, one in self._begun.items()}
        self._new, self._adapted, self._words, self.asked = {}, {}, {}, None

    def _write(
        self, client: int, last: Version | None, staged: tuple[Version, bytes] | None, old: int | None
    ) -> None:
        """Write a client's versions, and remove those that are not needed any more, of which ``old`` was the best."""
        who = self._id(client)
        rows = self.file.versions(who)
        if last is not None:
            last = last._replace(number=last.number or max((row.number for row in rows), default=0))
            self.file.put(last, self._packed(client, self._rows[client]))
        if staged is not None:
            made, row = staged
            if made.version == 1 and self.accept is not newest and _version(rows, 0) is None:
                first = Version(0, who, 0, 0, 0, 0, accepted=True)  # the rule will want it
                self.file.put(first, self._packed(client, self.default(who)))
            there = _version(rows, made.attempt)
            if there is None or not there.accepted:  # a late repetition changes nothing
                self.file.put(made, row)
        after = self.file.versions(who)
        best = self.file.named(who).get("best")
        keep = survivors(after, last, self.history, None if best is None else best.named.attempt, old)
        self.file.drop(version.number for version in after if version not in keep)

    def drop(self) -> None:
        """Forget what was staged and does not count."""
        self._new, self._adapted = {}, {}

    def clear(self) -> None:
        """Forget all of a message that is not in the file; nobody has begun."""
        self._begun, self._rows, self._words = {}, {}, {}
        self.drop()

    def close(self) -> None:
        """Let go of the file."""
        self.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _id(self, client: int) -> str:
        return str(self.ids[client])

    def _line(self, client: int) -> Line:
        return self._begun[client].line if client in self._begun else Line()

    def _packed(self, client: int, values: Mapping[str, Tensor]) -> bytes:
        return packed(self._format, values, self._id(client))

    def _unpacked(self, row: bytes) -> Params:
        return unpacked(self._format, row)


def survivors(
    rows: Sequence[Version],
    accepted: Version | None,
    history: int,
    best: int | None = None,
    old: int | None = None,
) -> list[Version]:
    """Return which of a client's versions stay.

    Where one was accepted just now: it, the ``history`` accepted ones that led to it, that of the ``best`` round, by its
    attempt, and what was staged later. Else all accepted ones but that of the round that was the best before (``old``),
    if the last does not need it. Of the staged ones the last ``STAGED`` stay.

    Args:
        rows: all there are.
        accepted: which was accepted just now; None: none was.
        history, best, old: as above.
    """
    staged = [row for row in rows if not row.accepted]
    kept = [row for row in rows if row.accepted]
    last = max(kept, key=lambda row: row.number, default=None)
    if accepted is not None:
        last = _version(kept, accepted.attempt)
        staged = [row for row in staged if row.number > accepted.number]
    line = [last] if last is not None else []
    while line and len(line) <= history and line[-1].version > 0:
        parent = _version(kept, line[-1].parent)
        if parent is None or parent.version != line[-1].version - 1:
            break
        line.append(parent)
    if accepted is None:
        return [row for row in kept if row.attempt != old or row in line or old == best] + staged[-STAGED:]
    pinned = None if best is None else _version(kept, best)
    if pinned is not None and pinned not in line:
        line.append(pinned)
    return line + staged[-STAGED:]


def stands(round: int, attempt: int, rolled_back: RolledBack) -> bool:
    """Tell whether what an attempt gave for the state after a round was not taken back since."""
    return not any(round > to and attempt < first for to, first in rolled_back)


def counted(
    file: DeviceFile, client: str, round: int, rolled_back: RolledBack = ()
) -> tuple[Version | None, str]:
    """Return the version of a client that counted after a round, and what is to be said where that is not certain.

    It is the one that the server has named of the round, as the best or the last. One that it named of an earlier round
    still counted then, unless the client has trained since for a round before, of which no word has come.

    Args:
        file: what the device keeps.
        client: whose.
        round: how many rounds were finished.
        rolled_back: what the server has taken back up to then.

    Returns:
        None: default values counted, or the device keeps none. Else an accepted version: where the one that counted is
        not here, the last one, and a text that says so.
    """
    rows, words = file.versions(client), file.named(client).values()
    kept = [row for row in rows if row.accepted]
    standing = {row.number: stands(row.round + 1, row.attempt, rolled_back) for row in rows}
    last = max(kept, key=lambda row: (standing[row.number], row.number), default=None)
    if not words:
        return last, ""
    known = [word.named for word in words if stands(word.named.round, word.message, rolled_back)]
    named = next((one for one in known if one.round == round), None)
    if named is None:
        named = max((one for one in known if one.round < round), default=None)
        since = [
            row
            for row in rows
            if standing[row.number] and named is not None and named.round <= row.round < round
        ]
        if named is None or since or max(known).round > round:
            return last, _said(client, f"word of the version that counted after round {round}", last)
    if not named.version and not file.about.has_begun(client):
        return None, ""
    found = _version(kept, named.attempt)
    if found is None:
        return last, _said(client, f"version {named.version}, which counted after round {round},", last)
    return found, ""


def _said(client: str, what: str, last: Version | None) -> str:
    instead = (
        "default values are"
        if last is None or not last.version
        else f"that of round {last.round + 1}, the last here, is"
    )
    return f"Of client {client!r} this device does not have {what}: {instead} used."


def last_accepted(rows: Sequence[Version], most: int) -> Version | None:
    """Return what was accepted last of a client's versions up to number ``most``; None: there is none."""
    there = (row for row in rows if row.accepted and row.version <= most)
    return max(there, key=lambda row: row.number, default=None)


def _version(rows: Sequence[Version], attempt: int) -> Version | None:
    return next((row for row in rows if row.attempt == attempt), None)
