"""Federated reconstruction: private parameters are trained from scratch in every round, and never kept.

Source: Singhal et al., Federated Reconstruction: Partially Local Federated Learning, arXiv 2102.03448, algorithm 1.
One round: (1) a cohort downloads w_f; (2) each client begins w_p again; (3) with w_f frozen, it fits w_p to its support
examples, w_p ← w_p − η_r ∇_p F_S(w_f, w_p), k_r steps; (4) with w_p frozen, it trains w_f on its query examples,
w_f ← w_f − η_u ∇_f F_Q(w_f, w_p); (5) it uploads the change of w_f and |Q|, by which the server weights; (6) it forgets
w_p. Whoever predicts, reconstructs first.
"""

from __future__ import annotations

from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client, Init
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.split import Split


@telling
def fedrecon(
    private: Patterns = "user",
    *,
    local: Phase = Phase(),
    reconstruction_optimizer: Optimizer = sgd(0.1),
    reconstruction_steps: int = 50,
    halves: bool = True,
    private_init: float | tuple[Literal["normal"], float] | Literal["model"] = "model",
    server: Server = Server(),
) -> Method:
    """Return federated reconstruction.

    What rounds measure uses the values of each client's last round; a run's answer reconstructs them anew.

    Args:
        private: name patterns of what is reconstructed.
        local: the phase of w_f, on query examples.
        reconstruction_optimizer: η_r, for w_p.
        reconstruction_steps: k_r mini-batches.
        halves: support and query are disjoint halves; False: both are all examples.
        private_init: what reconstruction starts from.
        server: see ``methods``.
    """
    query = local.but(trains="federated", examples="query" if halves else "opted_in")
    support = local.but(
        trains="private",
        optimizer=reconstruction_optimizer,
        steps=reconstruction_steps,
        examples="support" if halves else "opted_in",
    )
    return Method(
        name="fedrecon",
        split=Split(private),
        client=Client(phases=(support, query), keep=Init(value=private_init, every_round=True)),
        server=server,
        adapt=Adapt(phases=(support.but(examples="all"),), everyone=True),
        predict_shared=None,
    )
