"""Centralised training, through the same local run: all examples pooled as one client, private rows gathered.

The control of every federated experiment (FURL's "server" configurations). It sees everybody's data and private
parameters, so its runs are marked ``pooled``.
"""

from __future__ import annotations

import numpy as np

from fedkeep.core.errors import MethodError
from fedkeep.core.net import PooledNet
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.engines.base import CohortResult, Job, train_rows
from fedkeep.engines.combine import RunningMean
from fedkeep.engines.local import Stream, local_run


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
        net = PooledNet(job.net.module, frozenset(tables))
        steps = sum(
            p.steps if p.steps is not None else p.epochs * -(-len(rows) // p.batch_size)
            for p in method.phases
        )
        notify = job.after_step
        if self.states is None:
            self.states = [phase.optimizer.init() for phase in method.phases]
        local = local_run(
            net, split, method.phases, split.merge(received, tables), received, data, rows,
            Stream(job.seed, "pooled", round), turns=method.turns, tables=method.tables, device=job.device,
            progress=progress, states=self.states,
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


class WithClient:
    """A data set whose batches also hold ``client``: the position of each example's client in ``clients``."""

    def __init__(self, data: FederatedData, clients: list[int]) -> None:
        self._data = data
        self.columns = data.columns
        self._clients = np.asarray(clients, np.int64)
        self._sorted = np.argsort(self._clients, kind="stable")

    def batch(self, rows: np.ndarray) -> Params:
        """Return the rows' columns and their clients' positions."""
        import torch

        owner = np.searchsorted(self._data.offsets, rows, side="right") - 1
        position = self._sorted[np.searchsorted(self._clients, owner, sorter=self._sorted)]
        return self._data.batch(rows) | {"client": torch.from_numpy(position.astype(np.int64))}
