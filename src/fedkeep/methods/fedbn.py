"""FedBN: batch normalisation stays private, its scale and shift as well as its statistics.

Source: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, arXiv 2102.07623,
algorithm 1.
One round: (1) a cohort downloads everything but batch normalisation; (2) each client joins it with its own γ, β,
running mean and variance; (3) it trains all jointly on its own examples; (4) it uploads the change of the rest;
(5) the server averages the rest: w_f ← w_f + Σ_k c_k d_k / Σ_k c_k.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeep.core.errors import MethodError
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.methods.base import Method, Patterns, Phase
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split


def batch_norm_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and buffers of a module's batch-normalisation layers, for ``fedbn``.

    Raises:
        MethodError: there is no such layer; FedBN would be FedAvg.
    """
    layers = {name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    names = tuple(n for n in module.state_dict() if n.rpartition(".")[0] in layers)
    if not names:
        raise MethodError(
            f"{type(module).__name__} has no batch normalisation; without any, use methods.fedavg()."
        )
    return names


def fedbn(
    private: Patterns = "*norm*",
    *,
    loss: Term = cross_entropy(),
    optimizer: Optimizer = sgd(0.1),
    epochs: int = 1,
    batch_size: int = 32,
    clip_norm: float | None = None,
    weighting: Literal["examples", "uniform"] = "examples",
    server_optimizer: Optimizer = sgd(1.0),
) -> Method:
    """Return FedBN; ``private`` names the layers' parameters and statistics: ``fedbn(batch_norm_names(model))``.

    A new client fits γ and β, and gathers statistics, on the frozen rest.
    """
    phase = Phase(loss, "all", optimizer, epochs, batch_size=batch_size, clip_norm=clip_norm)
    return Method(
        "fedbn",
        Split(private),
        (phase,),
        weighting,
        server_optimizer=server_optimizer,
        adapt=(replace(phase, trains="private", epochs=10, examples="all"),),
        predict_shared=None,
    )
