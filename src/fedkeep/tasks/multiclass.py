"""The task ``multiclass``: one of several classes for each example."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.tasks.kind import (
    ACCURACY,
    ACCURACY_USER_MEAN,
    Array,
    Baseline,
    Counting,
    Kind,
    Means,
    Said,
    share_of_right,
)


def check_classes(output: Tensor) -> None:
    """Raise MethodError unless the model gave a logit for each class."""
    if output.dim() != 2 or output.shape[1] == 1:
        raise MethodError(
            f"Classes want logits of shape (B, classes), (B, 2) for a binary task; the model gave "
            f"{tuple(output.shape)}. Let its last layer have one output for each class; numbers as labels want the "
            f"loss squared_error."
        )


def judge_classes(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy, 1 where the likeliest class is the label, else 0, and that class, −1 beside a NaN."""
    loss = nn.functional.cross_entropy(output, label, reduction="none")
    likeliest = output.argmax(1)  # a NaN where there is one
    unknown = output.gather(1, likeliest.unsqueeze(1)).squeeze(1).isnan()
    score = ((likeliest == label) & ~unknown).double()
    return loss, score, likeliest.masked_fill(unknown, -1)


def right_classes(score: Array, label: Array) -> Array:
    """Return scores as they are: 1 where an answer is right."""
    return score


def zero_or_one(score: Tensor) -> str:
    """Return what is wrong with scores that are neither 0 nor 1."""
    return "should be 0 or 1" if bool(((score != 0) & (score != 1)).any()) else ""


def class_metrics(means: Means) -> dict[str, float]:
    """Return loss and accuracy, over all results and as mean over clients."""
    return {"loss": means.loss, "accuracy": means.right, "accuracy_user_mean": means.user_mean}


def shares_of(known: Baseline) -> tuple[Array, Array]:
    """Return each result's shares of classes in its client's training labels, (results, classes), and the loss of these."""
    classes = int(max(known.label.max(initial=0), known.true.max(initial=0), 1)) + 1
    cells = known.owner * classes + known.label
    table = np.bincount(cells, known.weight, known.clients * classes).reshape(-1, classes)
    everywhere = (np.bincount(known.label, minlength=classes) + 1) / (len(known.label) + classes)
    total = np.bincount(known.owner, known.weight, known.clients)
    mine = ((table + everywhere) / (total + 1)[:, None])[known.asked]
    return mine, -np.log(mine[np.arange(len(mine)), known.true])


def _frequent(known: Baseline) -> dict[str, Array]:
    mine, loss = shares_of(known)
    likeliest = mine.argmax(1)
    right = (likeliest == known.true).astype(np.uint8)
    return {"loss": loss, "score": right, "class": likeliest.astype(np.int32)}


def says_class(output: Tensor, names: Sequence[str]) -> list[Said]:
    """Return each row's likeliest class and the probabilities of all, by name."""
    if output.dim() != 2:
        raise MethodError(
            f"Wanted outputs of shape (rows, classes); got {tuple(output.shape)}. Let the model give one logit a class."
        )
    labels = names_of(names, output.shape[1])
    shares = output.float().softmax(1)
    rows = zip(shares.argmax(1).tolist(), shares.numpy(), strict=True)
    return [(labels[k], dict(zip(labels, map(short, row), strict=True))) for k, row in rows]


def names_of(names: Sequence[str], count: int) -> list[str]:
    """Return the names of so many labels; a label without a name is called by its number."""
    return [names[k] if k < len(names) else str(k) for k in range(count)]


def short(value: np.floating | float) -> float:
    """Return a number as the shortest decimal that is the same in float32."""
    return float(str(np.float32(value)))


FREQUENT = Counting(found=_frequent)

MULTICLASS = Kind(
    name="multiclass",
    one_class=True,
    judge=judge_classes,
    right=right_classes,
    metrics=class_metrics,
    shown=(ACCURACY, ACCURACY_USER_MEAN),
    headline=ACCURACY,
    score_fault=zero_or_one,
    kept_score=np.uint8,
    counting=FREQUENT,
    pooled=(share_of_right("accuracy"),),
    says=says_class,
    from_table=True,
)
"""One of several classes for each example."""
