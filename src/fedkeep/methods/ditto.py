"""Ditto: FedAvg, and beside it a private model of each client that stays near the federated one.

Source: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, arXiv 2012.04221, algorithm 1.
One round: (1) a cohort downloads w^t; (2) each client trains w on F_k as in FedAvg; (3) it trains its own v_k on
F_k(v) + ½ λ ‖v − w^t‖²; (4) it uploads the change of w, keeps v_k, and predicts with v_k; (5) the server averages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.copies import COPY, OnCopy, predict_copy, with_copy
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import Term, cross_entropy


def ditto(
    lam: float = 0.1,
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    own_optimizer: Optimizer | None = None,
    own_epochs: int | None = None,
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return Ditto. v never leaves and w never sees it, so v is trained on opted-out examples too.

    Args:
        lam: λ; 0 is local training of v, beside FedAvg.
        loss: F_k, of both models.
        optimizer: of w.
        own_optimizer: of v (patterns of its rates begin with ``own.``); by default ``optimizer``.
        own_epochs: passes for v; by default ``epochs``.
        epochs: passes for w.
        batch_size: examples a local step.
        clip_norm: bound on a step's gradient norm.
        weighting: ``"examples"`` or ``"uniform"``.
        server_optimizer: ``sgd(1.0)`` is plain averaging.
    """
    shared = Phase(loss, "federated", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    own = replace(
        shared, loss=OnCopy(loss + Proximal(float(lam))), trains="private", optimizer=own_optimizer or optimizer,
        epochs=epochs if own_epochs is None else own_epochs, examples="all",
    )  # fmt: skip
    return Method(
        "ditto", COPY, (shared, own), weighting, server_optimizer=server_optimizer, adapt=(replace(own, epochs=10),),
        predict=predict_copy, extend=with_copy,
    )  # fmt: skip
