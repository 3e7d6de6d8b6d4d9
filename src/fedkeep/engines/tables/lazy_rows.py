"""Exact lazy momentum: a mini-batch moves only the rows of a table that it looks up.

A row without a gradient of its own still moves: by its velocity v under SGD with momentum, and where a proximal term
½ λ ‖w − r‖² pulls it, by λ d with d = w − r. Such a step is linear, v ← μv + λd and d ← d − ηv, so Δ of them are the
Δ-th power of one 2 × 2 matrix. A row catches up when it is next looked up, and at the end of the phase. Equal to the
dense computation but for rounding; without momentum and proximal term equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.core.optim import Optimizer, OptimizerState
from fedkeep.core.params import Batch, Params
from fedkeep.engines.tables.local_rows import LocalTable, bounded
from fedkeep.kernels import native
from fedkeep.methods import Phase

FEW = 64
"""Steps for which powers are computed at first; twice as many whenever they are used up."""


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


@dataclass(eq=False)
class MovingRows:
    """The rows of one table; ``table`` and ``velocity`` are changed in place.

    Attributes:
        table: (V, …), the rows as of ``last``.
        velocity: as ``table``.
        rate, momentum: η and μ.
        anchor: r, as ``table``; None without a proximal term.
        pull: λ. The gradients of rows that are looked up contain the proximal term's.
    """

    table: Tensor
    velocity: Tensor
    rate: float
    momentum: float
    anchor: Tensor | None = None
    pull: float = 0.0
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        device = self.table.device
        self.last = torch.zeros(len(self.table), dtype=torch.int64, device=device)
        tensors = [t for t in (self.table, self.velocity, self.anchor) if t is not None]
        self._native = (
            device.type == "cpu"
            and self.table.dtype in (torch.float32, torch.float64)
            and all(t.is_contiguous() and t.dtype == self.table.dtype for t in tensors)
            and native.available()
        )
        self._rates = torch.tensor([self.rate, self.momentum], dtype=self.table.dtype, device=device)
        self._powers = self._raised(FEW)
        self._products = None if self.anchor is None else products(self.table, self.velocity, self.anchor)

    def _raised(self, steps: int) -> Tensor:
        """Return (steps + 1, 4): by Δ the a, b, c, e of d ← a d + b v and v ← c d + e v."""
        one = (1 - self.rate * self.pull, -self.rate * self.momentum, self.pull, self.momentum)
        found = [(1.0, 0.0, 0.0, 1.0)]
        for _ in range(steps):
            a, b, c, e = found[-1]
            found.append(
                (
                    one[0] * a + one[1] * c,
                    one[0] * b + one[1] * e,
                    one[2] * a + one[3] * c,
                    one[2] * b + one[3] * e,
                )
            )
        return torch.tensor(found, dtype=torch.float64).to(self.table)

    def look_up(self, used: Tensor) -> Tensor:
        """Return rows as they are now: the same shape as ``table[used]``.

        Args:
            used: (N,) int64, none twice.
        """
        if self._native:
            rows = self.table.new_empty(len(used), *self.table.shape[1:])
            self._call(False, used, rows, None)
            return rows
        return self._present(used)[0]

    def move(self, used: Tensor, rows: Tensor, grads: Tensor) -> None:
        """Take a step from the rows that ``look_up`` returned: v ← μv + g, w ← w − ηv. May change ``rows``."""
        if self._native:
            self._call(True, used, rows, grads.contiguous())
        else:
            velocity = self._present(used)[1].mul_(self.momentum).add_(grads)
            self.velocity.index_copy_(0, used, velocity)
            self.table.index_copy_(0, used, rows.sub_(velocity, alpha=self.rate))
            self.last.index_fill_(0, used, self.step + 1)
            if self._products is not None and self.anchor is not None:
                self._products[used] = products(self.table[used], self.velocity[used], self.anchor[used])
        self.step += 1
        if self.step >= len(self._powers):
            self._powers = self._raised(2 * self.step)

    def penalty(self, used: Tensor) -> Tensor | float:
        """Return ½ λ ‖w − r‖² over the rows that are not among ``used``: |a d + b v|² from the products of d and v."""
        if self._products is None:
            return 0.0
        a, b, _, _ = self._powers[self.step - self.last].unbind(1)
        dd, dv, vv = self._products.unbind(1)
        squares = a * a * dd + 2 * a * b * dv + b * b * vv
        return 0.5 * self.pull * squares.index_fill_(0, used, 0).sum()

    def finish(self) -> None:
        """Bring every row to the present."""
        if bool((self.last < self.step).any()):
            self._advance(self.table, self.velocity, self.anchor, self.last)
            self.last.fill_(self.step)
            if self.anchor is not None:
                self._products = products(self.table, self.velocity, self.anchor)

    def _present(self, used: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and their velocities as they are now."""
        rows, velocity = self.table.index_select(0, used), self.velocity.index_select(0, used)
        anchor = None if self.anchor is None else self.anchor.index_select(0, used)
        self._advance(rows, velocity, anchor, self.last[used])
        return rows, velocity

    def _advance(self, rows: Tensor, velocity: Tensor, anchor: Tensor | None, last: Tensor) -> None:
        """Bring rows and velocities as of ``last`` to the present, in place."""
        powers = self._powers[self.step - last].unbind(1)
        a, b, c, e = (p.reshape(-1, *[1] * (rows.dim() - 1)) for p in powers)
        if anchor is None:
            rows.addcmul_(b, velocity)
            velocity.mul_(e)
        else:
            apart = rows - anchor
            rows.copy_(anchor).addcmul_(a, apart).addcmul_(b, velocity)
            velocity.mul_(e).addcmul_(c, apart)

    def _call(self, back: bool, used: Tensor, rows: Tensor, grads: Tensor | None) -> None:
        width = self.table[:1].numel()
        words = (
            torch.get_num_threads(),
            native.load().level,
            self.table.dtype == torch.float64,
            len(used),
            width,
            self.step,
            used.data_ptr(),
            self.table.data_ptr(),
            self.velocity.data_ptr(),
            native.address(self.anchor),
            native.address(self._products),
            self.last.data_ptr(),
            self._powers.data_ptr(),
            self._rates.data_ptr(),
            rows.data_ptr(),
            native.address(grads),
        )
        native.call("rows", back, words)


def products(rows: Tensor, velocity: Tensor, anchor: Tensor) -> Tensor:
    """Return d·d, d·v and v·v of each row, (N, 3)."""
    shape = len(rows), -1
    d, v = (rows - anchor).reshape(shape), velocity.reshape(shape)
    return torch.stack(((d * d).sum(1), (d * v).sum(1), (v * v).sum(1)), 1)
