"""Reference results without training, that every trained model should be held against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeep.data import FederatedData


def users_most_frequent(data: FederatedData) -> dict[str, float]:
    """Return ``most_frequent_label`` of each user by id, of those with examples to count and to judge."""
    each = {str(data.ids[c]): most_frequent_label(data, clients=[c]) for c in range(len(data))}
    return {user: value for user, value in each.items() if value == value}


def most_frequent_label(
    data: FederatedData, split: str = "test", clients: Sequence[int] | None = None
) -> float:
    """Return the accuracy of predicting, for each user, the label most frequent in the user's training examples.

    ``clients`` are indices, by default all. NaN where no example is judged.
    """
    labels = np.asarray(data.columns["label"])
    right = total = 0
    for client in range(len(data)) if clients is None else clients:
        train, judged = (
            labels[r.start : r.stop] for r in (data.rows(client, "train"), data.rows(client, split))
        )
        if len(train):
            right += int((judged == np.bincount(train).argmax()).sum())
            total += len(judged)
    return right / total if total else float("nan")
