"""Convolution, ReLU and max-pool as one layer, faster on the CPU than the three.

The parameters are those of ``torch.nn.Conv2d``. On the CPU it runs the native kernel (``fedkeep.kernels.status()`` says
whether), else the three layers of PyTorch. ``torch.func.vmap`` over stacked parameters runs a whole cohort at once.

Shapes: B images, C channels, O output channels, H and W height and width, K side of the kernel, PH and PW height and
width after pooling. With ``cohort`` every tensor has a leading axis of clients; one that all share may be expanded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.kernels import native
from fedkeep.nn.cohort import stacked, unstacked
from fedkeep.nn.higher import second
from fedkeep.nn.native import per_client, traced

BLOCK = 16  # channels in a block of a packed image, at most, as in convolution.h


class ConvPool(nn.Conv2d):
    """Convolution with bias (stride 1), ReLU, and max-pooling of 2 × 2 pixels; an odd last row or column is left out.

    Images of bytes are scaled to −1…1 first. Of equal values in a pool the gradient goes to the first, as in torch.

    Args:
        in_channels: C.
        out_channels: O.
        kernel_size: K.
        padding: zeros around the image, on each side.
        flat: whether the result is (B, O * PH * PW), as a linear layer wants it.

    Raises:
        ConfigError: a size below 1, or padding below 0.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, padding: int = 0, *, flat: bool = False
    ) -> None:
        if min(in_channels, out_channels, kernel_size) < 1 or padding < 0:
            raise ConfigError(
                f"ConvPool wants channels and a kernel size of at least 1 and a padding of at least 0; got "
                f"{in_channels}, {out_channels}, {kernel_size} and {padding}."
            )
        super().__init__(in_channels, out_channels, kernel_size, padding=padding)
        self.side, self.margin, self.flat = kernel_size, padding, flat

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer.

        Args:
            x: (B, C, H, W), of the type of the weights, or uint8.

        Returns:
            (B, O, PH, PW) with PH = (H + 2 · padding − K + 1) // 2, or flat.

        Raises:
            DataError: a shape or a type is wrong, or the image is too small.
        """
        weight, bias = self.weight, self.bias
        assert bias is not None
        if usable(x, weight, bias):
            return run(x, weight, bias, self.margin, self.flat)
        planned(x, weight, self.margin, self.flat, False)  # for its errors
        return pure(x, weight, bias, self.margin, self.flat)


def pure(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> Tensor:
    """The layer in PyTorch alone."""
    if x.dtype == torch.uint8:
        x = x.to(weight.dtype) / 127.5 - 1
    x = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=padding)), 2)
    return x.flatten(1) if flat else x


def usable(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernel can take these tensors: on the CPU, float32 or float64, and a library in use."""
    return (
        weight.dtype in (torch.float32, torch.float64)
        and bias.dtype == weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and bias.is_cpu
        and native.available()
    )


_NOTHING = (0,) * 6  # a tensor that is not there: its address and strides


class Plan:
    """Shapes and strides of a call, which are the same at every step.

    Args:
        x: shape of the images, with the client axis if there is one.
        weight: shape of the weights, likewise.
        padding: zeros around the image.
        flat: whether the output is (B, O * PH * PW).
        double: whether numbers are float64.
        cohort: whether there is a client axis.

    Raises:
        DataError: a shape is wrong, or the image is too small.
    """

    def __init__(
        self,
        x: tuple[int, ...],
        weight: tuple[int, ...],
        padding: int,
        flat: bool,
        double: bool,
        cohort: bool,
    ) -> None:
        *front, outputs, inputs, kernel, _ = weight
        if len(x) - len(front) != 4 or x[-3] != inputs:
            raise DataError(
                f"ConvPool wants images of shape (B, {inputs}, H, W); got {tuple(x[len(front) :])}."
            )
        images, channels, height, width = x[-4:]
        high, wide = ((n + 2 * padding - kernel + 1) // 2 for n in (height, width))
        if min(high, wide) < 1:
            raise DataError(
                f"ConvPool with kernel {kernel} and padding {padding} wants images of at least "
                f"{max(kernel + 1 - 2 * padding, 1)} pixels a side; got {height} × {width}."
            )
        blocks = -(-channels // BLOCK)
        pixels = (2 * high + kernel - 1) * (2 * wide + kernel - 1)
        packed = blocks * -(-channels // blocks) * pixels + 64
        self.cohort, self.flat = cohort, flat
        self.head = (
            double,
            front[0] if front else 1,
            images,
            channels,
            height,
            width,
            outputs,
            kernel,
            padding,
        )
        self.flat_shape = (*front, images, outputs * high * wide)
        self.output = _channels_last(front, images, outputs, high, wide)
        self.kept = (*front, images, packed + high * wide * outputs // (8 if double else 4) + 1)
        self.images = _channels_last(front, images, channels, height, width)
        self.bias = (*front, outputs)
        self.steps = (high * wide, wide, 1)  # between channels, rows and columns of a flat output

    def five(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """Strides from client to client, image, channel, row and column."""
        return strides if self.cohort else (0, *strides)

    def five_of_output(self, strides: tuple[int, ...]) -> tuple[int, ...]:
        """The same for a tensor like the output."""
        if self.flat:
            *before, last = strides
            strides = (*before, *(last * step for step in self.steps))
        return self.five(strides)


def _channels_last(
    front: list[int], images: int, channels: int, high: int, wide: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor (B, channels, high, wide) with the channels together in memory."""
    size = channels * high * wide
    return (*front, images, channels, high, wide), (
        *(images * size for _ in front), size, 1, wide * channels, channels,
    )  # fmt: skip


_plan = lru_cache(maxsize=256)(Plan)


def planned(x: Tensor, weight: Tensor, padding: int, flat: bool, cohort: bool) -> Plan:
    """The plan of a call.

    Raises:
        DataError: a shape or a type is wrong.
    """
    if x.dtype != weight.dtype and x.dtype != torch.uint8:
        raise DataError(f"ConvPool wants images of {weight.dtype} or uint8; got {x.dtype}.")
    return _plan(x.shape, weight.shape, padding, flat, weight.dtype == torch.float64, cohort)


def forward(x: Tensor, weight: Tensor, bias: Tensor, plan: Plan, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Runs the forward pass.

    Args:
        x: (B, C, H, W), uint8 or of the type of the weights.
        weight: (O, C, K, K).
        bias: (O,).
        plan: of the call.
        keep: whether a backward pass may follow.

    Returns:
        output (B, O, PH, PW), channels last in memory, or flat; and what the backward pass needs.
    """
    (weight, weight_stride), (bias, bias_stride) = (
        per_client(weight, plan.cohort),
        per_client(bias, plan.cohort),
    )
    output, kept = _results(weight, plan, keep)
    native.call("convolution", False, (
        torch.get_num_threads(), native.load().level, *plan.head, x.dtype == torch.uint8,
        x.data_ptr(), *plan.five(x.stride()), weight.data_ptr(), bias.data_ptr(), weight_stride, bias_stride,
        output.data_ptr(), *plan.five_of_output(output.stride()), kept.data_ptr(), *_NOTHING, *_NOTHING, 0, 0,
    ))  # fmt: skip
    return output, kept


def _results(like: Tensor, plan: Plan, keep: bool) -> tuple[Tensor, Tensor]:
    output = like.new_empty(plan.flat_shape) if plan.flat else like.new_empty_strided(*plan.output)
    return output, like.new_empty(plan.kept if keep else 0)


def backward(grad: Tensor, kept: Tensor, weight: Tensor, plan: Plan, input_grad: bool) -> list[Tensor]:
    """Runs the backward pass.

    Args:
        grad: of the output.
        kept: what the forward pass kept.
        weight: (O, C, K, K).
        plan: of the forward pass.
        input_grad: whether the gradient of the images is wanted.

    Returns:
        The gradients of weight and bias, then, with ``input_grad``, of the images.
    """
    weight, weight_stride = per_client(weight, plan.cohort)
    kept = kept.contiguous()
    found = _gradients_of(weight, plan, input_grad)
    images = (found[2].data_ptr(), *plan.five(plan.images[1])) if input_grad else _NOTHING
    native.call("convolution", True, (
        torch.get_num_threads(), native.load().level, *plan.head, False,
        *_NOTHING, weight.data_ptr(), 0, weight_stride, 0, *_NOTHING, kept.data_ptr(),
        grad.data_ptr(), *plan.five_of_output(grad.stride()), *images, found[0].data_ptr(), found[1].data_ptr(),
    ))  # fmt: skip
    return found


def _gradients_of(weight: Tensor, plan: Plan, input_grad: bool) -> list[Tensor]:
    found = [weight.new_empty(weight.shape), weight.new_empty(plan.bias)]
    if input_grad:
        found.append(weight.new_empty_strided(*plan.images))
    return found


# The two passes as custom operations, for torch.func (vmap above all) and for tracing.


@torch.library.custom_op("fedkeep::conv_pool", mutates_args=(), device_types="cpu")
def conv_pool(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool, cohort: bool
) -> tuple[Tensor, Tensor]:
    """The forward pass; see ``forward``."""
    return forward(x, weight, bias, planned(x, weight, padding, flat, cohort))


@torch.library.custom_op("fedkeep::conv_pool_backward", mutates_args=(), device_types="cpu")
def conv_pool_backward(
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    image: list[int],
    padding: int,
    flat: bool,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    """The backward pass; see ``backward``. ``image`` is the shape (B, C, H, W) of the images of one client."""
    return backward(grad, kept, weight, _again(weight, image, padding, flat, cohort), input_grad)


def _again(weight: Tensor, image: list[int], padding: int, flat: bool, cohort: bool) -> Plan:
    x = (*(weight.shape[:1] if cohort else ()), *image)
    return _plan(x, weight.shape, padding, flat, weight.dtype == torch.float64, cohort)


@conv_pool.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool, cohort: bool
) -> tuple[Tensor, Tensor]:
    return _results(weight, planned(x, weight, padding, flat, cohort), True)


@conv_pool_backward.register_fake
def _(
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    image: list[int],
    padding: int,
    flat: bool,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    return _gradients_of(weight, _again(weight, image, padding, flat, cohort), input_grad)


@conv_pool.register_vmap
def _(
    info: Any,
    dims: tuple[Any, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    padding: int,
    flat: bool,
    cohort: bool,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    n = info.batch_size
    tensors = [stacked(t, d, n, cohort) for t, d in zip((x, weight, bias), dims, strict=False)]
    return tuple(unstacked(conv_pool(*tensors, padding, flat, True), n, cohort)), (0, 0)


@conv_pool_backward.register_vmap
def _(
    info: Any,
    dims: tuple[Any, ...],
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    image: list[int],
    padding: int,
    flat: bool,
    cohort: bool,
    input_grad: bool,
) -> tuple[list[Tensor], list[int]]:
    n = info.batch_size
    tensors = [stacked(t, d, n, cohort) for t, d in zip((grad, kept, weight), dims, strict=False)]
    found = conv_pool_backward(*tensors, image, padding, flat, True, input_grad)
    return unstacked(found, n, cohort), [0] * len(found)


def _keep(ctx: Any, arguments: tuple[Any, ...], kept: Tensor) -> None:
    x, weight, bias, *ctx.how = arguments
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(kept, x, weight, bias)


def _gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    kept, x, weight, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    if torch.is_grad_enabled():  # the gradient may be differentiated again
        found = Gradient.apply(grad, kept, x, weight, bias, *ctx.how, wanted)  # type: ignore[no-untyped-call]
    else:
        found = _backward(grad, kept, x, weight, *(*ctx.how, wanted))
    return found[2] if wanted else None, found[0], found[1], None, None, None


def _backward(
    grad: Tensor,
    kept: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: int,
    flat: bool,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    image = list(x.shape[-4:])
    if traced():
        found: list[Tensor] = conv_pool_backward(grad, kept, weight, image, padding, flat, cohort, input_grad)
        return found
    return backward(grad, kept, weight, _again(weight, image, padding, flat, cohort), input_grad)


class Gradient(torch.autograd.Function):
    """``backward``, differentiable."""

    @staticmethod
    def forward(
        grad: Tensor, kept: Tensor, x: Tensor, weight: Tensor, _: Tensor, *how: Any
    ) -> tuple[Tensor, ...]:
        """See ``backward``."""
        return tuple(_backward(grad, kept, x, weight, *how))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the derivative reads."""
        grad, _, x, weight, bias, *ctx.how = inputs
        ctx.save_for_backward(grad, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates the layer in PyTorch alone, twice."""
        grad, x, weight, bias = ctx.saved_tensors
        padding, flat, cohort, input_grad = ctx.how

        def layer(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor]:
            return (pure(x, weight, bias, padding, flat),)

        run = torch.func.vmap(layer) if cohort else layer
        if input_grad:
            of_weight, of_bias, of_x, of_grad = second(run, [weight, bias, x], [grad], wanted)
            return of_grad, None, of_x, of_weight, of_bias, None, None, None, None
        of_weight, of_bias, of_grad = second(lambda w, b: run(w, b, x), [weight, bias], [grad], wanted)
        return of_grad, None, None, of_weight, of_bias, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n, (padding, flat, cohort, input_grad) = info.batch_size, arguments[5:]
        own = [stacked(t, d, n, cohort) for t, d in zip(arguments[:5], dims, strict=False)]
        found = Gradient.apply(*own, padding, flat, True, input_grad)  # type: ignore[no-untyped-call]
        return tuple(unstacked(found, n, cohort)), (0,) * len(found)


class Eager(torch.autograd.Function):
    """The plain way, with a fraction of the dispatch cost of the ways that torch.func understands."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """See ``forward``."""
        x, weight, bias, *how = arguments
        output, kept = forward(x, weight, bias, planned(x, weight, *how))
        _keep(ctx, arguments, kept)
        return output, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, grad)


class Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile, on the custom operations; a cohort's vmap alone is the plain way."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool, cohort: bool
    ) -> tuple[Tensor, Tensor]:
        """See ``forward``."""
        found: tuple[Tensor, Tensor] = conv_pool(x, weight, bias, padding, flat, cohort)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keeps what the backward pass reads."""
        _keep(ctx, inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        padding: int,
        flat: bool,
        cohort: bool,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n = info.batch_size
        x, weight, bias = (stacked(t, d, n, cohort) for t, d in zip((x, weight, bias), dims, strict=False))
        found = _differentiable(x, weight, bias, padding, flat, True)
        return tuple(unstacked(found, n, cohort)), (0, 0)


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool, cohort: bool
) -> tuple[Tensor, Tensor]:
    way = Transformed if traced() else Eager
    found: tuple[Tensor, Tensor] = way.apply(x, weight, bias, padding, flat, cohort)  # type: ignore[no-untyped-call]
    return found


def run(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> Tensor:
    """The first result of ``forward``, differentiable, under vmap of a whole cohort.

    Raises:
        DataError: a shape or a type is wrong.
    """
    differentiable = x.requires_grad or weight.requires_grad or bias.requires_grad
    if traced() or (torch.is_grad_enabled() and differentiable):
        return _differentiable(x, weight, bias, padding, flat, False)[0]
    return forward(x, weight, bias, planned(x, weight, padding, flat, False), keep=False)[0]
