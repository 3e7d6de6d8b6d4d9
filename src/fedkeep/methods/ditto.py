"""Ditto: FedAvg, and beside it a private model of each client that stays near the federated one.

Source: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221, algorithm 1.
One round: (1) a cohort downloads w^t; (2) each client trains w on F_k as in FedAvg; (3) it trains its own v_k on
F_k(v) + ½ λ ‖v − w^t‖²; (4) it uploads the change of w, keeps v_k, and predicts with v_k; (5) the server averages.
"""

from __future__ import annotations

from fedkeep.core.optim import Optimizer
from fedkeep.methods.added_parts import COPY, PulledCopy, predict_copy, with_copy
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server


@telling
def ditto(
    lam: float = 0.1,
    *,
    local: Phase = Phase(),
    own_optimizer: Optimizer | None = None,
    own_epochs: int | None = None,
    server: Server = Server(),
) -> Method:
    """Return Ditto. v never leaves and w never sees it, so v is trained on opted-out examples too.

    Args:
        lam: λ; 0 is local training of v, beside FedAvg.
        local: the phase of w, with F_k.
        own_optimizer: of v (patterns of its rates begin with ``own.``); by default that of w.
        own_epochs: passes for v; by default those for w.
        server: see ``methods``.
    """
    shared = local.but(trains="federated")
    own = local.but(
        loss=PulledCopy(term=local.loss + Proximal(mu=float(lam))),
        trains="private",
        optimizer=own_optimizer or local.optimizer,
        examples="all",
    )
    if own_epochs is not None:
        own = own.but(epochs=own_epochs)
    return Method(
        name="ditto",
        split=COPY,
        client=Client(phases=(shared, own)),
        server=server,
        adapt=Adapt(phases=(own.but(epochs=10),)),
        predict=predict_copy,
        extend=with_copy,
    )
