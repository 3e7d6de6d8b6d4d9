"""Whole numbers of any size as lanes of 64 bits, in which secure sums add them exactly.

A number is written in limbs of 32 bits, in two's complement; each limb has a lane to itself, so sums of fewer than 2^32
limbs never wrap. Put together again modulo 2^(32 · limbs) and read with its sign, the sum is that of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError

LIMB = 32
ROOM = 24
"""Bits of a number that stay free, for the sum over 2^24 devices."""
COUNT = 2
"""Limbs of a count: below 2^39 on a device."""
SUM = 12
"""Limbs of Σ x · 2^172 over numbers in float32's range, below 2^300 each: there is room for 2^59 on a device."""
SQUARE = 21
"""Limbs of Σ x² · 2^344, below 2^600 each: there is room for 2^47 on a device."""


def to_lanes(numbers: Sequence[int], widths: Sequence[int]) -> NDArray[np.uint64]:
    """Return whole numbers as lanes, uint64 (Σ widths,).

    Args:
        numbers: the numbers.
        widths: how many limbs each takes.

    Raises:
        DataError: a number has no room.
    """
    content = bytearray()
    for number, width in zip(numbers, widths, strict=True):
        most = LIMB * width - 1 - ROOM
        if number.bit_length() > most:
            raise DataError(
                "A sum of this device's data is 2^{got} or more; wanted one below 2^{most}. Has it so many rows?",
                got=number.bit_length() - 1,
                most=most,
            )
        content += number.to_bytes(LIMB // 8 * width, "little", signed=True)
    return np.frombuffer(bytes(content), "<u4").astype(np.uint64)


def from_lanes(lanes: NDArray[np.uint64], widths: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers that sums of :func:`to_lanes`, uint64 (Σ widths,), stand for.

    Raises:
        DataError: there are more lanes or fewer.
    """
    if lanes.shape != (sum(widths),):
        raise DataError("Wanted {wanted} lanes; got {got}.", wanted=sum(widths), got=lanes.shape)
    found, place, limbs = [], 0, lanes.tolist()
    for width in widths:
        total = sum(limb << LIMB * n for n, limb in enumerate(limbs[place : place + width]))
        total %= 1 << LIMB * width
        found.append(total - (1 << LIMB * width) if total >> LIMB * width - 1 else total)
        place += width
    return tuple(found)
