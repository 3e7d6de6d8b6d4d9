"""Numbers of merit: the area under the ROC curve, metrics that count a rare class as much as a frequent one (balanced
accuracy, macro-F1), how a metric is spread over clients, and Ag and Ap.

Ag and Ap say how good the shared model is for each client, and how good it becomes when it is fine-tuned there: KTEPS
(arXiv 2107.11956), §5.3, eq. 14–16. The formula of eq. 16 is lost in every copy of the paper. A maximum over the curve
is impossible by the paper's own Table 5, so the mean is taken, and the last value and the client's best are given beside
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.errors import DataError, NonFiniteError

BINS = 256
"""Bins of a binary score, the logit: 1/8 wide from −16 to 16; the outer two have no other end."""
NO_SCORE = "auc: a score is NaN. Lower the learning rate or set clip_norm."
Numbers = Tensor | np.ndarray[Any, Any] | Sequence[float]


def auc(score: Numbers, label: Numbers) -> float:
    """Return the area under the ROC curve: the chance that a positive example scores above a negative one.

    Exact, by ranks: AUC = (Σ ranks of positives − P(P+1)/2) / (P·N); tied scores count half.

    Args:
        score: (B,) any real numbers; only their order matters.
        label: (B,) of 0 and 1.

    Returns:
        A fraction; NaN where all labels are the same (there is no pair to compare) or there is no example.

    Raises:
        DataError: the shapes differ or a label is neither 0 nor 1.
        NonFiniteError: a score is NaN.
    """
    scores, labels = floats(score), floats(label)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise DataError(
            "auc wants score and label of shape (B,); got {got} and {shape}.",
            got=scores.shape,
            shape=labels.shape,
        )
    if not np.isin(labels, (0.0, 1.0)).all():
        raise DataError(
            "auc wants labels 0 and 1; got {got}.",
            got=np.unique(labels)[:5].tolist(),
        )
    if np.isnan(scores).any():
        raise NonFiniteError(NO_SCORE)
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    rank = (below + (counts + 1) / 2)[place]  # (B,) mean rank of the tied scores, from 1
    return float((rank[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def floats(values: Numbers) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers as a float64 array; a tensor's may be of types that NumPy lacks, such as bfloat16."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def bin_of(score: np.ndarray) -> np.ndarray:
    """Return each score's bin, 0 .. BINS − 1."""
    if np.isnan(score).any():
        raise NonFiniteError(NO_SCORE)
    end = BINS // 16  # 16
    found: np.ndarray = (
        np.floor(8 * np.clip(score, -end, end)).clip(max=8 * end - 1).astype(np.int64) + 8 * end
    )
    return found


def binned_auc(positive: np.ndarray, negative: np.ndarray) -> tuple[float, float]:
    """Return the AUC of binned scores, ties counted half, and the most that it can differ from the exact one.

    Pairs in one bin count half, and each is worth 0 to 1, so the error is at most ½ Σ_b pos_b neg_b / (P N).

    Args:
        positive, negative: (bins,) examples of either label by bin, bins in ascending order of the score.

    Returns:
        Both NaN where there is no pair to compare.
    """
    pairs = int(positive.sum()) * int(negative.sum())
    if not pairs:
        return math.nan, math.nan
    below = np.cumsum(negative) - negative
    tied = int((positive * negative).sum())
    return (2 * int((positive * below).sum()) + tied) / (2 * pairs), tied / (2 * pairs)


Classes = Tensor | np.ndarray[Any, Any] | Sequence[int]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def balanced_accuracy(label: Classes, predicted: Classes) -> float:
    """Return the mean recall of the classes that are a label of some example.

    As scikit-learn's ``balanced_accuracy_score``. A class that is predicted alone, of no example, has no recall.

    Args:
        label: (examples,) classes from 0.
        predicted: (examples,) the predicted classes; below 0: none, which is wrong.

    Returns:
        A fraction; NaN without examples.

    Raises:
        DataError: shapes differ, or a label is below 0.
    """
    hits, labels, _ = _counts(label, predicted)
    some = labels > 0
    return float(np.mean(hits[some] / labels[some])) if some.any() else math.nan


def macro_f1(label: Classes, predicted: Classes) -> float:
    """Return the mean F1 = 2 TP / (2 TP + FP + FN) of the classes that occur, as a label or as a prediction.

    As scikit-learn's ``f1_score(average="macro", zero_division=0)``. A class that is never predicted, or is predicted
    and never a label, has F1 0; one that is neither does not count.

    Args:
        label, predicted: as of ``balanced_accuracy``.

    Returns:
        A fraction; NaN without examples.

    Raises:
        DataError: as of ``balanced_accuracy``.
    """
    hits, labels, predictions = _counts(label, predicted)
    return float(np.mean(2 * hits / (labels + predictions))) if len(hits) else math.nan


def mean_iou(label: Classes, predicted: Classes) -> float:
    """Return the mean intersection over union TP / (TP + FP + FN) of the classes that occur, as a label or as a prediction.

    As scikit-learn's ``jaccard_score(average="macro", zero_division=0)``; of segmentation it is called mIoU.

    Args:
        label, predicted: as of ``balanced_accuracy``.

    Returns:
        A fraction; NaN without examples.

    Raises:
        DataError: as of ``balanced_accuracy``.
    """
    hits, labels, predictions = _counts(label, predicted)
    return float(np.mean(hits / (labels + predictions - hits))) if len(hits) else math.nan


CLASS_METRICS: Mapping[str, Callable[[Classes, Classes], float]] = {
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "mean_iou": mean_iou,
}
"""Metrics of labels and predicted classes, by name."""


def _counts(label: Classes, predicted: Classes) -> tuple[Ints, Ints, Ints]:
    """Return for each class that occurs its right answers, labels and predictions."""
    true, guess = np.asarray(label), np.asarray(predicted)
    if true.ndim != 1 or true.shape != guess.shape:
        raise DataError(
            "Wanted labels and predictions as (examples,); got {got} and {shape}.",
            got=true.shape,
            shape=guess.shape,
        )
    if len(true) and true.min() < 0:
        raise DataError(
            "Wanted classes from 0 as labels; got {got}.",
            got=true.min(),
        )
    known = guess >= 0
    classes = np.unique(np.concatenate([true, guess[known]]))

    def counted(of: np.ndarray[Any, Any]) -> Ints:
        return np.bincount(np.searchsorted(classes, of), minlength=len(classes)).astype(np.int64)

    return counted(true[true == guess]), counted(true), counted(guess[known])


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """A metric's distribution over clients, each counted once whatever its number of examples.

    Attributes:
        clients: how many clients have a defined value.
        undefined: how many have none (NaN), e.g. an AUC on one class; they count nowhere else.
        mean: the mean over clients.
        std: the standard deviation over these clients (division by their number).
        min: the lowest value.
        max: the highest value.
        deciles: the nine values below which 10 %, 20 % .. 90 % of clients lie, interpolated linearly.
        worst: the id of the client with the worst value, the first one of several; None without clients.
    """

    clients: int
    undefined: int
    mean: float
    std: float
    min: float
    max: float
    deciles: tuple[float, ...]
    worst: str | None

    @property
    def median(self) -> float:
        """The fifth decile."""
        return self.deciles[4]


def per_client(values: Mapping[str, float], *, higher_is_better: bool = True) -> ClientSummary:
    """Summarise a metric over clients.

    Args:
        values: the metric by client id. NaN means not defined for this client.
        higher_is_better: which end is the worst client's.

    Returns:
        The summary; all its numbers are NaN where no client has a value.
    """
    ids = [client for client, value in values.items() if not math.isnan(value)]
    undefined = len(values) - len(ids)
    if not ids:
        nan = math.nan
        return ClientSummary(0, undefined, nan, nan, nan, nan, deciles=(nan,) * 9, worst=None)
    array = np.array([values[client] for client in ids], dtype=np.float64)
    deciles = np.quantile(array, np.arange(1, 10) / 10)
    return ClientSummary(
        clients=len(ids),
        undefined=undefined,
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        deciles=tuple(float(d) for d in deciles),
        worst=ids[int(array.argmin() if higher_is_better else array.argmax())],
    )


@dataclass(frozen=True, slots=True)
class Personalized:
    """What fine-tuning on each client is worth; accuracies are fractions, each client counts once.

    Attributes:
        mean: Ap = (1/K) Σ_k (1/(J+1)) Σ_j A_{p,j}^k, eq. 16.
        last: (1/K) Σ_k A_{p,J}^k.
        max: (1/K) Σ_k max_j A_{p,j}^k, which chooses by test accuracy.
        curve: (1/K) Σ_k A_{p,j}^k for j = 0..J.
        clients: A_p^k, the mean of each client's own curve.
    """

    mean: float
    last: float
    max: float
    curve: tuple[float, ...]
    clients: Mapping[str, float]


def ag(accuracy: Mapping[str, float]) -> float:
    """Return Ag = (1/K) Σ_k A_g^k, eq. 15: the shared model's accuracy, each client counting once; NaN without any.

    Args:
        accuracy: A_g^k, the shared model's accuracy on client k's test examples, by client.
    """
    return float(np.mean(list(accuracy.values()))) if accuracy else math.nan


def ap(curves: Mapping[str, Sequence[float]]) -> Personalized:
    """Return Ap and what goes with it.

    Args:
        curves: A_{p,j}^k by client: the accuracy on its test examples before fine-tuning (j = 0) and on the way.

    Raises:
        DataError: no client, an empty curve, or curves of different lengths.
    """
    lengths = {len(curve) for curve in curves.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise DataError(
            "Ap wants curves of one length, at least 1, for one client or more; got lengths {lengths}.",
            lengths=sorted(lengths),
        )
    table = np.asarray(list(curves.values()), dtype=np.float64)  # (K, J + 1)
    return Personalized(
        mean=float(table.mean()),
        last=float(table[:, -1].mean()),
        max=float(table.max(axis=1).mean()),
        curve=tuple(float(value) for value in table.mean(axis=0)),
        clients={client: float(value) for client, value in zip(curves, table.mean(axis=1), strict=True)},
    )
