"""Tensors within lists, as operations and Python's code are given them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operation's argument or result."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def flat(value: Any) -> Iterator[Any]:
    """Yield what is in sequences of any kind, at any depth."""
    alone = (Tensor, np.ndarray, np.generic, str, bytes, dict)
    if not isinstance(value, alone) and hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        for each in value:
            yield from flat(each)
    else:
        yield value


def at(value: Any, place: int | None, wide: int) -> Any:
    """Return what of an argument belongs to a place of lists."""
    if place is None or not isinstance(value, list | tuple):
        return value
    if value and all(isinstance(v, list | tuple) for v in value):
        return [at(v, place, wide) for v in value]
    return value[place] if len(value) == wide else value
