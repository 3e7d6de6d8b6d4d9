"""No order in which values lie in memory changes a run: masks of dropout, engines, kernels, and a run that is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Phase, methods, sgd, simulate
from fedkeep.core.params import Params
from fedkeep.engines.dropout import InOrder
from tests.engines.reference import close

CLIENTS, EXAMPLES = 4, 6


def images() -> FederatedData:
    rng, rows = np.random.default_rng(0), CLIENTS * EXAMPLES
    columns = {"x": rng.standard_normal((rows, 4, 5, 3)), "label": rng.integers(0, 3, rows)}
    return FederatedData.from_columns(
        np.repeat(np.arange(CLIENTS), EXAMPLES),
        columns,
        ["train"] * rows,
        {"classes": 3, "task": "multiclass"},
    )


DATA = images()


class Images(nn.Module):
    """Images whose last axis are the channels."""

    def __init__(self, drop: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.conv, self.out, self.drop = nn.Conv2d(3, 4, 3), nn.Linear(24, 3), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.conv(x.permute(0, 3, 1, 2)), self.training).flatten(1))


class Words(nn.Module):
    def __init__(self, layer: type[nn.LSTM | nn.GRU], batch_first: bool) -> None:
        super().__init__()
        self.first, self.drop, self.out = batch_first, nn.Dropout(0.5), nn.Linear(8, 3)
        self.layer = layer(15, 8, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2) if self.first else x.flatten(2).transpose(0, 1)
        return self.out(self.drop(self.layer(x)[0]).sum(1 if self.first else 0))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 60).t())

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ F.dropout(self.weight, 0.5, self.training)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Images(lambda x, training: F.dropout(x, 0.4, training)),
    "in place": lambda: Images(lambda x, training: F.dropout(x + 0, 0.4, training, inplace=True)),
    "channels_last": lambda: Images(lambda x, t: F.dropout(x, 0.4, t)).to(memory_format=torch.channels_last),
    "weight": Transposed,
    "lstm": lambda: Words(nn.LSTM, True),
    "gru": lambda: Words(nn.GRU, True),
    "time first": lambda: Words(nn.LSTM, False),
}


def trained(
    name: str,
    engine: str = "sequential",
    accelerate: bool = True,
    build: Any = methods.fedavg,
    **options: Any,
) -> Params:
    method = build(local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.1, momentum=0.5)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name]().double()
    options = {"rounds": 2, "cohort": 3, "evaluate_every": 0, "progress": False, **options}
    run = simulate(model, method, DATA, engine=engine, accelerate=accelerate, **options)
    return run.server | {f"{c}/{n}": v for c in DATA.ids for n, v in run.kept(c).flat.items()}


@pytest.mark.parametrize("name", MODELS)
def test_engines_and_kernels_draw_the_same_masks(name: str) -> None:
    expected = trained(name)
    close(trained(name, "vectorised"), expected, atol=1e-12)
    close(trained(name, accelerate=False), expected, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_mask_follows_the_axes_not_the_memory(inplace: bool) -> None:
    def drop(x: Tensor, training: bool = True) -> Tensor:
        torch.manual_seed(1)
        return F.dropout(x, 0.5, training, inplace)

    def ones() -> Tensor:
        return torch.ones(5, 3).t()

    with torch.random.fork_rng():
        plain = drop(torch.ones(3, 5))
        with InOrder(), InOrder():
            assert torch.equal(drop(ones()), plain)
            assert torch.equal(drop(torch.ones(3, 5)), plain)
            assert torch.equal(drop(ones(), training=False), ones())
        assert not torch.equal(drop(ones()), plain)  # elsewhere PyTorch stays as it is


@pytest.mark.parametrize("build", [methods.fedavg, methods.ditto])
@pytest.mark.parametrize("name", ["channels_last", "weight"])
def test_a_run_that_is_resumed_has_the_same_bits(name: str, build: Any, tmp_path: Path) -> None:
    whole = trained(name, build=build, rounds=3)
    for rounds in (1, 2, 3):
        found = trained(name, build=build, rounds=rounds, out=tmp_path, resume=rounds > 1)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[n], v) for n, v in whole.items())
