"""Private state by client, of which one version counts; and the values of a client that was never seen.

A version is named by the attempt that made it. What a client trained is staged under its attempt (``stage``); it counts
as soon as the server's ledger names that attempt (``begin``), and not before. ``flush`` makes what counts durable. So a
store that was killed at any instant needs one thing to go on: the lines of the server's ledger.

Of the past one moment can be kept, e.g. the best round so far: ``mark`` names it, and ``marked`` gives it back. Until the
next mark a version that counted then is not lost when another one follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, StoreError
from fedkeep.core.params import Params, is_state
from fedkeep.core.seeds import generator
from fedkeep.store.versions import ClientIndices, LedgerLines


class Staged(NamedTuple):
    """What a client would keep, each (*shape), of an attempt of a round."""

    params: Mapping[str, Tensor]
    attempt: int
    round: int


class PrivateStore(ABC):
    """Private state by client. Cost grows with the cohort, never with the number of clients.

    Args:
        default: gives the values, names, shapes and dtypes of a client that was never seen.
        ids: the clients' ids; a client's index is its position.
    """

    def __init__(self, default: Default, ids: Sequence[str]) -> None:
        self.default, self.ids = default, ids
        self._attempt = np.zeros(len(ids), np.int64)  # of the versions that count; 0: the default does
        self._staged: dict[int, Staged] = {}

    @abstractmethod
    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values that count, stacked, each (clients, *shape); the default for clients never seen."""

    @abstractmethod
    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it has values of its own."""

    def stage(self, client: int, params: Mapping[str, Tensor], attempt: int, round: int = 0) -> None:
        """Note what a client would keep of a round's attempt, each (*shape), not copied; it does not count yet."""
        self._staged[client] = Staged(params, attempt, round)

    def staged(self, client: int) -> Params:
        """Return what a client staged, on the CPU."""
        row = self._staged[client].params
        return {name: row[name].detach().cpu() for name in self.default.initial}

    def drop(self) -> None:
        """Forget what was staged and does not count."""
        self._staged = {}

    @abstractmethod
    def mark(self) -> None:
        """Keep what counts now, all of it or what a client begins with, until the next mark."""

    @abstractmethod
    def marked(self) -> PrivateStore:
        """Return a store of what counted at the last mark, to be read only."""

    def begin(self, lines: LedgerLines) -> None:
        """Let the versions that the server's ledger names count from now on.

        Raises:
            StoreError: one is not there, or has values that can't be kept; nothing is changed.
        """
        late = np.flatnonzero(self._attempt[lines.clients] != lines.attempt)
        if not len(late):
            return
        late_lines = lines.some(late)
        clients, attempts = late_lines.clients.tolist(), late_lines.attempt.tolist()
        for client, attempt in zip(clients, attempts, strict=True):
            if client not in self._staged or self._staged[client].attempt != attempt:
                raise self._missing(client, attempt)
        self._keep(late_lines, [self._staged[client] for client in clients])
        for client in clients:
            del self._staged[client]
        self._attempt[clients] = attempts

    @abstractmethod
    def _keep(self, lines: LedgerLines, staged: Sequence[Staged]) -> None:
        """Let copies of what these clients have staged count."""

    def _missing(self, client: int, attempt: int) -> StoreError:
        return StoreError(
            "The private values of client {client!r} that the run counts, those of attempt {attempt}, "
            "are not here; those of attempt {there} are. Restore the whole run from one copy.",
            client=str(self.ids[client]),
            attempt=attempt,
            there=self._attempt[client],
        )

    @abstractmethod
    def flush(self) -> None:
        """Make all that counts durable at once, or nothing of it."""


class Default:
    """The private values of a client that was never seen.

    Attributes:
        opted_out: the names of values of clients that were seen which opted-out examples may have made.

    Args:
        initial: the module's own private values, by name, and what a method keeps beside them.
        rule: a number, ``("normal", std)``, or ``"model"`` (``initial`` itself); it is for private parameters alone.
        seed: seeds the normal draws; each client has a stream of its own, named by its id.
        buffers: the names of the module's buffers, e.g. running statistics, which no rule makes.
    """

    def __init__(
        self, initial: Mapping[str, Tensor], rule: Any = "model", seed: int = 0, buffers: Collection[str] = ()
    ) -> None:
        self.buffers = frozenset(buffers)
        self.opted_out: frozenset[str] = frozenset()
        self.initial = {name: value.detach().cpu() for name, value in initial.items()}
        self.seed = seed
        self.std: float | None = None
        if isinstance(rule, (tuple, list)) and len(rule) == 2 and rule[0] == "normal":
            self.std = float(rule[1])
        elif isinstance(rule, (int, float)):
            self.initial = {
                n: torch.full_like(v, rule) if self._ruled(n, v) else v for n, v in self.initial.items()
            }
        elif rule != "model":
            raise ConfigError(
                "private_init must be a number, ('normal', std) or 'model'; got {rule!r}.", rule=rule
            )

    def __call__(self, client: str) -> Params:
        """Return the default values of the client of this id, by name."""
        if self.std is None:
            return {name: value.clone() for name, value in self.initial.items()}
        if not isinstance(client, str):
            raise TypeError(f"A client's default values are drawn by its id, a text; got {client!r}.")
        draw = generator(self.seed, "private_init", client)
        return {
            n: torch.randn(v.shape, generator=draw, dtype=v.dtype) * self.std
            if self._ruled(n, v)
            else v.clone()
            for n, v in self.initial.items()
        }

    def _ruled(self, name: str, value: Tensor) -> bool:
        """Tell whether the rule makes a new client's value: not that of a counter, a buffer, or a method's state."""
        return value.is_floating_point() and not is_state(name) and name not in self.buffers
