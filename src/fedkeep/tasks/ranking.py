"""The task ``ranking``: which of some candidates is the right one; the output are their scores, the label is its place.

Source: X. He et al., Neural Collaborative Filtering, WWW 2017 (arXiv:1708.05031), §4.1: HR@10 and NDCG@10 with one
right item among 100.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.metrics.worth.pooled_gains import mean_pooled
from fedkeep.tasks.kind import Array, Baseline, Counting, Kind, Means, Metric, PooledMetric, share_of_right

TOP = 10
"""How many candidates are shown: the 10 of HR@10 and NDCG@10."""
HR10 = Metric(name="hr10", words="HR@10", fraction=True)
NDCG10 = Metric(name="ndcg10", words="NDCG@10", fraction=True)


def ranks_of(scores: Array, label: Array) -> Array:
    """Return the place of each example's right candidate, (examples,) int64, 1 for the best.

    Candidates with the same score stand before the right one, so a model that scores all alike finds nothing; so do
    those whose scores are not numbers.

    Args:
        scores: (examples, candidates).
        label: (examples,) which candidate is the right one.
    """
    own = scores[np.arange(len(label)), label][:, None]
    found: Array = (~(scores < own)).sum(1)
    return found


def hits(rank: Array) -> Array:
    """Return whether the right candidate is among the first ten, bool; the mean is HR@10."""
    found: Array = rank <= TOP
    return found


def discounted(rank: Array) -> Array:
    """Return 1 / log2(1 + rank) for the first ten places, else 0, float64; the mean is NDCG@10."""
    found: Array = np.where(hits(rank), 1 / np.log2(1.0 + rank), 0.0)
    return found


def check_candidates(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave scores of so many candidates that the right one may be missed."""
    if output.dim() != 2 or output.shape[1] <= TOP:
        raise MethodError(
            "A ranking wants scores of shape (B, candidates), of more than {TOP} candidates: it is "
            "judged by whether the right one is among the first {TOP}. The model gave {shape}. Of fewer "
            "candidates, each is a class: say meta['task'] = 'multiclass'.",
            TOP=TOP,
            shape=tuple(output.shape),
        )


def _judge(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, None]:
    loss = nn.functional.cross_entropy(output, label, reduction="none")
    ranks = ranks_of(output.detach().cpu().numpy(), label.cpu().numpy())
    return loss, torch.from_numpy(ranks).double(), None


def _hits(score: Array, label: Array) -> Array:
    return hits(score)


def _discounted(score: Array, label: Array) -> Array:
    return discounted(score)


def _gains(results: Any) -> tuple[Array]:
    return (discounted(results.score),)


def _metrics(means: Means) -> dict[str, float]:
    return {"loss": means.loss, "hr10": means.right, "ndcg10": means.gain}


def _popular(known: Baseline) -> dict[str, Array]:
    """Return what comes of scoring a ranking's items by how often all users took them in training, plus one."""
    assert known.trained_items is not None
    assert known.asked_items is not None
    taken = known.trained_items[np.arange(len(known.label)), known.label]
    most = max(int(items.max(initial=0)) for items in (known.trained_items, known.asked_items))
    score = 1.0 + np.bincount(taken, minlength=most + 1)[known.asked_items]
    own = score[np.arange(len(score)), known.true]
    loss = np.log(score.sum(1)) - np.log(own)
    return {"loss": loss, "score": ranks_of(score, known.true).astype(np.int32)}


RANKING = Kind(
    name="ranking",
    has_classes=False,
    unlike_classes="places in a ranking, no classes",
    where="where one of an example's items is the right one",
    candidates=True,
    check_output=check_candidates,
    judge=_judge,
    right=_hits,
    right_name="hr10",
    gain=_discounted,
    metrics=_metrics,
    shown=(HR10, NDCG10),
    headline=NDCG10,
    client_metric="hr10",
    kept_score=np.int32,
    counting=Counting(name="counting what all users took", needs="trains nothing", found=_popular),
    pooled=(
        share_of_right("hr10"),
        PooledMetric("ndcg10", mean_pooled, _gains),
    ),
)
"""Which of some candidates is the right one."""
