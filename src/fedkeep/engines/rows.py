"""A table under SGD with momentum, of which each step looks up some rows and moves them.

A row without a gradient still moves, by its velocity v alone: after Δ steps with momentum μ it has moved by
−η v (μ + μ² + … + μ^Δ) = −η v μ (1 − μ^Δ) / (1 − μ), and v has become μ^Δ v. So a row catches up when it is next
looked up, and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkeep.kernels import native

FEW = 64
"""Steps for which powers of the momentum are computed at first; twice as many whenever they are used up."""


@dataclass(eq=False)
class MovingRows:
    """The rows of one table; ``table`` and ``velocity`` are changed in place.

    Attributes:
        table: (V, …), the rows as of ``last``.
        velocity: as ``table``.
        rate, momentum: η and μ, below 1.
    """

    table: Tensor
    velocity: Tensor
    rate: float
    momentum: float
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        device = self.table.device
        self.last = torch.zeros(len(self.table), dtype=torch.int64, device=device)
        self._native = (
            device.type == "cpu"
            and self.table.dtype in (torch.float32, torch.float64)
            and self.table.is_contiguous()
            and self.velocity.is_contiguous()
            and native.available()
        )
        self._rates = torch.tensor([self.rate, self.momentum], dtype=self.table.dtype, device=device)
        self._powers(FEW)

    def _powers(self, steps: int) -> None:
        """Compute μ^Δ and η (μ + … + μ^Δ) for Δ = 0 .. steps."""
        shrunk = self.momentum ** torch.arange(steps + 1, dtype=torch.float64, device=self.table.device)
        way = self.rate * self.momentum / (1 - self.momentum) * (1 - shrunk)
        self._shrunk, self._way = shrunk.to(self.table.dtype), way.to(self.table.dtype)

    def look_up(self, used: Tensor) -> Tensor:
        """Return rows as they are now: the same shape as ``table[used]``.

        Args:
            used: (N,) int64, none twice.
        """
        if self._native:
            rows = self.table.new_empty(len(used), *self.table.shape[1:])
            self._call(False, used, rows, None)
            return rows
        way = self._wide(self._way[self.step - self.last[used]])
        return self.table.index_select(0, used).addcmul_(way, self.velocity.index_select(0, used), value=-1)

    def move(self, used: Tensor, rows: Tensor, grads: Tensor) -> None:
        """Take a step from the rows that ``look_up`` returned: v ← μv + g, w ← w − ηv. May change ``rows``."""
        if self._native:
            self._call(True, used, rows, grads.contiguous())
        else:
            shrunk = self._wide(self._shrunk[self.step - self.last[used]] * self.momentum)
            velocity = self.velocity.index_select(0, used).mul_(shrunk).add_(grads)
            self.velocity.index_copy_(0, used, velocity)
            self.table.index_copy_(0, used, rows.sub_(velocity, alpha=self.rate))
            self.last.index_fill_(0, used, self.step + 1)
        self.step += 1
        if self.step >= len(self._shrunk):
            self._powers(2 * self.step)

    def finish(self) -> None:
        """Bring every row to the present."""
        missed = self.step - self.last
        if not bool(missed.any()):
            return
        self.table.addcmul_(self._wide(self._way[missed]), self.velocity, value=-1)
        self.velocity.mul_(self._wide(self._shrunk[missed]))
        self.last.fill_(self.step)

    def _wide(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *[1] * (self.table.dim() - 1))

    def _call(self, back: bool, used: Tensor, rows: Tensor, grads: Tensor | None) -> None:
        width = self.table[:1].numel()
        words = (
            torch.get_num_threads(), native.load().level, self.table.dtype == torch.float64, len(used), width,
            self.step, used.data_ptr(), self.table.data_ptr(), self.velocity.data_ptr(), self.last.data_ptr(),
            self._shrunk.data_ptr(), self._way.data_ptr(), self._rates.data_ptr(), rows.data_ptr(),
            native.address(grads),
        )  # fmt: skip
        native.call("rows", back, words)
