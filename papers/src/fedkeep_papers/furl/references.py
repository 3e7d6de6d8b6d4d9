"""Reference results without training, that every trained model should be held against."""

from __future__ import annotations

import numpy as np

from fedkeep.data import FederatedData


def most_frequent_label(data: FederatedData, split: str = "test") -> float:
    """Return the accuracy of predicting, for each user, the label most frequent in the user's training examples."""
    labels = np.asarray(data.columns["label"])
    right = total = 0
    for client in range(len(data)):
        train, judged = (
            labels[r.start : r.stop] for r in (data.rows(client, "train"), data.rows(client, split))
        )
        if len(train):
            right += int((judged == np.bincount(train).argmax()).sum())
            total += len(judged)
    return right / total if total else float("nan")
