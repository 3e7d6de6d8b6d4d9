"""The linear layer against torch's, in value and in every gradient, for a client and a cohort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from fedkeep.kernels.native import status
from fedkeep.nn import Linear, linear_layer
from tests.nn.recurrent import relative

needs_native = pytest.mark.skipif(not status().native, reason=str(status()))
SHAPES = [
    (10, 4096, 20),
    (10, 120, 84),
    (1, 1, 1),
    (3, 7, 5),
    (16, 1025, 33),
    (0, 5, 4),
    (7, 300, 3),
    (5, 257, 9),
]


@pytest.fixture(params=["native", "pure"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel also where it would not pay, or torch."""
    if request.param == "pure":
        monkeypatch.setattr(linear_layer, "usable", lambda *_: False)
    elif not status().native:
        pytest.skip(str(status()))
    monkeypatch.setattr(linear_layer, "WEIGHTS", 1)
    return str(request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 5e-6)])
def test_equals_torch(
    path: str, shape: tuple[int, int, int], relu: bool, dtype: torch.dtype, bound: float
) -> None:
    rows, inputs, outputs = shape
    torch.manual_seed(0)
    layer = Linear(inputs, outputs, relu=relu).to(dtype)
    weight, bias = (p.detach().double().requires_grad_() for p in layer.parameters())
    drawn = torch.randn(rows, inputs, dtype=dtype)
    for x in (drawn.clone(), drawn.t().contiguous().t(), F.pad(drawn, (2, 3))[:, 2:-3]):
        x.requires_grad_()
        exact = drawn.double().requires_grad_()
        wanted = F.linear(exact, weight, bias)
        wanted = F.relu(wanted) if relu else wanted
        y = layer(x)
        assert relative(y, wanted) < bound
        given = torch.arange(1, y.numel() + 1, dtype=torch.float64).cos().reshape(y.shape)
        grads = torch.autograd.grad(y, [layer.weight, layer.bias, x], given.to(dtype))
        for a, b in zip(grads, torch.autograd.grad(wanted, [weight, bias, exact], given), strict=True):
            assert relative(a, b) < bound
        assert all(g.is_contiguous() for g in grads[:2])
        with torch.no_grad():
            assert torch.equal(layer(x), y)


def test_by_hand(path: str) -> None:
    layer = Linear(2, 2, relu=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
        layer.bias.copy_(torch.tensor([0.5, 1.0]))
    x = torch.tensor([[1.0, 1.0]], requires_grad=True)
    y = layer(x)
    assert y.tolist() == [[3.5, 0.0]]  # 1 + 2 + 0.5, and 3 − 4 + 1 = 0, which has no gradient
    grads = torch.autograd.grad(y, [x, layer.weight, layer.bias], torch.tensor([[2.0, 5.0]]))
    assert [g.tolist() for g in grads] == [[[2.0, 4.0]], [[2.0, 2.0], [0.0, 0.0]], [2.0, 0.0]]


@needs_native
def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = Linear(6, 5, relu=True).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    for relu in (False, True):
        args = (x, layer.weight, layer.bias)
        assert torch.autograd.gradcheck(lambda x, w, b, r=relu: linear_layer.run(x, w, b, r), args)


@pytest.mark.parametrize("shared", [False, True])
def test_vmap_over_clients(path: str, shared: bool) -> None:
    torch.manual_seed(0)
    layers = [Linear(7, 6, relu=True).double() for _ in range(3)]
    stacked, _ = stack_module_state(layers)  # type: ignore[arg-type]
    x = torch.randn(3, 4, 7, dtype=torch.float64)
    x = x[0] if shared else x

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layers[0], parameters, (x,)).sin().sum()

    found, found_x = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None if shared else 0))(stacked, x)
    for client, layer in enumerate(layers):
        own = (x if shared else x[client]).clone().requires_grad_()
        wanted = torch.autograd.grad(layer(own).sin().sum(), [layer.weight, layer.bias, own])
        for a, b in zip([found["weight"], found["bias"], found_x], wanted, strict=True):
            assert relative(a[client], b) < 1e-14


@needs_native
def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    layer, x = Linear(1200, 70, relu=True), torch.randn(9, 1200, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y = layer(x)
            found.append([y, *torch.autograd.grad(y.sin().sum(), [x, layer.weight, layer.bias])])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_native
def test_where_the_kernel_pays() -> None:
    weight, bias = torch.zeros(512, 128), torch.zeros(512)
    few = torch.zeros(16, 128)
    assert linear_layer.usable(few, weight, bias)
    assert not linear_layer.usable(torch.zeros(17, 128), weight, bias)
    assert not linear_layer.usable(few, weight[:511], bias[:511])
    assert not linear_layer.usable(few.double(), weight, bias)
    assert not linear_layer.usable(few[:, :127], weight, bias)
    assert not linear_layer.usable(few[0], weight, bias)


@needs_native
@pytest.mark.parametrize("relu", [False, True])
def test_shapes_are_known_beforehand(relu: bool) -> None:
    layer, x = Linear(7, 6), torch.randn(3, 7)
    utils = ("test_schema", "test_faketensor")
    tensors = [layer.weight, layer.bias, x]
    args = (tensors, (relu,), False)
    torch.library.opcheck(torch.ops.fedkeep.linear.default, args, test_utils=utils)
    y, *rest = torch.ops.fedkeep.linear(*args)
    back = ([torch.randn_like(y)], (rest or [y])[0], tensors, (relu,), False, True)
    torch.library.opcheck(torch.ops.fedkeep.linear_backward.default, back, test_utils=utils)


def test_nan_stays(path: str) -> None:
    layer, x = Linear(3, 2, relu=True), torch.ones(2, 3)
    x[1, 1] = torch.nan
    assert layer(x).isnan().tolist() == [[False, False], [True, True]]


def test_parameters_are_those_of_torch_and_other_shapes_work() -> None:
    torch.manual_seed(3)
    ours = Linear(6, 4, relu=True)
    torch.manual_seed(3)
    theirs = nn.Linear(6, 4)
    assert all(torch.equal(v, theirs.state_dict()[n]) for n, v in ours.state_dict().items())
    x = torch.randn(2, 3, 6)
    assert torch.equal(ours(x), theirs(x).relu())
