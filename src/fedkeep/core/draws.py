"""Whether somebody draws random numbers from Python's or NumPy's global generator, which no seed of a run governs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def position() -> tuple[object, ...]:
    """Return how far both have come; normal numbers are drawn by twos, and one may be left."""
    there: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    _, own, left = random.getstate()
    return int(there[2]), int(there[3]), own[-1], own[0], left
