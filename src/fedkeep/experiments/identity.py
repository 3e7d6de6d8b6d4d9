"""The description of its model that a run saves, so that it can refuse to go on with another one."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedkeep.core.describe import digest
from fedkeep.core.params import Params
from fedkeep.methods import Method


def model_identity(module: nn.Module, method: Method, initial: Params) -> dict[str, Any]:
    """Return layers and hashes of a model: what must be the same when a run goes on."""
    return {
        "layers": repr(module),
        "initial_sha256": digest(initial),
        "frozen_sha256": method.split.halves(module).frozen_digest(initial),
    }


def initial_hashes(initial: Params, trained: frozenset[str]) -> dict[str, Any]:
    """Return a hash of each initial value by name, for reports: of what is frozen, and of what is trained."""
    hashes = {n: digest({n: v})[:16] for n, v in initial.items()}
    return {
        "trained": {n: h for n, h in hashes.items() if n in trained},
        "frozen": {n: h for n, h in hashes.items() if n not in trained},
    }
