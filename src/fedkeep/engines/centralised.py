"""Centralised training, through the same local run: all examples pooled as one client, private rows gathered.

The control of every federated experiment (FURL's "server" configurations). It sees everybody's data and private
parameters, so its runs are marked ``centralised``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, PooledNet
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, to
from fedkeep.data import FederatedData
from fedkeep.engines.batches import Stream, planned_steps
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Engine, Job
from fedkeep.engines.lanes import local_run
from fedkeep.engines.tables.lazy_rows import lazy_tables
from fedkeep.engines.tables.local_rows import CLIENT, LocalTable
from fedkeep.methods import Method, Optimize, WeightedMean, newest
from fedkeep.methods.client import by_share, nothing
from fedkeep.methods.server import no_state


class Centralised(Engine):
    """Trains on the pooled, shuffled examples of all clients of a cohort; its optimisers' states live on."""

    name = "centralised"

    def __init__(self) -> None:
        self.states: list[OptimizerState] | None = None

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train one pass (the phases' epochs) over all clients' examples together; the first result has it all.

        Raises:
            MethodError: the method cannot be trained so; says why.
        """
        method, client = job.method, job.method.client
        check_method(method)
        sent = work[0].sent
        clients = sorted(
            each.client for each in work
        )  # the optimisers' states of the private tables go by position
        data = WithClient(job.data, clients)
        rows = np.concatenate([job.rows(c) for c in clients])
        tables = job.store.read(clients)
        net = PooledNet(job.net.module, frozenset(tables), by_client(method, job.net, tables))
        net.opted_out = job.net.opted_out
        net.lookup = job.net.lookup
        counts = [job.data.count(c, "train") for c in clients]
        passes = counts if net.by_client else [sum(counts)]
        notify, steps = job.after_step, sum(planned_steps(phase, passes) for phase in client.phases)
        if self.states is None:
            self.states = [phase.optimizer.init() for phase in client.phases]
        local = local_run(
            net,
            method.split,
            client,
            method.split.merge(sent, tables),
            sent,
            data,
            rows,
            Stream(job.seed, "pooled", round, f"Centralised training, round {round}"),
            device=job.device,
            progress=progress,
            states=self.states,
            after_step=None if notify is None else lambda step: notify(step / max(steps, 1)),
        )
        self.states = local.states
        for state in self.states:
            state.first, state.second = to(state.first, "cpu"), to(state.second, "cpu")
        trained = to(local.params, "cpu")
        upload = method.split.upload(sent, trained, float(len(rows)))
        kept = method.split.personal(trained)
        yield ClientResult(
            work[0].client, upload, kept, local.loss, moves=local.moves, clients=tuple(clients)
        )
        yield from (ClientResult(each.client, clients=tuple(clients)) for each in work[1:])


def check_method(method: Method) -> None:
    """Raise MethodError if a method needs rounds: hooks, state, or another aggregation than a mean."""
    client, server = method.client, method.server
    if client.accept is by_share:
        raise MethodError("Centralised training has no aggregation, so private_scale must be 1.")
    if client.accept is not newest:
        raise MethodError(
            "{method!r} has an accept of its own, which says what a client keeps when a round ends; centralised "
            "training has no rounds of clients. Train it with engine='sequential'.",
            method=method.name,
        )
    if client.keep.every_round:
        raise MethodError(
            "{method!r} is stateless: its private values start from scratch in every round; centralised training has "
            "no rounds.",
            method=method.name,
        )
    if any(phase.early_stopping for phase in client.phases):
        raise MethodError(
            "{method!r} has a phase that stops early by a client's own validation loss; centralised training trains "
            "all clients at once. Set early_stopping=None, or train it with engine='sequential'.",
            method=method.name,
        )
    reduces = type(server.reduce) is not WeightedMean or not isinstance(server.update, Optimize)
    keeps = client.state is not nothing or client.sends is not nothing or server.state is not no_state
    if client.start or client.finish or server.send or reduces or keeps:
        raise MethodError(
            "{method!r} has hooks or state of its own on clients or server; centralised training has neither. Train "
            "it with engine='sequential'.",
            method=method.name,
        )


def by_client(method: Method, net: Net, private: Params) -> bool:
    """Tell whether a method's mini-batches hold one client's examples each.

    Raises:
        MethodError: private values couldn't be trained row by row.
    """
    phases = method.client.phases
    if method.client.pools == "examples":
        return False
    buffers = sorted(set(private) - net.trainable())
    if buffers:
        raise MethodError(
            "The private {name!r} of {method!r} is not trained by gradients; mini-batches of one client each "
            "(pools='clients') know no such private values. Make it federated.",
            name=buffers[0],
            method=method.name,
        )
    rows = torch.arange(1)
    table = LocalTable("", CLIENT, rows, rows, single=True)
    turns = method.client.take_turns and len(phases) > 1 and any(p.optimizer.momentum for p in phases)
    if turns or not all(lazy_tables(phase, [table]) for phase in phases):
        raise MethodError(
            "{method!r} trains each client's private values in mini-batches of its own (pools='clients'): that wants "
            "SGD without weight decay and bounds, losses of the model's output alone, and no momentum where phases "
            "take turns.",
            method=method.name,
        )
    return True


class WithClient:
    """A data set whose batches also hold ``client``: the position of each example's client in ``clients``."""

    def __init__(self, data: FederatedData, clients: Sequence[int] | np.ndarray) -> None:
        self._data = data
        self.columns, self.meta = data.columns, data.meta
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
