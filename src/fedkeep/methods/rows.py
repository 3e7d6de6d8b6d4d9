"""Sums of some rows of large tables."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeep.kernels.values import exact


class RowSums:
    """Weighted sums of a table's rows, which takes memory for those rows alone that were added.

    Args:
        table: gives shape, device and type.
    """

    def __init__(self, table: Tensor) -> None:
        self.place = torch.full((len(table),), -1, device=table.device)
        self.count = 0
        self.sums = table.new_zeros((0, *table.shape[1:]), dtype=exact(table))

    def add(self, rows: Tensor, values: Tensor, weight: float) -> None:
        """Add rows; their numbers are all different."""
        new = rows[self.place[rows] < 0]
        end = self.count + len(new)
        if end > len(self.sums):
            more = max(end, min(2 * end, len(self.place))) - len(self.sums)
            self.sums = torch.cat([self.sums, self.sums.new_zeros((more, *self.sums.shape[1:]))])
        self.place[new] = torch.arange(self.count, end, device=self.place.device)
        self.count = end
        self.sums.index_add_(0, self.place[rows], values, alpha=weight)

    def rows(self) -> Tensor:
        """Return the numbers of the rows, (rows,) int64, ascending."""
        return (self.place >= 0).nonzero().squeeze(1)

    def values(self) -> Tensor:
        """Return the sums, (rows, *shape), in the order of ``rows``."""
        return self.sums[self.place[self.rows()]]


def spread(values: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    """Return a table of zeros, but for some rows."""
    return torch.zeros_like(table).index_copy_(0, rows, values)
