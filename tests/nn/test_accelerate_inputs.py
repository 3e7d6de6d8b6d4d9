"""What stands in front of a swapped LSTM or GRU stays in the graph, and is read when the layer is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep.nn.accelerate import accelerate
from tests.nn.recurrent import needs_native

pytestmark = needs_native
IDS = torch.randint(0, 20, (6, 7), generator=torch.Generator().manual_seed(0))
"""More than there are rows: the kernel could multiply each row of the table once."""


class Reader(nn.Module):
    """Looks ids up and reads them; ``change`` is what happens in between or behind."""

    def __init__(self, change: str = "", kind: type[nn.RNNBase] = nn.LSTM, **more: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 3, **more)
        self.layer = kind(3, 5, batch_first=change != "time first", bidirectional=True)  # type: ignore[arg-type, call-arg]
        self.change = change
        self.kept: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Return all outputs and last states in one axis."""
        x = self.embedding(ids)
        self.kept = [x]
        if self.change == "in place":
            with torch.no_grad():
                x.mul_(2)
        if self.change == "hook" and x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)
        if self.change == "table moves":
            with torch.no_grad():
                self.embedding.weight.add_(1)
        found, last = self.layer(x)
        parts = [found, *(last if isinstance(last, tuple) else (last,))]
        if self.change == "table moves behind":
            with torch.no_grad():
                self.embedding.weight.add_(1)
        if self.change == "late hook" and x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)
        if self.change == "twice":
            parts += [self.layer(x * x)[0], x]
        return torch.cat([part.flatten() for part in parts])


def weighed(out: Tensor) -> Tensor:
    return (out * torch.arange(out.numel()).cos()).sum()


CHANGES = ["", "twice", "time first", "in place", "hook", "late hook", "table moves", "table moves behind"]
KINDS = [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("more", KINDS, ids=str)
@pytest.mark.filterwarnings("ignore:.*sparse")
def test_gradients_of_a_table_and_of_what_was_looked_up(
    more: dict[str, Any], change: str, kind: type[nn.RNNBase]
) -> None:
    torch.manual_seed(0)
    model = Reader(change, kind, **more).double()
    found = []
    for module in (accelerate(model), model):
        out = module(IDS)
        found.append([out, *torch.autograd.grad(weighed(out), [*module.kept, *module.parameters()])])  # type: ignore[list-item, misc]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_was_looked_up_can_be_asked_for_its_gradient_behind_the_call(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, found = Reader(kind=kind).double(), []
    for module in (accelerate(model), model):
        out = module(IDS)
        (x,) = module.kept  # type: ignore[misc]
        x.retain_grad()  # type: ignore[operator]
        weighed(out).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_frozen_table_is_read() -> None:
    model = Reader().double()
    model.embedding.requires_grad_(False)
    found = []
    for module in (accelerate(model), model):
        slopes = torch.autograd.grad(weighed(module(IDS)), list(module.layer.parameters()))  # type: ignore[union-attr]
        with torch.no_grad():
            found.append([module(IDS), *slopes])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_step_against_what_was_looked_up_can_be_differentiated_again(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = Reader(kind=kind).double()
    found = []
    for module in (accelerate(model), model):
        out = module(IDS)
        (slope,) = torch.autograd.grad(weighed(out), module.kept, create_graph=True)  # type: ignore[arg-type]
        found.append([slope, *torch.autograd.grad((slope**2).sum(), list(module.parameters()))])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_clients_side_by_side_each_get_the_gradient_of_what_they_looked_up(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    models = [Reader(kind=kind).double() for _ in range(3)]
    fast = accelerate(models[0])
    names = [n for n, _ in fast.named_parameters()]
    params = {n: torch.stack([m.get_parameter(n).detach() for m in models]) for n in names}

    def loss(params: dict[str, Tensor]) -> Tensor:
        return weighed(torch.func.functional_call(fast, params, (IDS,)))

    together = torch.func.vmap(torch.func.grad(loss))(params)
    for k, model in enumerate(models):
        alone = torch.autograd.grad(weighed(model(IDS)), list(model.parameters()))
        for name, wanted in zip(names, alone, strict=True):
            torch.testing.assert_close(together[name][k], wanted, rtol=1e-10, atol=1e-12)
