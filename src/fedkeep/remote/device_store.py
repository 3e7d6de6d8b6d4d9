"""What clients keep on their device, in step with the server: staged before an answer leaves, accepted by its word.

The server's order names a version of a client's state and the attempt that made it. On the device that very version is

- accepted: the client begins with it;
- staged: the server has taken the upload that was made beside it, so it is accepted now, by the method's rule
  (``Client.accept``; FURL eq. 6 wants the client's share);
- not there: an error, and nothing is reset.

What a message changes, for all clients of a device, is one transaction. Until it is done everything is as before, so a
device that is killed at any instant answers the same order again.

Of each client the device keeps the version accepted last, ``history`` accepted ones before it, so that a server that
goes back to an older round can be followed, and the attempts staged after it: ``STAGED`` at most, as a late repetition
of an old message must not push out the attempt that the server has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params
from fedkeep.methods import Kept, newest
from fedkeep.methods.client import accepted
from fedkeep.remote.device_file import Adapted, DeviceFile, Version, adapted_content
from fedkeep.remote.device_folder import PATIENCE, file_of
from fedkeep.store import Default
from fedkeep.store.database import check_row
from fedkeep.store.rows import RowFormat

STAGED = 4
Accept = Callable[[Kept, Kept, float], Kept]


class MissingError(StoreError):
    """A version that an order names is not on this device.

    Attributes:
        late: the last attempt of which a message that names it is older than what is there.
    """

    def __init__(self, text: str, late: int = 0) -> None:
        super().__init__(text)
        self.late = late


class Wanted(NamedTuple):
    """The version that an order names, see ``messages.ClientOrder``."""

    version: int = 0
    attempt: int = 0
    share: float = 0.0


NEW = Wanted()


class DeviceStore:
    """Private states of a device's clients in one run; ``create`` or ``migrate`` makes the file.

    Args:
        folder: where the file is.
        owner: whose device it is.
        run: the run's id.
        default: gives the values, names, shapes and dtypes of a client without any version.
        history: how many accepted versions are kept beside the last one.
        accept: the method's rule, ``Client.accept``.
        patience: seconds to wait for another process that serves a message of the same run.

    Raises:
        StoreError: the state is missing, damaged, of another owner, run or model, in use, or can't be written;
            or a client's values are more than a row holds.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        run: str,
        default: Default,
        *,
        history: int = 1,
        accept: Accept = newest,
        patience: float = PATIENCE,
    ) -> None:
        check_row(RowFormat(default.initial).bytes)
        self.file = DeviceFile(file_of(folder, run), owner, patience)
        self.run, self.default, self.history, self.accept = run, default, history, accept
        self._accepted: dict[str, tuple[Version, bytes]] = {}
        self._staged: dict[str, tuple[Version, bytes]] = {}
        self._adapted: dict[str, tuple[Adapted, bytes]] = {}
        wanted = columns_of(default.initial)
        if self.file.about.columns != wanted:
            self.file.close()
            raise StoreError(
                f"The private state of the run {run!r} was made for other private values: wanted {wanted}, found "
                f"{self.file.about.columns}. Use the model that it was made with."
            )

    def begin(self, client: str, wanted: Wanted = NEW) -> Params:
        """Return what a client keeps of exactly the version that the server names.

        A staged version is accepted with the next ``commit``.

        Raises:
            MissingError: there is no such version; says which there are.
            StoreError: it is damaged; names the client.
        """
        self._accepted.pop(client, None)
        rows = self.file.versions(client)
        if wanted.version == 0 and not self.file.about.has_begun(client):
            return self.default(client)
        row = _named(rows, wanted.version, wanted.attempt)
        if row is None:
            late = max((made.attempt - (not made.accepted) for made in rows), default=0)
            raise MissingError(self._not_there(client, wanted, rows), late)
        values = self.file.values(row)
        if row.accepted:
            return values
        if self.accept is not newest:
            before = self._before(client, row, rows)
            whose = f"{client!r} in round {row.round}"
            values = accepted(self.accept, before, values, wanted.share, whose)
        self._accepted[client] = row._replace(accepted=True), self.file.packed(values, client)
        return values

    def begin_anew(self, client: str, wanted: Wanted) -> Params:
        """Return a new client's values, which become the version that the server names with the next ``commit``."""
        values = self.default(client)
        made = Version(0, client, wanted.version, wanted.attempt, 0, 0, accepted=True)
        self._accepted[client] = made, self.file.packed(values, client)
        return values

    def _before(self, client: str, row: Version, rows: Sequence[Version]) -> Params:
        """Return what a staged version was trained from."""
        parent = _named(rows, row.version - 1, row.parent)
        if parent is None or not parent.accepted:
            raise StoreError(
                f"Version {row.version - 1} of what client {client!r} keeps in the run {self.run!r} is gone, and "
                f"version {row.version} follows from it. Restore the state from a copy."
            )
        return self.file.values(parent)

    def _not_there(self, client: str, wanted: Wanted, rows: Sequence[Version]) -> str:
        def told(version: Version) -> str:
            how = "accepted" if version.accepted else "staged"
            return f"{version.version} (round {version.round}, {how})"

        there = ", ".join(map(told, rows)) if rows else "none"
        same = " of another attempt" if any(row.version == wanted.version for row in rows) else ""
        mend = "Restore its state from a copy"
        if rows and wanted.version < min(row.version for row in rows):
            mend = "The server knows less than the device: give it the newer folder of its run again"
        return (
            f"The order wants version {wanted.version}{same} of what client {client!r} keeps in the run {self.run!r}; "
            f"this device has {there}. {mend}, or let the client start from default values: on_missing = 'anew'."
        )

    def stage(
        self, client: str, values: Mapping[str, Tensor], wanted: Wanted, *, round: int, attempt: int
    ) -> None:
        """Note what a client would keep after a round that began with ``wanted``: durable with the next ``commit``.

        Raises:
            StoreError: names, shapes or dtypes differ, or a value is not finite.
        """
        made = Version(0, client, wanted.version + 1, attempt, wanted.attempt, round, accepted=False)
        self._staged[client] = made, self.file.packed(values, client)

    def adapted(self, client: str) -> Adapted | None:
        """Return from what a client adapted last; None: it has not."""
        return self.file.adapted().get(client)

    def adapted_values(self, adapted: Adapted) -> Params:
        """Return what it adapted to.

        Raises:
            StoreError: it is damaged; names the client.
        """
        return self.file.adapted_values(adapted)

    def stage_adapted(
        self, client: str, values: Mapping[str, Tensor], wanted: Wanted, *, round: int, attempt: int
    ) -> None:
        """Note what a client adapted to from ``wanted``: durable with the next ``commit``, in the place of the last.

        Raises:
            StoreError: a value is not finite, or they are more than a row holds.
        """
        made = Adapted(client, wanted.version, attempt, wanted.attempt, round)
        self._adapted[client] = made, adapted_content(values, client)

    def commit(self) -> None:
        """Make what ``begin`` accepted, what was staged and what clients adapted to durable, all of it or nothing.

        Raises:
            StoreError: the disk is full or can't be written; everything is as before the message.
        """
        accepted, staged, adapted = self._accepted, self._staged, self._adapted
        self.discard()
        if not accepted and not staged and not adapted:
            return
        with self.file.writing():
            for found in adapted.values():
                self.file.put_adapted(*found)
            for client in {**accepted, **staged}:
                rows = self.file.versions(client)
                if client in accepted:
                    self.file.put(*accepted[client])
                if client in staged:
                    made, row = staged[client]
                    if made.version == 1 and self.accept is not newest and _named(rows, 0, 0) is None:
                        first = Version(0, client, 0, 0, 0, 0, accepted=True)  # the rule will want it
                        self.file.put(first, self.file.packed(self.default(client), client))
                    there = _named(rows, made.version, made.attempt)
                    if there is None or not there.accepted:  # a late repetition changes nothing
                        self.file.put(made, row)
                after = self.file.versions(client)
                last = accepted[client][0] if client in accepted else None
                keep = survivors(after, last, self.history)
                self.file.drop(version.number for version in after if version not in keep)

    def discard(self) -> None:
        """Forget what was not committed."""
        self._accepted, self._staged, self._adapted = {}, {}, {}

    def close(self) -> None:
        """Let go of the file."""
        self.discard()
        self.file.close()


def survivors(rows: Sequence[Version], accepted: Version | None, history: int) -> list[Version]:
    """Return which of a client's versions stay.

    Where one was accepted just now: it, the ``history`` accepted ones that led to it, and what was staged later. Of the
    staged ones the last ``STAGED`` stay.
    """
    staged = [row for row in rows if not row.accepted]
    kept = [row for row in rows if row.accepted]
    if accepted is not None:
        last = _named(kept, accepted.version, accepted.attempt)
        line = [last] if last is not None else []
        while line and len(line) <= history and (row := line[-1]).version > 0:
            parent = _named(kept, row.version - 1, row.parent)
            if parent is None:
                break
            line.append(parent)
        kept, staged = line, [row for row in staged if row.number > accepted.number]
    return kept + staged[-STAGED:]


def columns_of(initial: Mapping[str, Tensor]) -> list[list[object]]:
    """Return name, dtype and shape of each private value, as a file says them."""
    return RowFormat(initial).columns()


def _named(rows: Sequence[Version], version: int, attempt: int) -> Version | None:
    return next((row for row in rows if (row.version, row.attempt) == (version, attempt)), None)
