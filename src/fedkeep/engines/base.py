"""The contract of an engine, and the cohort's job and result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.engines.aggregate import RunningMean
from fedkeep.methods import Method
from fedkeep.split import Upload
from fedkeep.store import PrivateStore


@dataclass(frozen=True)
class Job:
    """What a run's rounds have in common.

    Attributes:
        method: the method.
        net: the model as a function.
        data: the data set; local training uses its split ``train``.
        store: private state by client.
        seed: the run's seed.
        device: where to compute, e.g. ``cpu`` or ``cuda``.
        on_nonfinite: a client whose training becomes NaN stops the run (``"stop"``) or sits out the round (``"skip"``).
        after_step: called now and then inside a round with the finished part of it in (0, 1].
        keep_uploads: keep every upload in the cohort's result; False: each is forgotten once it is in the mean.
    """

    method: Method
    net: Net
    data: FederatedData
    store: PrivateStore
    seed: int
    device: str = "cpu"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    after_step: Callable[[float], None] | None = None
    keep_uploads: bool = True

    def private(self, clients: list[int]) -> Params:
        """Return the private values, stacked, that clients start a round from: their last ones, or the default."""
        return defaults(self.store, clients) if self.method.stateless else self.store.read(clients)


def defaults(store: PrivateStore, clients: Sequence[int]) -> Params:
    """Return the values of clients that were never seen, stacked."""
    rows = [store.default(store.ids[int(c)]) for c in clients]
    return {name: torch.stack([row[name] for row in rows]) for name in store.default.initial}


@dataclass
class CohortResult:
    """What a cohort gives back.

    Attributes:
        clients: the clients that took part and were not refused, in the order of the job.
        uploads: an upload of each, decoded; without ``Job.keep_uploads`` only its weight and rows.
        private: their trained private values, stacked (clients, *shape).
        losses: their mean training losses.
        mean: the weighted mean of the uploads.
        refused: messages about clients that sat out the round.
        upload_bytes: the bytes that left each client.
    """

    clients: list[int]
    uploads: list[Upload]
    private: Params
    losses: list[float]
    mean: RunningMean
    refused: list[str] = field(default_factory=list)
    upload_bytes: list[int] = field(default_factory=list)


class Engine(Protocol):
    """Trains a cohort. Every engine gives the same result."""

    @property
    def name(self) -> str:
        """What the engine is called."""
        ...

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        ...

    def close(self) -> None:
        """Give back what the engine holds beyond memory, e.g. processes; another cohort takes it anew."""
        ...


def train_rows(data: FederatedData, client: int) -> np.ndarray:
    """Return the row numbers of a client's training examples."""
    rows = data.rows(client, "train")
    return np.arange(rows.start, rows.stop)
