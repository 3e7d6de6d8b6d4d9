"""Models whose ``forward`` is not ``head(features(…))`` are told apart, where the method trains the two steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, methods, simulate
from fedkeep.core.net import Net
from fedkeep.engines.rehearsal import first_batches, first_values, losses, steps_differ
from tests.methods.parts import Parts
from tests.methods.table import DATA, ROWS

STEPS = {"feddbe", "gpfl", "fedcp", "fedmmd", "fedfusion", "pfl_da", "kteps", "kteps_star", "fedproto"}
STEPS |= {"fedpac", "fedrod", "moon"}
"""Methods whose losses call ``head``."""


class Sharper(Parts):
    """``forward`` knows of a temperature that ``head`` does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0.7


class Drawn(Parts):
    """``forward`` draws, in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(len(x), 3)


class Dropped(Parts):
    """The two steps are ``forward``, with dropout between them."""

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().features(x), 0.5, self.training)


class Paired(Parts):
    """``head`` and ``forward`` give something beside the logits."""

    def head(self, features: Tensor) -> Tensor:
        return super().head(features), features  # type: ignore[return-value]


class NoHead(Parts):
    head = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)) * 2


def found(model: nn.Module, method: Method) -> bool:
    module = method.extend(model) if method.extend else model
    net = Net(module)
    net.train()
    seed = torch.get_rng_state()
    answer = steps_differ(
        net, first_values(net, method, 0), losses(net, method, DATA), first_batches(DATA, net)[0]
    )
    assert net.module.training
    assert torch.equal(torch.get_rng_state(), seed)
    return answer


@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("name", ROWS)
def test_only_methods_that_train_the_steps_ask(name: str, kind: str) -> None:
    make, method = ROWS[name]
    if name in STEPS:
        assert found(getattr(Sharper(), kind)(), method)
    model: nn.Module = Sharper() if make is Parts and name not in STEPS else make()
    assert not found(getattr(model, kind)(), method)


@pytest.mark.parametrize("make", [Drawn, Dropped, Paired, NoHead])
def test_what_is_no_difference(make: Callable[[], nn.Module]) -> None:
    assert not found(make(), ROWS["fedmmd"][1])


def test_a_run_warns_of_it() -> None:
    expected = (
        "The model's forward gives other values than its head(features(…)), and 'fedrod' trains these: it would be "
        "judged by what it has not trained. Let forward be head(features(…)), or give the two steps other names."
    )
    for model, method, told in (
        (Sharper(), methods.fedrod(), [expected]),
        (Sharper(), methods.fedavg(), []),
        (Parts(), methods.fedrod(), []),
    ):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            simulate(model.double(), method, DATA, rounds=1, cohort=2, progress=False)
        assert [str(w.message) for w in heard] == told
