"""Reductions for uploads that can't be trusted: median, trimmed mean, clipped norms, Krum. They look at single uploads.

A median follows from no sum, so the server keeps a round's uploads until all are there.

Sources: median and trimmed mean: Yin et al., 2018, "Byzantine-robust distributed learning: towards optimal statistical
rates", definitions 1 and 2, algorithm 1, option I; Krum: Blanchard et al., 2017, "Machine learning with adversaries: Byzantine tolerant gradient descent",
§4; clipped norms: Sun et al., 2019, "Can you really backdoor federated learning?" (arXiv 1911.07963), §3.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError, UploadError, check_range
from fedkeep.core.params import SERVER, Params, nbytes, under
from fedkeep.kernels.values import exact
from fedkeep.methods.aggregate import Reduced, RunningMean, spread
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.server import Global, Reduction, WeightedMean
from fedkeep.privacy.clip_and_noise import norm
from fedkeep.split import Upload


@dataclass(frozen=True, kw_only=True)
class Median(Reduction):
    """The median of changes, each number by itself; every client that has an example counts once.

    Of an even number of clients it is the mean of the two in the middle. A table's row that a client does not hold
    counts with no change. Integer tensors (counters) are those of the first client in the order of ids.
    """

    alike: ClassVar[bool] = True

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
            raise UploadError("Client {client!r} has two uploads in one round.", client=min(both))
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


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Median):
    """The mean of each number without its largest and smallest values; every client that has an example counts once.

    Stands ⌊share · m⌋ clients of m that send anything: a number that is not between honest ones is cut off, or an
    honest one beyond it is. With ``share`` 0 it is the mean.

    Attributes:
        share: β, the part of the clients that is cut off at each end, in [0, ½).
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        check_range("[0, 0.5)", MethodError, share=self.share)  # half is a median

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> Trimmed:
        """Return a place for the round's uploads."""
        return Trimmed(start, self.share)


class Trimmed(KeptUploads):
    """The uploads of a round, and their trimmed mean; ``share`` is cut off at each end."""

    def __init__(self, start: Params, share: float) -> None:
        super().__init__(start)
        self.share = share

    def middle(self, values: Tensor) -> Tensor:
        """Return the mean of what is left of values in order, (clients, *shape)."""
        count = len(values)
        cut = math.floor(self.share * count + 1e-9)  # 0.3 · 10 is 3
        return values[cut : count - cut].to(exact(values)).mean(0)


@dataclass(frozen=True, kw_only=True)
class Krum(Median):
    """The upload that is nearest to its neighbours, or the mean of the several nearest (multi-Krum).

    Of m uploads each has the score Σ ‖d_i − d_j‖² over the m − ``faulty`` − 2 others that are nearest to it, all
    floating-point numbers together; the lowest is taken, at a tie the first in the order of ids. Every client that has
    an example counts once. Stands ``faulty`` clients; wants m ≥ 2 ``faulty`` + 3.

    Attributes:
        faulty: f, how many clients may send anything.
        taken: of how many uploads of the lowest scores the mean is taken; 1: Krum.
    """

    faulty: int = 1
    taken: int = 1

    def __post_init__(self) -> None:
        check_count(0, faulty=self.faulty)
        check_count(1, taken=self.taken)

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> NearestUploads:
        """Return a place for the round's uploads."""
        return NearestUploads(start, self)


class NearestUploads(KeptUploads):
    """The uploads of a round, and those of the lowest scores."""

    def __init__(self, start: Params, rule: Krum) -> None:
        super().__init__(start)
        self.rule = rule

    def counted(self) -> list[Upload]:
        """Return the uploads that are taken.

        Raises:
            UploadError: there are too few for the number that may be faulty.
        """
        uploads, rule = super().counted(), self.rule
        if len(uploads) < 2 * rule.faulty + 3 or rule.taken > len(uploads) - rule.faulty:
            raise UploadError(
                "Krum wants at least {least} uploads where {faulty} "
                "may be faulty and {taken} is taken; got {count}. Take larger cohorts.",
                least=max(2 * rule.faulty + 3, rule.faulty + rule.taken),
                faulty=rule.faulty,
                taken=rule.taken,
                count=len(uploads),
            )
        points = torch.stack([self.flat(upload) for upload in uploads])
        apart = torch.stack([(points - point).square().sum(1) for point in points])
        nearest = apart.sort(1).values[:, 1 : len(uploads) - rule.faulty - 1]  # column 0 is the upload itself
        order = nearest.sum(1).sort(stable=True).indices[: rule.taken]
        return [uploads[k] for k in sorted(order.tolist())]

    def flat(self, upload: Upload) -> Tensor:
        """Return an upload's floating-point numbers, tables whole, in one row of double precision."""
        names = [n for n, v in self.start.items() if v.is_floating_point()]
        parts = [self.whole(upload, n).reshape(-1).to(exact(self.start[n])) for n in names]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    def middle(self, values: Tensor) -> Tensor:
        """Return the mean of the uploads that are taken."""
        return values.to(exact(values)).mean(0)


@dataclass(frozen=True, kw_only=True)
class ClippedMean(WeightedMean):
    """The mean of changes whose L2 norm is cut to a bound, all floating-point numbers of an upload together.

    A client moves the mean by at most its share times the bound, wherever it pulls; it stands no number of clients that
    pull the same way, and costs honest ones what of their changes is beyond the bound. Weights by examples would let a
    client claim more, so every client that has an example counts once. Uploads are summed as they come: none is kept.

    Attributes:
        bound: in units of the parameters, positive.
    """

    bound: float = 1.0

    is_sum = False  # the server looks at each upload's norm

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("(0, inf]", MethodError, bound=self.bound)

    def weight(self, examples: float) -> float:
        """Return 1 for a client that has any example."""
        return float(examples > 0)

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> Clipped:
        """Return the empty mean."""
        return Clipped(start, cohort, self)


class Clipped(RunningMean):
    """The mean of a round's uploads, each cut to the bound."""

    def __init__(self, start: Params, cohort: Sequence[str], rule: ClippedMean) -> None:
        super().__init__(start, cohort, rule.missing_rows)
        self.bound = rule.bound

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload within the bound, and of weight 1 at most, whatever weight it claims."""
        upload, size = replace(upload, weight=min(upload.weight, 1.0)), norm(upload.deltas)
        if size <= self.bound:
            return upload
        scale = self.bound / size
        return upload.but({n: v * scale if v.is_floating_point() else v for n, v in upload.deltas.items()})
