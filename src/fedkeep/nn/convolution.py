"""Convolution, ReLU and max-pool as one layer, faster on the CPU than the three.

The parameters are those of ``torch.nn.Conv2d``. On the CPU it runs the native kernel (``fedkeep.kernels.native.status()`` says
whether), else the three layers of PyTorch. ``torch.func.vmap`` over stacked parameters runs a whole cohort at once.

Shapes: B images, C channels, O output channels, H and W height and width, K side of the kernel, PH and PW height and
width after pooling. With ``cohort`` every tensor has a leading axis of clients; one that all share may be expanded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.declared import declare
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.kernels import native
from fedkeep.nn.operation import How, Operation, Tensors, per_client

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
                "ConvPool wants channels and a kernel size of at least 1 and a padding of at least 0; got "
                "{in_channels}, {out_channels}, {kernel_size} and {padding}.",
                in_channels=in_channels,
                out_channels=out_channels,
                kernel_size=kernel_size,
                padding=padding,
            )
        super().__init__(in_channels, out_channels, kernel_size, padding=padding)
        self.side, self.margin, self.flat = kernel_size, padding, flat
        declare(self, takes_bytes=True)

    def extra_repr(self) -> str:
        """Return what torch shows of the layer, and whether its result is flat."""
        shown: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return shown + (", flat=True" if self.flat else "")

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
        and native.in_memory(x, weight, bias)
        and native.available()
    )


_NOTHING = (0,) * 6  # a tensor that is not there: its address and strides


class CallPlan:
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
                "ConvPool wants images of shape (B, {wanted}, H, W); got {got}.",
                wanted=inputs,
                got=tuple(x[len(front) :]),
            )
        images, channels, height, width = x[-4:]
        high, wide = ((n + 2 * padding - kernel + 1) // 2 for n in (height, width))
        if min(high, wide) < 1:
            raise DataError(
                "ConvPool with kernel {kernel} and padding {padding} wants images of at least {least} pixels "
                "a side; got {height} × {width}.",
                kernel=kernel,
                padding=padding,
                least=max(kernel + 1 - 2 * padding, 1),
                height=height,
                width=width,
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
        *(images * size for _ in front),
        size,
        1,
        wide * channels,
        channels,
    )


_plan = lru_cache(maxsize=256)(CallPlan)


def planned(x: Tensor, weight: Tensor, padding: int, flat: bool, cohort: bool) -> CallPlan:
    """The plan of a call.

    Raises:
        DataError: a shape or a type is wrong.
    """
    if x.dtype != weight.dtype and x.dtype != torch.uint8:
        raise DataError(
            "ConvPool wants images of {wanted} or uint8; got {got}.", wanted=weight.dtype, got=x.dtype
        )
    return _plan(x.shape, weight.shape, padding, flat, weight.dtype == torch.float64, cohort)


def _planned(tensors: Tensors, how: How, cohort: bool) -> CallPlan:
    (weight, _, x), (padding, flat) = tensors, how
    return planned(x, weight, padding, bool(flat), cohort)


class _ConvolutionPasses(Operation):
    """The tensors are weight (O, C, K, K), bias (O,) and images (B, C, H, W); the settings padding and flat."""

    name = "conv_pool"

    def forward(self, tensors: Tensors, how: How, cohort: bool, keep: bool = True) -> list[Tensor]:
        """Give the output (B, O, PH, PW), channels last in memory, or flat."""
        weight, bias, x = tensors
        plan = _planned(tensors, how, cohort)
        (weight, weight_stride), (bias, bias_stride) = per_client(weight, cohort), per_client(bias, cohort)
        x = x.resolve_neg()  # a conjugate's imaginary part holds the numbers as they were, and a note
        output, kept = _results(weight, plan, keep)
        native.call(
            "convolution",
            False,
            (
                torch.get_num_threads(),
                native.load().level,
                *plan.head,
                x.dtype == torch.uint8,
                x.data_ptr(),
                *plan.five(x.stride()),
                weight.data_ptr(),
                bias.data_ptr(),
                weight_stride,
                bias_stride,
                output.data_ptr(),
                *plan.five_of_output(output.stride()),
                kept.data_ptr(),
                *_NOTHING,
                *_NOTHING,
                0,
                0,
            ),
        )
        return [output, kept]

    def backward(
        self, grads: Tensors, kept: Tensor, tensors: Tensors, how: How, cohort: bool, input_grad: bool
    ) -> list[Tensor]:
        """Run the kernel; ``kept`` is what it wants of the forward pass."""
        plan, (grad,), (weight, bias, x) = _planned(tensors, how, cohort), grads, tensors
        weight, weight_stride = per_client(weight, cohort)
        kept = kept.contiguous()
        found = self.empty_gradients((weight, bias, x), how, cohort, input_grad)
        images = (found[2].data_ptr(), *plan.five(plan.images[1])) if input_grad else _NOTHING
        native.call(
            "convolution",
            True,
            (
                torch.get_num_threads(),
                native.load().level,
                *plan.head,
                False,
                *_NOTHING,
                weight.data_ptr(),
                0,
                weight_stride,
                0,
                *_NOTHING,
                kept.data_ptr(),
                grad.data_ptr(),
                *plan.five_of_output(grad.stride()),
                *images,
                found[0].data_ptr(),
                found[1].data_ptr(),
            ),
        )
        return found

    def empty(self, tensors: Tensors, how: How, cohort: bool) -> list[Tensor]:
        """See ``Operation.empty``."""
        return _results(tensors[0], _planned(tensors, how, cohort), True)

    def empty_gradients(self, tensors: Tensors, how: How, cohort: bool, input_grad: bool) -> list[Tensor]:
        """See ``Operation.empty_gradients``."""
        plan, (weight, bias, _) = _planned(tensors, how, cohort), tensors
        found = [weight.new_empty(weight.shape), weight.new_empty(bias.shape)]
        return [*found, weight.new_empty_strided(*plan.images)] if input_grad else found

    def pure(self, tensors: Tensors, how: How) -> list[Tensor]:
        """See ``pure``."""
        weight, bias, x = tensors
        return [pure(x, weight, bias, how[0], bool(how[1]))]


def _results(like: Tensor, plan: CallPlan, keep: bool) -> list[Tensor]:
    output = like.new_empty(plan.flat_shape) if plan.flat else like.new_empty_strided(*plan.output)
    return [output, like.new_empty(plan.kept if keep else 0)]


PASSES = _ConvolutionPasses()


def run(x: Tensor, weight: Tensor, bias: Tensor, padding: int, flat: bool) -> Tensor:
    """The layer by its kernel, differentiable, under vmap for a whole cohort: (B, C, H, W) to (B, O, PH, PW) or flat.

    Raises:
        DataError: a shape or a type is wrong.
    """
    return PASSES((padding, flat), weight, bias, x)[0]
