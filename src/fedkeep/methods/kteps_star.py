"""KTEPS⋆: KTEPS whose embedding is uploaded by its principal components.

Source: Li et al., Preliminary Steps Towards Federated Sentiment Classification, arXiv 2107.11956, §4.2, eq. 10–12.
One round is KTEPS's, but (4) the client sends W V and V instead of its embedding W, V its components d_s .. d_e, and
all with noise; (5) the server restores W V Vᵀ for each client, then averages.
"""

from __future__ import annotations

from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method
from fedkeep.methods.kteps import kteps
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.privacy import Projection


def kteps_star(
    start: int = 2,
    end: int = 150,
    *,
    table: str = "embedding.weight",
    target: Literal["matrix", "delta"] = "matrix",
    center: bool = True,
    diversity: float = 0.01,
    transfer: float = 0.01,
    architecture: Literal["A", "B", "C"] | tuple[str, ...] = "A",
    projections: bool = True,
    temperature: float = 4.0,
    student_temperature: float = 1.0,
    kernel: Literal["mixture", "single"] = "mixture",
    predict: Literal["s", "p", "sp"] = "sp",
    noise: float = 1e-3,
    tables: Literal["exact", "local", "whole"] = "exact",
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return KTEPS⋆; ``start`` = 1 and ``end`` = the table's width is KTEPS, up to rounding.

    Args:
        start, end: d_s and d_e, counted from 1, both kept.
        table, target, center: as in ``privacy.Projection``.
        diversity, transfer, architecture, projections, temperature, student_temperature, kernel, predict, noise,
            tables, loss, optimizer, epochs, batch_size, clip_norm, weighting, server_optimizer: as in ``kteps``.
    """
    base = kteps(
        diversity, transfer, architecture=architecture, projections=projections, temperature=temperature,
        student_temperature=student_temperature, kernel=kernel, predict=predict, noise=noise, tables=tables, loss=loss,
        optimizer=optimizer, epochs=epochs, batch_size=batch_size, clip_norm=clip_norm, weighting=weighting,
        server_optimizer=server_optimizer,
    )  # fmt: skip
    return base.but(name="kteps_star", upload=(Projection(start, end, table, target, center), *base.upload))
