"""Losses of a ranking's candidates: by hand, with some drawn, and with what does not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.net import Net
from fedkeep.data import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.methods.candidates import bpr, drawn, pointwise
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.models import MatrixFactorization


class Given(nn.Module):
    """An item's score is what stands in a list."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, item: Tensor) -> Tensor:
        return self.scores[item]


NET = Net(Given([0.0, 1.0, -2.0, 0.5]))
BATCH = {"item": torch.tensor([[0, 1, 2], [3, 2, 1]]), "label": torch.tensor([1, 0])}


def value(term: Term, **more: Tensor) -> float:
    return float(term(NET, dict(NET.module.named_parameters()), {**BATCH, **more}, {}).detach())


def soft(x: float) -> float:
    """Return −log σ(−x)."""
    return math.log1p(math.exp(x))


def test_each_candidate_is_asked_yes_or_no() -> None:
    first = (soft(0.0) + soft(-1.0) + soft(-2.0)) / 3  # right: the item 1, of score 1
    second = (soft(-0.5) + soft(-2.0) + soft(1.0)) / 3
    assert value(pointwise()) == pytest.approx((first + second) / 2)
    assert value(pointwise(), weight=torch.tensor([1.0, 0.0])) == pytest.approx(first)


def test_the_right_one_stands_above_each_other() -> None:
    first = (soft(0.0 - 1.0) + soft(-2.0 - 1.0)) / 2
    second = (soft(-2.0 - 0.5) + soft(1.0 - 0.5)) / 2
    assert value(bpr()) == pytest.approx((first + second) / 2)
    assert value(bpr(), weight=torch.tensor([0.0, 1.0])) == pytest.approx(second)


def test_drawn_anew_from_the_others_alone() -> None:
    torch.manual_seed(0)
    found = {round(value(drawn(bpr(), 1)), 5) for _ in range(60)}
    firsts, seconds = (soft(-1.0), soft(-3.0)), (soft(-2.5), soft(0.5))
    assert found == {round((a + b) / 2, 5) for a in firsts for b in seconds}
    with torch.no_grad():  # as validation losses are: all candidates
        assert value(drawn(bpr(), 1)) == pytest.approx(value(bpr()))


def test_a_sampled_softmax_is_the_softmax_over_the_right_one_and_those_drawn() -> None:
    batch = {"item": torch.tensor([[2, 1]]), "label": torch.tensor([1])}
    found = value(drawn(cross_entropy(), 3), **batch)  # there is one other: it is drawn three times
    assert found == pytest.approx(-math.log(math.exp(1.0) / (math.exp(1.0) + 3 * math.exp(-2.0))))


@pytest.mark.parametrize("term", [pointwise(), bpr(), drawn()], ids=["pointwise", "bpr", "drawn"])
def test_ratings_are_no_questions(term: Term) -> None:
    with pytest.raises(MethodError, match="leave_one_out"):
        value(term, item=torch.tensor([0, 1]))


def test_at_least_one_other() -> None:
    with pytest.raises(MethodError, match="against"):
        drawn(against=0)


def questions() -> FederatedData:
    """Return questions of six users who rated 5 of 40 items."""
    who = [f"user-{u}" for u in range(6) for _ in range(5)]
    item = torch.tensor([(7 * u + 3 * k) % 40 for u in range(6) for k in range(5)]).numpy()
    time = torch.arange(30).numpy()
    return leave_one_out(
        FederatedData.from_columns(who, {"item": item, "time": time}, meta={"items": 40}), against=12
    )


@pytest.mark.parametrize(
    "term", [drawn(pointwise()), drawn(bpr(), 1), drawn()], ids=["bce", "bpr", "softmax"]
)
def test_it_trains_and_draws_by_the_seed(term: Term) -> None:
    method = methods.furl("user*", private_init=("normal", 0.1), local=Phase(loss=term, batch_size=2))

    def trained() -> Tensor:
        torch.manual_seed(0)
        return simulate(MatrixFactorization(40, dim=4), method, questions(), rounds=2, cohort=6).server[
            "item.weight"
        ]

    assert torch.equal(trained(), trained())
    with pytest.raises(ConfigError, match="sequential"):
        simulate(MatrixFactorization(40, dim=4), method, questions(), rounds=1, engine="vectorised")
