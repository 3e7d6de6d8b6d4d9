"""What a server knows of each client's private state: how many of its rounds count, and which attempt made the last.

It is a log: a line for each round, appended to the run's folder and committed with the run's records. In memory it is
arrays, of which only pages that are written take memory. No private value is in it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from fedkeep.core.errors import RunError

ClientIndices = Sequence[int] | np.ndarray
NONCE_BITS = 31
"""Of the name of an attempt, drawn anew for each, below the number of its round from 1.

So what was staged by a process that was killed, or by one that goes on with another copy of the run, has another name.
"""
CLOCK_NONCE_BITS = 20
"""Of one whose name has the clock's milliseconds in place of a round: these take 41 bits of the 63, and tell apart, too."""


def new_attempt(number: int, bits: int = NONCE_BITS) -> int:
    """Return the name of a new attempt, in [1, 2⁶³): a number of at least 1 that ascends, and a nonce below it."""
    return number << bits | secrets.randbits(bits)


class Line(NamedTuple):
    """What the ledger says of one client; see ``LedgerLines``."""

    version: int = 0
    attempt: int = 0
    share: float = 0.0


class Named(NamedTuple):
    """Which of a client's versions counted after a round, as a server names it to the client's device.

    Attributes:
        round: how many rounds were finished.
        version, attempt: as of ``Line``.
    """

    round: int
    version: int = 0
    attempt: int = 0


class LedgerLines(NamedTuple):
    """Lines of the ledger, one for each client, each (clients,).

    Attributes:
        clients: their places.
        version: how many of their rounds count; 0: they have default values.
        attempt: the name of the version that counts: the attempt that made it; 0: there is none.
        share: z = c_k / Σ c of the round that made it, where clients accept by it (FURL eq. 6); else 0. It tells of the
            others' numbers of examples, so it stands nowhere else.
    """

    clients: np.ndarray
    version: np.ndarray
    attempt: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, lines: Mapping[int, Line]) -> LedgerLines:
        """Return the lines of clients, by place."""
        columns = zip(*lines.values(), strict=True) if lines else ((), (), ())
        version, attempt, share = columns
        return cls(
            np.array(list(lines), np.int64),
            np.array(version, np.uint32),
            np.array(attempt, np.int64),
            np.array(share, np.float64),
        )

    def by_client(self) -> dict[int, Line]:
        """Return each client's line, by place."""
        columns = (column.tolist() for column in self)
        return {client: Line(*line) for client, *line in zip(*columns, strict=True)}

    def some(self, rows: np.ndarray) -> LedgerLines:
        """Return some of them."""
        return LedgerLines(*(column[rows] for column in self))


class VersionLedger:
    """The lines of all clients, by place.

    Args:
        clients: how many there are.
    """

    def __init__(self, clients: int) -> None:
        self._version, self._attempt = np.zeros(clients, np.uint32), np.zeros(clients, np.int64)
        self._share = np.zeros(clients)
        self._new: list[dict[str, Any]] = []

    def of(self, clients: ClientIndices | np.ndarray) -> LedgerLines:
        """Return the lines of some clients."""
        at = np.asarray(clients, np.int64).reshape(-1)
        return LedgerLines(at, self._version[at], self._attempt[at], self._share[at])

    def seen(self) -> LedgerLines:
        """Return the lines of all clients of whom a round counts."""
        return self.of(np.flatnonzero(self._version))

    def accept(
        self, clients: ClientIndices, attempts: Sequence[int], shares: Sequence[float] | None = None
    ) -> LedgerLines:
        """Note that what these clients staged in these attempts counts; return their lines.

        Args:
            clients: their places, each once.
            attempts: of each.
            shares: of each, as in ``LedgerLines``; None: clients do not accept by them, or were told already.
        """
        told = [None] * len(clients) if shares is None else list(shares)
        for attempt, some in groupby(zip(clients, attempts, told, strict=True), key=lambda one: one[1]):
            rows = list(some)
            line = {"attempt": attempt, "clients": [int(client) for client, _, _ in rows]}
            self._new.append(line if shares is None else line | {"shares": [share for _, _, share in rows]})
        self._note(np.asarray(clients, np.int64), attempts, shares)
        return self.of(clients)

    def at(self, content: bytes) -> VersionLedger:
        """Return what a run had committed of these clients when its ledger was so long."""
        then = VersionLedger(len(self._version))
        then.read(content)
        return then

    def copy(self) -> VersionLedger:
        """Return the lines as they are now; what is noted later does not change them."""
        then = VersionLedger(0)
        then._version, then._attempt = self._version.copy(), self._attempt.copy()
        then._share = self._share.copy()
        return then

    def _note(self, at: np.ndarray, attempts: Any, shares: Sequence[float] | None) -> None:
        self._version[at] += 1
        self._attempt[at] = attempts
        if shares is not None:
            self._share[at] = shares

    def written(self) -> bytes:
        """Return what is noted and not committed, as lines of JSON."""
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in self._new).encode()

    def committed(self) -> None:
        """Take what was written as durable."""
        self._new = []

    def read(self, content: bytes) -> None:
        """Take over what a run has committed before.

        Raises:
            RunError: it is damaged, or of other clients.
        """
        try:
            for line in content.splitlines():
                found = json.loads(line)
                clients = np.array(found["clients"], np.int64)
                if (clients < 0).any() or found["attempt"] <= 0:
                    raise ValueError("a line is of nobody")
                self._note(clients, found["attempt"], found.get("shares"))
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise RunError(
                "The run's ledger.jsonl is damaged: {why}. Restore the run from a copy.",
                why=error,
            ) from error
