"""Second derivatives of the layers whose backward pass is their own.

A backward pass is an operation of its own to autograd, whose derivative is computed by PyTorch from the layer in plain
operations, and only if somebody asks for it. (``once_differentiable`` would not do: ``torch.autograd.grad`` through it
finds no way to the inputs, and gives a gradient without the second-order part rather than an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def second(
    layer: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run the backward pass of a layer's backward pass.

    Args:
        layer: the layer in plain operations, from ``inputs`` to results.
        inputs: what is differentiated by.
        grads: the gradients of the results.
        wanted: the gradients of what the backward pass gave, one for each input.

    Returns:
        The gradients of ``inputs``, then of ``grads``.
    """

    def slopes(*both: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.func.vjp(layer, *both[: len(inputs)])[1](both[len(inputs) :])
        return found

    found: tuple[Tensor, ...] = torch.func.vjp(slopes, *inputs, *grads)[1](tuple(wanted))
    return found
