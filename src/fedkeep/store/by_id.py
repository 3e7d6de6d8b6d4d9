"""A store of one run for the clients of another: each client is found by its id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import layout
from fedkeep.core.params import Params
from fedkeep.store.base import ClientIndices, Default, PrivateStore
from fedkeep.store.memory import MemoryStore
from fedkeep.store.staging import Staging


def for_clients(store: PrivateStore, default: Default, ids: Sequence[str]) -> PrivateStore:
    """Return a store, or a view of it by id where its clients are others or stand in another order.

    Args:
        store: what was given.
        default: of the run that wants it.
        ids: that run's clients.

    Raises:
        ConfigError: it keeps values of other names, shapes or dtypes, has none of these clients, or can only be read.
    """
    if not getattr(store, "writable", True):
        raise ConfigError(
            "The store given as private can only be read: it is of a run with a folder. Run that one without out, or "
            "leave private out."
        )
    wanted, found = layout(default.initial), layout(store.default.initial)
    if wanted != found:
        raise ConfigError(
            f"The store given as private does not keep what this run does: wanted {wanted}, found {found}. Give the "
            f"store of a run with the same private parameters, or leave private out."
        )
    if store.ids is ids or list(store.ids) == list(ids):
        return store
    return ById(store, default, ids)


class ById(Staging):
    """A store as one of other clients. What those keep whom it lacks stands in memory.

    Args:
        store: the store; what its clients keep is read and written there.
        default: what the others begin with.
        ids: the clients' ids; a client's index is its position.

    Raises:
        ConfigError: the store has none of these clients.
    """

    def __init__(self, store: PrivateStore, default: Default, ids: Sequence[str]) -> None:
        super().__init__()
        self.store, self.default, self.ids = store, default, ids
        self._others = MemoryStore(default, ids)
        places = {client: place for place, client in enumerate(store.ids)}
        self._places = [places.get(client, -1) for client in ids]
        if not any(place >= 0 for place in self._places):
            raise ConfigError(
                f"The store given as private has none of this run's clients: wanted {list(ids[:3])}, ..., found "
                f"{list(store.ids[:3])}, .... Name the same people alike in both data sets, or leave private out."
            )

    def _found(self, client: int) -> tuple[PrivateStore, list[int]]:
        """Return where a client's values stand, and its index there."""
        place = self._places[client]
        return (self._others, [int(client)]) if place < 0 else (self.store, [place])

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape)."""
        rows = [store.read(place) for store, place in map(self._found, clients)] or [self._others.read(())]
        return {name: torch.cat([row[name] for row in rows]) for name in self.default.initial}

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Write the clients' new values, each (clients, *shape)."""
        for number, (store, place) in enumerate(map(self._found, clients)):
            store.write(place, {name: params[name][number : number + 1] for name in self.default.initial})

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it has values of its own."""
        return [store.seen(place)[0] for store, place in map(self._found, clients)]

    def prepare(self, round: int) -> str:
        """Make what the store's clients keep durable, as it does."""
        return self.store.prepare(round)

    def apply(self) -> None:
        """Make what the store prepared the accepted versions."""
        self.store.apply()

    def recover(self, round: int, digest: str | None = None) -> None:
        """Return to the store's versions after a round."""
        self.store.recover(round, digest)
