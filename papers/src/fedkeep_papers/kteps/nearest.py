"""Nearest words: how far an embedding keeps the neighbours that a word has in another one.

Source: KTEPS (arXiv 2107.11956), §5.5 and Figure 5: the words nearest to "man" in a client's embedding, in what the
server restores of it, and in the aggregate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, DataError

Similarity = Literal["cosine", "inner"]


def nearest(table: Tensor, row: int, k: int, similarity: Similarity = "cosine") -> list[int]:
    """Return the k rows most similar to a row, itself left out, the most similar first; of equals the lower row.

    Args:
        table: (n, d) vectors.
        row: whose neighbours.
        k: how many, fewer where there are not so many others.
        similarity: ``"cosine"`` (a zero vector is similar to nothing: 0) or ``"inner"`` product.

    Raises:
        ConfigError: an unknown similarity, or k below 1.
        DataError: there is no such row, or the table is not finite.
    """
    if similarity not in ("cosine", "inner") or k < 1:
        raise ConfigError(
            f"Neighbours want a similarity 'cosine' or 'inner' and k of at least 1; got {similarity!r} and {k}."
        )
    if table.dim() != 2 or not 0 <= row < len(table) or not bool(torch.isfinite(table).all()):
        raise DataError(
            f"Neighbours want a finite table (n, d) and a row of it; got shape {tuple(table.shape)}, row {row}."
        )
    exact = table.detach().double()
    if similarity == "cosine":
        exact = torch.nn.functional.normalize(exact, dim=1)
    scores = exact @ exact[row]
    scores[row] = -torch.inf
    order = torch.sort(scores, descending=True, stable=True).indices
    return [int(i) for i in order[: min(k, len(table) - 1)]]


def common_neighbours(
    first: Tensor, second: Tensor, row: int, ks: Sequence[int], similarity: Similarity = "cosine"
) -> dict[int, int]:
    """Return for each k how many of a row's k nearest rows are the same in two tables of the same rows.

    Raises:
        ConfigError, DataError: as for ``nearest``; the tables have different numbers of rows; no k.
    """
    if len(first) != len(second) or not ks:
        raise DataError(
            f"Common neighbours want two tables of the same rows and some k; got {len(first)} and {len(second)} rows, "
            f"k {list(ks)}."
        )
    a, b = (nearest(table, row, max(ks), similarity) for table in (first, second))
    return {k: len(set(a[:k]) & set(b[:k])) for k in ks}
