"""Parts that are to be trained and cannot move are named; those that only start late are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Split, check_split, methods
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.split import immovable
from tests.split.test_check import CROSS_ENTROPY, batches
from tests.tiny import Logits


class Head(nn.Module):
    """A body, and a private head of two layers."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), activation(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class LoRA(nn.Module):
    """x (W + A B): private factors of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Norm(nn.Module):
    """A private batch normalisation before a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.body(x))))


def zeros(model: nn.Module, private: str) -> Params:
    split, params = Split(private), Net(model).initial()
    return {n: torch.zeros_like(v) if split.is_private(n) else v for n, v in params.items()}


def found(
    model: nn.Module, private: str, start: Params | None = None, data: list[Batch] | None = None
) -> Any:
    net, halves = Net(model), Split(private).halves(model)
    phases = [(CROSS_ENTROPY, halves.trainable)]
    return immovable(net, halves, start or net.initial(), data or batches(), phases)


def test_a_head_of_two_layers_that_starts_at_zero_moves_nothing_but_its_last_bias() -> None:
    model = Head()
    assert found(model, "head.*", zeros(model, "head.*")) == (
        "body.weight",
        "body.bias",
        "head.0.weight",
        "head.0.bias",
        "head.2.weight",
    )
    assert found(model, "head.*") == ()
    model = Head(nn.Tanh)
    assert "head.0.weight" in found(model, "head.*", zeros(model, "head.*"))


def test_factors_of_low_rank() -> None:
    model = LoRA()
    assert found(model, "[ab]") == ()  # B starts at 0: B moves first, then A
    assert found(model, "[ab]", zeros(model, "[ab]")) == ("a", "b")


def test_a_batch_norm_of_zeros() -> None:
    model = Norm()
    assert found(model, "norm.*") == ()
    stays = found(model, "norm.*", zeros(model, "norm.*"))
    assert set(stays) == {"body.weight", "body.bias", "norm.weight", "norm.bias", "out.weight"}


def test_a_vector_of_zeros_moves() -> None:
    assert found(Logits(), "user", zeros(Logits(), "user")) == ()


def test_what_no_loss_reaches_stays() -> None:
    model = Logits()
    model.spare = nn.Parameter(torch.ones(2))
    assert found(model, "user") == ("spare",)
    assert found(model, "user", {n: v for n, v in Net(model).initial().items() if n != "spare"}) == ()


def test_phases_follow_each_other_and_rounds_too() -> None:
    """Ditto's copy starts as the model, so that the pull between them has no gradient until one of them has moved."""
    model, split = Logits(), Split("user")
    net, halves = Net(model), split.halves(model)
    data = batches()

    def pull(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        return ((params["linear.bias"] - received["linear.bias"]) ** 2).sum()

    alone = [(pull, ("linear.bias",))]
    assert immovable(net, halves, net.initial(), data, alone) == ("linear.bias",)
    after = [(CROSS_ENTROPY, ("user",)), (CROSS_ENTROPY, ("linear.bias",)), (pull, ("linear.bias",))]
    assert immovable(net, halves, net.initial(), data, after) == ()


def test_the_model_is_left_as_it_was() -> None:
    model = Norm().eval()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    start = Net(model).initial()
    assert found(model, "norm.*", start) == ()
    assert not model.training
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(torch.equal(before[n], v) for n, v in start.items())
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_checker_warns() -> None:
    model = Head()
    report = check_split(model, Split("head.*"), batches(), loss=CROSS_ENTROPY, start=zeros(model, "head.*"))
    assert report.ok
    assert report.immovable[0] == "body.weight"
    (warning,) = report.warnings
    assert warning == (
        "To be trained, but unable to move: body.weight, body.bias, head.0.weight, head.0.bias, head.2.weight. Their "
        "gradient is exactly zero at the start and after some steps. Let private values start elsewhere "
        "(private_init='model' takes the module's own), let the loss reach them, or freeze them."
    )
    assert check_split(model, Split("head.*"), batches(), loss=CROSS_ENTROPY).warnings == ()
    frozen = Split("head.*", frozen="body.*")
    report = check_split(model, frozen, batches(), loss=CROSS_ENTROPY, start=zeros(model, "head.*"))
    assert report.immovable == ("head.0.weight", "head.0.bias", "head.2.weight")
    head = [f"head.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")]
    report = check_split(model, Split("head.*"), batches(), loss=CROSS_ENTROPY, trains=head)
    assert report.immovable == ()
    assert (
        check_split(
            model, Split("head.*"), batches(), loss=CROSS_ENTROPY, start=zeros(model, "head.*"), trains=()
        ).immovable
        == ()
    )


@pytest.mark.parametrize("private", [(), "user"])
def test_it_is_looked_for_where_nothing_is_private_or_one_user_is_at_hand(private: Any) -> None:
    model = Logits()
    model.spare = nn.Parameter(torch.ones(2))
    report = check_split(model, Split(private), batches(1), loss=methods.terms.cross_entropy())
    assert (report.probed, report.immovable) == ((), ("spare",))


def test_every_user_begins_with_a_module_that_remembers_nobody() -> None:
    """Only the second user's examples move w, and only before the module was called."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.called = nn.Parameter(torch.ones(())), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, self.called = not self.called, True
            return x * self.w * first

    batches = [{"x": torch.zeros(2)}, {"x": torch.ones(2)}]
    report = check_split(
        Once(), Split(), batches, loss=lambda net, params, batch, _: net(params, batch).sum()
    )
    assert report.immovable == ()
