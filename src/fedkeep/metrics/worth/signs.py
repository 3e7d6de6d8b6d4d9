"""Who gains and who loses: exact paired tests of single clients, and what they say of all clients together.

The test flips signs. Where a client's model is worth nothing, each example's difference is as likely to be x as −x.
So p is the share of all 2^c ways to give the c differences signs whose sum is at least the one that was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fedkeep.metrics.worth.intervals import Floats

ALPHA = 0.05
ENOUGH = 7  # with fewer differences no p is below 0.01
DRAWS = 9999
_BLOCK = 512  # examples whose signs are drawn at once
_TINY = float(np.finfo(np.float64).tiny)
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Flips:
    """One client's test.

    Attributes:
        better: p of the sum of differences, one-sided: small where the client gains.
        worse: the same for the sum with its sign changed.
        attainable: the largest p of at most ½ that these differences can give; NaN where there is none.
        differing: how many differences are not 0.
    """

    better: float
    worse: float
    attainable: float
    differing: int


def sign_flips(x: np.ndarray[Any, Any]) -> Flips:
    """Test one client's differences, one for each example, summed over seeds.

    Whole numbers (right answers) are tested exactly, by the distribution of their sum: for 0 and ±1 that is the sign
    test. Other numbers (losses) are tested over all signs, or over 9,999 random ones where there are more.

    Args:
        x: (n,) of an integer type, or float64.
    """
    x = x[x != 0]
    if not len(x):
        return Flips(1.0, 1.0, math.nan, 0)
    if x.dtype.kind in "iu":
        sizes = Counter(np.abs(x).tolist())
        tail, attainable = _tail(tuple(sorted(sizes.items())))
        reach, total = len(tail) // 2, int(x.sum())
        better, worse = float(tail[reach + total]), float(tail[reach - total])
        return Flips(max(better, _TINY), max(worse, _TINY), attainable, len(x))
    return _of_losses(x)


@lru_cache(maxsize=4096)
def _tail(sizes: tuple[tuple[int, int], ...]) -> tuple[Floats, float]:
    """Return P(sum ≥ j − T) for j = 0 .. 2T, and the largest of these that is attained and at most ½.

    Args:
        sizes: (size, how many differences have it) for each; T is the sum of all sizes.
    """
    law = np.ones(1)
    for size, count in sizes:
        k = torch.arange(count + 1, dtype=torch.float64)
        n = torch.tensor(float(count), dtype=torch.float64)
        ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1) - n * math.log(2)
        one = np.zeros(2 * size * count + 1)
        one[:: 2 * size] = torch.exp(ways).numpy()
        law = np.convolve(law, one)
    tail = np.minimum(np.cumsum(law[::-1])[::-1], 1.0)
    attained = tail[(law > 0) & (tail <= 0.5 + _ROUNDING)]
    return tail, float(attained.max()) if len(attained) else math.nan


def _of_losses(x: Floats) -> Flips:
    sizes, total = np.abs(x), float(x.sum())
    near = _ROUNDING * float(sizes.sum())
    if 2 ** len(x) <= DRAWS:
        signs = 1 - 2 * (np.arange(2 ** len(x))[:, None] >> np.arange(len(x)) & 1)
        sums = np.sort(signs @ sizes)
        better, worse = float((sums >= total - near).mean()), float((sums <= total + near).mean())
        tails = 1 - np.searchsorted(sums, sums - near) / len(sums)
        return Flips(better, worse, float(tails[tails <= 0.5].max(initial=0.0)) or math.nan, len(x))
    draws, sums = np.random.default_rng(0), np.zeros(DRAWS)
    for start in range(0, len(x), _BLOCK):
        part = sizes[start : start + _BLOCK]
        sums += (1 - 2 * draws.integers(0, 2, (DRAWS, len(part)), np.int8)) @ part
    above, below = (sums >= total - near).sum(), (sums <= total + near).sum()
    return Flips((1 + int(above)) / (DRAWS + 1), (1 + int(below)) / (DRAWS + 1), 0.5, len(x))


def false_discovery(p: Sequence[float] | Floats) -> Floats:
    """Return p adjusted for the false-discovery rate (Benjamini and Hochberg, 1995).

    Of the clients whose adjusted p is at most 5 %, on average at most 5 % are named wrongly.

    Args:
        p: (K,).
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)
    scaled = values[order] * len(values) / np.arange(1, len(values) + 1)
    out = np.empty_like(values)
    out[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return out


def at_least(p: Sequence[float] | Floats, attainable: Sequence[float] | Floats) -> int:
    """Return a 95 % lower bound for the number of clients that gain (or lose), though it may not be known which.

    Of clients without a gain, p is at most h in a share of h cases, and q = p / h is then spread evenly over (0, 1] or
    lies higher. Fisher's test is put to the j largest q; the bound is the number of all q less the largest j that it
    does not reject: −2 Σ_{i≤j} ln q_i ≤ χ²_{.95, 2j}.

    Args:
        p: (K,) p of each client in one direction.
        attainable: (K,) the largest attainable p of at most ½, NaN where there is none.
    """
    p, h = np.asarray(p, np.float64), np.asarray(attainable, np.float64)
    within = p <= h * (1 + _ROUNDING)  # False for NaN
    q = np.sort(np.minimum(p[within] / h[within], 1.0))[::-1]
    if not len(q):
        return 0
    j = torch.arange(1, len(q) + 1, dtype=torch.float64)
    fisher = torch.from_numpy(-np.cumsum(np.log(q)))  # half of the statistic
    kept = torch.special.gammaincc(j, fisher).numpy() >= ALPHA  # the chance of more, by χ² with 2j degrees
    return int(len(q) - np.flatnonzero(kept).max(initial=-1) - 1)


def examples_needed(discordant: float, difference: float = 0.1) -> int:
    """Return how many examples a client needs, so that a difference in accuracy is told with a chance of 80 %.

    n₈₀ = (2.65 √π + 0.84 √(π − δ²))² / δ².

    Args:
        discordant: π, the share of examples that one model gets right and the other wrong; at least δ is taken, as a
            client with such a difference has no lower share.
        difference: δ, as a fraction.
    """
    share = max(discordant, difference)
    root = 2.65 * math.sqrt(share) + 0.84 * math.sqrt(share - difference**2)
    return math.ceil(root**2 / difference**2)


def holm(p: Sequence[float] | Floats) -> Floats:
    """Return p corrected for their number (Holm, 1979); NaN stays NaN, and counts as a test.

    Of all that are at most 5 %, the chance that any is there wrongly is at most 5 %.

    Args:
        p: (M,).
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)  # NaN comes last
    out = np.full_like(values, np.nan)
    out[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1.0)
    return out
