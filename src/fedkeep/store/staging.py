"""What clients would keep of the round that is on its way: staged in the store until the server's word comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default


class Staging(ABC):
    """The part of every store that holds staged versions.

    Attributes:
        default: gives the names of what is kept.
    """

    default: Default

    def __init__(self) -> None:
        self._staged: dict[int, Mapping[str, Tensor]] = {}

    @abstractmethod
    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Write the clients' new values, each (clients, *shape)."""

    def stage(self, client: int, params: Mapping[str, Tensor]) -> None:
        """Stage what a client would keep, each (*shape); not read before it is accepted, and not copied."""
        self._staged[client] = params

    def staged(self, clients: ClientIndices) -> Params:
        """Return what the clients staged, stacked, on the CPU, each (clients, *shape)."""
        rows = [self._staged[c] for c in clients]
        return {name: torch.stack([row[name] for row in rows]).cpu() for name in self.default.initial}

    def accept(self, clients: ClientIndices, params: Mapping[str, Tensor] | None = None) -> None:
        """Write what the clients staged, or ``params`` in its place, each (clients, *shape); drop all others'."""
        if len(clients):
            self.write(clients, self.staged(clients) if params is None else params)
        self._staged = {}
