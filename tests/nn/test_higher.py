"""Second derivatives of the native layers: none is dropped, wherever the gradient is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.func import functional_call, grad, vmap

from fedkeep.kernels.native import status
from fedkeep.nn import GRU, LSTM, ConvPool, Linear, linear_layer

CLIENTS = 3
LENGTHS = torch.tensor([3, 2])
IDS = torch.tensor([[0, 2, 2], [1, 0, 0]])
Layer = tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Tensor]]
LAYERS: dict[str, Layer] = {
    "lstm": (
        lambda: LSTM(3, 2, True),
        (2, 4, 3),
        lambda m, x: torch.cat([t.flatten() for t in m(x, LENGTHS)]),
    ),
    "gru": (lambda: GRU(2, 2, True), (2, 3, 2), lambda m, x: torch.cat([t.flatten() for t in m(x, LENGTHS)])),
    "outputs": (lambda: GRU(2, 2), (2, 3, 2), lambda m, x: m(x, LENGTHS)[0]),
    "last": (lambda: LSTM(2, 2), (3, 2), lambda m, x: m.pooled_ids(IDS, x, LENGTHS)),  # type: ignore[operator]
    "mean": (lambda: GRU(2, 2), (2, 3, 2), lambda m, x: m.pooled(x, LENGTHS, "mean")),  # type: ignore[operator]
    "max": (lambda: LSTM(2, 2, True), (2, 3, 2), lambda m, x: m.pooled(x, LENGTHS, "max")),  # type: ignore[operator]
    "linear": (lambda: Linear(4, 3), (2, 4), lambda m, x: m(x)),
    "relu": (lambda: Linear(4, 3, relu=True), (2, 4), lambda m, x: m(x)),
    "convolution": (lambda: ConvPool(2, 2, 3, 1), (1, 2, 4, 5), lambda m, x: m(x)),
    "flat": (lambda: ConvPool(1, 2, 3, flat=True), (2, 1, 6, 6), lambda m, x: m(x)),
}
SLOW = {"gru", "last", "mean", "max"}
"""Whose numbers of second derivatives take seconds; a gradient through a step of them is taken in the fast suite."""


@pytest.fixture(params=["native", "pure"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pure":
        monkeypatch.setattr("fedkeep.kernels.native.available", lambda: False)
    elif not status().native:
        pytest.skip(str(status()))
    monkeypatch.setattr(linear_layer, "WEIGHTS", 1)  # the kernel also where it would not pay
    return str(request.param)


def drawn(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A layer as a function of its input and parameters, and these."""
    torch.manual_seed(0)
    make, shape, use = LAYERS[name]
    layer = make().double()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return use(self.layer, x)

    whole = Whole()
    names = [n for n, _ in whole.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(whole, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(shape, dtype=torch.float64)
    return run, [t.detach().requires_grad_() for t in (x, *whole.parameters())]


def after_a_step(run: Callable[..., Tensor], inputs: list[Tensor], inner: str) -> Tensor:
    """L(w − 0.1 ∇L(w)) with L the sum of squares: what Per-FedAvg minimises."""

    def loss(*inputs: Tensor) -> Tensor:
        return run(*inputs).square().sum()

    if inner == "func":
        slopes = grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
    else:
        slopes = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    return loss(*(t - 0.1 * s for t, s in zip(inputs, slopes, strict=True)))


def numerically(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradient of ``after_a_step`` by central differences."""
    found = []
    for place, tensor in enumerate(inputs):
        slopes = torch.zeros_like(tensor)
        for k in range(tensor.numel()):
            ends = []
            for way in (1e-5, -1e-5):
                moved = [t.detach().clone() for t in inputs]
                moved[place].view(-1)[k] += way
                ends.append(after_a_step(run, [t.requires_grad_() for t in moved], "autograd").item())
            slopes.view(-1)[k] = (ends[0] - ends[1]) / 2e-5
        found.append(slopes)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LAYERS]
)
def test_second_derivatives(name: str) -> None:
    run, inputs = drawn(name)
    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_gradient_through_a_gradient_step(name: str) -> None:
    """The case in which a derivative that is dropped raises no error: w also has a way of its own to the loss."""
    run, inputs = drawn(name)
    wanted = numerically(run, inputs)
    for inner in ("autograd", "func"):
        found = torch.autograd.grad(after_a_step(run, inputs, inner), inputs)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() < 1e-7 * max(1.0, float(b.abs().max())), inner


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shared", [False, True])
def test_of_a_cohort(name: str, shared: bool) -> None:
    """Each client's, with vmap around the inner gradient and with the outer one outside; x shared or their own."""
    run, inputs = drawn(name)
    x, *own = (t.detach() for t in inputs)
    several = [torch.stack([t * (1 + 0.1 * k) for k in range(CLIENTS)]) for t in own]
    x = x if shared else torch.stack([x * (1 - 0.1 * k) for k in range(CLIENTS)])
    dims = (None if shared else 0, *[0] * len(own))
    leaves = [t.clone().requires_grad_() for t in (x, *several)]
    losses = vmap(lambda *mine: after_a_step(run, list(mine), "func"), in_dims=dims)(*leaves)
    found = torch.autograd.grad(losses.sum(), leaves)
    one_by_one = [
        after_a_step(run, [leaves[0] if shared else leaves[0][k], *(t[k] for t in leaves[1:])], "func")
        for k in range(CLIENTS)
    ]
    wanted = torch.autograd.grad(torch.stack(one_by_one).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-12 * max(1.0, float(b.abs().max()))


def test_bytes_have_no_gradient() -> None:
    torch.manual_seed(0)
    layer = ConvPool(1, 2, 3, 1).double()
    x = torch.randint(0, 256, (2, 1, 4, 4), dtype=torch.uint8)

    def run(*own: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(("weight", "bias"), own, strict=True)), (x,))

    assert gradgradcheck(run, [p.detach().requires_grad_() for p in layer.parameters()])
