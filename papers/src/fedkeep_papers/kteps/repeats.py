"""Test reviews that also stand in training, and accuracy without them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedkeep.data import FederatedData, Ragged
from fedkeep.engines import Judged


def repeated(data: FederatedData) -> np.ndarray:
    """Return whether each row is a test review with the words of some client's training review, (rows,) bool.

    Of a long review the words that are read count, the first 200.
    """
    texts = data.columns["text"]
    assert isinstance(texts, Ragged)

    def rows(part: str) -> Iterable[int]:
        return (row for client in range(len(data)) for row in data.rows(client, part))

    def words(row: int) -> bytes:
        return texts.values[texts.offsets[row] : texts.offsets[row + 1]].tobytes()

    known = {words(row) for row in rows("train")}
    found = np.zeros(len(texts), bool)
    found[[row for row in rows("test") if words(row) in known]] = True
    return found


def by_repeats(data: FederatedData, judged: Judged) -> dict[str, Any]:
    """Return how many test examples repeat a training one, by client, and accuracy on these and on the others.

    A client that has none of them has no accuracy there.
    """
    repeats = repeated(data)[judged.examples[0].row]

    def mean(values: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
        clients = judged.examples[0].client[chosen]
        number = np.bincount(clients, minlength=len(data))
        sums = np.bincount(clients, values[chosen], len(data))
        return {data.ids[c]: float(sums[c] / number[c]) for c in np.flatnonzero(number).tolist()}

    right = {model: judged.of(model).right() for model in judged.models}
    counts = np.bincount(judged.examples[0].client[repeats], minlength=len(data))
    return {
        "repeats": {data.ids[c]: int(counts[c]) for c in np.flatnonzero(counts).tolist()},
        "again": {model: mean(values, repeats) for model, values in right.items()},
        "rest": {model: mean(values, ~repeats) for model, values in right.items()},
    }
