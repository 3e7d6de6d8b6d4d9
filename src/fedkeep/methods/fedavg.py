"""FedAvg: every parameter is federated.

Source: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
One round: (1) a cohort downloads w; (2) each client trains w locally on its own examples; (3) it uploads its change;
(4) the server adds the mean change, weighted by the numbers of examples (FURL eq. 5).
"""

from __future__ import annotations

from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.terms import Term, cross_entropy


def fedavg(
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return FedAvg, or FedOpt (Reddi et al., 2021) with another ``server_optimizer``.

    w^{t+1} = w^t + Σ_k c_k d_k / Σ_k c_k, with d_k = u_k − w^t.
    """
    phase = Phase(loss, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    return Method("fedavg", phases=(phase,), weighting=weighting, server_optimizer=server_optimizer)
