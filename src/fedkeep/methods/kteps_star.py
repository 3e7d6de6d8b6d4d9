"""KTEPS⋆: KTEPS whose embedding is uploaded by its principal components.

Source: Li et al., Preliminary Steps Towards Federated Sentiment Classification, arXiv 2107.11956, §4.2, eq. 10–12.
One round is KTEPS's, but (4) the client sends W V and V instead of its embedding W, V its components d_s .. d_e, and
all with noise; (5) the server restores W V Vᵀ for each client, then averages.
"""

from __future__ import annotations

from typing import Literal, Unpack

from fedkeep.methods.base import Method
from fedkeep.methods.kteps import KtepsOptions, kteps
from fedkeep.methods.phase import telling
from fedkeep.privacy import Projection
from fedkeep.privacy.projection import WORDS


@telling
def kteps_star(
    start: int = 2,
    end: int = 150,
    *,
    table: str = WORDS,
    target: Literal["matrix", "delta"] = "matrix",
    noise: float = 1e-3,
    **others: Unpack[KtepsOptions],
) -> Method:
    """Return KTEPS⋆; ``start`` = 1 and ``end`` = the table's width is KTEPS, up to rounding.

    Args:
        start, end: d_s and d_e, counted from 1, both kept.
        table, target: as in ``privacy.Projection``; a model without ``embedding.weight`` has its one table of words projected.
        noise: as in ``kteps``, of what the projection leaves.
        others: the other arguments of ``kteps``.
    """
    base = kteps(noise=noise, **others)
    return base.but(name="kteps_star", upload=(Projection(start, end, table, target), *base.upload))
