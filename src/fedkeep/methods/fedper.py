"""FedPer: federated base layers below private top layers.

Source: Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, algorithms 1 and 2.
One round: (1) a cohort downloads the base w_B; (2) each client joins it with its own head w_P, kept from its last
participation; (3) it trains both jointly on its own examples; (4) it uploads the change of the base; (5) the server
moves w_B by Σ_k c_k d_k / Σ_k c_k, and the client keeps its head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Patterns, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def fedper(
    private: Patterns = "head.*",
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return FedPer. There is no global model: a head that nobody trained predicts nothing.

    With no private pattern its rounds are FedAvg's. A new client's head is fitted on the frozen base.
    """
    phase = Phase(loss, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    return Method(
        "fedper",
        Split(private),
        (phase,),
        weighting,
        server_optimizer=server_optimizer,
        adapt=(replace(phase, trains="private", epochs=10, examples="all"),),
        predict_shared=None,
    )
