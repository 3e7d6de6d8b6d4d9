"""Local: every client trains a model of its own; nothing leaves it.

The baseline without collaboration ("Indiv" in KTEPS, "Local" in the mixture of experts): FURL's split with
everything private.
"""

from __future__ import annotations

from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def local(
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
) -> Method:
    """Return local training: all parameters private, started from the module's values, trained on all own examples."""
    phase = Phase(loss, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm, examples="all")
    return Method("local", Split(("*",)), (phase,), adapt=(phase,), predict_shared=None)
