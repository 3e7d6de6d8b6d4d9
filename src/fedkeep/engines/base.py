"""What training a client needs and gives, wherever it happens: ``Job``, ``Work``, ``ClientResult``; and ``Engine``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from fedkeep.core.errors import NonFiniteError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Params, prefixed
from fedkeep.data import FederatedData
from fedkeep.methods import Global, Kept, Method
from fedkeep.split import Upload
from fedkeep.store import PrivateStore


@dataclass(frozen=True)
class Job:
    """What all clients of a device have in common.

    Attributes:
        method: the method.
        net: the model as a function.
        data: the data set; local training uses its examples ``train``.
        store: what clients keep.
        seed: the run's seed.
        device: where to compute, e.g. ``cpu`` or ``cuda``.
        after_step: called now and then inside a round with the finished part of it in (0, 1].
    """

    method: Method
    net: Net
    data: FederatedData
    store: PrivateStore
    seed: int
    device: str = "cpu"
    after_step: Callable[[float], None] | None = None

    def kept(self, clients: Sequence[int]) -> Params:
        """Return what clients start a round from, stacked: what they kept, or the default."""
        every_round = self.method.client.keep.every_round
        return defaults(self.store, clients) if every_round else self.store.read(clients)

    def declared(self) -> Params:
        """Return zeros of what clients send along, under ``server/NAME``: names, shapes and types that may leave."""
        sends = self.method.client.sends(self.net)
        return prefixed(SERVER, {name: value.to(self.device) for name, value in sends.items()})


def first_global(method: Method, net: Net, data: FederatedData, device: str = "cpu") -> Global:
    """Return what a server has before the first round."""
    params = {n: v.to(device) for n, v in method.split.federated(net.initial()).items()}
    state = {n: v.to(device) for n, v in method.server.state(net, data).items()}
    return Global(params=params, state=state, trainable=net.trainable(), clients=data)


def first_kept(method: Method, net: Net) -> Params:
    """Return what a new client keeps before ``Init`` has its say, state under ``client/NAME``."""
    return Kept(params=method.split.personal(net.initial()), state=method.client.state(net)).flat


def defaults(store: PrivateStore, clients: Sequence[int]) -> Params:
    """Return the values of clients that were never seen, stacked."""
    rows = [store.default(int(c)) for c in clients]
    return {name: torch.stack([row[name] for row in rows]) for name in store.default.initial}


@dataclass(frozen=True)
class Work:
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
        clients: in centralised training, all whose values ``kept`` holds, stacked; else none.
    """

    client: int
    upload: Upload | None = None
    kept: Params | None = None
    loss: float = float("nan")
    fault: NonFiniteError | UploadError | None = None
    clients: tuple[int, ...] = ()


class Engine(Protocol):
    """Trains clients. Every engine gives the same result."""

    @property
    def name(self) -> str:
        """What the engine is called."""
        ...

    def train(self, job: Job, work: Sequence[Work], round: int, progress: float) -> Iterator[ClientResult]:
        """Train clients from what they were sent and kept; yield what each gives, in the order of ``work``."""
        ...

    def close(self) -> None:
        """Give back what the engine holds beyond memory, e.g. processes; the next round takes it again."""
        ...


OnFault = Literal["stop", "skip"]


def train_rows(data: FederatedData, client: int) -> np.ndarray:
    """Return the row numbers of a client's training examples."""
    rows = data.rows(client, "train")
    return np.arange(rows.start, rows.stop)
