"""Exact lazy momentum: a mini-batch moves only the rows of a table that it looks up.

A row without a gradient still moves under SGD with momentum μ, by its velocity v alone: after Δ such steps it has moved
by −η v (μ + μ² + … + μ^Δ), and v has become μ^Δ v. So a row catches up when it is next looked up, and at the end of
the phase. Equal to the dense computation but for rounding; without momentum equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedkeep.core.optim import Optimizer, OptimizerState
from fedkeep.core.params import Batch, Params
from fedkeep.engines.vocabulary import LocalTable
from fedkeep.methods import Phase


def lazy_tables(phase: Phase, tables: Sequence[LocalTable]) -> list[LocalTable]:
    """Return the tables that a phase can train row by row: SGD, no weight decay, terms that read outputs alone."""
    optimizer, loss = phase.optimizer, phase.loss
    exact = optimizer.kind == "sgd" and not optimizer.weight_decay
    if not exact or loss.reads_parameters or loss.reads_received:
        return []
    bounded = any(fnmatchcase(t.parameter, pattern) for t in tables for pattern, _ in optimizer.bounds)
    return [] if bounded else list(tables)


class LazyRows:
    """The tables of one phase, of which a step sees the rows that its mini-batch looks up.

    Args:
        tables: what ``lazy_tables`` returned.
        names: what the phase trains.
        params: all parameters, tables cut to local rows; changed in place.
        received: what the server sent, cut likewise.
        optimizer: SGD.
        state: its state; velocities of tables stand there as of any parameter.
        scale: the schedule's factor on the rates.
    """

    def __init__(
        self,
        tables: Sequence[LocalTable],
        names: Sequence[str],
        params: Params,
        received: Mapping[str, Tensor],
        optimizer: Optimizer,
        state: OptimizerState,
        scale: float,
    ) -> None:
        self.single = {t.column for t in tables if t.single}
        self.columns = {t.column: len(params[t.parameter]) for t in tables if not t.single}
        self.of = {t.parameter: t.column for t in tables}
        self.trained = [t.parameter for t in tables if t.parameter in names]
        self.params, self.received = params, received
        self.rates = {n: optimizer.rate(n) * scale for n in self.trained}
        self.momentum = optimizer.momentum
        self.step = dict.fromkeys(self.trained, 0)
        if self.momentum:
            for name in self.trained:
                state.first.setdefault(name, torch.zeros_like(params[name]))
        self.velocity = {n: state.first[n] for n in self.trained} if self.momentum else {}
        self.last = {n: torch.zeros(len(params[n]), dtype=params[n].dtype) for n in self.velocity}
        self.used: dict[str, Tensor] = {}
        self.drawn: Params = {}

    def look_up(self, batch: Batch) -> tuple[Params, Params]:
        """Cut the tables to a batch's rows and rewrite its ids; return these rows of ``params`` and of ``received``."""
        for column, size in self.columns.items():
            ids = batch[column]
            mark = torch.zeros(size, dtype=torch.bool, device=ids.device)
            mark[ids.reshape(-1)] = True
            mark[0] = True  # padding keeps the number 0
            used = mark.nonzero().squeeze(1)
            place = torch.empty(size, dtype=ids.dtype, device=ids.device)
            place[used] = torch.arange(len(used), dtype=ids.dtype, device=ids.device)
            batch[column] = place[ids]
            self.used[column] = used
        for column in self.single:
            self.used[column] = batch[column][:1]
        rows = {name: self._rows(name, self.used[column]) for name, column in self.of.items()}
        seen = {
            n: self.received[n].index_select(0, self.used[c])
            for n, c in self.of.items()
            if n in self.received
        }
        return rows, seen

    @torch.no_grad()
    def _rows(self, name: str, used: Tensor) -> Tensor:
        """Return rows of a table as they are now; what they missed is written back by the step that follows."""
        rows = self.params[name].index_select(0, used)
        if name in self.velocity:
            velocity = self.velocity[name].index_select(0, used)
            self._catch_up(name, rows, velocity, self.last[name].index_select(0, used))
            self.drawn[name] = velocity
        if self.of[name] in self.single:
            rows = rows.squeeze(0)
        return rows.requires_grad_(name in self.rates)

    @torch.no_grad()
    def update(self, rows: Params, grads: Params) -> None:
        """Take the optimiser's step on the rows of this batch: v ← μv + g, w ← w − ηv."""
        for name, change in grads.items():
            used, before = self.used[self.of[name]], rows[name].detach()
            if self.of[name] in self.single:
                change, before = change.unsqueeze(0), before.unsqueeze(0)
            self.step[name] += 1
            if self.momentum:
                change = self.drawn[name].mul_(self.momentum).add_(change)
                self.velocity[name].index_copy_(0, used, change)
                self.last[name].index_fill_(0, used, self.step[name])
            self.params[name].index_copy_(0, used, before.sub_(change, alpha=self.rates[name]))

    @torch.no_grad()
    def finish(self) -> None:
        """Bring every row to the present."""
        for name, velocity in self.velocity.items():
            self._catch_up(name, self.params[name], velocity, self.last[name])
            self.last[name].fill_(self.step[name])

    def _catch_up(self, name: str, rows: Tensor, velocity: Tensor, last: Tensor) -> None:
        missed = self.step[name] - last
        if not bool(missed.any()):
            return
        shrunk = (self.momentum**missed).reshape(-1, *[1] * (rows.dim() - 1))
        way = self.rates[name] * self.momentum / (1 - self.momentum) * (1 - shrunk)
        rows.addcmul_(way, velocity, value=-1)
        velocity.mul_(shrunk)
