"""Was this example among those that the model was trained on?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedkeep.metrics.scores import auc
from fedkeep.metrics.worth.intervals import Interval, jackknife, t_quantile

Floats = np.ndarray[Any, np.dtype[np.float64]]
FPR = 0.01
"""The share of false alarms at which the share of members found is read."""


def confidence(loss: Floats) -> Floats:
    """Return log p − log(1 − p) of the right class, near normal (LiRA, §IV-B), given the cross-entropy −log p."""
    p = np.clip(np.exp(-loss), 1e-9, 1 - 1e-9)
    found: Floats = np.log(p) - np.log1p(-p)
    return found


def tpr_at(score: Floats, member: Floats, fpr: float = FPR) -> float:
    """Return the share of members above the threshold that at most a share ``fpr`` of the others exceed.

    NaN without a member, and without others.
    """
    others = np.sort(score[member == 0])
    if not 0 < len(others) < len(score):
        return math.nan
    allowed = int(np.floor(fpr * len(others)))
    return float((score[member == 1] > others[len(others) - 1 - allowed]).mean())


def guessed_tpr(others: np.ndarray[Any, Any], fpr: float = FPR) -> float:
    """Return the mean of ``tpr_at`` for scores that say nothing of members: (⌊fpr n⌋ + 1) / (n + 1).

    Args:
        others: (models,) how many examples did not train each, n.
    """
    return float(((np.floor(fpr * others) + 1) / (others + 1)).mean())


def lira(scores: Floats, inside: np.ndarray[Any, np.dtype[np.bool_]], target: int) -> Floats:
    """Return the online likelihood ratio of every example, that it trained a model (LiRA).

    The attacker has the model, the examples in question, and data like the clients' from which it trains models of its
    own, some with the example and some without. Λ = log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²), with means by
    example and, as models are few, variances over all examples (Carlini et al., Membership Inference Attacks From First
    Principles, 2022, algorithm 1 and §VI-C). Guessing gives an AUC of ½.

    Args:
        scores: (models, examples) confidence φ of each model.
        inside: (models, examples) whether the example trained it.
        target: the attacked model; the others are the attacker's.

    Returns:
        (examples,); 0 where no model of the attacker's had the example, or all had it.
    """
    others = np.arange(len(scores)) != target
    means, spreads, known = [], [], np.ones(scores.shape[1], bool)
    for there in (inside[others], ~inside[others]):
        count = there.sum(0)
        mean = (scores[others] * there).sum(0) / np.maximum(count, 1)
        apart = ((scores[others] - mean) ** 2 * there).sum() / max(int((count - 1).clip(0).sum()), 1)
        means.append(mean)
        spreads.append(max(float(apart), 1e-12) * (1 + 1 / np.maximum(count, 1)))  # the mean's own error
        known &= count > 0
    ratio = [-0.5 * ((scores[target] - m) ** 2 / s + np.log(s)) for m, s in zip(means, spreads, strict=True)]
    return np.where(known, ratio[0] - ratio[1], 0.0)


def membership(
    scores: Floats, inside: np.ndarray[Any, np.dtype[np.bool_]], client: np.ndarray[Any, Any]
) -> dict[str, Interval]:
    """Return what the loss says of membership, by LiRA and by one threshold for everybody.

    The threshold attack (Yeom et al., 2018) sees the model and the examples alone: a low loss is taken as a member.
    LiRA's attacker has data like the clients' besides, and trains models of its own, some with an example and some
    without. Guessing gives an AUC of ½, and of the TPR what ``guessed_tpr`` says.
    Every model is attacked in turn; numbers are means over these. Intervals are of clients, left out one at a time, and
    of models.

    Args:
        scores, inside: as for ``lira``.
        client: (examples,) whose example it is.

    Returns:
        ``AUC`` and ``TPR`` (at 1 % FPR), of ``threshold`` and ``LiRA``, e.g. ``"LiRA AUC"``.
    """
    made = {"threshold": scores, "LiRA": np.stack([lira(scores, inside, k) for k in range(len(scores))])}
    found = {}
    people, models = np.unique(client), len(scores)
    for way, values in made.items():
        for what, number in (("AUC", auc), ("TPR", tpr_at)):

            def each(rows: np.ndarray[Any, Any], number: Any = number, values: Floats = values) -> Floats:
                pairs = zip(values[:, rows], inside[:, rows], strict=True)
                return np.array([number(v, i.astype(float)) for v, i in pairs])

            by_model = each(np.ones(len(client), bool))
            over = jackknife(float(by_model.mean()), [float(each(client != p).mean()) for p in people])
            between = float(t_quantile(models - 1) * by_model.std(ddof=1) / models**0.5)
            half = math.hypot(over.high - over.mean, between)
            found[f"{way} {what}"] = Interval(over.mean, over.mean - half, over.mean + half)
    return found
