"""Noise on uploads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedkeep.core.errors import ConfigError
from fedkeep.core.params import Params
from fedkeep.privacy.base import Encoded, Link
from fedkeep.privacy.draws import Draw


@dataclass(frozen=True)
class GaussianNoise(Link):
    """Adds independent Gaussian noise to every floating-point number of an upload (KTEPS, arXiv 2107.11956, §4.2).

    Whole numbers (counters, places) stay. Frozen parameters are in no upload, so they stay too. Uploads are not
    clipped, so no (ε, δ) follows from it: this is not differential privacy. Where the noise comes from is the caller's
    choice (``draws``): from the run's seed it hides nothing from whoever knows that.

    Attributes:
        sigma: the standard deviation, in units of the parameters; 0 changes nothing.
    """

    sigma: float = 1e-3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"sigma must be a number of at least 0; got {self.sigma!r}.")

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return the tensors with noise."""
        if not self.sigma:
            return Encoded(tensors=tensors)
        floating = sorted(n for n, v in tensors.items() if v.is_floating_point())
        noisy = {}  # in the order of names, so that the order in which a server holds its parameters has no part in it
        for name in floating:
            value = tensors[name]
            noisy[name] = value + self.sigma * draw.normal(value.shape, value.dtype).to(value.device)
        return Encoded(tensors={**tensors, **noisy})
