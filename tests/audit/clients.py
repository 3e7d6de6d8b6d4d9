"""Clients by their numbers of examples: those to train on, those opted out of that, and those to judge."""

from __future__ import annotations

import numpy as np

from fedkeep import FederatedData
from tests.tiny import parts


def users(**counts: tuple[int, int, int, int]) -> FederatedData:
    """Return clients with so many training examples, opted-out training examples, validation and test examples."""
    owner = [name for name, four in counts.items() for _ in range(sum(four))]
    split = [part for train, out, valid, test in counts.values() for part in parts(train + out, valid, test)]
    opted_in = [
        k < train or k >= train + out
        for train, out, *rest in counts.values()
        for k in range(train + out + sum(rest))
    ]
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.standard_normal((len(owner), 3)).astype("f4"),
        "label": np.arange(len(owner)) % 3,
        "opted_in": np.array(opted_in),
    }
    return FederatedData.from_columns(owner, columns, split, meta={"task": "multiclass", "classes": 3})
