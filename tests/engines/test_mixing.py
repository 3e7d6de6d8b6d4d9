"""Models whose predictions for an example depend on the examples beside it are told apart from all others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods
from fedkeep.core.net import Net
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines.mixing import mixes
from fedkeep.experiments.simulate import simulate


class Small(nn.Module):
    """A layer, what each test puts after it, and another layer."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.middle = middle
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.last(self.middle(self.first(x)))
        return found


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
    with pytest.warns(
        UserWarning, match="^The model predicts otherwise for an example when others are in its batch"
    ):
        simulate(Small(lambda h: h - h.mean(0)), methods.fedavg(), numbers(), rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(Small(torch.relu), methods.fedavg(), numbers(), rounds=1)


def test_a_phase_that_trains_nothing_is_named() -> None:
    with pytest.warns(
        UserWarning, match="^A phase of 'fedrep' trains 'federated' parameters, and the split leaves none"
    ):
        simulate(Small(torch.relu), methods.fedrep("*"), numbers(), rounds=1)
