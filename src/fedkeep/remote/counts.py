"""How many examples the server gets to know of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkeep.data import FederatedData
from fedkeep.methods import Method


def told_counts(data: FederatedData, method: Method) -> NDArray[np.int64]:
    """Return for each client how many training examples the server gets to know of: those that are opted in.

    Where private phases use all of them, a client that opted out wholly trains too, and tells of one.
    """
    counts, opted = data.counts("train"), data.columns.get("opted_in")
    if opted is None:
        return counts
    rows = data.split_rows("train")
    inside = np.bincount(data.clients_of(rows[np.asarray(opted)[rows].astype(bool)]), minlength=len(data))
    alone = any(phase.examples == "all" for phase in method.client.phases) & (counts > 0)
    return np.maximum(inside, alone)
