"""Which models do not differ significantly from the best: paired tests over clients and seeds, corrected by Holm.

The best has the largest mean over clients, each client counting once. All pairs of models are compared on the same test
examples, by the intervals of ``intervals.py``, and Holm's correction is over all these pairs. So it does not matter
that the best was chosen after the tests: with a correction over the comparisons with the best alone, one of twelve
models that are equally good is told apart wrongly in up to 28 % of tables (`docs/compare.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from fedkeep.metrics.worth.gains import FEW, Paired
from fedkeep.metrics.worth.intervals import (
    Floats,
    Interval,
    chance_of_examples,
    chance_of_users,
    these_users,
    users_like_these,
)
from fedkeep.metrics.worth.signs import ALPHA


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a model stands beside the best one.

    Attributes:
        mean: over clients and seeds, more is better.
        by_seed: (S,) its mean over clients under each seed.
        behind: its mean less the best one's, at most 0, with a 95 % interval; None where no interval is known. The best
            one's has no width.
        p: of no difference to the best, after Holm's correction over all pairs; 1 for the best; NaN: not tested.
        is_best: whether its mean is the largest, of equals the first; if none is finite, the first is.
    """

    mean: float
    by_seed: tuple[float, ...]
    behind: Interval | None
    p: float
    is_best: bool

    @property
    def told_apart(self) -> bool:
        """Whether it is worse than the best, and not by chance alone."""
        return self.p <= ALPHA

    @property
    def close(self) -> bool:
        """Whether it is the best, or was tested and does not differ significantly.

        False where it was not tested, and where its mean is not finite.
        """
        return math.isfinite(self.mean) and self.p > ALPHA


def means(paired: Paired) -> Floats:
    """Return (S,) the mean over clients of ``paired.ours`` under each seed."""
    found: Floats = paired.means(paired.ours.astype(np.float64)).mean(-1)
    return found


def standings(models: Sequence[Paired]) -> list[Standing]:
    """Return where models stand beside the best.

    With ten clients or more this is about users like these, with fewer about these users.

    Args:
        models: of each its results as ``ours``, all of the same examples and seeds; ``theirs`` is not looked at.
    """
    own = [means(model) for model in models]
    best, pairs = best_of(own), list(combinations(range(len(models)), 2))
    found = {(a, b): _difference(models[a], models[b]) for a, b in pairs}
    p = dict(zip(pairs, holm([found[pair][1] for pair in pairs]).tolist(), strict=True))
    return [
        Standing(
            mean=float(own[m].mean()),
            by_seed=tuple(own[m].tolist()),
            behind=Interval(0.0, 0.0, 0.0) if m == best else _difference(models[m], models[best])[0],
            p=1.0 if m == best else p[min(m, best), max(m, best)],
            is_best=m == best,
        )
        for m in range(len(models))
    ]


def best_of(by_seed: Sequence[Floats]) -> int:
    """Return which mean is the largest, of equals the first; one that is not finite is the smallest."""
    return int(np.argmax(np.nan_to_num([own.mean() for own in by_seed], nan=-np.inf, posinf=-np.inf)))


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


def _difference(one: Paired, other: Paired) -> tuple[Interval | None, float]:
    """Return what one model is better than another, and the chance of such a difference without any."""
    paired = replace(one, theirs=other.ours)
    y = paired.means(paired.differences)
    if len(paired.clients) >= FEW:
        return paired.interval(users_like_these(y)), float(chance_of_users(y))
    if (paired.examples < 2).any():
        return None, float("nan")
    own = (y, paired.variance, paired.examples)
    return paired.interval(these_users(*own)), float(chance_of_examples(*own))
