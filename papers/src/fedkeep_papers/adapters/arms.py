"""What is compared, and how it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedkeep import Phase, adagrad, averaging, methods, sgd
from fedkeep.methods import Method
from fedkeep_papers.adapters.models import Arm

BIAS, VECTOR, OWN = "user_bias", "user", "*.lora_?.own.*"
LAYERS = 1
"""How many last layers have adapters."""
ARMS: Mapping[str, Arm] = {
    "counts": Arm("counts alone"),
    "head": Arm("global head"),
    "bias": Arm("private bias", (BIAS,), bias=True, own_rate=0.01),
    "private-head": Arm("private head", (OWN, BIAS), head_rank=2, bias=True, own_rate=0.01),
    "adapter": Arm("global adapter", shared_rank=8),
    "vector": Arm(
        "FURL vector with a global adapter", (VECTOR,), shared_rank=8, user_dim=1536, own_rate=0.03
    ),
    "private-adapter": Arm("private adapter", (OWN,), shared_rank=8, own_rank=1, own_rate=0.3),
}
"""By the name in files. Private are at most 1536 numbers: a rank-1 adapter on queries and values has 4 × 384."""
RECIPE: Mapping[str, Any] = {
    "batch_size": 16,
    "cohort": 5,
    "epochs": 2,
    "rate": 0.01,
    "adapter_rate": 0.3,
    "server_rate": 0.02,
    "server_eps": 1e-3,
    "adapter_server_rate": 0.001,
    "clip_norm": 1.0,
}


def recipe(arm: str) -> Method:
    """Return FedAvg, or FURL where something is private, with Adagrad at the server."""
    it, shared = ARMS[arm], "*.lora_?.default.*"
    own = dict.fromkeys(it.private, it.own_rate)
    local = Phase(
        optimizer=sgd(
            RECIPE["rate"],
            schedule="linear",
            rates=own | ({shared: RECIPE["adapter_rate"]} if it.shared_rank else {}),
        ),
        batch_size=RECIPE["batch_size"],
        clip_norm=RECIPE["clip_norm"],
        clip_over="halves",
    )
    step = adagrad(
        RECIPE["server_rate"],
        eps=RECIPE["server_eps"],
        schedule="linear",
        rates={shared: RECIPE["adapter_server_rate"]} if it.shared_rank else None,
    )
    if it.private:
        return methods.furl(list(it.private), local=local, server=averaging(step))
    return methods.fedavg(local=local, server=averaging(step))
