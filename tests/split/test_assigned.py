"""What ``forward`` gives to buffers is looked at whether it is written in place or assigned, whichever dict a loss makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Split, check_split, declare
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.split.joint import Joint, fedavg_update, joint_from_loss, keep_trained
from tests.split.test_check import CROSS_ENTROPY, batches
from tests.split.test_probe import EQUATION_2, FILLED

HOW = pytest.mark.parametrize("how", ["in place", "assigned"])


class Filled(nn.Module):
    """Scales by buffers that it fills, ``level`` and ``own`` from a user's vector, ``mean`` from examples."""

    def __init__(self, how: str, declared: bool = True) -> None:
        super().__init__()
        self.how = how
        self.linear, self.user, self.layer = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), nn.Module()
        names = ("level", "mean", "own")
        for name in names:
            self.layer.register_buffer(name, torch.ones(3))
        declare(self.layer, updated_buffers=names if declared else ())

    def fill(self, name: str, value: Tensor) -> None:
        old = getattr(self.layer, name)
        if self.how == "in place":
            old.copy_(0.9 * old + 0.1 * value.detach())
        else:
            setattr(self.layer, name, 0.9 * old + 0.1 * value.detach())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.layer.level.clone() * self.layer.own.clone() + self.user
        if self.how == "assigned":  # the gradient needs the old one
            out = out * self.layer.level
        self.fill("level", self.user)
        self.fill("mean", x.mean(0))
        self.fill("own", self.user)
        return out


def of_another_dict(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
    """Gives the net a dict of its own, as many methods do, and the one that the server sent."""
    sent = net({**params, **received}, batch).mean()
    return CROSS_ENTROPY(net, {**params}, batch, received) + 0.1 * sent


@HOW
@pytest.mark.parametrize("loss", [CROSS_ENTROPY, of_another_dict])
@pytest.mark.parametrize("own", [False, True])
def test_a_buffer_that_forward_assigns_is_looked_at_too(how: str, loss: Any, own: bool) -> None:
    model = Filled(how)
    joint = Joint(joint_from_loss(Net(model), loss).loss, fedavg_update, keep_trained)
    given = {"joint": joint} if own else {"loss": loss}
    report = check_split(model, Split(["user", "layer.own"]), batches(), **given)
    assert [str(v) for v in report.violations] == [EQUATION_2.format("layer.level") + FILLED]
    assert check_split(model, Split(["user", "layer.[lo]*"]), batches(), **given).ok


@HOW
def test_a_frozen_buffer_that_forward_assigns_is_named(how: str) -> None:
    report = check_split(Filled(how, declared=False), Split("user"), batches(), loss=CROSS_ENTROPY)
    assert [(v.equation, v.parameter) for v in report.violations] == [
        (2, "layer.level"),
        (2, "layer.own"),
        (None, "layer.mean"),
    ]


@HOW
def test_what_forward_gives_buffers_stands_in_the_losses_dicts_afterwards(how: str) -> None:
    net = Net(Filled(how))
    shared = {n: v.detach() for n, v in net.initial().items()}
    private = {n: torch.stack([shared.pop(n)] * 2) for n in ("user", "layer.own")}
    private["user"][1] = 2
    step = joint_from_loss(net, of_another_dict)
    for _ in range(2):
        step.loss(shared, private, batches()[0], 1)
    # of four calls, all fill the user's own, and two what the server sent, which is another tensor
    torch.testing.assert_close(shared["layer.level"], torch.full((3,), 2 - 0.9**2))
    torch.testing.assert_close(private["layer.own"], torch.tensor([[1.0] * 3, [2 - 0.9**4] * 3]))


class Waking(nn.Module):
    """Scales a layer by a buffer that is zero until the first step is over."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear, self.user = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.register_buffer("gate", torch.zeros(()))
        declare(self, updated_buffers=("gate",))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.gate.clone() + self.user
        if self.how == "in place":
            self.gate.fill_(1)
        else:
            self.gate = torch.ones(())
        return out


@HOW
def test_what_a_buffer_wakes_can_move(how: str) -> None:
    report = check_split(Waking(how), Split("user"), batches(), loss=CROSS_ENTROPY)
    assert (report.violations, report.immovable) == ((), ())
