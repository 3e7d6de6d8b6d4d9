"""Some clients of a cohort side by side: what each starts from, stacked (clients, *shape), and what each gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import NonFiniteError
from fedkeep.core.params import Params, nbytes
from fedkeep.engines.base import Job, train_rows
from fedkeep.engines.client import ClientResult, handed_over
from fedkeep.engines.local import LocalResult, Stream, broken, float_type
from fedkeep.engines.tables.local_rows import LocalTable, local_tables
from fedkeep.engines.vectorised.batches import Gathered

Pick = slice | Tensor
"""Some of the stacked clients: a slice, which is a view and costs nothing, or their positions."""


class Stacked:
    """Some clients of a cohort, and their parameters while they train.

    What no phase changes and all clients share is kept once. A local table is padded with rows of zeros to the longest
    of these clients, in ``params`` as in ``received``; no id names a padding row, so it stays zero.

    Args:
        job: what the rounds have in common.
        sent: the federated parameters as the server sent them.
        clients: indices.
        own: their private values, (clients, *shape).
        round: the round's number.
        progress: the finished part of the run in [0, 1).

    Attributes:
        params: all parameters, those named in ``stacked`` with a client axis.
        received: the federated parameters that terms compare with; those named in ``cut`` with a client axis.
        losses, steps: of each client, as in ``LocalResult``.
    """

    def __init__(
        self, job: Job, sent: Params, clients: Sequence[int], own: Params, round: int, progress: float
    ) -> None:
        rows = [train_rows(job.data, client) for client in clients]
        # The largest first: those who still have full mini-batches then stand side by side, and are a slice.
        self.order = sorted(range(len(clients)), key=lambda k: -len(rows[k]))
        self.job, self.sent, self.round, self.progress = job, sent, round, progress
        self.method, self.trainable = job.method, job.net.trainable()
        self.clients = [clients[k] for k in self.order]
        self.rows = [rows[k] for k in self.order]
        self.own = [{n: v[k] for n, v in own.items()} for k in self.order]
        self.draws = [Stream(job.seed, job.data.ids[client], round) for client in self.clients]
        self.tables = [
            local_tables(job.net, job.method.phases, sent | own, job.data, rows, mode=job.method.tables)
            for own, rows in zip(self.own, self.rows, strict=True)
        ]
        self._stack()
        self.examples = Gathered(job.data, self.rows, self.tables, float_type(self.params), job.device)
        self.losses = np.full(len(clients), np.nan)
        self.steps = np.zeros(len(clients), np.int64)

    def _stack(self) -> None:
        names = [n for n in {**self.sent, **self.own[0]} if n in self.trainable]
        changing = {n for p in self.method.phases for n in p.trained_names(self.method.split, names)}
        changing |= {n for n in self.sent if n not in self.trainable}  # buffers
        tables = {t.parameter: [own[k] for own in self.tables] for k, t in enumerate(self.tables[0])}
        self.params, self.received = Params(), Params()
        for name, value in self.sent.items():
            start = self.received[name] = value.detach().to(self.job.device)
            if name in tables:
                start = self.received[name] = padded([start] * len(self.clients), tables[name])
            elif name in changing:
                start = start.expand(len(self.clients), *start.shape)
                if name not in self.trainable:  # a term may run the model at what was received
                    self.received[name] = start.clone(memory_format=torch.contiguous_format)
            self.params[name] = (
                start.clone(memory_format=torch.contiguous_format) if name in changing else start
            )
        for name in self.own[0]:
            values = [own[name].detach() for own in self.own]
            start = padded(values, tables[name]) if name in tables else torch.stack(values)
            self.params[name] = start.to(self.job.device)
        self.stacked = {*changing, *tables, *self.own[0]}
        self.cut = {n for n in self.sent if n in tables or n not in self.trainable}

    def results(self) -> Iterator[ClientResult]:
        """Yield what each client gives back, in the order given; a breakdown to NaN is a result with ``fault``."""
        faults = self._faults()
        for k in np.argsort(self.order):
            client, own, tables = self.clients[k], self.own[k], self.tables[k]
            if (fault := faults[k]) is not None:
                yield ClientResult(client, fault=fault)
                continue
            trained = {n: v[k] if n in self.stacked else v for n, v in self.params.items()}
            for table in tables:
                trained[table.parameter] = trained[table.parameter][: len(table.rows)]
            local = LocalResult(trained, self.sent | own, tables, float(self.losses[k]), int(self.steps[k]))
            yield handed_over(self.job, self.sent, own, local, client, self.round)

    def _faults(self) -> list[NonFiniteError | None]:
        """Look at every client's loss and values, with one transfer from the device."""
        names = [n for n, v in self.params.items() if n in self.stacked and v.is_floating_point()]
        finite = [torch.isfinite(flat(self.params[n])).all(1) for n in names]
        fine = torch.stack(finite, 1).cpu().numpy() if names else np.ones((len(self.clients), 0), bool)
        faults: list[NonFiniteError | None] = []
        for k, draws in enumerate(self.draws):
            steps = int(self.steps[k])
            bad = [n for n, good in zip(names, fine[k], strict=True) if not good]
            if steps and not np.isfinite(self.losses[k]):
                bad = ["the training loss"]
            faults.append(broken(draws, bad[0], steps) if bad else None)
        return faults

    def pick(self, who: np.ndarray) -> Pick:
        """Return how to pick the clients at these (ascending) positions."""
        if who[-1] - who[0] == len(who) - 1:
            return slice(int(who[0]), int(who[-1]) + 1)
        return torch.from_numpy(who).to(self.job.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """The bytes that these clients hold by themselves."""
        mine = {n: v for n, v in self.params.items() if n in self.stacked}
        return nbytes(mine) + nbytes({n: self.received[n] for n in self.cut}) + self.examples.nbytes


def picked(values: Mapping[str, Tensor], pick: Pick) -> Params:
    """Return some clients' values of stacked tensors; a slice's are views."""
    if isinstance(pick, slice):
        return {n: v[pick] for n, v in values.items()}
    return {n: v.index_select(0, pick) for n, v in values.items()}


def put_back(values: Mapping[str, Tensor], pick: Pick, changed: Params) -> None:
    """Write what was picked and changed back into the stacked tensors (views need none)."""
    if not isinstance(pick, slice):
        for name, value in changed.items():
            values[name].index_copy_(0, pick, value)


def flat(value: Tensor) -> Tensor:
    """Return a stacked tensor as (clients, numbers)."""
    return value.reshape(len(value), value[0].numel())


def padded(values: Sequence[Tensor], tables: Sequence[LocalTable]) -> Tensor:
    """Return each client's rows of its table, stacked, with rows of zeros behind the shorter ones."""
    longest = max(len(t.rows) for t in tables)
    out = values[0].new_zeros(len(tables), longest, *values[0].shape[1:])
    for mine, value, table in zip(out, values, tables, strict=True):
        mine[: len(table.rows)] = value[table.rows.to(value.device)]
    return out
