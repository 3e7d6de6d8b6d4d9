"""The clients of a run across machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.data.ids import Ids, check_ids


@dataclass(frozen=True)
class Roster:
    """The clients of a run, by id, and which of them have examples to train on."""

    ids: Ids
    counts: Sequence[Mapping[str, int]]

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, client: str) -> int:
        """Return a client's place."""
        place = self.ids.position(client)
        if place < 0:
            raise ConfigError(f"Client {client!r} is none of this run's {len(self)} clients.")
        return place

    @property
    def trains(self) -> np.ndarray:
        """The places of those who train."""
        return np.flatnonzero([counts.get("train", 0) > 0 for counts in self.counts])

    def plain(self) -> dict[str, Any]:
        """Return it for ``run.json``."""
        return {"ids": list(self.ids), "counts": [dict(counts) for counts in self.counts]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Roster:
        """Return what ``plain`` gave."""
        return cls(check_ids(plain["ids"]), plain["counts"])

    @classmethod
    def of(cls, counts: Mapping[str, Mapping[str, int]]) -> Roster:
        """Return the roster of clients, by id, in an order that no node decides."""
        ids = sorted(counts)
        return cls(check_ids(ids), [counts[client] for client in ids])
