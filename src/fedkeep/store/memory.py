"""Private state in memory: for runs that keep nothing on disk, and for tests."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import layout
from fedkeep.core.params import Params
from fedkeep.store.private_store import Default, PrivateStore, Staged
from fedkeep.store.versions import ClientIndices, LedgerLines


class MemoryStore(PrivateStore):
    """A dict from client to values.

    Args:
        default: gives the values of a client that was never seen.
        ids: the clients' ids; a client's index is its position.
        older: a store of another run. Clients of the same id begin with what they keep there; it is never changed.

    Raises:
        ConfigError: the older store keeps values of other names, shapes or dtypes, or has none of these clients.
    """

    def __init__(self, default: Default, ids: Sequence[str], older: PrivateStore | None = None) -> None:
        super().__init__(default, ids)
        self._rows: dict[int, Params] = {}
        self._undo: dict[int, Params | None] | None = (
            None  # what clients had at the mark who have other values since
        )
        self._older, self._older_places = older, {} if older is None else _places(older, default, ids)
        if isinstance(older, MemoryStore):  # rows are replaced and never changed, so both may have them
            held = {place: older._rows.get(self._older_places.get(str(c), -1)) for place, c in enumerate(ids)}
            self._rows = {place: row for place, row in held.items() if row is not None}
            self._older, self._older_places = older._older, older._older_places

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape)."""
        if not self.default.initial:
            return {}
        rows = [self._rows.get(int(c)) or self._first(int(c)) for c in clients]
        return {
            name: torch.stack([row[name] for row in rows]) if rows else value.new_empty((0, *value.shape))
            for name, value in self.default.initial.items()
        }

    def _first(self, client: int) -> Params:
        """Return what a client begins with."""
        if self._older is None or not self._is_older(client):
            return self.default(self.ids[client])
        place = self._older_places[str(self.ids[client])]
        return {name: value[0] for name, value in self._older.read([place]).items()}

    def _is_older(self, client: int) -> bool:
        if self._older is None:
            return False
        place = self._older_places.get(str(self.ids[client]))
        return place is not None and self._older.seen([place])[0]

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it has values of its own."""
        return [int(c) in self._rows or self._is_older(int(c)) for c in clients]

    def mark(self) -> None:
        """Keep what counts now."""
        self._undo = {}

    def marked(self) -> MemoryStore:
        """Return what counted at the last mark; rows are replaced and never changed, so both have them."""
        found = copy.copy(self)
        rows = {**self._rows, **(self._undo or {})}
        found._rows, found._undo, found._staged = {c: v for c, v in rows.items() if v is not None}, None, {}
        return found

    def flush(self) -> None:
        """Do nothing: memory has no durable state."""

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Let copies of values count that no ledger names, e.g. of an adaptation; each (clients, *shape)."""
        for k, client in enumerate(clients):
            self._copy(int(client), {name: value[k] for name, value in params.items()})

    def _keep(self, lines: LedgerLines, staged: Sequence[Staged]) -> None:
        for client, one in zip(lines.clients.tolist(), staged, strict=True):
            if self._undo is not None:
                self._undo.setdefault(client, self._rows.get(client))
            self._copy(client, one.params)

    def _copy(self, client: int, row: Mapping[str, Tensor]) -> None:
        self._rows[client] = {n: row[n].detach().cpu().clone() for n in self.default.initial}


def _places(older: PrivateStore, default: Default, ids: Sequence[str]) -> dict[str, int]:
    """Return the places of an older store's clients, by id."""
    wanted, found = layout(default.initial), layout(older.default.initial)
    if wanted != found:
        raise ConfigError(
            "The store given as private does not keep what this run does: wanted {wanted}, found {found}. Give the store "
            "of a run with the same private parameters, or leave private out.",
            wanted=wanted,
            found=found,
        )
    places = {str(client): place for place, client in enumerate(older.ids)}
    if not any(str(client) in places for client in ids):
        raise ConfigError(
            "The store given as private has none of this run's clients: wanted {wanted}, ..., found {found}, .... Name "
            "the same people alike in both data sets, or leave private out.",
            wanted=list(ids[:3]),
            found=list(older.ids[:3]),
        )
    return places
