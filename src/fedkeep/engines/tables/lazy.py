"""Exact lazy momentum: a mini-batch moves only the rows of a table that it looks up.

A row without a gradient still moves under SGD with momentum, or where a proximal term pulls it; it catches up when it
is next looked up, and at the end of the phase (``rows``). Equal to the dense computation but for rounding; without
momentum and proximal term equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.optim import Optimizer, OptimizerState
from fedkeep.core.params import Batch, Params
from fedkeep.engines.tables.local_rows import LocalTable, bounded
from fedkeep.engines.tables.momentum import MovingRows
from fedkeep.methods import Phase


def lazy_tables(phase: Phase, tables: Sequence[LocalTable]) -> list[LocalTable]:
    """Return the tables that a phase can train row by row: SGD, no weight decay or bounds, losses of outputs alone.

    And proximal terms, unless the gradient's norm is bounded: rows that no example looks up are part of it then.
    """
    optimizer, loss = phase.optimizer, phase.loss
    exact = optimizer.kind == "sgd" and not optimizer.weight_decay and loss.reads_parameters is False
    if not exact or loss.pull is None or (loss.pull and phase.clip_norm is not None):
        return []
    return [] if any(bounded([phase], t.parameter) for t in tables) else list(tables)


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
        pull: λ of the proximal term.
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
        pull: float = 0.0,
    ) -> None:
        self.single = {t.column for t in tables if t.single}
        self.columns = {t.column: len(params[t.parameter]) for t in tables if not t.single}
        self.of = {t.parameter: t.column for t in tables}
        self.trained = [t.parameter for t in tables if t.parameter in names]
        self.params, self.received = params, received
        self.rates = {n: optimizer.rate(n) * scale for n in self.trained}
        self.moving: dict[str, MovingRows] = {}
        for name in self.trained:
            anchor = received.get(name) if pull else None
            if optimizer.momentum or anchor is not None:
                fresh = torch.zeros_like(params[name])
                velocity = state.first.setdefault(name, fresh) if optimizer.momentum else fresh
                self.moving[name] = MovingRows(
                    params[name],
                    velocity,
                    self.rates[name],
                    optimizer.momentum,
                    anchor,
                    0.0 if anchor is None else pull,
                )
        self.used: dict[str, Tensor] = {}
        # The proximal term's value for the rows that the batch does not look up.
        self.penalty: Tensor | float = 0.0

    def look_up(self, batch: Batch) -> tuple[Params, Mapping[str, Tensor]]:
        """Cut the tables to a batch's rows and rewrite its ids; return these rows, and what was received cut likewise.

        The received rows are cut when they are asked for: most losses don't.
        """
        for column, size in self.columns.items():
            ids = batch[column]
            flat = ids.reshape(-1)
            place = torch.zeros(size, dtype=ids.dtype, device=ids.device).index_fill_(0, flat, 1)
            place[0] = 1  # padding keeps the number 0
            used = place.nonzero().squeeze(1)
            place.index_copy_(0, used, torch.arange(len(used), dtype=ids.dtype, device=ids.device))
            batch[column] = place.index_select(0, flat).reshape(ids.shape)
            self.used[column] = used
        for column in self.single:
            self.used[column] = batch[column][:1]
        rows = {name: self._rows(name, self.used[column]) for name, column in self.of.items()}
        self.penalty = sum(moving.penalty(self.used[self.of[name]]) for name, moving in self.moving.items())
        return rows, ReceivedRows(self.received, {n: self.used[column] for n, column in self.of.items()})

    @torch.no_grad()
    def _rows(self, name: str, used: Tensor) -> Tensor:
        """Return rows of a table as they are now; what they missed is written back by the step that follows."""
        if name in self.moving:
            rows = self.moving[name].look_up(used)
        else:
            rows = self.params[name].index_select(0, used)
        if self.of[name] in self.single:
            rows = rows.squeeze(0)
        return rows.requires_grad_(name in self.rates)

    @torch.no_grad()
    def update(self, rows: Params, grads: Params) -> None:
        """Take the optimiser's step on the rows of this batch."""
        for name, change in grads.items():
            used, before = self.used[self.of[name]], rows[name].detach()
            if self.of[name] in self.single:
                change, before = change.unsqueeze(0), before.unsqueeze(0)
            if name in self.moving:
                self.moving[name].move(used, before, change)
            else:
                self.params[name].index_copy_(0, used, before.sub_(change, alpha=self.rates[name]))

    @torch.no_grad()
    def finish(self) -> None:
        """Bring every row to the present."""
        for rows in self.moving.values():
            rows.finish()


class ReceivedRows(Mapping[str, Tensor]):
    """What the server sent, of whose tables only the rows of a batch are seen; each is cut when asked for."""

    def __init__(self, received: Mapping[str, Tensor], used: Mapping[str, Tensor]) -> None:
        self._received, self._used = received, used

    def __getitem__(self, name: str) -> Tensor:
        value = self._received[name]
        return value.index_select(0, self._used[name]) if name in self._used else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._received)

    def __len__(self) -> int:
        return len(self._received)
