"""The median of uploads, coordinate by coordinate: a few clients that send anything cannot move it far.

Source: Yin et al., 2018, "Byzantine-robust distributed learning: towards optimal statistical rates", definition 1 and
algorithm 1, option I. A median follows from no sum, so the server keeps a round's uploads until all are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import UploadError
from fedkeep.core.params import SERVER, Params, nbytes, under
from fedkeep.kernels.values import exact
from fedkeep.methods.aggregate import Reduced
from fedkeep.methods.rows import spread
from fedkeep.methods.server import Global, Reduction
from fedkeep.split import Upload


@dataclass(frozen=True, kw_only=True)
class Median(Reduction):
    """The median of changes, each number by itself; every client that has an example counts once.

    Of an even number of clients it is the mean of the two in the middle. A table's row that a client does not hold
    counts with no change. Integer tensors (counters) are those of the first client in the order of ids.
    """

    def weight(self, examples: float) -> float:
        """Return 1 for a client that has any example."""
        return float(examples > 0)

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> KeptUploads:
        """Return a place for the round's uploads."""
        return KeptUploads(start)


class KeptUploads:
    """The uploads of a round, all of them.

    Args:
        start: what uploads are changes of, by name.

    Attributes:
        held_bytes: how many bytes they take now.
    """

    def __init__(self, start: Params) -> None:
        self.start, self.held_bytes = start, 0
        self._uploads: dict[str, Upload] = {}

    def add(self, client: str, upload: Upload) -> None:
        """Keep a client's (decoded, checked) upload."""
        self._uploads[client] = upload
        self.held_bytes += nbytes(upload.deltas) + nbytes(upload.rows)

    def skip(self, client: str) -> None:
        """A client without an upload does not count."""

    def merge(self, other: KeptUploads) -> None:
        """Take over what another one of the same round keeps.

        Raises:
            UploadError: both keep an upload of one client.
        """
        if both := self._uploads.keys() & other._uploads.keys():
            raise UploadError(f"Client {min(both)!r} has two uploads in one round.")
        self._uploads |= other._uploads
        self.held_bytes += other.held_bytes

    def value(self) -> Reduced:
        """Return the median, or what a subclass makes of the uploads.

        Raises:
            UploadError: no client counts, or too few for the reduction.
        """
        uploads = self.counted()
        found = {name: self._reduced(name, start, uploads) for name, start in self.start.items()}
        return Reduced(
            changes={n: v for n, v in found.items() if not n.startswith(SERVER)},
            state=under(SERVER, found),
            weight=float(len(uploads)),
            count=len(uploads),
        )

    def counted(self) -> list[Upload]:
        """Return the uploads that count, in the order of ids; UploadError: there is none."""
        uploads = [u for _, u in sorted(self._uploads.items()) if u.weight > 0]
        if not uploads:
            raise UploadError("A median needs at least one upload of positive weight; got none.")
        return uploads

    def middle(self, values: Tensor) -> Tensor:
        """Return what values of one number each, (clients, *shape) in ascending order, are reduced to."""
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        return low.to(exact(values)) / 2 + high.to(exact(values)) / 2

    def whole(self, upload: Upload, name: str) -> Tensor:
        """Return an upload's change of a tensor, all rows of a table."""
        change, start = upload.deltas[name], self.start[name]
        return (spread(change, upload.rows[name], start) if name in upload.rows else change).to(start.device)

    def _reduced(self, name: str, start: Tensor, uploads: Sequence[Upload]) -> Tensor:
        whole = [self.whole(upload, name) for upload in uploads]
        if not start.is_floating_point():
            return whole[0].clone()
        return self.middle(torch.stack(whole).sort(0).values).to(start.dtype)
