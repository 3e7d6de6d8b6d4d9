"""What a model asks of its parameters is answered as where it is trained alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedkeep import Method, Phase, methods, sgd, simulate
from fedkeep.engines import Sequential, Vectorised
from tests.engines.vectorised.cohorts import RAGGED, close, cohort, furl
from tests.tiny import Unsaid, job, run_by, same_bits


class Sized(Unsaid):
    """Logits divided by 1 + the sum of squares of what is trained."""

    def asked(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def forward(self, x: Tensor) -> Tensor:
        size = torch.stack([p.square().sum() for p in self.asked()]).sum()
        return super().forward(x) / (1 + size)


class Named(Sized):
    """The same where all is trained."""

    def asked(self) -> list[Tensor]:
        return list(self.parameters())


class Frozen(Sized):
    """A bias is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.bias.requires_grad_(False)


LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
HALVES = (LOCAL.but(trains="private"), LOCAL.but(trains="federated"))


@pytest.mark.parametrize("model", [Sized, Frozen])
@pytest.mark.parametrize(
    "method", [furl(), methods.furl("user").on_client(phases=HALVES)], ids=["all", "halves"]
)
def test_a_model_that_looks_for_what_is_trained(model: type[Sized], method: Method) -> None:
    ours, theirs = (cohort(job(model().double(), method, RAGGED), e) for e in (Vectorised(), Sequential()))
    close(ours, theirs)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "centralised"])
def test_to_look_for_what_is_trained_is_to_name_it(engine: str) -> None:
    method = methods.furl("user", local=LOCAL)
    found, named = (
        simulate(
            model().double(), method, RAGGED, rounds=2, cohort=4, **run_by(engine), evaluate_every=0
        ).server
        for model in (Sized, Named)
    )
    assert same_bits(found, named)
