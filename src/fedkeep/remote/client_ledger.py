"""What a server knows of clients on other machines: who they are, which of their versions count, what it has asked.

The lines of the ledger go to the clients' devices with their orders. A share, which tells of the others' numbers of
examples, stands in them only where clients accept by it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.data.ids import Ids, check_ids
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.store import Line, VersionLedger
from fedkeep.store.versions import CLOCK_NONCE_BITS, new_attempt

AHEAD = 600_000
"""Milliseconds of attempts that are kept free at a time: ten minutes."""


class Attempts:
    """Gives attempts their numbers, which ascend over all starts of a run's server.

    They are the clock's milliseconds and a nonce, so that what lies between two of them says no more than when they
    came. Where the clock was set back, ``run.json`` keeps a time that none has passed.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.last = self.free = int(directory.read_info().get("attempts", 0))

    def __call__(self) -> int:
        """Return a number that no message of the run had: larger than all before."""
        self.last = max(self.last + 1, time.time_ns() // 1_000_000)
        if self.last > self.free:
            self.free = self.last + AHEAD
            self.directory.write_info({**self.directory.read_info(), "attempts": self.free})
        return new_attempt(self.last, CLOCK_NONCE_BITS)


def first_after(attempts: int) -> int:
    """Return what the attempts of a server that is started again are no less than, and all before are less than.

    Args:
        attempts: as ``run.json`` has them.
    """
    return (attempts + 1) << CLOCK_NONCE_BITS


@dataclass(frozen=True)
class RunClients:
    """The clients of a run, by id, and which of them have examples to train on."""

    ids: Ids
    counts: Sequence[Mapping[str, int]]
    keys: Sequence[str] = ()
    """Of each client, what stands for the key that it belongs to; none where the link knows no keys."""
    joined: Sequence[tuple[int, int]] = ()
    """Rounds at which clients joined, ascending, each with how many there were before; later ones stand behind."""

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, client: str) -> int:
        """Return a client's place."""
        place = self.ids.position(client)
        if place < 0:
            raise ConfigError(
                "Client {client!r} is none of this run's {count} clients.", client=client, count=len(self)
            )
        return place

    @property
    def trains(self) -> np.ndarray:
        """The places of those who train."""
        return np.flatnonzero([counts.get("train", 0) > 0 for counts in self.counts])

    @property
    def first(self) -> int:
        """How many clients the run began with."""
        return self.joined[0][1] if self.joined else len(self)

    @property
    def drawn(self) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """The places of those who train from the first round on, and from each later one, as for ``Sampler``."""
        trains, sizes = self.trains, [*(before for _, before in self.joined[1:]), len(self)]
        later = [(at, trains[trains < size]) for (at, _), size in zip(self.joined, sizes, strict=False)]
        return trains[trains < self.first], later

    def grown(
        self, counts: Mapping[str, Mapping[str, int]], owners: Mapping[str, str], round: int
    ) -> RunClients:
        """Return it with more clients, who may be drawn from a round on."""
        new = RunClients.of(counts, owners)
        keys = [*(self.keys or [""] * len(self)), *(new.keys or [""] * len(new))]
        return replace(
            self,
            ids=check_ids([*self.ids, *new.ids]),
            counts=[*self.counts, *new.counts],
            keys=keys if any(keys) else (),
            joined=[*self.joined, (round, len(self))],
        )

    def plain(self) -> dict[str, Any]:
        """Return it for ``run.json``."""
        keys: dict[str, Any] = {"keys": list(self.keys)} if self.keys else {}
        joined = {"joined": [list(one) for one in self.joined]} if self.joined else {}
        return {"ids": list(self.ids), "counts": [dict(counts) for counts in self.counts], **keys, **joined}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunClients:
        """Return what ``plain`` gave."""
        joined = [(int(at), int(before)) for at, before in plain.get("joined", ())]
        return cls(check_ids(plain["ids"]), plain["counts"], plain.get("keys", ()), joined)

    @classmethod
    def of(cls, counts: Mapping[str, Mapping[str, int]], owners: Mapping[str, str]) -> RunClients:
        """Return the roster of clients, by id, in an order that no node decides."""
        ids = sorted(counts)
        keys = [owners.get(client, "") for client in ids]
        return cls(check_ids(ids), [counts[client] for client in ids], keys if any(keys) else ())

    def listed(self, listed: Listed | None) -> RunClients:
        """Return it as the owner lists clients now; None: as it is."""
        if listed is None:
            return self
        return replace(self, keys=[listed.key(client) or "" for client in map(str, self.ids)])

    @property
    def owners(self) -> dict[str, str]:
        """By client, the key that it belongs to."""
        return dict(zip(self.ids, self.keys, strict=True)) if self.keys else {}


@dataclass(frozen=True)
class Ledger:
    """The lines of clients, by id.

    Attributes:
        versions: where they stand.
        roster: gives each id its place there.
        by_share: whether the method's clients accept by their share (``Client.accept``).
    """

    versions: VersionLedger
    roster: RunClients
    by_share: bool = False

    def entries(self, clients: Sequence[str]) -> dict[str, Line]:
        """Return clients' lines by id."""
        lines = self.versions.of([self.roster.index(client) for client in clients]).by_client()
        return dict(zip(clients, lines.values(), strict=True))

    def accept(self, shares: Mapping[str, float], attempts: Mapping[str, int]) -> None:
        """Note that these clients' staged states count, given z of each, and the attempt that made it."""
        places = [self.roster.index(client) for client in shares]
        told = list(shares.values()) if self.by_share else None
        self.versions.accept(places, [attempts[client] for client in shares], told)


@dataclass(frozen=True)
class Listed:
    """The clients of nodes.

    Attributes:
        clients: names of clients and globs, by what stands for a node's key at the link (``Transport.key``).
    """

    clients: Mapping[str, Sequence[str]]

    def keys(self, client: str) -> tuple[str, ...]:
        """Return the keys that a client is listed for: by its name if anywhere, else by globs. It is whose it is if one."""
        by_name = tuple(key for key, names in self.clients.items() if client in names)
        return by_name or tuple(
            key for key, globs in self.clients.items() if any(fnmatchcase(client, glob) for glob in globs)
        )

    def key(self, client: str) -> str | None:
        """Return the one key that a client is listed for; None: it is for none, or for several."""
        found = self.keys(client)
        return found[0] if len(found) == 1 else None

    def instead(self, client: str) -> str:
        """Return for whom a client is listed, where it is not for the node that claims it."""
        return ("no node", "another node", "several nodes")[min(2, len(self.keys(client)))]
