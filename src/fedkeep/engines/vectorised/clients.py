"""Some clients of a cohort side by side: what each starts from, stacked (clients, *shape), and what each gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import NonFiniteError
from fedkeep.core.params import Params, is_state, nbytes, nonfinite
from fedkeep.engines.base import ClientResult, Job, Work, train_rows
from fedkeep.engines.batches import Stream, float_type
from fedkeep.engines.client import begin, finish
from fedkeep.engines.local import LocalResult, broken
from fedkeep.engines.opt_out import tainted
from fedkeep.engines.tables.local_rows import LocalTable, local_tables, narrow
from fedkeep.engines.vectorised.batches import Gathered

Pick = slice | Tensor
"""Some of the stacked clients: a slice, which is a view and costs nothing, or their positions."""


class Stacked:
    """Some clients of a cohort, and their parameters while they train.

    What no phase changes and all clients share is kept once. A local table is padded with rows of zeros to the longest
    of these clients, in ``params`` as in ``received``; no id names a padding row, so it stays zero.

    Args:
        job: what the rounds have in common.
        work: the clients, and what each was sent.
        own: what they kept, (clients, *shape).
        round: the round's number.
        progress: the finished part of the run in [0, 1).

    Attributes:
        params: all parameters, those named in ``stacked`` with a client axis.
        received: what terms compare with; those named in ``cut`` with a client axis.
        losses, steps, looked_at: of each client, as in ``LocalResult``.
    """

    def __init__(self, job: Job, work: Sequence[Work], own: Params, round: int, progress: float) -> None:
        clients = [each.client for each in work]
        rows = [train_rows(job.data, client) for client in clients]
        # The largest first: those who still have full mini-batches then stand side by side, and are a slice.
        self.order = sorted(range(len(clients)), key=lambda k: -len(rows[k]))
        self.job, self.round, self.progress = job, round, progress
        self.method, self.client, self.trainable = job.method, job.method.client, job.net.trainable()
        self.clients = [clients[k] for k in self.order]
        self.rows = [rows[k] for k in self.order]
        self.sent = [work[k].sent for k in self.order]
        self.own = [{n: v[k] for n, v in own.items()} for k in self.order]
        self.starts = [
            begin(job, sent, own, client, round)
            for sent, own, client in zip(self.sent, self.own, self.clients, strict=True)
        ]
        self.draws = [Stream(job.seed, job.data.ids[client], round) for client in self.clients]
        self.tables = [
            local_tables(job.net, self.client.phases, start, job.data, rows, mode=self.client.tables)
            for start, rows in zip(self.starts, self.rows, strict=True)
        ]
        self._stack()
        self.examples = Gathered(job.data, self.rows, self.tables, float_type(self.params), job.device)
        self.losses = np.full(len(clients), np.nan)
        self.steps = np.zeros(len(clients), np.int64)
        self.looked_at = np.zeros(len(clients), bool)

    def _stack(self) -> None:
        first = self.starts[0]
        names = [n for n in first if n in self.trainable]
        self.changing = {n for p in self.client.phases for n in p.trained_names(self.method.split, names)}
        self.changing |= {n for n in first if n not in self.trainable and not is_state(n)}  # buffers
        tables = {t.parameter: [own[k] for own in self.tables] for k, t in enumerate(self.tables[0])}
        apart = self.method.server.send is not None
        own = {n for n in first if apart or first[n] is not self.sent[0].get(n)}
        self.params, self.stacked = self._side_by_side(self.starts, tables, copy=self.changing, own=own)
        # A term may run the model at what was received, which moves buffers.
        buffers = {n for n in self.sent[0] if n not in self.trainable and not is_state(n)}
        sent = set(self.sent[0]) if apart else set()
        self.received, self.cut = self._side_by_side(self.sent, tables, copy=buffers, own=sent)

    def _side_by_side(
        self, each: Sequence[Params], tables: Mapping[str, list[LocalTable]], copy: set[str], own: set[str]
    ) -> tuple[Params, set[str]]:
        """Return every client's tensors by name, and which names have a client axis: tables, those to be copied, and
        those that are not one tensor for all, which of a client alone is said by ``own``; of the others there is one.
        """  # fmt: skip
        out, stacked = Params(), set()
        for name, value in each[0].items():
            values = [tensors[name].detach() for tensors in each]
            same = all(tensors[name] is value for tensors in each) and (len(each) > 1 or name not in own)
            if name in tables:
                out[name] = padded(values, tables[name]).to(self.job.device)
            elif same and name in copy:
                wide = value.detach().to(self.job.device).expand(len(each), *value.shape)
                out[name] = wide.clone(memory_format=torch.contiguous_format)
            elif same:
                out[name] = value.detach().to(self.job.device)
                continue
            else:
                out[name] = torch.stack(values).to(self.job.device)
            stacked.add(name)
        return out, stacked

    def tainted(self) -> set[str]:
        """Return what opted-out examples train or move."""
        return tainted(self.job.data, self.client.phases, self.method.split, self.params, self.trainable)

    def drop_what_opted_out_examples_broke(self) -> dict[int, str]:
        """Put private values back as they were before where opted-out examples made one NaN; say for which clients."""
        hidden, said = self.tainted(), dict[int, str]()
        for k in range(len(self.clients) if hidden else 0):
            bad = nonfinite({n: self.params[n][k] for n in hidden})
            if bad is None:
                continue
            whole = {n: self.starts[k][n] for n in hidden}
            start = narrow(whole, [t for t in self.tables[k] if t.parameter in hidden])
            for name, value in start.items():
                place = self.params[name][k]
                (place[: len(value)] if value.dim() else place).copy_(value)
            said[k] = (
                f"{self.draws[k]}: the private {bad!r} became NaN or infinite; the client keeps what it had."
            )
        return said

    def results(self) -> Iterator[ClientResult]:
        """Yield what each client gives back, in the order given; a breakdown to NaN is a result with ``fault``."""
        dropped = self.drop_what_opted_out_examples_broke()
        faults = self._faults()
        for k in np.argsort(self.order):
            client, own, start, tables = self.clients[k], self.own[k], self.starts[k], self.tables[k]
            if (fault := faults[k]) is not None:
                yield ClientResult(client, fault=fault)
                continue
            trained = {n: v[k] if n in self.stacked else v for n, v in self.params.items()}
            for table in tables:
                trained[table.parameter] = trained[table.parameter][: len(table.rows)]
            local = LocalResult(
                trained, start, tables, float(self.losses[k]), bool(self.looked_at[k]), dropped.get(int(k), ""),
                int(self.steps[k]),
            )  # fmt: skip
            yield finish(self.job, self.sent[k], own, start, local, client, self.round, self.progress)

    def _faults(self) -> list[NonFiniteError | None]:
        """Look at every client's loss and values, with one transfer from the device."""
        names = [n for n, v in self.params.items() if n in self.stacked and v.is_floating_point()]
        finite = [torch.isfinite(flat(self.params[n])).all(1) for n in names]
        fine = torch.stack(finite, 1).cpu().numpy() if names else np.ones((len(self.clients), 0), bool)
        faults: list[NonFiniteError | None] = []
        for k, draws in enumerate(self.draws):
            steps = int(self.steps[k])
            bad = [n for n, good in zip(names, fine[k], strict=True) if not good]
            if self.looked_at[k] and not np.isfinite(self.losses[k]):
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
