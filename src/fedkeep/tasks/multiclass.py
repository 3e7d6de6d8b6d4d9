"""The task ``multiclass``: one of several classes for each example; ``tokens`` and ``next_token``: a class for each token
of an example; and ``pixels``: one for each pixel of an image. Each token or pixel with a label is a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedkeep.core.errors import DataError, MethodError
from fedkeep.tasks.kind import (
    ACCURACY,
    ACCURACY_USER_MEAN,
    Array,
    Baseline,
    Counting,
    Kind,
    Means,
    Metric,
    Said,
    share_of_right,
)


def check_classes(output: Tensor) -> None:
    """Raise MethodError unless the model gave a logit for each class."""
    if output.dim() != 2 or output.shape[1] == 1:
        raise MethodError(
            "Classes want logits of shape (B, classes), (B, 2) for a binary task; the model gave "
            "{shape}. Let its last layer have one output for each class; numbers as labels want the loss "
            "squared_error.",
            shape=tuple(output.shape),
        )


def judge_classes(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy, 1 where the likeliest class is the label, else 0, and that class, −1 beside a NaN."""
    loss = nn.functional.cross_entropy(output, label, reduction="none")
    most, likeliest = output.max(1)  # a NaN where there is one
    unknown = most.isnan()
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
            "Wanted outputs of shape (rows, classes); got {got}. Let the model give one logit a class.",
            got=tuple(output.shape),
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
    where="where each example is of one class",
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


IGNORED = -100
"""The label of a token that does not count, as in torch and transformers."""
PERPLEXITY = Metric(name="perplexity", words="Perplexity", lower=True)


def check_tokens(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave logits for each token."""
    if output.dim() != label.dim() + 1 or output.shape[:-1] != label.shape:
        raise MethodError(
            "Labels are {shape}, one for each token, so the model's logits must be (B, T, classes); it "
            "gave {got}. Take a model with a head for tokens, or labels of shape (examples,).",
            shape=tuple(label.shape),
            got=tuple(output.shape),
        )


def _check_shifted(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    """Refuse labels that are the tokens themselves, which a model is shown."""
    counts, ids = label != IGNORED, columns.get("input_ids")
    if isinstance(ids, np.ndarray) and ids.shape == label.shape and (ids == label)[counts].all():
        raise DataError(
            "Labels of a next-token task are the tokens that follow; got the input_ids themselves, which the model is "
            "shown. Make them by fedkeep.data.next_tokens(input_ids, attention_mask)."
        )


def _with_perplexity(means: Means) -> dict[str, float]:
    return class_metrics(means) | {"perplexity": perplexity(means.loss)}


def perplexity(loss: float) -> float:
    """Return e to the mean loss in nats."""
    return math.exp(min(loss, 700.0))  # beyond, a float64 has no room


TOKENS = replace(
    MULTICLASS,
    name="tokens",
    axes=2,
    one_class=False,
    unlike_classes="of tokens",
    where="where each token has a label",
    ignored=IGNORED,
    close=False,
    check_output=check_tokens,
    counting=None,
    says=None,
    from_table=False,
)
"""A class for each token of an example."""
NEXT_TOKEN = replace(
    TOKENS,
    name="next_token",
    where="where each token's label is the one that follows",
    check_labels=_check_shifted,
    metrics=_with_perplexity,
    shown=(PERPLEXITY,),
    headline=PERPLEXITY,
)
"""The token that follows, for each token of an example."""


def check_pixels(output: Tensor, label: Tensor) -> None:
    """Raise MethodError unless the model gave logits for each pixel: (B, classes, H, W)."""
    if output.dim() != 4 or output.movedim(1, -1).shape[:-1] != label.shape:
        raise MethodError(
            "Labels are masks {shape}, one class for each pixel, so the model's logits must be (B, classes, H, W) with "
            "the mask's height and width; it gave {got}. Bring them to the mask's size, e.g. by "
            "torch.nn.functional.interpolate.",
            shape=tuple(label.shape),
            got=tuple(output.shape),
        )


def _check_masks(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    """Refuse masks of another size than the images that they belong to."""
    images = {
        name: column.shape[2:]
        for name, column in columns.items()
        if name != "label" and isinstance(column, np.ndarray) and column.ndim == 4
    }
    if images and label.shape[1:] not in images.values():
        name, size = next(iter(images.items()))
        raise DataError(
            "Wanted masks of the size of the images {column!r}, {height} × {width}; got {got_height} × {got_width}. Bring "
            "both to one size, masks without mixing classes (nearest neighbour).",
            column=name,
            height=size[0],
            width=size[1],
            got_height=label.shape[1],
            got_width=label.shape[2],
        )


def classes_last_of_pixels(output: Tensor) -> Tensor:
    """Return logits (B, classes, H, W) as (B, H, W, classes)."""
    return output.movedim(1, -1)


PIXELS = replace(
    TOKENS,
    name="pixels",
    axes=3,
    classes_last=classes_last_of_pixels,
    unlike_classes="of pixels",
    where="where each pixel has a label",
    check_labels=_check_masks,
    check_output=check_pixels,
)
"""A class for each pixel of an image: a mask (H, W), −100 where a pixel does not count."""
