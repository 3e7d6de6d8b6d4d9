"""Private state in memory: for runs that keep nothing on disk, and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default
from fedkeep.store.staging import Staging


class MemoryStore(Staging):
    """A dict from client to values.

    Args:
        default: gives the values of a client that was never seen.
        ids: the clients' ids; a client's index is its position.
    """

    def __init__(self, default: Default, ids: Sequence[str]) -> None:
        super().__init__()
        self.default, self.ids = default, ids
        self._rows: dict[int, Params] = {}

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape)."""
        if not self.default.initial:
            return {}
        rows = [self._rows.get(int(c)) or self.default(self.ids[int(c)]) for c in clients]
        return {
            name: torch.stack([row[name] for row in rows]) if rows else value.new_empty((0, *value.shape))
            for name, value in self.default.initial.items()
        }

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Store copies of the clients' values."""
        for position, client in enumerate(clients):
            self._rows[int(client)] = {
                name: params[name][position].detach().cpu().clone() for name in self.default.initial
            }

    def accept(self, clients: ClientIndices, params: Mapping[str, Tensor] | None = None) -> None:
        """Keep what the clients staged, or ``params`` in its place, each (clients, *shape); drop all others'."""
        if params is None:
            for client in clients:
                row = self._staged[client]
                self._rows[client] = {n: row[n].detach().cpu().clone() for n in self.default.initial}
            clients = ()
        super().accept(clients, params)

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it was ever written."""
        return [int(c) in self._rows for c in clients]

    def prepare(self, round: int) -> str:
        """Do nothing: memory has no durable state."""
        return ""

    def apply(self) -> None:
        """Do nothing: writes are visible at once."""

    def recover(self, round: int, digest: str | None = None) -> None:
        """Do nothing: a process that was killed has lost its memory."""
