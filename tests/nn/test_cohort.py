"""The layers as the engine for cohorts uses them: gradients taken outside ``vmap``, so no custom operation is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fedkeep.kernels.native import status
from fedkeep.nn import GRU, LSTM, ConvPool, Linear, convolution, linear_layer, native_recurrent
from tests.nn.recurrent import relative

pytestmark = pytest.mark.skipif(not status().native, reason=str(status()))

CLIENTS = 4
Layer = Callable[[], nn.Module]
LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "lstm": (lambda: LSTM(3, 5, True), (2, 6, 3)),
    "gru": (lambda: GRU(3, 5), (2, 6, 3)),
    "linear": (lambda: Linear(7, 6, relu=True), (3, 7)),
    "convolution": (lambda: ConvPool(2, 3, 3, 1), (2, 2, 6, 8)),
    "flat": (lambda: ConvPool(2, 3, 3, 1, flat=True), (2, 2, 6, 8)),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear layer takes the kernel where it would not pay; the custom operations are out of reach."""
    monkeypatch.setattr(linear_layer, "WEIGHTS", 1)
    for passes in (native_recurrent.PASSES, linear_layer.PASSES, convolution.PASSES):
        for name in ("custom", "custom_backward"):
            monkeypatch.setattr(passes, name, None)


def scalar(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return sum(
        ((t * t.detach().sin()).sum() for t in (found if isinstance(found, tuple) else (found,))),
        torch.zeros(()),
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shared", ["nothing", "inputs", "weights"])
def test_gradients_outside_vmap(name: str, shared: str) -> None:
    """Each client's gradients are its own; of what all share they are the clients' sum."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layers = [make().double() for _ in range(CLIENTS)]
    same = shared == "weights"
    stacked, _ = stack_module_state(layers)  # type: ignore[arg-type]
    parameters = {n: (v[0] if same else v).detach().requires_grad_() for n, v in stacked.items()}
    x = torch.randn(*(() if shared == "inputs" else (CLIENTS,)), *shape, dtype=torch.float64)
    x.requires_grad_()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return scalar(functional_call(layers[0], parameters, (x,)))

    dims = (None if same else 0, None if shared == "inputs" else 0)
    losses = vmap(loss, in_dims=dims)(parameters, x)
    found = torch.autograd.grad(losses.sum(), [x, *parameters.values()])
    assert losses.shape == (CLIENTS,)

    one_by_one = []
    for client in range(CLIENTS):
        own = {n: v if same else v[client] for n, v in parameters.items()}
        one_by_one.append(loss(own, x if shared == "inputs" else x[client]))
    wanted = torch.autograd.grad(sum(one_by_one), [x, *parameters.values()])
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("name", LAYERS)
def test_nested(name: str) -> None:
    """Two levels of vmap are one cohort."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    parameters = {
        n: torch.randn(2, *v.shape, dtype=v.dtype).requires_grad_() for n, v in layer.named_parameters()
    }
    x = torch.randn(2, 3, *shape, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return scalar(functional_call(layer, parameters, (x,)))

    losses = vmap(vmap(loss, in_dims=(None, 0)))(parameters, x)
    found = torch.autograd.grad(losses.sum(), list(parameters.values()))
    wanted = torch.autograd.grad(
        sum(loss({n: v[i] for n, v in parameters.items()}, x[i, j]) for i in range(2) for j in range(3)),
        list(parameters.values()),
    )
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-13
