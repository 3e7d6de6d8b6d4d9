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
        self._held: Params = {}

    def add(self, upload: Upload) -> None:
        """Add a (decoded, checked) upload."""
        began = time.perf_counter()
        for name, start in self.received.items():
            delta, rows = upload.deltas[name], upload.rows.get(name)
            if not start.is_floating_point():
                if name not in self._sums:
                    self._sums[name] = delta.clone()
                continue
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(start, dtype=_exact(start))
            if rows is None:
                self._sums[name].add_(delta.to(start.device), alpha=upload.weight)
            else:
                change = delta.to(device=start.device, dtype=_exact(start))
                self._sums[name].index_add_(0, rows.to(start.device), change, alpha=upload.weight)
            if self.missing_rows == "owners_only":
                self._hold(name, start, rows, upload.weight)
        self.weight += upload.weight
        self.count += 1
        self.seconds += time.perf_counter() - began

    def _hold(self, name: str, start: Tensor, rows: Tensor | None, weight: float) -> None:
        if rows is not None and name not in self._held:
            self._held[name] = torch.full(
                (len(start),), self.weight, dtype=_exact(start), device=start.device
            )
        if name in self._held:
            self._held[name][slice(None) if rows is None else rows.to(start.device)] += weight

    def mean(self) -> Params:
        """Return the mean, by name.

        Raises:
            UploadError: there was no upload, or the weights' sum is not positive.
        """
        if not self.weight > 0:
            raise UploadError(
                f"An average needs at least one upload of positive weight; got {self.count} of total {self.weight}."
            )
        return {name: self._mean(name, total) for name, total in self._sums.items()}

    def _mean(self, name: str, total: Tensor) -> Tensor:
        if not total.is_floating_point():
            return total
        if name not in self._held:
            return (total / self.weight).to(self.received[name].dtype)
        share = (
            self._held[name].clamp_min(torch.finfo(total.dtype).tiny).reshape(-1, *[1] * (total.dim() - 1))
        )
        return (total / share).to(self.received[name].dtype)


def mean_of(uploads: Iterable[Upload], received: Params, missing_rows: str = "unchanged") -> Params:
    """Return the weighted mean of uploads that are at hand, as a ``RunningMean`` makes it."""
    mean = RunningMean(received, missing_rows)
    for upload in uploads:
        mean.add(upload)
    return mean.mean()


def _exact(value: Tensor) -> torch.dtype:
    return torch.float64 if value.device.type != "mps" else value.dtype
