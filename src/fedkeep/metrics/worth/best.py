"""Which models may be the best: multiple comparisons with the best, paired over clients and seeds (Hsu, 1984).

The largest mean over clients, each client counting once, is compared with every other of the k models on the same test
examples, by the intervals of ``intervals.py`` at the level 1 − 5 % / (k − 1). A model may be the best where its interval
holds 0. With two models this is the rule by which ``worth`` says that a gain helps.

What is promised is about the truly best model i: it is left out only if the largest mean is told apart from it, so if
any of the k − 1 others seems better than i and is not. That happens in at most 5 % of tables (Bonferroni), whichever model
has the largest mean, though this was chosen after looking. Of models that are exactly as good as i each is kept as
often, but not all of them together. ``benchmarks/worth_coverage.py`` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        behind: its mean less the best one's, at most 0, with an interval of the level ``level``; None where no interval
            is known. The best one's has no width.
        p: of no difference to the best, times the number of comparisons; 1 for the best; NaN: not tested.
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
    best = best_of(own)
    found = []
    for m, model in enumerate(models):
        behind, p = (
            (Interval(0.0, 0.0, 0.0), 1.0) if m == best else _difference(model, models[best], len(models))
        )
        by_seed = tuple(own[m].tolist())
        mean = float(own[m].mean())
        found.append(Standing(mean=mean, by_seed=by_seed, behind=behind, p=p, is_best=m == best))
    return found


def level(models: int) -> float:
    """Return the level of each interval where so many models, at least two, are compared with the best of them."""
    return 1 - ALPHA / (models - 1)


def best_of(by_seed: Sequence[Floats]) -> int:
    """Return which mean is the largest, of equals the first; one that is not finite is the smallest."""
    return int(np.argmax(np.nan_to_num([own.mean() for own in by_seed], nan=-np.inf, posinf=-np.inf)))


def _difference(one: Paired, other: Paired, models: int) -> tuple[Interval | None, float]:
    """Return what one model is better than another, and the corrected chance of such a difference without any."""
    paired = replace(one, theirs=other.ours)
    y = paired.means(paired.differences)
    if len(paired.clients) >= FEW:
        span, p = users_like_these(y, level(models)), chance_of_users(y)
    elif (paired.examples < 2).any():
        return None, math.nan
    else:
        own = (y, paired.variance, paired.examples)
        span, p = these_users(*own, level(models)), chance_of_examples(*own)
    return paired.interval(span), float(np.minimum(p * (models - 1), 1.0))
