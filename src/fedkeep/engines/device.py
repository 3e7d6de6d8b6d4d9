"""The device seam: what the server's round may know of the place where clients live.

A device owns data, private state and the local run. It takes orders and gives answers, and no type here has a private
value or an example in it. ``LocalDevice`` holds any number of clients in this process and its workers; a remote
transport is another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedkeep.core.params import Params
from fedkeep.engines.base import Engine, Job, Work
from fedkeep.engines.faults import Fault
from fedkeep.methods import Kept, Sent, newest
from fedkeep.split import Upload


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the server asks of a client.

    Attributes:
        round: the round's number.
        client: the client's id.
        sent: parameters and state that it trains from.
        progress: the finished part of the run in [0, 1), for schedules.
    """

    round: int
    client: str
    sent: Sent
    progress: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes back from a client.

    Attributes:
        client: its id.
        upload: what left it; None: there is none, see ``fault``. In centralised training one answer has the upload of
            all, and the others have neither.
        loss: its mean training loss.
        fault: why there is no upload.
    """

    client: str
    upload: Upload | None = None
    loss: float = float("nan")
    fault: Fault | None = None


class Device(Protocol):
    """Where clients live."""

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train clients, all in one round; stage what they will keep; yield an answer for each, in their order."""
        ...

    def accept(self, shares: Mapping[str, float]) -> None:
        """Keep what clients have staged, given z = c_k / Σ c of those whose upload was taken; drop the others'."""
        ...


class LocalDevice:
    """All clients of a data set in this process, trained by an engine.

    Args:
        job: what they have in common.
        engine: trains them.
    """

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job, self.engine = job, engine
        self._trained: dict[
            str, tuple[int, ...]
        ] = {}  # by the client that has the upload: whose versions are staged

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train clients; the answers come as they are ready, in the order of ``orders``."""
        store = self.job.store
        store.accept(())
        self._trained = {}
        if not orders:
            return
        flat: dict[int, Params] = {}
        work = [Work(self.job.data.index(o.client), flat.setdefault(id(o.sent), o.sent.flat)) for o in orders]
        round, progress = orders[0].round, orders[0].progress
        # Not held by a name: a round that is broken off lets go of it at once, and the engine ends what still runs.
        for done, (order, result) in enumerate(
            zip(orders, self.engine.train(self.job, work, round, progress), strict=True), 1
        ):
            if result.kept is not None and result.clients:
                for k, client in enumerate(result.clients):
                    store.stage(client, {n: v[k] for n, v in result.kept.items()})
                self._trained[order.client] = result.clients
            elif result.kept is not None:
                store.stage(result.client, result.kept)
                self._trained[order.client] = (result.client,)
            if result.note:
                warnings.warn(result.note, stacklevel=2)
            yield Answer(client=order.client, upload=result.upload, loss=result.loss, fault=result.fault)
            if self.job.after_step is not None and not result.clients:
                self.job.after_step(done / len(orders))

    def accept(self, shares: Mapping[str, float]) -> None:
        """Keep what clients have staged."""
        store, rule = self.job.store, self.job.method.client.accept
        taken = {
            c: shares[name] for name, clients in self._trained.items() if name in shares for c in clients
        }
        clients = tuple(taken)
        if rule is newest or not clients:
            store.accept(clients)
        else:
            before, after = store.read(clients), store.staged(clients)
            rows = [
                rule(Kept.of(_row(before, k)), Kept.of(_row(after, k)), share).flat
                for k, share in enumerate(taken.values())
            ]
            store.accept(clients, {n: torch.stack([row[n] for row in rows]) for n in rows[0]})
        self._trained = {}


def _row(stacked: Params, place: int) -> Params:
    return {name: value[place] for name, value in stacked.items()}
