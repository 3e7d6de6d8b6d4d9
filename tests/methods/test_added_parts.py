"""What a method adds to a model is none of what the model's own forward goes over."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Run, methods, sgd, simulate
from fedkeep.core.net import Net
from fedkeep.methods import Phase
from tests.methods.parts import Parts
from tests.methods.table import DATA, ROWS
from tests.tiny import everyone, on_server, run_by, same_bits

ADDING = [name for name, (_, method) in ROWS.items() if method.extend is not None and name != "mixture"]


class Plain(Parts):
    """x → encoder → tanh → classifier, and what ``WithSum`` adds."""

    shrink: float = 0.0

    def head(self, features: Tensor) -> Tensor:
        return super().head(features) + self.shrink * self.own_sum()

    def own_sum(self) -> Tensor:
        parts = (self.encoder.weight, self.encoder.bias, self.classifier.weight, self.classifier.bias)
        return torch.stack([p.sum() for p in parts]).sum() * torch.arange(3.0)


class Chain(nn.Sequential):
    """The same as ``Plain``, as a sequence of layers; all layers but the last make the features."""

    def __init__(self) -> None:
        same = Parts()
        super().__init__(OrderedDict(encoder=same.encoder, tanh=nn.Tanh(), classifier=same.classifier))

    def features(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x

    def head(self, features: Tensor) -> Tensor:
        return self[-1](features)


class OverChildren(Plain):
    """The same as ``Plain``: a forward that goes over ``children()``."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.children()):
            x = layer(torch.tanh(x) if place else x)
        return x


class PlainSum(Plain):
    shrink = 0.1


class OverParameters(Plain):
    """The same as ``PlainSum``: a head that reads all of ``parameters()``, and counts ``modules()``."""

    def head(self, features: Tensor) -> Tensor:
        assert (len(list(self.modules())), len(self.state_dict())) == (3, 4)
        logits: Tensor = self.classifier(features)
        return logits + 0.1 * (torch.stack([p.sum() for p in self.parameters()]).sum() * torch.arange(3.0))


def run_of(model: nn.Module, name: str, **options: Any) -> Run:
    return simulate(model.double(), method_of(name), DATA, rounds=2, cohort=4, seed=3, **options)


@functools.cache
def plain_run(model: type[nn.Module], name: str) -> Run:
    return run_of(model(), name, engine="sequential")


def method_of(name: str) -> methods.Method:
    """Return the table's method for models with an encoder and a classifier."""
    phase = Phase(batch_size=4, optimizer=sgd(0.3))
    return methods.fedala("classifier.*", local=phase) if name == "fedala" else ROWS[name][1]


def check_same(one: Run, other: Run) -> None:
    assert same_bits(on_server(one), on_server(other))
    assert same_bits(everyone(one.private, 6), everyone(other.private, 6))
    assert one.evaluate("test") == other.evaluate("test")


@pytest.mark.parametrize(
    ("same", "plain", "name"),
    [
        *(pytest.param(Chain, Plain, name, id=f"sequential, {name}") for name in ADDING),
        *(
            pytest.param(
                OverParameters,
                PlainSum,
                name,
                id=f"parameters, {name}",
                marks=() if name in ADDING[:3] else pytest.mark.slow,
            )
            for name in ADDING
        ),
        *(pytest.param(OverChildren, Plain, name, id=f"children, {name}") for name in ADDING[:3]),
    ],
)
def test_a_forward_that_goes_over_what_it_has_computes_as_one_that_names_it(
    name: str, same: Any, plain: Any
) -> None:
    check_same(run_of(same(), name, engine="sequential"), plain_run(plain, name))


@pytest.mark.parametrize("engine", ["vectorised", "centralised", "workers"])
def test_it_does_so_on_every_engine(engine: Any) -> None:
    name = "fedfusion" if engine == "centralised" else "ditto"
    check_same(run_of(Chain(), name, **run_by(engine)), run_of(Plain(), name, **run_by(engine)))


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme", "mr_mtl", "fedamp"])
def test_a_sequence_of_other_widths_trains(name: str) -> None:
    """Its copy could not even be called behind it."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    run = simulate(model, ROWS[name][1], DATA, rounds=1, cohort=4, engine="sequential")
    assert set(run.server) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfl_da"])
def test_the_model_has_its_names_in_the_same_order_after_a_call(name: str) -> None:
    method = method_of(name)
    net = Net(method.made_for(Chain()))
    names, parts = list(net.initial()), [n for n, _ in net.module.named_modules()]
    params, x = net.initial(), {"x": torch.randn(2, 3)}
    assert torch.equal(net(params, x), Net(Chain())(Chain().state_dict(), x))
    with net.bound(params):
        net(params, x)
    with pytest.raises(RuntimeError):
        net(params, {"x": torch.randn(2, 9)})
    assert list(net.initial()) == names
    assert [n for n, _ in net.module.named_modules()] == parts
    assert "own.encoder.weight" in names
