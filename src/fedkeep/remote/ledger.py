"""What a server knows of each client's private state: how many of its rounds were accepted, and which was the last.

It is kept in the store that keeps private states in a simulation, so that it is committed with each round, and a run's
folder recovers it in the same way. No private value is in it. What stands there goes to the client's device, so a
share, which tells of the others' numbers of examples, stands there only where clients accept by it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.methods import Roster
from fedkeep.store import Default, PrivateStore

COLUMNS = Default(
    {
        "version": torch.zeros((), dtype=torch.int64),
        "share": torch.zeros((), dtype=torch.float64),
        "round": torch.full((), -1, dtype=torch.int64),
        "attempt": torch.zeros((), dtype=torch.int64),
    }
)
"""What stands in the ledger of a client that was never accepted."""


AHEAD = 600_000_000
"""Numbers of attempts that are kept free at a time: microseconds, so ten minutes."""


class Attempts:
    """Gives attempts their numbers, which ascend over all starts of a run's server.

    They are the clock's microseconds, so that what lies between two of them says no more than when they came. Where the
    clock was set back, ``run.json`` keeps a number that none has passed.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.last = self.free = int(directory.read_info().get("attempts", 0))

    def __call__(self) -> int:
        """Return a number that no message of the run had: larger than all before."""
        self.last = max(self.last + 1, time.time_ns() // 1000)
        if self.last > self.free:
            self.free = self.last + AHEAD
            self.directory.write_info({**self.directory.read_info(), "attempts": self.free})
        return self.last


class Made(NamedTuple):
    """What made a client's staged state: its order's round, and the message's attempt."""

    round: int
    attempt: int


class Entry(NamedTuple):
    """A client's line.

    Attributes:
        version: how many of its rounds were accepted in this run; 0: it has default values.
        share: z = c_k / Σ c of the last accepted one, where clients accept by it; else 0.
        round: the number of that round; −1: there is none.
        attempt: of the message that it answered, see ``messages.Work``; 0: there is none.
    """

    version: int
    share: float
    round: int
    attempt: int


@dataclass(frozen=True)
class Ledger:
    """The lines of all clients.

    Attributes:
        store: where they are kept, made with ``COLUMNS``.
        roster: gives each id its place in the store.
        by_share: whether the method's clients accept by their share (``Client.accept``).
    """

    store: PrivateStore
    roster: Roster
    by_share: bool = False

    def entries(self, clients: Sequence[str]) -> dict[str, Entry]:
        """Return clients' lines by id."""
        columns = self.store.read([self.roster.index(client) for client in clients])
        lines = zip(*(columns[name].tolist() for name in Entry._fields), strict=True)
        return {client: Entry(*line) for client, line in zip(clients, lines, strict=True)}

    def accept(self, shares: Mapping[str, float], made: Mapping[str, Made]) -> None:
        """Note that these clients' staged states count, given z of each, and what made it."""
        if not shares:
            return
        before = self.entries(list(shares))
        told = list(shares.values()) if self.by_share else [0.0] * len(shares)
        columns = {
            "version": torch.tensor([entry.version + 1 for entry in before.values()]),
            "share": torch.tensor(told, dtype=torch.float64),
            "round": torch.tensor([made[client].round for client in shares]),
            "attempt": torch.tensor([made[client].attempt for client in shares]),
        }
        self.store.write([self.roster.index(client) for client in shares], columns)
