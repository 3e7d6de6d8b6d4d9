"""The custom operations by themselves under vmap: as a client at a time, with what all clients share, and nested."""

from __future__ import annotations

import sys
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedkeep.kernels.native import status
from fedkeep.nn import ConvPool, Linear, convolution, linear_layer, native_recurrent
from fedkeep.nn.operation import Operation

pytestmark = pytest.mark.skipif(not status().native, reason=str(status()))

CLIENTS = 3
Case = tuple[Operation, tuple[int, ...], list[Any]]


def draw(*shape: int) -> Tensor:
    return torch.randn(CLIENTS, *shape, dtype=torch.float64)


def case(name: str) -> Case:
    """Return an operation, its settings, and its tensors with an axis of clients in front; lengths are shared."""
    torch.manual_seed(0)
    if name == "linear":
        return linear_layer.PASSES, (1,), [draw(4, 5), draw(4), draw(2, 5)]
    if name == "convolution":
        return convolution.PASSES, (1, 0), [draw(3, 2, 3, 3), draw(3), draw(2, 2, 6, 8)]
    weights = [draw(12, 3), draw(12, 4), draw(12), draw(12)] * 2
    pool = native_recurrent.MAX if name == "pooled" else native_recurrent.OUTPUT
    return native_recurrent.PASSES, (1, pool), [*weights, draw(2, 6, 3), None, torch.tensor([6, 2])]


def client(tensors: list[Any], k: int) -> list[Any]:
    return [t[k] if t is not None and t.is_floating_point() else t for t in tensors]


@pytest.mark.parametrize("name", ["recurrent", "pooled", "linear", "convolution"])
def test_vmap_is_a_client_at_a_time(name: str) -> None:
    layer, how, tensors = case(name)
    mapped = [t for t in tensors if t is not None and t.is_floating_point()]
    rest = tensors[len(mapped) :]

    def forward(*mine: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer.custom([*mine, *rest], how, False))

    found = torch.vmap(forward)(*mapped)
    results = found if layer.keeps_result(how) else found[:-1]
    grads = [torch.randn_like(r) for r in results]

    def backward(kept: Tensor, grads: list[Tensor], *mine: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer.custom_backward(grads, kept, [*mine, *rest], how, False, True))

    slopes = torch.vmap(backward)(found[-1], grads, *mapped)
    for k in range(CLIENTS):
        own = client(tensors, k)
        *_, kept = alone = layer.forward(own, how, False)
        assert all(torch.equal(a[k], b) for a, b in zip(results, alone, strict=False))
        wanted = layer.backward([g[k] for g in grads], kept, own, how, False, True)
        assert len(wanted) == len(mapped)
        assert all(torch.equal(a[k], b) for a, b in zip(slopes, wanted, strict=True))


@pytest.mark.parametrize("name", ["recurrent", "pooled", "linear", "convolution"])
def test_what_all_share_and_two_axes(name: str) -> None:
    """Inputs that clients share, inside a second vmap over two copies of everything."""
    layer, how, tensors = case(name)
    place = len(tensors) - layer.others - 1
    weights, x, rest = tensors[:place], tensors[place], tensors[place + 1 :]

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return layer.custom([*weights, x, *rest], how, False)[0]

    inner = torch.vmap(forward, (None, *[0] * place))
    found = torch.vmap(inner)(x[:2], *[torch.stack([w, 2 * w]) for w in weights])
    for copy in range(2):
        for k in range(CLIENTS):
            own = [(1 + copy) * w[k] for w in weights]
            assert torch.equal(found[copy, k], layer.forward([*own, x[copy], *rest], how, False)[0])


LAYERS = {
    "linear": (lambda: Linear(300, 300), (2, 300)),
    "convolution": (lambda: ConvPool(2, 3, 3), (2, 2, 8, 8)),
}


def without_values(name: str) -> None:
    make, shape = LAYERS[name]
    plain = make()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for layer in (make(), plain):
            out = layer(torch.randn(shape))
            assert out.shape == plain(torch.zeros(shape)).shape
            out.sum().backward()


def without_any_values() -> None:
    for name in LAYERS:
        without_values(name)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_tensors_without_values_are_pytorchs_own() -> None:
    """Shapes are told without memory: a kernel would read address 0, and end the process.

    In a process of its own: after such a backward pass torch lets no process that is forked take another.
    """
    child = get_context("fork" if sys.platform == "linux" else "spawn").Process(target=without_any_values)
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_what_is_traced_holds_pytorchs_operations() -> None:
    layer, x = nn.Sequential(Linear(300, 300, relu=True)), torch.randn(2, 300)
    traced = torch.jit.trace(layer, x)
    assert {"aten::linear", "aten::relu"} <= {node.kind() for node in traced.inlined_graph.nodes()}
    assert torch.allclose(traced(x), layer(x), atol=1e-6)
