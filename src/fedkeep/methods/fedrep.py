"""FedRep: FedPer's split, trained in turn: the head on a frozen body, then the body under a frozen head.

Source: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, arXiv 2102.07078,
algorithm 1.
One round: (1) a cohort downloads the body φ; (2) each client passes τ times over its examples with its own head h
alone, h ← h − η ∇_h F_k(φ, h); (3) then with the body alone, φ ← φ − η ∇_φ F_k(φ, h); (4) it uploads the change of φ;
(5) the server takes the plain mean, φ ← Σ_k φ_k / m (algorithm 1: 1 / (r n), with r n clients), and the client keeps h.
"""

from __future__ import annotations

from fedkeep.core.optim import Optimizer
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server, averaging
from fedkeep.split import Split


@telling
def fedrep(
    private: Patterns = "head.*",
    *,
    local: Phase = Phase(),
    head_optimizer: Optimizer | None = None,
    head_epochs: int = 10,
    server: Server = averaging(by="uniform"),
) -> Method:
    """Return FedRep.

    Args:
        private: name patterns of the head.
        local: the body's phase.
        head_optimizer: of the head; by default the body's.
        head_epochs: τ, passes over the client's examples with the body frozen.
        server: see ``methods``; by default every client counts once, as in algorithm 1; ``averaging()`` weighs by examples.
    """
    body = local.but(trains="federated")
    head = local.but(trains="private", optimizer=head_optimizer or local.optimizer, epochs=head_epochs)
    return Method(
        name="fedrep",
        split=Split(private),
        client=Client(phases=(head, body)),
        server=server,
        adapt=Adapt(phases=(head.but(examples="all"),)),
        predict_shared=None,
    )
