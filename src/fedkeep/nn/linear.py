"""A linear layer with or without ReLU, faster on the CPU for many weights and the few rows of a small batch.

The parameters are those of ``torch.nn.Linear``. There it runs the native kernel, elsewhere PyTorch.
``torch.func.vmap`` over stacked parameters runs a whole cohort at once.

Shapes: B rows, I inputs, O outputs. With ``cohort`` every tensor has a leading axis of clients; one that all share may
be expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.kernels import native
from fedkeep.nn.cohort import stacked, unstacked
from fedkeep.nn.higher import second
from fedkeep.nn.native import per_client, traced

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

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer.

        Args:
            x: (B, I), or any shape that ends in I.

        Returns:
            (B, O).
        """
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
        and x.dim() == 2
        and x.shape[0] <= ROWS
        and weight.numel() >= WEIGHTS
        and x.shape[1] == weight.shape[-1]  # or PyTorch says what is wrong
        and x.is_cpu
        and weight.is_cpu
        and bias.is_cpu
        and native.available()
    )


def _rows(x: Tensor, cohort: bool) -> tuple[Tensor, int, int]:
    """The rows, each contiguous, and the distances from client to client and from row to row."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.stride(0) if cohort else 0, x.stride(-2)


def _head(x: Tensor, weight: Tensor, relu: bool) -> tuple[int, ...]:
    clients = weight.shape[0] if weight.dim() == 3 else 1
    double = weight.dtype == torch.float64
    threads, level = torch.get_num_threads(), native.load().level
    return (threads, level, double, clients, x.shape[-2], x.shape[-1], weight.shape[-2], relu)


def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool = False) -> Tensor:
    """Runs the forward pass: x (B, I), weight (O, I), bias (O,) to (B, O)."""
    x, x_stride, row_stride = _rows(x, cohort)
    (weight, weight_stride), (bias, bias_stride) = per_client(weight, cohort), per_client(bias, cohort)
    output = x.new_empty((*x.shape[:-1], weight.shape[-2]))
    native.call("linear", False, (
        *_head(x, weight, relu), x.data_ptr(), x_stride, row_stride, weight.data_ptr(), bias.data_ptr(), weight_stride,
        bias_stride, output.data_ptr(), 0, 0, 0, 0,
    ))  # fmt: skip
    return output


def backward(
    grad: Tensor,
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    relu: bool,
    input_grad: bool,
    cohort: bool = False,
) -> list[Tensor]:
    """Runs the backward pass; ``output`` is that of the forward pass.

    Returns:
        The gradients of weight and bias, then, with ``input_grad``, of x.
    """
    x, x_stride, row_stride = _rows(x, cohort)
    weight, weight_stride = per_client(weight, cohort)
    grad, output = grad.contiguous(), output.contiguous()
    found = _gradients_of(x, weight, input_grad)
    native.call("linear", True, (
        *_head(x, weight, relu), x.data_ptr(), x_stride, row_stride, weight.data_ptr(), 0, weight_stride, 0,
        output.data_ptr(), grad.data_ptr(), found[2].data_ptr() if input_grad else 0, found[0].data_ptr(),
        found[1].data_ptr(),
    ))  # fmt: skip
    return found


def _gradients_of(x: Tensor, weight: Tensor, input_grad: bool) -> list[Tensor]:
    found = [x.new_empty(weight.shape), x.new_empty(weight.shape[:-1])]
    return [*found, x.new_empty(x.shape)] if input_grad else found


# The two passes as custom operations, for torch.func (vmap above all) and for tracing.


@torch.library.custom_op("fedkeep::linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool) -> Tensor:
    """The forward pass; see ``forward``."""
    return forward(x, weight, bias, relu, cohort)


@torch.library.custom_op("fedkeep::linear_backward", mutates_args=(), device_types="cpu")
def linear_backward(
    grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, relu: bool, input_grad: bool, cohort: bool
) -> list[Tensor]:
    """The backward pass; see ``backward``."""
    return backward(grad, output, x, weight, relu, input_grad, cohort)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-2]))


@linear_backward.register_fake
def _(
    grad: Tensor, output: Tensor, x: Tensor, weight: Tensor, relu: bool, input_grad: bool, cohort: bool
) -> list[Tensor]:
    return _gradients_of(x, weight, input_grad)


@linear.register_vmap
def _(
    info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool
) -> tuple[Tensor, int]:
    n = info.batch_size
    tensors = [stacked(t, d, n, cohort) for t, d in zip((x, weight, bias), dims, strict=False)]
    return unstacked([linear(*tensors, relu, True)], n, cohort)[0], 0


@linear_backward.register_vmap
def _(
    info: Any,
    dims: tuple[Any, ...],
    grad: Tensor,
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    relu: bool,
    input_grad: bool,
    cohort: bool,
) -> tuple[list[Tensor], list[int]]:
    n = info.batch_size
    tensors = [stacked(t, d, n, cohort) for t, d in zip((grad, output, x, weight), dims, strict=False)]
    found = linear_backward(*tensors, relu, input_grad, True)
    return unstacked(found, n, cohort), [0] * len(found)


def _keep(ctx: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.relu, ctx.cohort = arguments
    ctx.save_for_backward(output, *tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    output, x, weight, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    if torch.is_grad_enabled():  # the gradient may be differentiated again
        found = Gradient.apply(grad, output, x, weight, bias, ctx.relu, wanted, ctx.cohort)  # type: ignore[no-untyped-call]
    else:
        found = (linear_backward if traced() else backward)(
            grad, output, x, weight, ctx.relu, wanted, ctx.cohort
        )
    return found[2] if wanted else None, found[0], found[1], None, None


class Gradient(torch.autograd.Function):
    """``backward``, differentiable."""

    @staticmethod
    def forward(
        grad: Tensor,
        output: Tensor,
        x: Tensor,
        weight: Tensor,
        _: Tensor,
        relu: bool,
        input_grad: bool,
        cohort: bool,
    ) -> tuple[Tensor, ...]:
        """See ``backward``."""
        run = linear_backward if traced() else backward
        return tuple(run(grad, output, x, weight, relu, input_grad, cohort))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the derivative reads."""
        grad, _, x, weight, bias, ctx.relu, ctx.input_grad, ctx.cohort = inputs
        ctx.save_for_backward(grad, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates the layer in PyTorch alone, twice."""
        grad, x, weight, bias = ctx.saved_tensors

        def layer(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor]:
            return (pure(x, weight, bias, ctx.relu),)

        run = torch.func.vmap(layer) if ctx.cohort else layer
        if ctx.input_grad:
            of_weight, of_bias, of_x, of_grad = second(run, [weight, bias, x], [grad], wanted)
            return of_grad, None, of_x, of_weight, of_bias, None, None, None
        of_weight, of_bias, of_grad = second(lambda w, b: run(w, b, x), [weight, bias], [grad], wanted)
        return of_grad, None, None, of_weight, of_bias, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n, (relu, input_grad, cohort) = info.batch_size, arguments[5:]
        own = [stacked(t, d, n, cohort) for t, d in zip(arguments[:5], dims, strict=False)]
        found = Gradient.apply(*own, relu, input_grad, True)  # type: ignore[no-untyped-call]
        return tuple(unstacked(found, n, cohort)), (0,) * len(found)


class Eager(torch.autograd.Function):
    """The plain way, with a fraction of the dispatch cost of the ways that torch.func understands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool) -> Tensor:
        """See ``forward``."""
        output = forward(x, weight, bias, relu, cohort)
        _keep(ctx, (x, weight, bias, relu, cohort), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, grad)


class Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile, on the custom operations; a cohort's vmap alone is the plain way."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool) -> Tensor:
        """See ``forward``."""
        output: Tensor = linear(x, weight, bias, relu, cohort)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps what the backward pass reads."""
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        relu: bool,
        cohort: bool,
    ) -> tuple[Tensor, int]:
        """Runs what vmap maps over as a cohort."""
        n = info.batch_size
        x, weight, bias = (stacked(t, d, n, cohort) for t, d in zip((x, weight, bias), dims, strict=False))
        return unstacked([_differentiable(x, weight, bias, relu, True)], n, cohort)[0], 0


def _differentiable(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, cohort: bool) -> Tensor:
    way = Transformed if traced() else Eager
    return way.apply(x, weight, bias, relu, cohort)  # type: ignore[no-untyped-call,no-any-return]


def run(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """``forward``, differentiable, under vmap of a whole cohort."""
    differentiable = x.requires_grad or weight.requires_grad or bias.requires_grad
    if traced() or (torch.is_grad_enabled() and differentiable):
        return _differentiable(x, weight, bias, relu, False)
    return forward(x, weight, bias, relu)
