"""Ag and Ap: how good the shared model is for each client, and how good it becomes when it is fine-tuned there.

Source: KTEPS (arXiv 2107.11956), §5.3, eq. 14–16. The formula of eq. 16 is lost in every copy of the paper. A maximum
over the curve is impossible by the paper's own Table 5, so the mean is taken, and the last value and the client's best
are given beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import DataError


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
            f"Ap wants curves of one length, at least 1, for one client or more; got lengths {sorted(lengths)}."
        )
    table = np.asarray(list(curves.values()), dtype=np.float64)  # (K, J + 1)
    return Personalized(
        mean=float(table.mean()),
        last=float(table[:, -1].mean()),
        max=float(table.max(axis=1).mean()),
        curve=tuple(float(value) for value in table.mean(axis=0)),
        clients={client: float(value) for client, value in zip(curves, table.mean(axis=1), strict=True)},
    )
