"""Fine-tuning: FedAvg, and after federation every client trains a copy of the model on its own examples.

The baseline of personalisation (KTEPS §4, "Ap"; Specialized federated learning using a mixture of experts, arXiv
2010.02056, §4).
One round is FedAvg's: (1) download w; (2) train; (3) upload; (4) average. After the last: (5) each client copies w and
takes v ← v − η ∇F_k(v) for some passes, over all its examples, opted-out ones included; (6) it predicts with v, and
nothing of v leaves.
"""

from __future__ import annotations

from fedkeep.core.optim import Optimizer
from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.fedavg import fedavg
from fedkeep.methods.phase import EarlyStopping, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.split import Split


@telling
def fine_tuned(
    *,
    local: Phase = Phase(),
    server: Server = Server(),
    tune_optimizer: Optimizer | None = None,
    tune_epochs: int = 10,
    early_stopping: EarlyStopping | None = None,
) -> Method:
    """Return FedAvg with fine-tuning, which ``experiments.personalize.cold_start`` runs and measures.

    Args:
        local: FedAvg's phase.
        server: see ``methods``.
        tune_optimizer: of the copy; by default FedAvg's.
        tune_epochs: passes over the client's own examples, at most so many with early stopping.
        early_stopping: of the copy, by the client's own validation loss; None: all passes.
    """
    tune = local.but(
        optimizer=tune_optimizer or local.optimizer,
        epochs=tune_epochs,
        examples="all",
        early_stopping=early_stopping,
    )
    adapt = Adapt(phases=(tune,), split=Split("*"), everyone=True)
    return fedavg(local=local, server=server).but(name="fine_tuned", adapt=adapt)
