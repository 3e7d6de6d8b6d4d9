"""Noise on uploads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedkeep.core.errors import ConfigError
from fedkeep.core.params import Params


@dataclass(frozen=True)
class GaussianNoise:
    """Adds independent Gaussian noise to every number of an upload (KTEPS, arXiv 2107.11956, §4.2); counters stay.

    Uploads are not clipped, so no (ε, δ) follows from it: this is not differential privacy.

    Attributes:
        sigma: the standard deviation, in units of the parameters; 0 changes nothing.
    """

    sigma: float = 1e-3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"sigma must be a number of at least 0; got {self.sigma!r}.")

    def encode(self, tensors: Params, received: Params, draw: torch.Generator) -> Params:
        """Return the tensors with noise."""
        if not self.sigma:
            return tensors
        noise = {  # by name, so that the order in which a server holds its parameters has no part in it
            name: torch.randn(tensors[name].shape, generator=draw, dtype=tensors[name].dtype)
            for name in sorted(tensors)
            if tensors[name].is_floating_point()
        }
        return {
            name: value + self.sigma * noise[name].to(value.device) if name in noise else value
            for name, value in tensors.items()
        }

    def decode(self, tensors: Params, received: Params) -> Params:
        """Return the tensors as they came: noise stays."""
        return tensors
