"""Models whose predictions for an example depend on the examples beside it are told apart from all others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods
from fedkeep.core.net import Net
from fedkeep.core.params import clone
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines.rehearsal import mixes
from fedkeep.experiments.simulate import simulate
from tests.tiny import same_bits


class Small(nn.Module):
    """A layer, what each test puts after it, and another layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.middle = middle
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.middle(self.first(x)))


class Words(nn.Module):
    """The mean of a text's vectors, over its padding too or not."""

    def __init__(self, *, padding: bool) -> None:
        super().__init__()
        self.table, self.head, self.padding = nn.Embedding(9, 4), nn.Linear(4, 2), padding

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        vectors = self.table(text)
        if self.padding:
            return self.head(vectors.mean(1))  # type: ignore[no-any-return]
        inside = torch.arange(text.shape[1]) < text_length[:, None]
        mean = (vectors * inside[..., None]).sum(1) / text_length[:, None]
        return self.head(mean)  # type: ignore[no-any-return]


def numbers() -> FederatedData:
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(24, 3)).astype("float32"), "label": draw.integers(0, 2, 24)}
    return FederatedData.from_columns(np.repeat([0, 1, 2], 8), columns, ["train"] * 24)


def texts() -> FederatedData:
    draw = np.random.default_rng(0)
    text = Ragged.from_rows([draw.integers(1, 9, size=length) for length in (2, 7, 3, 5, 1, 6, 4, 8)])
    columns = {"text": text, "label": draw.integers(0, 2, 8)}
    return FederatedData.from_columns([0] * 8, columns, ["train"] * 8)


def found(model: nn.Module, data: FederatedData) -> bool:
    net = Net(model)
    return mixes(net, net.initial(), data)


@pytest.mark.parametrize(
    "middle",
    [
        lambda h: h - h.mean(0),
        lambda h: h / (1 + h.norm()),
        lambda h: torch.softmax(h, 0),
        nn.BatchNorm1d(5, track_running_stats=False),  # refuses one example alone
    ],
    ids=["mean", "norm", "softmax", "batch statistics"],
)
def test_a_model_that_mixes_examples_is_found(middle: Callable[[Tensor], Tensor]) -> None:
    assert found(Small(middle), numbers())


@pytest.mark.parametrize(
    "middle",
    [torch.relu, nn.BatchNorm1d(5), nn.Dropout(0.5), nn.LayerNorm(5), lambda h: h + torch.rand_like(h)],
    ids=["relu", "running statistics", "dropout", "layer norm", "draws"],
)
def test_a_model_that_computes_each_example_alone_is_not(middle: Callable[[Tensor], Tensor]) -> None:
    model = Small(middle)
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert not found(model, numbers())
    assert model.training
    assert model.calls == 0  # what it counts is put back
    assert torch.equal(draws, torch.get_rng_state())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


class Beside(Small):
    """Its output has a number beside the logits, e.g. a penalty."""

    def __init__(self, middle: Callable[[Tensor], Tensor], *, first: bool) -> None:
        super().__init__(middle)
        self.first_of_two = first

    def forward(self, x: Tensor) -> Any:
        logits, penalty = super().forward(x), self.last.weight.square().mean()
        if self.first_of_two:
            return {"penalty": penalty, "logits": logits}
        return {"logits": logits, "penalty": penalty}


@pytest.mark.parametrize("first", [True, False])
def test_a_number_beside_the_logits_says_nothing(first: bool) -> None:
    assert found(Beside(lambda h: h - h.mean(0), first=first), numbers())
    assert not found(Beside(torch.relu, first=first), numbers())


class Scaled(Small):
    """Its outputs are as large as wished."""

    def __init__(self, middle: Callable[[Tensor], Tensor], scale: float) -> None:
        super().__init__(middle)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_rounding_is_relative_to_outputs(scale: float) -> None:
    assert found(Scaled(lambda h: h - h.mean(0), scale), numbers())
    assert not found(Scaled(lambda h: h * (1 + 1e-5 * len(h)), scale), numbers())


def test_what_a_model_writes_into_its_parameters_is_no_mixing_and_stays_here() -> None:
    model = Small(lambda h: h)
    model.middle = lambda h: h * model.last.bias.mul_(0.5).sum()
    net = Net(model)
    params = net.initial()
    before = clone(params)
    assert not mixes(net, params, numbers())
    assert same_bits(params, before)


def test_a_compiled_model_is_not_compiled_for_it() -> None:
    compiled: list[Any] = []

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    layer = torch.compile(nn.Linear(5, 5), backend=note)
    assert not found(Small(layer), numbers())
    assert compiled == []
    with torch.no_grad():
        layer(torch.zeros(2, 5))
    assert len(compiled) == 1


def test_the_first_client_with_enough_examples_is_asked() -> None:
    few = 2 * [0] + 4 * [1]
    columns = {"x": numbers().columns["x"][:6], "label": [0] * 6}
    data = FederatedData.from_columns(few, columns, ["train"] * 6)
    assert found(Small(lambda h: h - h.mean(0)), data)


@pytest.mark.parametrize("padding", [True, False])
def test_padding_that_counts_is_found(padding: bool) -> None:
    assert found(Words(padding=padding), texts()) is padding


def test_a_model_that_cannot_run_mixes_nothing() -> None:
    assert not found(Small(lambda h: h.reshape(1, -1)), numbers())
    assert not found(Words(padding=True), numbers())
    few = FederatedData.from_columns(
        [0, 0], {"x": np.zeros((2, 3), "float32"), "label": [0, 1]}, ["train"] * 2
    )
    assert not found(Small(lambda h: h - h.mean(0)), few)


def test_a_run_warns_and_goes_on() -> None:
    with pytest.warns(UserWarning, match="predicts otherwise .* when others are in its batch"):
        simulate(Small(lambda h: h - h.mean(0)), methods.fedavg(), numbers(), rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(Small(torch.relu), methods.fedavg(), numbers(), rounds=1)


def test_a_phase_that_trains_nothing_is_named() -> None:
    with pytest.warns(UserWarning, match="^A phase of 'fedrep' trains 'federated' .* leaves none"):
        simulate(Small(torch.relu), methods.fedrep("*"), numbers(), rounds=1)
