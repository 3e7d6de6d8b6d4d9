"""Federated reconstruction: private parameters that are made anew from data in every round, and never kept.

Source: Singhal et al., Federated Reconstruction: Partially Local Federated Learning, arXiv 2102.03448, algorithm 1.
One round: (1) a cohort downloads w_f; (2) each client starts w_p anew; (3) with w_f frozen, it fits w_p to its support
examples, w_p ← w_p − η_r ∇_p F_S(w_f, w_p), k_r steps; (4) with w_p frozen, it trains w_f on its query examples,
w_f ← w_f − η_u ∇_f F_Q(w_f, w_p); (5) it uploads the change of w_f and |Q|, by which the server weights; (6) it forgets
w_p. Whoever predicts, reconstructs first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Patterns, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def fedrecon(
    private: Patterns = "user",
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    reconstruction_optimizer: Optimizer = sgd(0.1),
    reconstruction_steps: int = 50,
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    halves: bool = True,
    weighting: Literal["examples", "uniform"] = "examples",
    private_init: float | tuple[Literal["normal"], float] | Literal["model"] = "model",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return federated reconstruction.

    Metrics of a run use the values of each client's last round; ``cold_start`` reconstructs from a client's examples.

    Args:
        private: name patterns of what is reconstructed.
        loss: of both phases.
        optimizer: η_u, for w_f.
        reconstruction_optimizer: η_r, for w_p.
        reconstruction_steps: k_r mini-batches.
        epochs: passes over the query examples.
        batch_size: examples a local step.
        clip_norm: bound on a step's gradient norm.
        halves: support and query are disjoint halves; False: both are all examples.
        weighting: ``"examples"`` (the query's) or ``"uniform"``.
        private_init: what reconstruction starts from.
        server_optimizer: ``sgd(1.0)`` is plain averaging.
    """
    query = Phase(
        loss, "federated", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm,
        part="query" if halves else "all",
    )  # fmt: skip
    support = replace(
        query, trains="private", optimizer=reconstruction_optimizer, steps=reconstruction_steps,
        part="support" if halves else "all",
    )  # fmt: skip
    return Method(
        "fedrecon",
        Split(private),
        (support, query),
        weighting,
        private_init=private_init,
        server_optimizer=server_optimizer,
        adapt=(replace(support, part="all", examples="all"),),
        predict_shared=None,
        stateless=True,
    )
