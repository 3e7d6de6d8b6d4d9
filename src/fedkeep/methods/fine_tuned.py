"""Fine-tuning: FedAvg, and after federation every client trains a copy of the model on its own examples.

The baseline of personalisation (KTEPS §4, "Ap"; Specialized federated learning using a mixture of experts, arXiv
2010.02056, §4).
One round is FedAvg's: (1) download w; (2) train; (3) upload; (4) average. After the last: (5) each client copies w and
takes v ← v − η ∇F_k(v) for some passes, over all its examples, opted-out ones included; (6) it predicts with v, and
nothing of v leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import EarlyStopping, Method
from fedkeep.methods.fedavg import fedavg
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def fine_tuned(
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
    tune_optimizer: Optimizer | None = None,
    tune_epochs: int = 10,
    early_stopping: EarlyStopping | None = None,
) -> Method:
    """Return FedAvg with fine-tuning, which ``experiments.personalize.cold_start`` runs and measures.

    Args:
        loss: of both.
        optimizer, epochs, batch_size, clip_norm, weighting, server_optimizer: FedAvg's.
        tune_optimizer: of the copy; by default ``optimizer``.
        tune_epochs: passes over the client's own examples, at most so many with early stopping.
        early_stopping: of the copy, by the client's own validation loss; None: all passes.
    """
    method = fedavg(
        loss=loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size, clip_norm=clip_norm,
        weighting=weighting, server_optimizer=server_optimizer,
    )  # fmt: skip
    (phase,) = method.phases
    tune = replace(
        phase, optimizer=tune_optimizer or optimizer, epochs=tune_epochs, examples="all", early_stopping=early_stopping
    )  # fmt: skip
    return method.but(name="fine_tuned", adapt=(tune,), adapt_split=Split(("*",)))
