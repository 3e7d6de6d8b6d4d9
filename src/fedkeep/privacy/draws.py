"""Where a link's random numbers come from: the run's seed, or the system.

``"run"`` makes a simulation repeatable. It hides nothing: whoever knows the seed can draw the same noise again and take
it off, and torch's generators have only 2³² different streams, so that even without the seed all can be tried.
``"system"`` takes every bit from the operating system's cryptographic source. Devices use it; nothing can repeat it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import check_choice
from fedkeep.core.seeds import generator

Entropy = Literal["run", "system"]
"""Where noise comes from: the run's seed, which repeats, or the operating system."""


class Draw(Protocol):
    """One link's random numbers, for one client and round."""

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return standard normal numbers, on the CPU."""


class Draws(Protocol):
    """The random numbers of all links of a chain, for one client and round."""

    def link(self, number: int) -> Draw:
        """Return those of the link of this number, counted from 0."""


@dataclass(frozen=True)
class RunDraw:
    """Draws from a stream that the run's seed names."""

    stream: torch.Generator

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return standard normal numbers; the same again from a stream of the same name."""
        return torch.randn(tuple(shape), generator=self.stream, dtype=dtype)


@dataclass(frozen=True)
class SystemDraw:
    """Draws from the operating system's source (``os.urandom``), which nobody can repeat; for all links of a chain."""

    def link(self, number: int) -> Draw:
        """Return the numbers of a link."""
        return self

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return standard normal numbers, by the transform of Box and Muller from uniform ones of 53 bits."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        uniform = (np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64) >> np.uint64(11)).astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-53  # inside (0, 1)
        radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
        np.multiply(radius, np.cos(angle), out=uniform[:pairs])
        np.multiply(radius, np.sin(angle), out=uniform[pairs:])
        return torch.from_numpy(uniform[:count]).reshape(tuple(shape)).to(dtype)


@dataclass(frozen=True)
class RunDraws:
    """Streams named by (seed, ``upload/number of the link``, client, round)."""

    seed: int
    client: str
    round: int

    def link(self, number: int) -> Draw:
        """Return the numbers of a link."""
        return RunDraw(generator(self.seed, f"upload/{number}", self.client, self.round))


def draws(entropy: Entropy, seed: int, client: str, round: int) -> Draws:
    """Return the random numbers of a client's upload chain in a round.

    Args:
        entropy: ``"run"``, for simulations; ``"system"``, for devices, and for uploads that are shown to others.
        seed, client, round: names of the streams; without meaning for ``"system"``.

    Raises:
        ConfigError: ``entropy`` is neither.
    """
    check_choice("entropy must be", entropy, ("run", "system"))
    return RunDraws(seed, client, round) if entropy == "run" else SystemDraw()
