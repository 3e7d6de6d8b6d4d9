"""Federations in this process: cases of the conformance table, their clients dealt out to nodes, over a virtual clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedkeep import FederatedData, Method
from fedkeep.core.params import Params
from fedkeep.remote import Packet, RoundPolicy
from fedkeep.remote.memory import MemoryTransport
from fedkeep.remote.server import Federation
from tests.engines.test_conformance import CASES, COHORT, ROUNDS, SEED
from tests.remote.stub import StubNode
from tests.tiny import everyone


def federation(case: str, kind: str = "float32", **changes: Any) -> Federation:
    """Return a case of the conformance table as a run across machines."""
    what = CASES[case]

    def build(encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
        torch.manual_seed(0)
        return what.model().to(getattr(torch, kind)), what.method

    meta = {k: what.data.meta[k] for k in ("task", "tasks", "classes", "name") if k in what.data.meta}
    options = {"cohort": COHORT, "seed": SEED, "evaluate_every": 2, "rounds": ROUNDS, **what.options}
    given: dict[str, Any] = {
        "name": case, "text": case, "build": build, "encode": lambda told: {"meta": meta},
        "clients": len(what.data), "leaves": "clients", "simulated_noise": True, **options, **changes,
    }  # fmt: skip
    return Federation(**given)


def dealt(data: FederatedData, nodes: int) -> list[FederatedData]:
    """Return the clients dealt out to nodes in turn."""
    return [data.select(list(range(k, len(data), nodes))) for k in range(min(nodes, len(data)))]
