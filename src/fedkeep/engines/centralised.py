"""Centralised training, through the same local run: all examples pooled as one client, private rows gathered.

The control of every federated experiment (FURL's "server" configurations). It sees everybody's data and private
parameters, so its runs are marked ``pooled``.
"""

from __future__ import annotations

import numpy as np
import torch

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, PooledNet
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.engines.aggregate import RunningMean
from fedkeep.engines.base import CohortResult, Job, train_rows
from fedkeep.engines.local import Stream, local_run
from fedkeep.engines.tables.lazy import lazy_tables
from fedkeep.engines.tables.local_rows import CLIENT, LocalTable
from fedkeep.methods import Method


class Pooled:
    """Trains on the pooled, shuffled examples of all clients of a cohort; its optimisers' states live on."""

    name = "pooled"

    def __init__(self) -> None:
        self.states: list[OptimizerState] | None = None

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train one pass (the phases' epochs) over all clients' examples together."""
        method, split = job.method, job.method.split
        if method.private_scale != 1:
            raise MethodError("Centralised training has no aggregation, so private_scale must be 1.")
        if method.stateless:
            raise MethodError(
                f"{method.name!r} is stateless: its private values start anew in every round; centralised training "
                f"has no rounds."
            )
        clients = sorted(clients)  # the optimisers' states of the private tables go by position
        data = WithClient(job.data, clients)
        rows = np.concatenate([train_rows(job.data, c) for c in clients])
        tables = job.store.read(clients)
        net = PooledNet(job.net.module, frozenset(tables), by_client(method, job.net, tables))
        counts = np.array([len(train_rows(job.data, c)) for c in clients])
        steps = sum(
            p.steps
            if p.steps is not None
            else p.epochs * int((-(-(counts if net.by_client else counts.sum()) // p.batch_size)).sum())
            for p in method.phases
        )
        notify = job.after_step
        if self.states is None:
            self.states = [phase.optimizer.init() for phase in method.phases]
        local = local_run(
            net, split, method.phases, split.merge(received, tables), received, data, rows,
            Stream(job.seed, "pooled", round, f"Centralised training, round {round}"), turns=method.turns,
            tables=method.tables, device=job.device, progress=progress, states=self.states,
            after_step=None if notify is None else lambda step: notify(step / max(steps, 1)),
        )  # fmt: skip
        self.states = local.states
        trained = local.params
        upload = split.upload(received, trained, float(len(rows)))
        mean = RunningMean(received)
        mean.add(upload)
        return CohortResult(list(clients), [upload], split.personal(trained), [local.loss], mean)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def by_client(method: Method, net: Net, private: Params) -> bool:
    """Tell whether a method's mini-batches hold one client's examples each.

    Raises:
        MethodError: some phases do and others don't, or private values couldn't be trained row by row.
    """
    asked = [phase.by_client for phase in method.phases]
    if not any(asked):
        return False
    if not all(asked):
        raise MethodError(f"Either all phases of {method.name!r} are by_client, or none is.")
    buffers = sorted(set(private) - net.trainable())
    if buffers:
        raise MethodError(
            f"The private {buffers[0]!r} of {method.name!r} is not trained by gradients; mini-batches of one client "
            f"each (by_client) know no such private values. Make it federated."
        )
    rows = torch.arange(1)
    table = LocalTable("", CLIENT, rows, rows, single=True)
    turns = (
        method.turns == "batches"
        and len(method.phases) > 1
        and any(p.optimizer.momentum for p in method.phases)
    )
    if turns or not all(lazy_tables(phase, [table]) for phase in method.phases):
        raise MethodError(
            f"{method.name!r} trains each client's private values in mini-batches of its own (by_client): that wants "
            f"SGD without weight decay and bounds, losses of the model's output alone, and no momentum where phases "
            f"take turns."
        )
    return True


class WithClient:
    """A data set whose batches also hold ``client``: the position of each example's client in ``clients``."""

    def __init__(self, data: FederatedData, clients: list[int]) -> None:
        self._data = data
        self.columns = data.columns
        self._clients = np.asarray(clients, np.int64)
        self._sorted = np.argsort(self._clients, kind="stable")

    def batch(self, rows: np.ndarray) -> Params:
        """Return the rows' columns and their clients' positions."""
        return self._data.batch(rows) | {CLIENT: torch.from_numpy(self.owners(rows))}

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the positions of the rows' clients."""
        owner = np.searchsorted(self._data.offsets, rows, side="right") - 1
        position = self._sorted[np.searchsorted(self._clients, owner, sorter=self._sorted)]
        return position.astype(np.int64)
