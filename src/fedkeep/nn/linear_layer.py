"""A linear layer with or without ReLU, faster on the CPU for many weights and the few rows of a small batch.

The parameters are those of ``torch.nn.Linear``. There it runs the native kernel, elsewhere PyTorch.
``torch.func.vmap`` over stacked parameters runs a whole cohort at once.

Shapes: B rows, I inputs, O outputs. With ``cohort`` every tensor has a leading axis of clients; one that all share may
be expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.kernels import native
from fedkeep.nn.operation import How, Operation, Tensors, per_client

# Where the kernel pays: few rows, so that reading the weights is what takes time, and many weights.
ROWS, WEIGHTS = 16, 1 << 16


class Linear(nn.Linear):
    """A linear layer with bias, and a ReLU behind it where one is wanted.

    Args:
        in_features: I.
        out_features: O.
        relu: whether negative results become 0.
    """

    def __init__(self, in_features: int, out_features: int, *, relu: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.relu = relu

    def extra_repr(self) -> str:
        """Return what torch shows of the layer, and whether there is a ReLU: a run goes on with the same alone."""
        return super().extra_repr() + (", relu=True" if self.relu else "")

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: from (B, I), or any shape that ends in I, to (B, O)."""
        weight, bias = self.weight, self.bias
        if usable(x, weight, bias):
            return run(x, weight, bias, self.relu)
        return pure(x, weight, bias, self.relu)


def pure(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """The layer in PyTorch alone."""
    x = F.linear(x, weight, bias)
    return F.relu(x) if relu else x


def usable(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernel can take these tensors: few rows, many weights, floats on the CPU, a library."""
    kind = weight.dtype
    return (
        (kind == torch.float32 or kind == torch.float64)
        and x.dtype == kind
        and bias.dtype == kind
        and x.layout == torch.strided
        and x.dim() == 2
        and x.shape[0] <= ROWS
        and weight.numel() >= WEIGHTS
        and x.shape[1] == weight.shape[-1]  # or PyTorch says what is wrong
        and x.is_cpu
        and weight.is_cpu
        and bias.is_cpu
        and native.in_memory(x, weight, bias)
        and native.available()
    )


def _rows(x: Tensor, cohort: bool) -> tuple[Tensor, int, int]:
    """The rows, each contiguous, and the distances from client to client and from row to row."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.stride(0) if cohort else 0, x.stride(-2)


def _head(x: Tensor, weight: Tensor, how: How) -> tuple[int, ...]:
    clients = weight.shape[0] if weight.dim() == 3 else 1
    double = weight.dtype == torch.float64
    threads, level = torch.get_num_threads(), native.load().level
    return (threads, level, double, clients, x.shape[-2], x.shape[-1], weight.shape[-2], *how)


class _LinearPasses(Operation):
    """The tensors are weight (O, I), bias (O,) and x (B, I); the setting is whether there is a ReLU."""

    name = "linear"

    def keeps_result(self, how: How) -> bool:
        """Tell whether there is a ReLU: without one the result is the caller's to change."""
        return bool(how[0])

    def forward(self, tensors: Tensors, how: How, cohort: bool, keep: bool = True) -> list[Tensor]:
        """Give the output (B, O)."""
        weight, bias, x = tensors
        x, x_stride, row_stride = _rows(x, cohort)
        (weight, weight_stride), (bias, bias_stride) = per_client(weight, cohort), per_client(bias, cohort)
        found = self.empty((weight, bias, x), how, cohort)
        native.call(
            "linear",
            False,
            (
                *_head(x, weight, how),
                x.data_ptr(),
                x_stride,
                row_stride,
                weight.data_ptr(),
                bias.data_ptr(),
                weight_stride,
                bias_stride,
                found[0].data_ptr(),
                0,
                0,
                0,
                0,
            ),
        )
        return found

    def backward(
        self, grads: Tensors, kept: Tensor, tensors: Tensors, how: How, cohort: bool, input_grad: bool
    ) -> list[Tensor]:
        """Run the kernel; ``kept`` is the output where there is a ReLU, else empty and not read."""
        weight, bias, x = tensors
        x, x_stride, row_stride = _rows(x, cohort)
        weight, weight_stride = per_client(weight, cohort)
        grad, output = grads[0].contiguous(), kept.contiguous()
        found = self.empty_gradients((weight, bias, x), how, cohort, input_grad)
        native.call(
            "linear",
            True,
            (
                *_head(x, weight, how),
                x.data_ptr(),
                x_stride,
                row_stride,
                weight.data_ptr(),
                0,
                weight_stride,
                0,
                output.data_ptr(),
                grad.data_ptr(),
                found[2].data_ptr() if input_grad else 0,
                found[0].data_ptr(),
                found[1].data_ptr(),
            ),
        )
        return found

    def empty(self, tensors: Tensors, how: How, cohort: bool) -> list[Tensor]:
        """See ``Operation.empty``."""
        weight, _, x = tensors
        output = x.new_empty((*x.shape[:-1], weight.shape[-2]))
        return [output] if self.keeps_result(how) else [output, x.new_empty((*x.shape[:-2], 0))]

    def empty_gradients(self, tensors: Tensors, how: How, cohort: bool, input_grad: bool) -> list[Tensor]:
        """See ``Operation.empty_gradients``."""
        weight, bias, x = tensors
        found = [x.new_empty(weight.shape), x.new_empty(bias.shape)]
        return [*found, x.new_empty(x.shape)] if input_grad else found

    def pure(self, tensors: Tensors, how: How) -> list[Tensor]:
        """See ``pure``."""
        weight, bias, x = tensors
        return [pure(x, weight, bias, bool(how[0]))]


PASSES = _LinearPasses()


def run(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """The layer by its kernel, differentiable, under vmap for a whole cohort: x (B, I) to (B, O)."""
    return PASSES((relu,), weight, bias, x)[0]
