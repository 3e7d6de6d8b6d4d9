"""The recurrence of LSTM and GRU for many weights at once, in PyTorch's operations, with a backward pass of its own.

What ``vmap`` over clients runs where the native kernels don't: on CUDA, without a compiler, and for other number
types. A step is one batched matrix product and a few operations on all clients and directions. The backward pass
computes all steps at once, but for what flows from step to step. Left to autograd under ``vmap``, every operation of
every step would be dispatched twice in each pass.

Shapes: N weights (directions, or clients times directions), B sequences, L steps, H hidden units, K gates (LSTM 4,
GRU 3).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedkeep.core.errors import warn
from fedkeep.kernels.native import in_memory
from fedkeep.nn.operation import second, stacked, unstacked

WIDEST = 64
"""Hidden units whose weights a program of ``nn.fused`` can hold."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's kernels run on the CPU, slowly, for tests."""


def recurrence(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    """Return all states of a layer that starts from zeros; the equations are those of torch.nn.LSTM and GRU.

    Differentiable any number of times, also inside ``torch.func``.

    Args:
        projected: (N, B, L, K*H), what the inputs add to the gates: their product with ``w_ih``, and ``b_ih``; for an
            LSTM ``b_hh`` too.
        w_hh: (N, K*H, H).
        b_hh: (N, K*H) of a GRU; None: an LSTM.

    Returns:
        (N, B, L, H).
    """
    kind = projected.dtype  # under autocast, whose products are narrow, another than the weights'
    w_hh, b_hh = w_hh.to(kind), None if b_hh is None else b_hh.to(kind)
    where = projected.device.type
    with torch.autocast(where, enabled=False) if torch.is_autocast_enabled(where) else nullcontext():
        states: Tensor = _Recurrence.apply(projected, w_hh, b_hh)[0]  # type: ignore[no-untyped-call]
    return states


def forward(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run all steps.

    Returns:
        The states (N, B, L, H), and an LSTM's cells (N, B, L, H), for a GRU (N, 0).
    """
    if (kernels := fused(projected, w_hh)) is not None:
        states, cells = kernels.forward(projected, w_hh, b_hh)
        return states, cells
    width, back = w_hh.shape[2], w_hh.transpose(1, 2)
    states = projected.new_empty(*projected.shape[:3], width)
    cells = states.new_empty(len(states), 0) if b_hh is not None else torch.empty_like(states)
    h = c = states.new_zeros(*states.shape[:2], width)
    for t in range(states.shape[2]):
        step, state = projected[:, :, t], states[:, :, t]
        if b_hh is not None:
            product = torch.baddbmm(b_hh.unsqueeze(1), h, back)
            rates = (step[..., : 2 * width] + product[..., : 2 * width]).sigmoid_()
            reset, update = rates.chunk(2, -1)
            fresh = torch.addcmul(step[..., 2 * width :], reset, product[..., 2 * width :]).tanh_()
            h = torch.lerp(fresh, h, update)
        else:
            gates = torch.baddbmm(step, h, back)
            i, f, g, o = gates.chunk(4, -1)
            gates[..., : 2 * width].sigmoid_()
            c = (f * c).addcmul_(i, g.tanh_())
            h = o.sigmoid_() * c.tanh()
            cells[:, :, t] = c
        state.copy_(h)
    return states, cells


def backward(
    grad: Tensor, states: Tensor, cells: Tensor, projected: Tensor, w_hh: Tensor, b_hh: Tensor | None
) -> tuple[Tensor, ...]:
    """Run all steps back.

    Args:
        grad: (N, B, L, H), of the states.
        states, cells: what ``forward`` gave; the other arguments are its own.

    Returns:
        The gradients of ``projected`` and ``w_hh``, and of a GRU's ``b_hh``.
    """
    before, back, width = _earlier(states), w_hh.transpose(1, 2), w_hh.shape[2]
    kernels = fused(projected, w_hh)
    dh = dc = grad.new_zeros(*grad.shape[:2], width)
    # Of what stands before each gate; times all that arrives there, once it has.
    slopes = torch.empty_like(projected, memory_format=torch.contiguous_format)
    if b_hh is not None:
        product = torch.baddbmm(b_hh.unsqueeze(1), before.flatten(1, 2), back).reshape_as(projected)
        hidden = product[..., 2 * width :]
        rates = (projected[..., : 2 * width] + product[..., : 2 * width]).sigmoid_()
        r, z = rates.chunk(2, -1)
        n = torch.addcmul(projected[..., 2 * width :], r, hidden).tanh_()
        through = (1 - z) * (1 - n * n)
        to_r, to_z, to_n = slopes.chunk(3, -1)
        to_r.copy_(through * hidden * r * (1 - r))
        to_z.copy_((before - n) * z * (1 - z))
        to_n.copy_(through * r)  # the part of n that is behind the reset gate
        flows = kernels.gru_back(grad, slopes, z, w_hh) if kernels else torch.empty_like(states)
        for t in reversed(range(0 if kernels else grad.shape[2])):
            flow = torch.add(grad[:, :, t], dh, out=flows[:, :, t])
            by_gate = _by_gate(slopes[:, :, t], 3)
            by_gate *= flow.unsqueeze(-2)
            dh = torch.baddbmm(flow * z[:, :, t], slopes[:, :, t], w_hh)
        inward = torch.cat([slopes[..., : 2 * width], flows * through], -1)
    else:
        gates = torch.baddbmm(projected.flatten(1, 2), before.flatten(1, 2), back).reshape_as(projected)
        gates[..., : 2 * width].sigmoid_()
        i, f, g, o = gates.chunk(4, -1)
        g.tanh_()
        o.sigmoid_()
        squashed = cells.tanh()
        through = o * (1 - squashed * squashed)  # from a state into its cell
        to_i, to_f, to_g, to_o = slopes.chunk(4, -1)
        to_i.copy_(g * i * (1 - i))
        to_f.copy_(_earlier(cells) * f * (1 - f))
        to_g.copy_(i * (1 - g * g))
        to_o.copy_(squashed * o * (1 - o))
        if kernels:
            kernels.lstm_back(grad, slopes, through, f, w_hh)
        for t in reversed(range(0 if kernels else grad.shape[2])):
            flow = grad[:, :, t] + dh
            dc = torch.addcmul(dc, flow, through[:, :, t])
            by_gate = _by_gate(slopes[:, :, t], 4)
            by_gate[..., :3, :] *= dc.unsqueeze(-2)
            by_gate[..., 3, :] *= flow
            dh = slopes[:, :, t] @ w_hh
            dc = dc * f[:, :, t]
        inward = slopes
    weights = slopes.flatten(1, 2).transpose(1, 2) @ before.flatten(1, 2)
    return (inward, weights) if b_hh is None else (inward, weights, slopes.sum((1, 2)))


def fused(projected: Tensor, w_hh: Tensor) -> Any:
    """Return the module of kernels that run all steps at once (``nn.fused``), or None: they do not compute this.

    They take single precision on CUDA, and no more hidden units than a program can hold.
    """
    if not (projected.is_cuda or INTERPRETED) or projected.dtype != torch.float32 or not projected.numel():
        return None
    if not in_memory(projected, w_hh):
        return None
    gates, width = w_hh.shape[1] // w_hh.shape[2], w_hh.shape[2]
    return _kernels(projected.device, gates, -(-width // 16) * 16) if width <= WIDEST else None


@cache
def _kernels(device: torch.device, gates: int, width: int) -> Any:
    """Return the module, once its kernels have run on a device; None: they do not run there.

    They lack Triton, which PyTorch for CUDA brings along on Linux; or a C compiler, which Triton wants; or the GPU has
    too little memory on its chip; or it is of a make that has no such products.
    """
    try:
        module = importlib.import_module("fedkeep.nn.fused")
    except ImportError:
        return None
    try:
        module.tried(device, gates, width)
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises; the steps give the same)
        warn(f"LSTM and GRU of {width} units run step by step on {device}, which takes longer: {error}")
        return None
    return module


def plain(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    """``recurrence`` without a backward pass of its own, for the derivatives of that one."""
    back, width = w_hh.transpose(1, 2), w_hh.shape[2]
    h = c = torch.zeros_like(projected[:, :, 0, :width])
    states = []
    for step in projected.unbind(2):
        product = h @ back
        if b_hh is not None:
            product = product + b_hh.unsqueeze(1)
            of_r, of_z, of_n = step.chunk(3, -1)
            on_r, on_z, on_n = product.chunk(3, -1)
            r, z = torch.sigmoid(of_r + on_r), torch.sigmoid(of_z + on_z)
            n = torch.tanh(of_n + r * on_n)
            h = n + z * (h - n)
        else:
            i, f, g, o = (step + product).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return torch.stack(states, 2)


def _earlier(values: Tensor) -> Tensor:
    """(N, B, L, H) one step later; the first is zero."""
    return torch.cat([torch.zeros_like(values[:, :, :1]), values[:, :, :-1]], 2)


def _by_gate(values: Tensor, gates: int) -> Tensor:
    return values.view(*values.shape[:-1], gates, -1)


def _mapped(
    function: type[torch.autograd.Function], info: Any, dims: Sequence[int | None], tensors: Any
) -> Any:
    """Run what vmap maps over as more weights: (clients*N, ...), and apart again."""
    several = [stacked(t, d, info.batch_size, True) for t, d in zip(tensors, dims, strict=True)]
    found = function.apply(*several)  # type: ignore[no-untyped-call]
    return tuple(unstacked(found, info.batch_size, True)), (0,) * len(found)


class _Recurrence(torch.autograd.Function):
    """``forward`` with its gradient; vmap maps over it by one call with more weights."""

    @staticmethod
    def forward(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``forward``."""
        return forward(projected, w_hh, b_hh)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the backward pass reads."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        if grad is None:
            return None, None, None
        found: tuple[Tensor, ...] = _StepGradient.apply(grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return found if len(found) == 3 else (*found, None)

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *tensors: Tensor | None) -> Any:
        """Runs what vmap maps over as more weights."""
        return _mapped(_Recurrence, info, dims, tensors)


class _StepGradient(torch.autograd.Function):
    """``backward``, differentiable."""

    @staticmethod
    def forward(*tensors: Any) -> tuple[Tensor, ...]:
        """See ``backward``."""
        return backward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the derivative reads."""
        grad, _, _, *own = inputs
        ctx.save_for_backward(grad, *own)

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates the plain loop twice."""
        grad, projected, w_hh, b_hh = ctx.saved_tensors
        own = [projected, w_hh] if b_hh is None else [projected, w_hh, b_hh]
        *found, of_grad = second(lambda p, w, b=None: (plain(p, w, b),), own, [grad], wanted)
        return of_grad, None, None, *found, *[None] * (3 - len(own))

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], *tensors: Tensor | None) -> Any:
        """Runs what vmap maps over as more weights."""
        return _mapped(_StepGradient, info, dims, tensors)
