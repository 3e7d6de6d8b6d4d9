"""Modules and surroundings as strangers have them: right numbers, or an error of a class that says what is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params
from fedkeep.data import toy
from tests.tiny import same_bits

DATA = toy(users=6, examples=40)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x))
        return out


class Wrapper(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, **columns: Tensor) -> Any:
        return self.net(**columns)


class Peeks(Wrapper):
    """Would read the label where it is given one."""

    def forward(self, x: Tensor, **more: Tensor) -> Any:
        return self.net(x) + 9 * nn.functional.one_hot(more["label"], 3)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def trained(module: nn.Module, engine: Any = "sequential", method: Any = None) -> Params:
    run = simulate(module, method or methods.fedavg(), DATA, rounds=2, engine=engine, seed=1, device="cpu")
    assert run.evaluate("test")["loss"] < 2
    return run.server


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(Net())  # type: ignore[no-any-return]


def exported() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.export.export(Net(), (torch.randn(9, 4),)).module()


def bare(values: Params) -> Params:
    return {name.removeprefix("net."): value for name, value in values.items()}


@pytest.mark.parametrize("kind", [lambda: torch.fx.symbolic_trace(Net()), Wrapper])
def test_another_form_of_a_module_trains_the_same(kind: Callable[[], nn.Module]) -> None:
    assert same_bits(bare(trained(made(kind))), trained(made(Net)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", [quantised, exported, Peeks])
def test_what_cannot_be_trained_is_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(MethodError):
        trained(made(kind))


@pytest.mark.parametrize("name", ["moon", "fedrod", "fedproto", "knn_per", "fedpac", "kteps"])
def test_layers_called_features_and_classifier_are_no_methods(name: str) -> None:
    trained(made(Net), method=getattr(methods, name)())


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers"])
def test_the_hosts_default_device_changes_nothing(engine: str) -> None:
    wanted, module = trained(made(Net), engine), made(Net)
    torch.set_default_device("meta")
    try:
        found = trained(module, engine)
    finally:
        torch.set_default_device(None)
    assert same_bits(found, wanted)


class Summed(Net):
    """Adds one number to every output, so that a vector's gradient is that number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shift.sum().exp()


def test_an_expanded_gradient_is_clipped() -> None:
    method = methods.fedavg(local=Phase(clip_norm=0.01))
    found, wanted = (trained(made(Summed), engine, method) for engine in ("sequential", "vectorised"))
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name])
