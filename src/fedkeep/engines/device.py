"""The device seam: what the server's round may know of the place where clients live.

A device owns data, private state and the local run. It takes orders and gives answers, and no type here has a private
value or an example in it. ``LocalDevice`` holds any number of clients in this process and its workers; a remote
transport is another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from fedkeep.core.params import Params, to
from fedkeep.engines.base import Engine, Job, Work, paired
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
        self._position = lru_cache(maxsize=1 << 16)(job.data.index)
        self._staged: dict[int, Params] = {}
        self._pooled: tuple[tuple[int, ...], Params] | None = None

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train clients; the answers come as they are ready, in the order of ``orders``."""
        self._staged, self._pooled = {}, None
        if not orders:
            return
        flat: dict[int, Params] = {}
        work = [Work(self._position(o.client), flat.setdefault(id(o.sent), o.sent.flat)) for o in orders]
        round, progress = orders[0].round, orders[0].progress
        # Not held by a name: a round that is broken off lets go of it at once, and the engine ends what still runs.
        training = paired(orders, self.engine.train(self.job, work, round, progress))
        for done, (order, result) in enumerate(training, 1):
            notify = None if result.clients else self.job.after_step
            if result.kept is not None and result.clients:
                self._pooled = (result.clients, result.kept)
            elif result.kept is not None:
                self._staged[result.client] = result.kept
            if result.note:
                warnings.warn(result.note, stacklevel=2)
            answer = Answer(client=order.client, upload=result.upload, loss=result.loss, fault=result.fault)
            del result  # its upload is large: it goes before the next client is trained
            yield answer
            del answer
            if notify is not None:
                notify(done / len(orders))

    def accept(self, shares: Mapping[str, float]) -> None:
        """Keep what clients have staged."""
        if self._pooled is not None:
            clients, stacked = self._pooled
            self.job.store.write(clients, stacked)
        taken = {self._position(client): share for client, share in shares.items()}
        clients = tuple(c for c in self._staged if c in taken)
        if clients:
            rows = [self._staged[c] for c in clients]
            if self.job.method.client.accept is not newest:
                rows = self._accepted(clients, rows, [taken[c] for c in clients])
            self.job.store.write(clients, {n: torch.stack([row[n] for row in rows]) for n in rows[0]})
        self._staged, self._pooled = {}, None

    def _accepted(
        self, clients: Sequence[int], rows: Sequence[Params], shares: Sequence[float]
    ) -> list[Params]:
        before = self.job.store.read(clients)
        rule = self.job.method.client.accept
        return [
            rule(Kept.of({n: v[k] for n, v in before.items()}), Kept.of(to(row, "cpu")), share).flat
            for k, (row, share) in enumerate(zip(rows, shares, strict=True))
        ]
