"""Models that PyTorch allows and an engine could stumble over: they train, alike in every engine, or are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, Phase, adam, methods, sgd, simulate
from tests.engines.reference import close, cohorts, federated
from tests.tiny import classes, same_bits, texts

DATA, TEXTS = classes(kind="f4"), texts(counts=(4, 6, 3, 5))
CLIPPED = methods.fedavg(local=Phase(batch_size=4, optimizer=adam(0.01), clip_norm=0.1))
PLAIN = methods.fedavg(local=Phase(batch_size=4, optimizer=sgd(0.3)))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Halved(nn.Module):
    """A part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).bfloat16())
        return out.float()


class Words(nn.Module):
    """A table with sparse gradients, or with dense ones."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, 4, padding_idx=0, sparse=sparse), nn.Linear(4, 3)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(text).sum(1))
        return out


@pytest.mark.parametrize("make", [Twice, Tied, Halved])
@pytest.mark.parametrize("method", [PLAIN, CLIPPED], ids=["sgd", "adam, clipped"])
def test_engines_agree_and_leave_the_users_model_alone(make: Callable[[], nn.Module], method: Method) -> None:
    found = []
    for engine in ("sequential", "vectorised"):
        model = make()
        before = {n: v.clone() for n, v in model.state_dict().items()}
        found.append(
            simulate(model, method, DATA, rounds=2, cohort=4, engine=engine, evaluate_every=0).server
        )
        assert same_bits(dict(model.state_dict()), before)
    # Gradients of the whole model pass through the part in bfloat16, which keeps eight bits.
    atol = 1e-2 if any(v.dtype == torch.bfloat16 for v in found[0].values()) else 1e-5
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=atol)
        assert not torch.equal(value, dict(make().state_dict())[name])


@pytest.mark.parametrize("make", [Twice, Tied])
def test_shared_weights_train_as_in_pytorch(make: Callable[[], nn.Module]) -> None:
    data = classes()
    plan = cohorts(data, 4, 3, 2)
    theirs = federated(
        make().double(), data, plan, PLAIN.client.phases[0], lambda m: torch.optim.SGD(m.parameters(), 0.3), seed=2
    )  # fmt: skip
    run = simulate(make().double(), PLAIN, data, rounds=3, cohort=4, seed=2, evaluate_every=0)
    close(run.server, theirs)


@pytest.mark.parametrize("method", [PLAIN, CLIPPED], ids=["sgd", "adam, clipped"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "auto"])
def test_sparse_gradients_train_like_dense_ones(method: Method, engine: str) -> None:
    options: dict[str, Any] = {"rounds": 2, "cohort": 3, "engine": engine, "evaluate_every": 0}
    sparse, dense = (simulate(Words(kind), method, TEXTS, **options).server for kind in (True, False))
    assert same_bits(sparse, dense)
