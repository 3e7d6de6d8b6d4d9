"""What a round does to every number of every upload, in one pass over memory: look for NaN, sum, divide.

Tensors that the kernel can't take (another device or type, gaps in memory, no library) go through PyTorch, with the
same results; sums differ at most in the last of their 53 bits, and are equal for whole weights of float32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from fedkeep.kernels import native

FINITE, FOLD, MEAN, FOLD_ROWS = range(4)  # Phase in values.h
FORMS = {(plain, True, kind) for plain in native.PLAIN for kind in (torch.float32, torch.float64)}
_form = attrgetter("__class__", "is_cpu", "dtype")
FEW, WHOLE = 1 << 16, 1 << 29
"""Numbers that PyTorch sums sooner; and above which the product of a whole weight and a float32 is not exact."""
PIECE = 1 << 16
"""Numbers of a large tensor that are computed with at a time: what is made of them in passing stays small."""
LANES = 4
"""Sums, side by side, that a norm is made of: every fourth number is in the same, as PyTorch does on x86."""


def exact(value: Tensor) -> torch.dtype:
    """Return the type that sums are made in: double precision, where the device has it."""
    return torch.float64 if value.device.type != "mps" else value.dtype


def is_finite(values: Tensor) -> bool:
    """Tell whether no number of a floating-point tensor is NaN or infinite."""
    if _lies(values) and native.available():
        return not _call(FINITE, values.dtype, values.numel(), values.data_ptr(), *[0] * 8)
    # A finite sum has only finite summands, and is cheaper than looking at each of them.
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


Summand = tuple[Tensor | None, Tensor, float, Tensor | None, float]
"""A tensor that is added to a sum: the sum so far, of its shape, changed in place (None: zeros); the tensor; its weight;
one of the same shape that comes before it, where there is no sum yet, or None; and the weight of this one.
"""


def fold(summands: Iterable[Summand]) -> list[Tensor]:
    """Add each tensor, times its weight, to its sum in double precision; return the sums."""
    summands, sums, in_use = list(summands), list[Tensor](), native.available()
    totals, added = [s[0] for s in summands if s[0] is not None], [s[1] for s in summands]
    forms = {(given.dtype, weight) for _, given, weight, *_ in summands}
    whole = all(k == torch.float32 and w % 1 == 0 and w < WHOLE for k, w in forms)
    # PyTorch's step is exact then, as the kernel's is, and takes less of a few numbers.
    if whole and len(forms) == 1 and len(totals) == len(added) and sum(map(Tensor.numel, added)) <= FEW:
        torch._foreach_add_(totals, added, alpha=summands[0][2])
        return totals
    for total, given, weight, held, share in summands:
        before = total if held is None else held
        takes = in_use and _lies(given) and (before is None or _lies(before))
        takes = takes and (held is None or held.dtype == given.dtype)
        make, kind = (torch.empty, torch.float64) if takes else (torch.zeros, exact(given))
        found = make(given.shape, dtype=kind, device=given.device) if total is None else total
        sums.append(found)
        if takes:
            places = map(native.address, (given, held, found))
            _call(FOLD, given.dtype, given.numel(), *places, total is None, weight, share, *[0] * 3)
            continue
        for each, w in ((held, share), (given, weight)):
            if each is not None:
                for part, change in pieces(found, each):
                    part.add_(change, alpha=w)
    return sums


def fold_rows(sums: Tensor, places: Tensor, given: Tensor, weight: float, fresh: int) -> None:
    """Add rows, times their weight, to rows of sums in double precision.

    Args:
        sums: (any, *shape), contiguous; changed in place.
        places: (rows,) int64, all different: which row of ``sums`` each goes to.
        given: (rows, *shape).
        weight: of all rows.
        fresh: from this row on sums are taken as zeros, whatever is there.
    """
    exact_products = given.dtype == torch.float32 and weight % 1 == 0 and weight < WHOLE
    # Of other products PyTorch may round otherwise.
    if exact_products and _lies(given) and _lies(sums) and places.is_contiguous() and native.available():
        at = map(native.address, (given, None, sums))
        width = given[:1].numel()
        _call(FOLD_ROWS, given.dtype, len(given), *at, fresh, weight, 0.0, 0, native.address(places), width)
        return
    sums[places[places >= fresh]] = 0
    sums.index_add_(0, places, given.to(sums.dtype), alpha=weight)


def mean(total: Tensor, weight: float, kind: torch.dtype) -> Tensor:
    """Return a sum in double precision divided by a weight, in another floating type."""
    found = torch.empty_like(total, dtype=kind)
    if _lies(total) and _lies(found) and native.available():
        place = native.address(found)
        _call(MEAN, kind, found.numel(), place, 0, native.address(total), False, weight, 0.0, place, 0, 0)
        return found
    for part, sums in pieces(found, total):
        part.copy_(sums / weight)
    return found


def pieces(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return views of tensors of one shape: ``PIECE`` numbers each, of which the last has what is left too.

    So no piece is very short: PyTorch draws fewer than 16 normal numbers in another way.
    """
    count = tensors[0].numel() // PIECE
    if count <= 1 or not all(t.is_contiguous() for t in tensors):
        return [tensors]
    sizes = [PIECE] * (count - 1) + [PIECE + tensors[0].numel() % PIECE]
    return list(zip(*(torch.split(t.view(-1), sizes) for t in tensors), strict=True))


def norm(values: Tensor) -> float:
    """Return the L2 norm of a floating-point tensor, in double precision.

    PyTorch makes a double of every number first. Of a large tensor this is done by pieces, whose squares are added up
    in the same order.
    """
    if values.numel() <= PIECE or values.dtype == torch.float64 or not _lies(flat := values.detach()):
        return float(torch.linalg.vector_norm(values, dtype=torch.float64))
    flat, sums = flat.view(-1), np.zeros(LANES)
    whole = len(flat) - len(flat) % LANES
    for piece in torch.split(flat[:whole], PIECE - PIECE % LANES):
        squares = piece.double().square_().view(-1, LANES).numpy()
        squares[0] += sums
        sums = np.add.reduce(squares, 0)  # row after row
    total = 0.0
    for summand in (*sums.tolist(), *flat[whole:].double().square_().tolist()):
        total += summand
    return math.sqrt(total)


def _lies(t: Tensor) -> bool:  # what traces values has a type of its own
    return _form(t) in FORMS and t.is_contiguous()


def _call(phase: int, kind: torch.dtype, *fields: float) -> int:
    """Call the kernel, of the fields ``native.VALUES`` with those from ``N`` on."""
    threads, level = torch.get_num_threads(), native.load().level
    return native.call("values", False, (phase, threads, level, kind == torch.float64, *fields))
