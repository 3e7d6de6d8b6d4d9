"""The weighted mean of a round's uploads, summed while they come in, so that one at a time has to be held."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params
from fedkeep.split import Upload


class RunningMean:
    """The weighted mean of uploads (FURL eq. 4 and 5).

    Sums run in the order of ``add`` and in double precision, so they lose no digits of many clients and depend on
    nothing but the uploads and their order. Integer tensors (counters) are taken from the first upload.

    A table of which clients hold different rows (KTEPS §4.2, Remark 3) is averaged row by row: a client that lacks a
    row counts with no change, or not at all (``"owners_only"``).

    Args:
        received: the federated parameters as the server sent them; they give shapes and types.
        missing_rows: as ``Method.missing_rows``.
    """

    def __init__(self, received: Params, missing_rows: str = "unchanged") -> None:
        self.received, self.missing_rows = received, missing_rows
        self.weight, self.count, self.seconds = 0.0, 0, 0.0
        self._sums: Params = {}
        self._rows: dict[str, RowSums] = {}
        self._held: Params = {}

    def add(self, upload: Upload) -> None:
        """Add a (decoded, checked) upload."""
        began = time.perf_counter()
        for name, start in self.received.items():
            delta, rows = upload.deltas[name].to(start.device), upload.rows.get(name)
            if not start.is_floating_point():
                if name not in self._sums:
                    self._sums[name] = delta.clone()
            elif rows is None:
                self._whole(name, start).add_(delta, alpha=upload.weight)
                if name in self._held:
                    self._held[name] += upload.weight
            else:
                self._add_rows(name, start, rows.to(start.device), delta, upload.weight)
        self.weight += upload.weight
        self.count += 1
        self.seconds += time.perf_counter() - began

    def _whole(self, name: str, start: Tensor) -> Tensor:
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(start, dtype=_exact(start))
            if name in self._rows:
                few = self._rows.pop(name)
                self._sums[name][few.rows()] = few.values()
        return self._sums[name]

    def _add_rows(self, name: str, start: Tensor, rows: Tensor, delta: Tensor, weight: float) -> None:
        change = delta.to(_exact(start))
        if name in self._sums:
            self._sums[name].index_add_(0, rows, change, alpha=weight)
        else:
            self._rows.setdefault(name, RowSums(start)).add(rows, change, weight)
        if self.missing_rows == "owners_only":
            if name not in self._held:
                self._held[name] = torch.full(
                    (len(start),), self.weight, dtype=_exact(start), device=start.device
                )
            self._held[name][rows] += weight

    def mean(self) -> Params:
        """Return the mean, by name.

        Raises:
            UploadError: there was no upload, or the weights' sum is not positive.
        """
        means, rows = self.compact()
        return {n: spread(v, rows[n], self.received[n]) if n in rows else v for n, v in means.items()}

    def compact(self) -> tuple[Params, Params]:
        """Return the mean with tables cut to the rows that any client sent, and these rows' numbers, ascending.

        A table that a client sent whole is whole, and absent from the second.

        Raises:
            UploadError: as for ``mean``.
        """
        if not self.weight > 0:
            raise UploadError(
                f"An average needs at least one upload of positive weight; got {self.count} of total {self.weight}."
            )
        means, rows = Params(), {name: few.rows() for name, few in self._rows.items()}
        for name, start in self.received.items():
            total = self._rows[name].values() if name in rows else self._sums[name]
            if total.is_floating_point():
                total = (total / self._share(name, total, rows.get(name))).to(start.dtype)
            means[name] = total
        return means, rows

    def _share(self, name: str, total: Tensor, rows: Tensor | None) -> Tensor | float:
        if name not in self._held:
            return self.weight
        held = self._held[name] if rows is None else self._held[name][rows]
        return held.clamp_min(torch.finfo(total.dtype).tiny).reshape(-1, *[1] * (total.dim() - 1))


class RowSums:
    """Weighted sums of a table's rows, which takes memory for those rows alone that were added.

    Args:
        table: gives shape, device and type.
    """

    def __init__(self, table: Tensor) -> None:
        self.place = torch.full((len(table),), -1, device=table.device)
        self.count = 0
        self.sums = table.new_zeros((0, *table.shape[1:]), dtype=_exact(table))

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


def mean_of(uploads: Iterable[Upload], received: Params, missing_rows: str = "unchanged") -> Params:
    """Return the weighted mean of uploads that are at hand, as a ``RunningMean`` makes it."""
    mean = RunningMean(received, missing_rows)
    for upload in uploads:
        mean.add(upload)
    return mean.mean()


def _exact(value: Tensor) -> torch.dtype:
    return torch.float64 if value.device.type != "mps" else value.dtype
