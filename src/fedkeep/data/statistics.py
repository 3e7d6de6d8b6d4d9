"""What the clients of a text data set hold: numbers of texts, words a text, different words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged
from fedkeep.data.federated import FederatedData
from fedkeep.data.text import SPECIAL


@dataclass(frozen=True)
class TextStatistics:
    """A client's texts (KTEPS Table 1).

    Attributes:
        client: the client's id.
        train, valid, test: numbers of texts, N^k and N^k_te.
        mean_words: words of a training text, before it is cut where the reader tells; NaN without training texts.
        different_words: |V^k|, the different known words of the training texts as they are trained on.
    """

    client: str
    train: int
    valid: int
    test: int
    mean_words: float
    different_words: int


def text_statistics(data: FederatedData, column: str = "text") -> list[TextStatistics]:
    """Return the statistics of each client.

    Raises:
        DataError: there is no ragged column of this name, or the data are not split.
    """
    ids = data.columns.get(column)
    if not isinstance(ids, Ragged):
        raise DataError(f"Wanted texts in a ragged column {column!r}; the data have {sorted(data.columns)}.")
    whole = data.columns.get("_words")
    words = np.diff(ids.offsets) if whole is None or isinstance(whole, Ragged) else whole
    found = []
    for client in range(len(data)):
        train = data.rows(client, "train")
        rows = np.arange(train.start, train.stop)
        used = np.unique(ids.take(rows).values)
        found.append(
            TextStatistics(
                client=data.ids[client],
                train=len(train),
                valid=data.count(client, "valid"),
                test=data.count(client, "test"),
                mean_words=float(words[rows].mean()) if len(rows) else float("nan"),
                different_words=int((used >= SPECIAL).sum()),
            )
        )
    return found
