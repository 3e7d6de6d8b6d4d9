"""Convolution, ReLU and max-pool as one layer against the three of torch, in value and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.kernels import native
from fedkeep.kernels.native import status
from fedkeep.nn import ConvPool, convolution
from tests.nn.recurrent import relative
from tests.refusals import raises

needs_native = pytest.mark.skipif(not status().native, reason=str(status()))


@pytest.fixture(params=["native", "pure"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pure":
        monkeypatch.setattr(convolution, "usable", lambda *_: False)
    elif not status().native:
        pytest.skip(str(status()))
    return str(request.param)


def reference(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool = False) -> Tensor:
    if x.dtype == torch.uint8:
        x = (x.to(weight.dtype) / 255 - 0.5) / 0.5
    y = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=padding)), 2)
    return y.flatten(1) if flat else y


def exact(layer: ConvPool) -> tuple[Tensor, Tensor]:
    return (
        layer.weight.detach().double().requires_grad_(),
        layer.bias.detach().double().requires_grad_(),  # type: ignore[union-attr]
    )


def weights_of(y: Tensor) -> Tensor:
    return torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().reshape(y.shape)


SHAPES = [  # B, C, O, kernel, padding, height, width
    (10, 3, 32, 5, 2, 32, 32),
    (3, 32, 64, 5, 2, 16, 16),
    (10, 3, 6, 5, 0, 32, 32),
    (4, 6, 16, 5, 0, 14, 14),
    (1, 1, 1, 1, 0, 2, 2),
    (3, 20, 33, 3, 1, 9, 13),
    (2, 5, 70, 7, 3, 8, 6),
    (17, 17, 5, 5, 4, 5, 7),
    (0, 3, 4, 3, 0, 8, 8),
    (2, 40, 9, 2, 0, 5, 6),
    (2, 1, 3, 9, 4, 10, 10),
    (2, 3, 3, 3, 6, 4, 4),
    (130, 2, 3, 3, 0, 6, 6),
]
LAYOUTS = {
    "channels first": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "columns first": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "a part": lambda x: F.pad(x, (1, 2, 3, 4))[:, :, 3:-4, 1:-2],
    "reversed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("whole", [False, True], ids=["random", "whole numbers"])
def test_equals_torch(path: str, shape: tuple[int, ...], dtype: torch.dtype, whole: bool) -> None:
    """Whole numbers, some divided by 4, have exact sums in any order, and many equal values in a pool.

    Of random numbers in float32 the greatest of four may be another one than in float64, and with it the gradients.
    """
    images, channels, outputs, kernel, padding, height, width = shape
    bound = 0.0 if whole else 1e-13 if dtype == torch.float64 else 5e-6
    torch.manual_seed(0)
    for number, lay in enumerate(LAYOUTS.values()):
        flat, input_grad = number % 2 == 0, number != 2
        layer = ConvPool(channels, outputs, kernel, padding, flat=flat).to(dtype)
        drawn = torch.randn(images, channels, height, width, dtype=dtype)
        if whole:
            drawn = (4 * drawn).round() / 4
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randint(-4, 5, p.shape) / 4)
        x = lay(drawn).requires_grad_(input_grad)
        wanted_x, parameters = drawn.double().requires_grad_(), exact(layer)
        y, wanted = layer(x), reference(wanted_x, *parameters, padding, flat)
        assert relative(y, wanted) <= bound
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        if not whole and dtype == torch.float32:
            continue
        given = torch.randint(-8, 9, y.shape) if whole else weights_of(wanted)
        grads = torch.autograd.grad(y, [layer.weight, layer.bias, x][: 2 + input_grad], given.to(dtype))
        expected = torch.autograd.grad(wanted, [*parameters, wanted_x], given.double())
        for a, b in zip(grads, expected, strict=False):
            assert relative(a, b) <= bound
        assert path == "pure" or all(
            g.is_contiguous() for g in grads[:2]
        )  # as the fused optimiser wants them


def test_by_hand(path: str) -> None:
    """One channel, kernel 1, weight 2, bias −1: y = max(2x − 1, 0); the gradient goes to the greatest of each four."""
    layer = ConvPool(1, 1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(-1.0)  # type: ignore[union-attr]
    x = torch.tensor([[1.0, 3.0, 0.0, 0.2], [2.0, -4.0, 0.5, 0.1]]).view(1, 1, 2, 4).requires_grad_()
    y = layer(x)
    assert y.tolist() == [[[[5.0, 0.0]]]]
    grads = torch.autograd.grad(y.sum() * 3, [x, layer.weight, layer.bias])
    assert grads[0].tolist() == [
        [[[0.0, 6.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]]
    ]  # 2 · 3; 2 · 0.5 − 1 is not above 0
    assert float(grads[1]) == 9.0  # x · 3
    assert float(grads[2]) == 3.0


def test_of_equal_values_the_first_has_the_gradient_and_none_at_zero(path: str) -> None:
    layer = ConvPool(1, 1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()  # type: ignore[union-attr]
    for four, at in (([1.0, 2.0, 2.0, 2.0], 1), ([3.0, 1.0, 3.0, 0.0], 0), ([0.0, 0.0, -1.0, 0.0], None)):
        x = torch.tensor(four).view(1, 1, 2, 2).requires_grad_()
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        (torchs,) = torch.autograd.grad(F.max_pool2d(F.relu(x), 2).sum(), x)
        assert torch.equal(found, torchs)
        assert found.flatten().nonzero().flatten().tolist() == ([] if at is None else [at])


def test_nan_passes_as_in_torch(path: str) -> None:
    torch.manual_seed(0)
    layer = ConvPool(1, 2, 3, 1)
    x = torch.randn(2, 1, 8, 8)
    x[0, 0, 2, 3], x[1, 0, 0, 0] = torch.nan, torch.inf
    wanted = reference(x, layer.weight, layer.bias, 1)  # type: ignore[arg-type]
    assert torch.equal(layer(x).isnan(), wanted.isnan())
    assert torch.equal(layer(x).isinf(), wanted.isinf())


def test_bytes_are_scaled(path: str) -> None:
    torch.manual_seed(0)
    layer = ConvPool(3, 4, 3, 1)
    image = torch.randint(0, 256, (5, 3, 8, 6), dtype=torch.uint8)
    image[0, 0, 0, :2] = torch.tensor([0, 255])
    y = layer(image)
    assert torch.equal(y, layer(image.float() / 127.5 - 1))
    assert relative(y, reference(image, *exact(layer), 1)) < 5e-6
    grads = torch.autograd.grad(y.sum(), list(layer.parameters()))
    expected = torch.autograd.grad(layer(image.float() / 127.5 - 1).sum(), list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@needs_native
@pytest.mark.parametrize(("kernel", "padding"), [(3, 1), (5, 0), (2, 1)])
def test_gradcheck(kernel: int, padding: int) -> None:
    torch.manual_seed(0)
    layer = ConvPool(2, 3, kernel, padding).double()
    x = torch.randn(2, 2, 7, 6, dtype=torch.float64, requires_grad=True)
    weight, bias = layer.weight, layer.bias
    assert bias is not None
    for flat in (False, True):
        assert torch.autograd.gradcheck(
            lambda x, w, b, flat=flat: convolution.run(x, w, b, padding, flat), (x, weight, bias)
        )


def test_only_some_gradients(path: str) -> None:
    torch.manual_seed(0)
    layer = ConvPool(2, 3, 3)
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    all_three = torch.autograd.grad(layer(x).sum(), [x, layer.weight, layer.bias])
    layer.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], all_three[0])
    layer.bias.requires_grad_()  # type: ignore[union-attr]
    assert torch.equal(torch.autograd.grad(layer(x.detach()).sum(), layer.bias)[0], all_three[2])  # type: ignore[arg-type]


def test_gradients_of_any_strides(path: str) -> None:
    """An expanded gradient, as ``sum().backward()`` makes it, and a transposed one."""
    torch.manual_seed(0)
    for flat in (False, True):
        layer = ConvPool(2, 3, 3, 1, flat=flat)
        x = torch.randn(4, 2, 6, 8, requires_grad=True)
        y = layer(x)
        for given in (
            torch.ones(()).expand(y.shape),
            weights_of(y).transpose(0, -1).contiguous().transpose(0, -1),
        ):
            found = torch.autograd.grad(y, [x, layer.weight], given, retain_graph=True)
            wanted = torch.autograd.grad(y, [x, layer.weight], given.contiguous(), retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_vmap_over_clients(path: str, flat: bool, shared: bool) -> None:
    """Different weights for each client; images of each client's own, or the same for all."""
    torch.manual_seed(0)
    layers = [ConvPool(2, 3, 3, 1, flat=flat).double() for _ in range(3)]
    stacked, _ = stack_module_state(layers)  # type: ignore[arg-type]
    x = torch.randn(3, 4, 2, 6, 8, dtype=torch.float64)
    x = x[0] if shared else x

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y = functional_call(layers[0], parameters, (x,))
        return (y * weights_of(y)).sum()

    (found, found_x) = vmap(grad(loss, argnums=(0, 1)), in_dims=(0, None if shared else 0))(stacked, x)
    for client, layer in enumerate(layers):
        own = (x if shared else x[client]).clone().requires_grad_()
        y = layer(own)
        wanted = torch.autograd.grad((y * weights_of(y)).sum(), [layer.weight, layer.bias, own])
        for a, b in zip([found["weight"], found["bias"], found_x], wanted, strict=True):
            assert relative(a[client], b) < 1e-14


def test_vmap_in_vmap(path: str) -> None:
    torch.manual_seed(0)
    layer = ConvPool(1, 2, 3).double()
    x = torch.randn(2, 3, 4, 1, 6, 6, dtype=torch.float64)
    weights = torch.randn(2, 3, 2, 1, 3, 3, dtype=torch.float64)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, (x,))

    found = vmap(vmap(run))(x, weights)
    for i in range(2):
        for j in range(3):
            assert relative(found[i, j], run(x[i, j], weights[i, j])) < 1e-14


@needs_native
def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    layer, x = ConvPool(3, 20, 5, 2), torch.randn(20, 3, 12, 12, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            y = layer(x)
            found.append([y, *torch.autograd.grad(y.sin().sum(), [x, layer.weight, layer.bias])])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))


@needs_native
def test_traced_as_eager() -> None:
    """Inside torch.func the custom operations compute the same bits, and their shapes are known beforehand."""
    torch.manual_seed(0)
    layer, x = ConvPool(3, 4, 3, 1), torch.randn(5, 3, 8, 8)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(layer, parameters, (x,)).sin().sum()

    wanted = torch.autograd.grad(layer(x).sin().sum(), list(parameters.values()))
    found = grad(loss)(parameters)
    assert all(torch.equal(found[n], w) for n, w in zip(parameters, wanted, strict=True))
    tensors, how = [layer.weight, layer.bias, x.requires_grad_()], (1, True)
    args = (tensors, how, False)
    torch.library.opcheck(
        torch.ops.fedkeep.conv_pool.default, args, test_utils=("test_schema", "test_faketensor")
    )
    y, kept = torch.ops.fedkeep.conv_pool(*args)
    back = ([torch.randn_like(y)], kept, tensors, how, False, True)
    torch.library.opcheck(
        torch.ops.fedkeep.conv_pool_backward.default, back, test_utils=("test_schema", "test_faketensor")
    )


def test_parameters_are_those_of_torch() -> None:
    torch.manual_seed(3)
    ours = ConvPool(3, 4, 5, 2).state_dict()
    torch.manual_seed(3)
    theirs = nn.Conv2d(3, 4, 5, padding=2).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_other_types_run_in_torch() -> None:
    layer = ConvPool(2, 3, 3).to(torch.bfloat16)
    x = torch.randn(2, 2, 6, 6, dtype=torch.bfloat16)
    assert torch.equal(layer(x), F.max_pool2d(F.relu(F.conv2d(x, layer.weight, layer.bias)), 2))


def test_bad_input(path: str) -> None:
    layer = ConvPool(3, 4, 5, 1)
    for x, message in (
        (torch.zeros(2, 1, 8, 8), "ConvPool wants images of shape (B, 3, H, W); got (2, 1, 8, 8)."),
        (torch.zeros(3, 8, 8), "ConvPool wants images of shape (B, 3, H, W); got (3, 8, 8)."),
        (
            torch.zeros(2, 3, 8, 8).double(),
            "ConvPool wants images of torch.float32 or uint8; got torch.float64.",
        ),
        (
            torch.zeros(2, 3, 8, 3),
            "ConvPool with kernel 5 and padding 1 wants images of at least 4 pixels a side; got 8 × 3.",
        ),
    ):
        with raises(DataError, text=message):
            layer(x)
    assert layer(torch.zeros(2, 3, 4, 4)).shape == (2, 4, 1, 1)
    with raises(ConfigError, in_channels=3, out_channels=0, kernel_size=5):
        ConvPool(3, 0, 5)


@needs_native
def test_out_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_WORDS", native._WORDS)
    layer, x = ConvPool(1, 1, 1), torch.zeros(1, 1, 2, 2)
    plan = convolution.planned(x, layer.weight, 0, False, False)
    head = list(plan.head)
    head[6] = 1 << 55  # outputs: more than any machine has room for
    words = [1, 0, *head, 0, x.data_ptr(), 0, 4, 4, 2, 1, 0, 0, 0, 0, *[0] * 6, 0, *[0] * 12, 0, 0]
    with pytest.raises(MemoryError, match="^the convolution kernel is out of memory$"):
        native.call("convolution", False, words)
