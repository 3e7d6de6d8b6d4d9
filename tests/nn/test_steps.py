"""The recurrence for many weights at once, against torch's layers and under torch.func."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from fedkeep.nn import steps
from fedkeep.nn.steps import recurrence
from tests.nn.recurrent import relative

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}


def draw(kind: str, n: int = 3, b: int = 4, length: int = 6, hidden: int = 5) -> list[Tensor]:
    """What the inputs add, the weights, and a GRU's bias."""
    torch.manual_seed(0)
    k = 4 if kind == "lstm" else 3
    shapes = [(n, b, length, k * hidden), (n, k * hidden, hidden), (n, k * hidden)][: k if k == 3 else 2]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def run(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None = None) -> Tensor:
    return recurrence(projected, w_hh, b_hh)


def torchs(kind: str, projected: Tensor, w_hh: Tensor, b_hh: Tensor | None = None) -> Tensor:
    """Torch's layer on (B, L, K*H): its input weight is the identity, so that inputs are what they add to the gates."""
    size, hidden = w_hh.shape
    layer = KINDS[kind](size, hidden, batch_first=True).double()
    zeros = torch.zeros(size, dtype=torch.float64)
    own = {"weight_ih_l0": torch.eye(size, dtype=torch.float64), "bias_ih_l0": zeros}
    own |= {"weight_hh_l0": w_hh, "bias_hh_l0": zeros if b_hh is None else b_hh}
    return torch.func.functional_call(layer, own, (projected,))[0]


def scalar(states: Tensor) -> Tensor:
    """A different weight for every number, so that no gradient is the same as another by chance."""
    weights = torch.arange(states.numel(), dtype=states.dtype).reshape(states.shape).sin()
    return (states.square() * weights + states * weights.cos()).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 6])
def test_equals_torchs_layers(kind: str, length: int) -> None:
    """N weights side by side are N layers, in states and in every gradient."""
    inputs = draw(kind, length=length)
    states = run(*inputs)
    wanted = torch.stack([torchs(kind, *(t[n] for t in inputs)) for n in range(3)])
    assert relative(states, wanted) < 1e-14
    found = torch.autograd.grad(scalar(states), inputs)
    for a, b in zip(found, torch.autograd.grad(scalar(wanted), inputs), strict=True):
        assert relative(a, b) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_plain_loop_is_the_same(kind: str) -> None:
    """The loop that second derivatives come from."""
    inputs = draw(kind)
    wanted = run(*inputs)
    found = steps.plain(*inputs, *[None] * (3 - len(inputs)))
    assert relative(found, wanted) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind: str) -> None:
    """What the inputs add is of 16 bits there, and the weights of 32; the backward pass runs outside."""
    inputs = [t.detach().float().requires_grad_() for t in draw(kind)]
    wanted = torch.autograd.grad(scalar(run(*inputs)), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        states = run(inputs[0].bfloat16(), *inputs[1:])
    assert states.dtype == torch.bfloat16
    for ours, theirs in zip(torch.autograd.grad(scalar(states.float()), inputs), wanted, strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) < 0.05


def test_kernels_that_do_not_run_on_a_gpu_leave_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds no C compiler, or the GPU has too little memory on its chip."""
    module = ModuleType("fedkeep.nn.fused")
    monkeypatch.setitem(sys.modules, "fedkeep.nn.fused", module)
    asked = list[tuple[object, ...]]()

    def tried(*what: object) -> None:
        asked.append(what)
        raise OSError("Failed to find C compiler")

    module.tried = tried  # type: ignore[attr-defined]
    device = torch.device("cuda", 7)
    said = (
        "^LSTM and GRU of 64 units run step by step on cuda:7, which takes longer: Failed to find C compiler"
    )
    with pytest.warns(UserWarning, match=said):
        assert steps._kernels(device, 3, 64) is None
    assert steps._kernels(device, 3, 64) is None
    assert asked == [(device, 3, 64)], "once"


def test_one_step_by_hand() -> None:
    """From zeros: LSTM h = σ(o) tanh(σ(i) tanh(g)); GRU h = (1 − σ(z)) tanh(n + σ(r) b)."""

    def s(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def step(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 1, -1)

    lstm = run(step(0.6, 0.8, 1.0, 1.2), torch.full((1, 4, 1), 9.0, dtype=torch.float64))
    assert lstm.item() == pytest.approx(s(1.2) * math.tanh(s(0.6) * math.tanh(1.0)), abs=1e-15)
    bias = step(0.5, 0.6, 0.7).reshape(1, 3)
    gru = run(step(0.1, 0.2, 0.3), torch.full((1, 3, 1), 9.0, dtype=torch.float64), bias)
    assert gru.item() == pytest.approx((1 - s(0.8)) * math.tanh(0.3 + s(0.6) * 0.7), abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)])
def test_vmap_is_one_call_with_more_weights(
    kind: str, shared: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients inside and outside vmap are each client's own; both passes run once, for all."""
    clients = [[t.detach() for t in draw(kind, n=2)] for _ in range(3)]
    for client, tensors in enumerate(clients):
        for place, t in enumerate(tensors):
            t += 0 if place in shared else 0.1 * client
    mapped = [
        ts[0] if place in shared else torch.stack(ts) for place, ts in enumerate(zip(*clients, strict=True))
    ]
    dims = tuple(None if place in shared else 0 for place in range(len(mapped)))
    calls: list[tuple[str, int]] = []
    for name in ("forward", "backward"):
        was = getattr(steps, name)
        monkeypatch.setattr(
            steps, name, lambda *a, was=was, name=name: (calls.append((name, len(a[0]))), was(*a))[1]
        )

    def loss(*tensors: Tensor) -> Tensor:
        return scalar(run(*tensors))

    inside = vmap(grad(loss, argnums=tuple(range(len(mapped)))), in_dims=dims)(*mapped)
    assert calls == [("forward", 6), ("backward", 6)]
    leaves = [t.requires_grad_() for t in mapped]
    outside = torch.autograd.grad(vmap(loss, in_dims=dims)(*leaves).sum(), leaves)
    assert calls == [("forward", 6), ("backward", 6)] * 2
    for client, tensors in enumerate(clients):
        own = [t.clone().requires_grad_() for t in tensors]
        wanted = torch.autograd.grad(loss(*own), own)
        for place, by_hand in enumerate(wanted):
            assert relative(inside[place][client], by_hand) < 1e-13
            if place not in shared:
                assert relative(outside[place][client], by_hand) < 1e-13
    for place in set(shared) & set(range(len(mapped))):
        assert relative(outside[place], inside[place].sum(0)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_in_vmap(kind: str) -> None:
    projected, *own = draw(kind, n=2)
    several = torch.stack([projected, 2 * projected, 3 * projected]).reshape(3, 1, *projected.shape)
    found = vmap(vmap(lambda p: run(p, *own)))(several)
    for factor in range(3):
        assert relative(found[factor, 0], run((factor + 1) * projected, *own)) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_every_order(kind: str) -> None:
    inputs = draw(kind, n=2, b=1, length=3, hidden=2)
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone(kind: str) -> None:
    inputs = draw(kind)
    before = [t.detach().clone() for t in inputs]
    states = run(*inputs)
    given = torch.ones_like(states)
    torch.autograd.grad(states, inputs, given)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    assert torch.equal(given, torch.ones_like(given))
