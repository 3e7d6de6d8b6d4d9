"""A mixture of two small experts, and its federated training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Run, adam, simulate
from fedkeep.core.params import Params
from fedkeep.methods import EarlyStopping, Method, Phase
from fedkeep.models import MixtureOfExperts
from tests.tiny import classes

DATA = classes(counts=(12, 9, 7, 10), valid=6, test=5)
LOCAL = Phase(optimizer=adam(0.02), batch_size=4, epochs=2)
LATER: dict[str, Any] = {
    "local_epochs": 12,
    "mixture_epochs": 9,
    "early_stopping": EarlyStopping(every=2, patience=2),
}


class Expert(nn.Module):
    """A linear expert with dropout."""

    def __init__(self, seed: int, outputs: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.drop = nn.Dropout(dropout)
            self.body = nn.Linear(3, 5)
            self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.body(x))))


class Switch(nn.Module):
    """A linear gate."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.linear = nn.Linear(3, 1)

    def logit(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(1)


def model(dropout: float = 0.0) -> MixtureOfExperts:
    return MixtureOfExperts(Expert(1, dropout=dropout), Expert(2, dropout=dropout), Switch()).double()


def federated(
    method: Method, data: FederatedData = DATA, dropout: float = 0.0, rounds: int = 4, **options: Any
) -> Run:
    return simulate(model(dropout), method, data, rounds=rounds, cohort=3, seed=5, **options)


def part(values: Params, prefix: str) -> Params:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
