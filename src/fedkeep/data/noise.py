"""Noise by which clients' inputs differ: what a partition adds to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.seeds import numpy_generator

BYTE = 255


def noisy(
    values: NDArray[Any], clients: Sequence[int], sigma: Sequence[float], seed: int, column: str
) -> NDArray[Any]:
    """Return numbers with normal noise, of the type that they have.

    Args:
        values: (rows, ...), client after client. Bytes are numbers from 0 to 1 in 255 steps, and stay in that range.
        clients: how many rows each has.
        sigma: each one's standard deviation: of bytes on the scale from 0 to 1; of others in units of the standard
            deviation of each number over all rows.
        seed, column: name the draws, together with the client's number.
    """
    made = values.copy()
    byte = values.dtype == np.uint8
    scale = np.float64(BYTE) if byte else np.nan_to_num(np.nanstd(values.astype(np.float64), axis=0))
    end = 0
    for number, (rows, level) in enumerate(zip(clients, sigma, strict=True)):
        end += rows
        own = made[end - rows : end]
        draw = numpy_generator(seed, f"partition/noise/{column}", f"client-{number}")
        changed = own + level * scale * draw.standard_normal(own.shape)
        own[...] = np.rint(changed).clip(0, BYTE) if byte else changed
    return made
