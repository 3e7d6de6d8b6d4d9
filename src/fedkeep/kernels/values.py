"""What a round does to every number of every upload, in one pass over memory: look for NaN, sum, divide.

Tensors that the kernel can't take (another device or type, gaps in memory, no library) go through PyTorch, with the
same results; sums differ at most in the last of their 53 bits, and are equal for whole weights of float32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor

from fedkeep.kernels import native

FINITE, FOLD, MEAN = range(3)  # Phase in values.h
FORMS = {(plain, True, kind) for plain in native.PLAIN for kind in (torch.float32, torch.float64)}
_form = attrgetter("__class__", "is_cpu", "dtype")
PIECE = 1 << 18
"""Numbers that PyTorch sums or divides at a time: what is made of them in passing stays small."""


def exact(value: Tensor) -> torch.dtype:
    """Return the type that sums are made in: double precision, where the device has it."""
    return torch.float64 if value.device.type != "mps" else value.dtype


def is_finite(values: Tensor) -> bool:
    """Tell whether no number of a floating-point tensor is NaN or infinite."""
    if _lies(values) and native.available():
        return not _call(FINITE, values, values.data_ptr())
    # A finite sum has only finite summands, and is cheaper than looking at each of them.
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


Summand = tuple[Tensor | None, Tensor, float, Tensor | None, float]
"""A tensor that is added to a sum: the sum so far, of its shape, changed in place (None: zeros); the tensor; its weight;
one of the same shape that comes before it, where there is no sum yet, or None; and the weight of this one.
"""


def fold(summands: Iterable[Summand]) -> list[Tensor]:
    """Add each tensor, times its weight, to its sum in double precision; return the sums."""
    sums, in_use = list[Tensor](), native.available()
    for total, given, weight, held, share in summands:
        before = total if held is None else held
        takes = in_use and _lies(given) and (before is None or _lies(before))
        takes = takes and (held is None or held.dtype == given.dtype)
        make, kind = (torch.empty, torch.float64) if takes else (torch.zeros, exact(given))
        found = make(given.shape, dtype=kind, device=given.device) if total is None else total
        sums.append(found)
        if takes:
            place, other, where = map(native.address, (given, held, found))
            _call(FOLD, given, place, other, where, total is None, weight, share)
            continue
        for each, w in ((held, share), (given, weight)):
            if each is not None:
                for part, change in pieces(found, each):
                    part.add_(change, alpha=w)
    return sums


def mean(total: Tensor, weight: float, kind: torch.dtype) -> Tensor:
    """Return a sum in double precision divided by a weight, in another floating type."""
    found = torch.empty_like(total, dtype=kind)
    if _lies(total) and _lies(found) and native.available():
        place = native.address(found)
        _call(MEAN, found, place, 0, native.address(total), False, weight)
        return found
    for part, sums in pieces(found, total):
        part.copy_(sums / weight)
    return found


def pieces(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return views of tensors of one shape, ``PIECE`` numbers each."""
    if tensors[0].numel() <= PIECE or not all(t.is_contiguous() for t in tensors):
        return [tensors]
    return list(zip(*(t.view(-1).split(PIECE) for t in tensors), strict=True))  # type: ignore[no-untyped-call]


def _lies(t: Tensor) -> bool:  # what traces values has a type of its own
    return _form(t) in FORMS and t.is_contiguous()


def _call(
    phase: int,
    values: Tensor,
    place: int,
    held: int = 0,
    total: int = 0,
    fresh: bool = False,
    weight: float = 0.0,
    share: float = 0.0,
) -> int:
    return native.call(
        "values",
        False,
        (
            phase,
            torch.get_num_threads(),
            native.load().level,
            values.dtype == torch.float64,
            values.numel(),
            place,
            held,
            total,
            fresh,
            weight,
            share,
            place if phase == MEAN else 0,
        ),
    )
