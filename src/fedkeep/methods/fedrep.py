"""FedRep: FedPer's split, trained in turn: the head on a frozen body, then the body under a frozen head.

Source: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, arXiv 2102.07078,
algorithm 1.
One round: (1) a cohort downloads the body φ; (2) each client passes τ times over its examples with its own head h
alone, h ← h − η ∇_h F_k(φ, h); (3) then with the body alone, φ ← φ − η ∇_φ F_k(φ, h); (4) it uploads the change of φ;
(5) the server averages, and the client keeps h.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Patterns, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def fedrep(
    private: Patterns = "head.*",
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    head_optimizer: Optimizer | None = None,
    head_epochs: int = 10,
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return FedRep.

    Args:
        private: name patterns of the head.
        loss: the local loss of both phases.
        optimizer: of the body.
        head_optimizer: of the head; by default ``optimizer``.
        head_epochs: τ, passes over the client's examples with the body frozen.
        epochs: passes with the head frozen.
        batch_size: examples a local step.
        clip_norm: bound on a step's gradient norm.
        weighting: ``"examples"`` or ``"uniform"`` (the paper: clients of equal size).
        server_optimizer: ``sgd(1.0)`` is plain averaging.
    """
    body = Phase(loss, "federated", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    head = replace(body, trains="private", optimizer=head_optimizer or optimizer, epochs=head_epochs)
    return Method(
        "fedrep",
        Split(private),
        (head, body),
        weighting,
        server_optimizer=server_optimizer,
        adapt=(replace(head, examples="all"),),
        predict_shared=None,
    )
