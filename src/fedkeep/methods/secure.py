"""Any method whose reduction is a sum, by secure sums: the server learns Σ c_k d̄_k and Σ c_k, and no single upload.

In a simulation both sides run in this process: it shows that a method works so, exactly, and what it costs; it hides
nothing. Each client clips its change, takes it times its weight, and sends that and the weight, masked. Tables go
whole, so that no row number says which rows a client has: all clients send the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from fedkeep.core.errors import MethodError, SecureSumError, UploadError, check_range
from fedkeep.core.params import SERVER, Params, nbytes, under
from fedkeep.kernels.values import pieces
from fedkeep.methods.aggregate import Reduced, spread
from fedkeep.methods.base import Method
from fedkeep.methods.private import bounded_mean
from fedkeep.methods.server import Global, WeighedBy
from fedkeep.privacy import Link
from fedkeep.privacy.dp import Clipping, floating
from fedkeep.privacy.secure.ring import FixedPoint
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_server import SecureServer, threshold_for
from fedkeep.split import Upload

ROUNDING = 1e-6
"""By which part a clipped number may exceed the bound, as clipping in single precision rounds."""


@dataclass(frozen=True, kw_only=True)
class SecureSums:
    """What a secure sum takes.

    Attributes:
        clip: the bound of a change's L2 norm; the range of fixed-point numbers follows from it.
        threshold: the share of a cohort that must be there at every step, above ½; others may drop out.
        heaviest: the weight that counts as 1, and above which weights count as 1 too; wanted where a method weights
            clients by their numbers of examples.
        bits: of the ring: 32, or 64 for smaller steps and twice the bytes.
    """

    clip: float
    threshold: float = 2 / 3
    heaviest: float | None = None
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        check_range("(0, inf]", MethodError, clip=self.clip, heaviest=self.heaviest)
        if not 0.5 < self.threshold <= 1:
            raise MethodError(
                "threshold must be a share above ½ and at most 1, so that no two sums can be made of one cohort; got "
                "{threshold!r}.",
                threshold=self.threshold,
            )
        FixedPoint(bound=self.clip, clients=1, bits=self.bits)  # says what is wrong with bits


@dataclass(frozen=True, kw_only=True)
class SecureMean(WeighedBy):
    """The weighted mean of clipped changes, of which the server sees masked vectors and their sum.

    Whole numbers (counters) stay as they are.

    Attributes:
        mean: the method's own, which gives the weights.
        sums: clipping, range and threshold.
    """

    sums: SecureSums

    is_sum: ClassVar[bool] = True

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> Masked:
        """Return the empty sum."""
        return Masked(self.sums, start, cohort, str(server.round))

    def traffic(self, upload: Upload, sent: Params, start: Params) -> tuple[int, int]:
        """Return the bytes of a masked vector and of all that is sent, tables whole in both; keys are not counted."""
        numbers = sum(start[name].numel() for name in floating(start)) + 1
        return numbers * self.sums.bits // 8, nbytes(sent)


class Vectors:
    """How a round's uploads become vectors of a ring, and the sum of these a mean.

    Args:
        rule: clipping, range and threshold.
        start: what uploads are changes of, by name.
        cohort: how many clients were asked.

    Attributes:
        size: of a vector.
        threshold: how many clients must be there at every step.
    """

    def __init__(self, rule: SecureSums, start: Params, cohort: int) -> None:
        self.rule, self.start, self.names = rule, start, sorted(floating(start))
        self.clipping = Clipping((("*", rule.clip),))
        self.clipping.groups(self.names)  # says now where nothing leaves
        bound = rule.clip * (1 + ROUNDING)
        self.ring = FixedPoint(bound=bound, clients=max(cohort, 1), bits=rule.bits)
        self.size = sum(start[n].numel() for n in self.names) + 1
        self.threshold = threshold_for(cohort, rule.threshold)

    def vector(self, upload: Upload) -> np.ndarray:
        """Return what a client sends, before it is masked: its weight times the clipped change, and the weight."""
        weight = min(upload.weight / (self.rule.heaviest or 1.0), 1.0)
        clipped, _ = self.clipping.clipped(upload.deltas)
        parts = []
        for name in self.names:
            change, start = clipped[name].to(self.start[name].device), self.start[name]
            whole = (
                spread(change, upload.rows[name], start.to(change.dtype)) if name in upload.rows else change
            )
            parts.append(weight * whole.double().cpu().numpy().reshape(-1))
        return self.ring.encode(np.concatenate([*parts, [weight * self.rule.clip]]))

    def reduced(self, summed: np.ndarray, count: int) -> Reduced:
        """Return the mean of so many clients' vectors, given their sum; UploadError: no weight is positive."""
        weight = float(self.ring.decode(summed[-1:])[0]) / self.rule.clip
        if not weight > 0:
            raise UploadError(
                "An average needs at least one upload of positive weight; got a total of {weight}.",
                weight=weight,
            )
        found, place = dict(self.start), 0
        for name in self.names:
            start = self.start[name]
            values = torch.empty(start.shape, dtype=start.dtype)
            for (part,) in pieces(values):
                exact = self.ring.decode(summed[place : place + part.numel()]) / weight
                part.copy_(torch.from_numpy(exact).reshape(part.shape))
                place += part.numel()
            found[name] = values.to(start.device)
        return Reduced(
            changes={n: v for n, v in found.items() if not n.startswith(SERVER)},
            state=under(SERVER, found),
            weight=weight * (self.rule.heaviest or 1.0),
            count=count,
        )


class Undivided:
    """What every secure sum of a round has in common.

    Attributes:
        held_bytes: 0; masked vectors are added as they come.
    """

    held_bytes = 0

    def skip(self, client: str) -> None:
        """Note that a client dropped out."""

    def merge(self, other: object) -> None:
        """Refuse: the masks of a cohort are taken off in one place."""
        raise SecureSumError("A secure sum is made by one server; partial sums of it can't be merged.")


class Masked(Undivided, Vectors):
    """A round's secure sum, with both sides in one process.

    Args:
        rule, start: as for ``Vectors``.
        cohort: the ids of the clients.
        round: what masks are bound to.
    """

    def __init__(self, rule: SecureSums, start: Params, cohort: Sequence[str], round: str) -> None:
        super().__init__(rule, start, len(cohort))
        self.server = SecureServer(round, self.threshold, self.size, self.ring.dtype)
        self.clients = {name: SecureClient(name, round, self.threshold) for name in cohort}
        self.count = 0
        self._agreed = False

    def _agree(self) -> None:
        """Take the steps before training: keys, and shares."""
        if self._agreed:
            return
        for name, client in self.clients.items():
            self.server.add_keys(name, client.keys())
        keys = self.server.keys()
        for name, client in self.clients.items():
            self.server.add_shares(name, client.shares(keys))
        self._agreed = True

    def add(self, client: str, upload: Upload) -> None:
        """Let a client mask its upload, and the server add that."""
        self._agree()
        masked = self.clients[client].masked(self.server.shares_for(client), self.vector(upload))
        self.server.add_masked(client, masked)
        self.count += 1

    def value(self) -> Reduced:
        """Return the mean.

        Raises:
            SecureSumError: fewer clients than the threshold are left.
            UploadError: the weights' sum is not positive.
        """
        self._agree()
        survivors = self.server.survivors()
        for name in survivors:
            self.server.add_revealed(name, self.clients[name].revealed(survivors))
        return self.reduced(self.server.total(), self.count)


def securely(method: Method, sums: SecureSums) -> Method:
    """Return a method whose uploads the server sees in a sum alone.

    Args:
        method: its reduction is a ``WeightedMean``.
        sums: what the sums take.

    Raises:
        MethodError: the method looks at single uploads.
    """
    mean = bounded_mean(
        method,
        sums.heaviest,
        wants="Secure sums want",
        heaviest_name="heaviest",
        other="which looks at single uploads, and secure sums show none",
        rows="which secure sums hide",
        shares="which the server tells it and secure sums hide",
    )
    kinds = [type(link) for link in method.upload]
    alone = next((k for k in kinds if k.decode is not Link.decode or k.update is not Link.update), None)
    if alone is not None:
        raise MethodError(
            "The link {function} of {method!r} has the server decode each upload by itself, or gather "
            "reports of it, and secure sums show none. Leave it out.",
            function=alone.__name__,
            method=method.name,
        )
    return method.on_server(reduce=SecureMean(mean=mean, sums=sums))
