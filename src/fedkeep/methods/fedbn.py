"""FedBN: batch normalisation stays private, its scale and shift as well as its statistics.

Source: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623,
algorithm 1.
One round: (1) a cohort downloads everything but batch normalisation; (2) each client joins it with its own γ, β,
running mean and variance; (3) it trains all jointly on its own examples; (4) it uploads the change of the rest;
(5) the server averages the rest: w_f ← Σ_k w_f,k / m over the m clients of the cohort, each counted once (algorithm 1;
the authors' code too gives all equal weights).
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeep.core.errors import MethodError
from fedkeep.methods.base import Method
from fedkeep.methods.fedper import fedper
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server, averaging


def batch_norm_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and buffers of a module's batch-normalisation layers, for ``fedbn``.

    Raises:
        MethodError: there is no such layer; FedBN would be FedAvg.
    """
    layers = {name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    names = tuple(n for n in module.state_dict() if n.rpartition(".")[0] in layers)
    if not names:
        raise MethodError(
            "{module} has no batch normalisation; without any, use methods.fedavg().",
            module=type(module).__name__,
        )
    return names


@telling
def fedbn(
    private: Patterns = "*norm*", *, local: Phase = Phase(), server: Server = averaging(by="uniform")
) -> Method:
    """Return FedBN; ``private`` names the layers' parameters and statistics: ``fedbn(batch_norm_names(model))``.

    By default every client counts once, as in algorithm 1; ``server=averaging()`` weighs by examples. A new client fits
    γ and β, and gathers statistics, on the frozen rest.
    """
    return fedper(private, local=local, server=server).but(name="fedbn")
