"""Numbers of a known range as whole numbers of a ring, in which sums are exact and masks hide all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from fedkeep.core.errors import SecureSumError, check_choice, check_range


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """Fixed-point numbers modulo 2^bits: x becomes the nearest multiple of ``step``; sums of these are exact.

    Attributes:
        bound: the largest absolute value that a client may add.
        clients: how many are added, at most; the sum of as many never wraps.
        bits: of the ring, 32 or 64.
    """

    bound: float
    clients: int
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        check_choice("bits must be", self.bits, (32, 64))
        check_range("(0, inf)", bound=self.bound)
        check_range(f"[1, {2 ** (self.bits - 2)})", clients=self.clients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the ring's numbers."""
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    @property
    def signed(self) -> np.dtype[Any]:
        """The same numbers, the upper half of them negative."""
        return np.dtype(np.int32 if self.bits == 32 else np.int64)

    @property
    def step(self) -> float:
        """The smallest power of two with clients · (bound / step + ½) ≤ 2^(bits − 1) − 1."""
        room = Fraction(2 ** (self.bits - 1) - 1, self.clients) - Fraction(
            1, 2
        )  # exact: a double has 53 bits
        least = Fraction(self.bound) / room
        power = math.frexp(least)[1]  # 2^power is enough, as least < 2^power
        return 2.0 ** (power - 1 if Fraction(2) ** (power - 1) >= least else power)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return the ring's numbers.

        Raises:
            SecureSumError: a value is out of range, or no number; it is neither wrapped nor cut.
        """
        exact = np.asarray(values, np.float64)
        wrong = ~(np.abs(exact) <= self.bound)
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise SecureSumError(
                "A secure sum takes numbers of at most {bound:g} in size; number {place} is {value:g}. Clip "
                "before, or raise the bound.",
                bound=self.bound,
                place=place,
                value=exact.ravel()[place],
            )
        return np.rint(exact / self.step).astype(self.signed).view(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Return the sum of at most ``clients`` encoded vectors as the nearest numbers in float64."""
        signed = np.ascontiguousarray(total, self.dtype).view(self.signed)
        return signed.astype(np.float64) * self.step
