"""What training a client needs and gives, wherever it happens: ``Job``, ``ClientToTrain``, ``ClientResult``; and ``Engine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch

from fedkeep.core.errors import LostError, MethodError, NonFiniteError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Params, is_state, prefixed, to
from fedkeep.data import FederatedData
from fedkeep.methods import Global, Kept, Method, Phase, Roster, WeightedMean
from fedkeep.methods.checks import UPLOAD, as_state
from fedkeep.privacy.draws import Entropy
from fedkeep.split import Upload
from fedkeep.store import Default, PrivateStore

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Job:
    """What all clients of a device have in common.

    Attributes:
        method: the method.
        net: the model as a function.
        data: the data set; local training uses its examples ``train``.
        store: what clients keep.
        seed: the run's seed.
        device: where models compute, e.g. ``cpu`` or ``cuda``; all that is sent, kept and aggregated is on the CPU.
        after_step: called now and then inside a round with the finished part of it in (0, 1].
        entropy: where noise on uploads comes from: ``"run"``, the seed (simulations), or ``"system"`` (devices).
    """

    method: Method
    net: Net
    data: FederatedData
    store: PrivateStore
    seed: int
    device: str = "cpu"
    after_step: Callable[[float], None] | None = None
    entropy: Entropy = "run"

    def kept(self, clients: Sequence[int]) -> Params:
        """Return what clients start a round from, stacked: the values of their last round, or the default.

        Where private values start from scratch in every round, the method's state goes on.
        """
        stored = self.store.read(clients)
        if not self.method.client.keep.every_round:
            return stored
        state = {name: value for name, value in stored.items() if is_state(name)}
        return {**defaults(self.store, clients), **state}

    @cached_property
    def leaving(self) -> list[Phase]:
        """The phases that train something that leaves a client."""
        return self.method.leaving(sorted(self.net.trainable()))

    @cached_property
    def frozen(self) -> Params:
        """The frozen half, as the module holds it."""
        names = set(self.method.split.halves(self.net.module).frozen_names)
        return {n: v for n, v in self.net.module.state_dict(keep_vars=True).items() if n in names}

    @cached_property
    def declared(self) -> Params:
        """Zeros of what clients send along, under ``server/NAME``."""
        return to(declared(self.method, self.net), "cpu")


def first_global(method: Method, net: Net, data: Roster, population: int | None = None) -> Global:
    """Return what a server has before the first round, on the CPU; cohorts are drawn from ``population`` clients, or
    from all.
    """
    params = to(method.split.halves(net.module).federated(net.initial()), "cpu")
    state = to(as_state(f"server's state of {method.name!r}", lambda: method.server.state(net, data)), "cpu")
    links = to(method.chain().server_state({**params, **to(declared(method, net), "cpu")}), "cpu")
    return Global(
        params=params,
        state=state,
        links=links,
        trainable=net.trainable(),
        clients=data,
        population=len(data) if population is None else population,
    )


def first_kept(method: Method, net: Net) -> Params:
    """Return what a new client keeps before ``Init`` has its say, state under ``client/NAME``."""
    halves, initial = method.split.halves(net.module), net.initial()
    links = method.chain().client_state({**halves.federated(initial), **declared(method, net)})
    own = as_state(f"client's state of {method.name!r}", lambda: method.client.state(net))
    state = {**own, **prefixed(UPLOAD, links)}
    return Kept(params=halves.private(initial), state=state).flat


def first_default(method: Method, net: Net, seed: int) -> Default:
    """Return what clients keep that were never trained, each its own draw where the method says so."""
    return Default(first_kept(method, net), method.client.keep.value, seed, net.buffers())


def declared(method: Method, net: Net) -> Params:
    """Return zeros of what clients send along, under ``server/NAME``: names, shapes and types that may leave.

    Raises:
        MethodError: they are no tensors, or no floating numbers, and the server takes a mean.
    """
    who = f"sends of {method.name!r}"
    along = as_state(who, lambda: method.client.sends(net))
    whole = [n for n, v in along.items() if not v.is_floating_point()]
    if whole and type(method.server.reduce) is WeightedMean:
        raise MethodError(
            "The {hook} declares {name!r} as {got}, of which the server's mean takes the first client's. Send floats, "
            "or reduce otherwise (Server.reduce).",
            hook=who,
            name=whole[0],
            got=along[whole[0]].dtype,
        )
    return prefixed(SERVER, along)


def defaults(store: PrivateStore, clients: Sequence[int]) -> Params:
    """Return the values of clients that were never seen, stacked."""
    rows = [store.default(store.ids[int(c)]) for c in clients]
    return {name: torch.stack([row[name] for row in rows]) for name in store.default.initial}


@dataclass(frozen=True)
class ClientToTrain:
    """A client to train.

    Attributes:
        client: its index in the data.
        sent: what the server sent it, state under ``server/NAME``; often one object for all clients.
    """

    client: int
    sent: Params


@dataclass
class ClientResult:
    """What a client's training gives on its device.

    Attributes:
        client: its index.
        upload: what leaves it, encoded by the method's upload chain; None: its training broke down.
        kept: what it will keep, state under ``client/NAME``.
        loss: its mean training loss.
        fault: why there is no upload.
        note: what the device's owner should know; it does not leave the device.
        clients: in centralised training, all whose values ``kept`` holds, stacked; else none.
    """

    client: int
    upload: Upload | None = None
    kept: Params | None = None
    loss: float = float("nan")
    fault: NonFiniteError | UploadError | None = None
    note: str = ""
    clients: tuple[int, ...] = ()


class Engine(Protocol):
    """Trains clients. Every engine gives the same result."""

    @property
    def name(self) -> str:
        """What the engine is called."""
        ...

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients from what they were sent and kept; yield what each gives, in the order of ``work``."""
        ...

    def close(self) -> None:
        """Give back what the engine holds beyond memory, e.g. processes; the next round takes it again."""
        ...


def train_rows(data: FederatedData, client: int) -> np.ndarray:
    """Return the row numbers of a client's training examples."""
    rows = data.rows(client, "train")
    return np.arange(rows.start, rows.stop)


def valid_rows(data: FederatedData, client: int) -> np.ndarray:
    """Return the row numbers of a client's validation examples."""
    rows = data.rows(client, "valid")
    return np.arange(rows.start, rows.stop)


def paired(orders: Sequence[A], answers: Iterator[B]) -> Iterator[tuple[A, B]]:
    """Yield each order with its answer. Unlike ``zip``, hold on to no answer while the next is made: they are large.

    Raises:
        LostError: there are more or fewer answers than orders.
    """
    for given, order in enumerate(orders):
        try:
            yield order, next(answers)
        except StopIteration:
            raise LostError(
                "A device gave {got} answers to {wanted} orders.", got=given, wanted=len(orders)
            ) from None
    if next(answers, None) is not None:  # so it runs to its end
        raise LostError("A device gave more than {wanted} answers to as many orders.", wanted=len(orders))
