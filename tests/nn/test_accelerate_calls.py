"""What a user may do around a swapped layer, torch allows and the kernel must not forbid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from fedkeep.nn import GRU, LSTM, ConvPool, Linear, linear_layer
from fedkeep.nn.accelerate import accelerate
from tests.nn.recurrent import needs_native

pytestmark = needs_native
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "relu": lambda y: y.relu_(),
    "dropout": lambda y: F.dropout(y, 0.5, True, inplace=True),
    "sum": lambda y: y.add_(1.0) ** 2,
}


def same(layer: nn.Module, call: Callable[[nn.Module], Tensor], grads: bool = True) -> None:
    """Call a layer and its swapped copy, and compare what they give, and all gradients."""
    found = []
    for module in (layer, accelerate(layer)):
        torch.manual_seed(1)
        out = call(module)
        found.append([out, *(torch.autograd.grad(out.sum(), list(module.parameters())) if grads else ())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def images() -> tuple[nn.Sequential, Tensor]:
    chain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return chain.double(), torch.randn(4, 3, 11, 12, dtype=torch.float64)


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_what_a_linear_layer_gives_may_be_changed_in_place(change: str) -> None:
    x = torch.randn(8, 512, dtype=torch.float64)
    same(nn.Linear(512, 512).double(), lambda module: CHANGES[change](module(x)))


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_so_may_what_it_gives_many_clients(change: str) -> None:
    x, layer = torch.randn(3, 8, 512, dtype=torch.float64), nn.Linear(512, 512).double()
    weights = torch.stack([layer.weight.detach() * k for k in (1.0, 2.0, 3.0)])

    def loss(weight: Tensor, x: Tensor, module: nn.Module) -> Tensor:
        values = {"weight": weight, "bias": layer.bias.detach()}
        return CHANGES[change](torch.func.functional_call(module, values, (x,))).sum()

    def slopes(module: nn.Module) -> Tensor:
        each = torch.func.grad(lambda weight, x: loss(weight, x, module))
        return torch.func.vmap(each, randomness="different")(weights, x)

    same(layer, slopes, grads=False)


def test_our_linear_layer_keeps_its_output_for_a_relu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layer, "WEIGHTS", 1)
    x = torch.randn(4, 3)
    Linear(3, 2)(x).relu_().sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as of torch's ReLU
        Linear(3, 2, relu=True)(x).mul_(2.0).sum().backward()


@pytest.mark.parametrize("state", [0, 1])
def test_last_states_may_be_changed_in_place(state: int) -> None:
    x = torch.randn(3, 5, 6, dtype=torch.float64)

    def call(module: nn.Module) -> Tensor:
        out, last = module(x)
        last[state].mul_(2.0)
        return out.sum() + (last[state] ** 2).sum()

    same(nn.LSTM(6, 7, batch_first=True).double(), call)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own first jvp
def test_forward_differentiation_is_torchs() -> None:
    chain, x = images()
    layer, rows = nn.Linear(512, 512).double(), torch.randn(8, 512, dtype=torch.float64)
    same(chain, lambda module: torch.func.jvp(module, (x,), (x.cos(),))[1], grads=False)
    same(layer, lambda module: torch.func.jvp(module, (rows,), (rows.cos(),))[1], grads=False)

    def dual(module: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            out = module(forward_ad.make_dual(rows, rows.cos()))
            return forward_ad.unpack_dual(out).tangent

    same(layer, dual, grads=False)
    own = ConvPool(3, 5, 3, flat=True).double()
    own.load_state_dict(chain[0].state_dict())
    slopes = [torch.func.jvp(module, (x,), (x.cos(),))[1] for module in (chain, own)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "own"), [(nn.LSTM, LSTM), (nn.GRU, GRU)])
def test_forward_differentiation_of_recurrent_layers_is_torchs(
    kind: type[nn.RNNBase], own: type[nn.RNNBase]
) -> None:
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    layer, mine = kind(6, 9, batch_first=True).double(), own(6, 9).double()
    mine.load_state_dict(layer.state_dict())

    def slope(module: nn.Module) -> Tensor:
        return torch.func.jvp(lambda given: module(given)[0], (x,), (x.cos(),))[1]

    same(layer, slope, grads=False)
    torch.testing.assert_close(slope(mine), slope(layer), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_rows_go_to_torch() -> None:
    x = torch.randn(8, 512, dtype=torch.float64)
    for given in (x.to_sparse(), x.to_sparse_csr()):
        same(nn.Linear(512, 512).double(), lambda module, given=given: module(given))
        own = Linear(512, 512).double()
        torch.testing.assert_close(own(given), own(x))


def test_a_number_to_be_negated_is() -> None:
    """Of a conjugate torch keeps the numbers as they were, with a note that the kernel did not read."""
    chain, x = images()
    turned = torch.complex(x, x + 1).conj().imag
    assert turned.is_neg()
    same(chain, lambda module: module(turned))
    each = [torch.func.vmap(accelerate(chain))(t[:, None]) for t in (turned, turned.resolve_neg())]
    assert torch.equal(*each)
    own = ConvPool(3, 5, 3).double()
    assert torch.equal(own(turned), own(turned.resolve_neg()))
