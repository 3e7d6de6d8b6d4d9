"""The contract of a private store, and the values of a client that was never seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError
from fedkeep.core.params import Params, is_state
from fedkeep.core.seeds import generator

ClientIndices = Sequence[int]


class PrivateStore(Protocol):
    """Private state by client. Cost grows with the cohort, never with the number of clients.

    A client's state has versions, each of one round. What a client trained is staged (``stage``) until the server's
    word comes: ``accept`` writes it, or drops it. What was written is read at once; ``prepare`` makes it durable under
    a round's number beside the versions that it follows, ``apply`` makes it the accepted version, and ``recover``
    brings a store that was killed at any instant to the versions accepted after ``round``. ``default`` gives the values
    of a client that was never seen. Clients are named by their position in ``ids``.
    """

    default: Default
    ids: Sequence[str]

    def read(self, clients: ClientIndices) -> Params:
        """Return the clients' values stacked, each (clients, *shape); the default for clients never seen."""
        ...

    def write(self, clients: ClientIndices, params: Mapping[str, Tensor]) -> None:
        """Write new values, each (clients, *shape): read at once, durable with the next ``prepare``."""
        ...

    def seen(self, clients: ClientIndices) -> list[bool]:
        """Tell for each client whether it has values of its own."""
        ...

    def stage(self, client: int, params: Mapping[str, Tensor]) -> None:
        """Stage what a client would keep, each (*shape); not read before it is accepted, and not copied."""
        ...

    def staged(self, clients: ClientIndices) -> Params:
        """Return what the clients staged, stacked, on the CPU, each (clients, *shape)."""
        ...

    def accept(self, clients: ClientIndices, params: Mapping[str, Tensor] | None = None) -> None:
        """Write what the clients staged, or ``params`` in its place, each (clients, *shape); drop all others'."""
        ...

    def prepare(self, round: int) -> str:
        """Make what was written durable under this round's number; return a digest of all states after it."""
        ...

    def apply(self) -> None:
        """Make the prepared versions the accepted ones."""
        ...

    def recover(self, round: int, digest: str | None = None) -> None:
        """Return to the versions accepted after ``round``, whose digest is given if known; drop everything later."""
        ...


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
            raise ConfigError(f"private_init must be a number, ('normal', std) or 'model'; got {rule!r}.")

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
