"""The native recurrent kernels as a PyTorch operation: autograd, and ``vmap`` over clients as the cohort axis.

Shapes: B sequences, L longest length, I inputs, H hidden units, D directions, V rows of the table, K gates (LSTM 4,
GRU 3). With ``cohort`` every tensor has a leading axis of G clients; one that all clients share may be expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.core.errors import DataError
from fedkeep.kernels import native
from fedkeep.nn import pure
from fedkeep.nn.cohort import stacked, unstacked
from fedkeep.nn.higher import second
from fedkeep.nn.pooling import LAST, MAX, OUTPUT


def per_client(tensor: Tensor, cohort: bool) -> tuple[Tensor, int]:
    """The tensor with each client's values contiguous, and the distance from client to client in elements."""
    if not cohort:
        return tensor.contiguous(), 0
    if tensor.shape[0] and not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def _front(inputs: Tensor, ids: Tensor | None, cohort: bool) -> tuple[tuple[int, ...], torch.Size]:
    """The client axis, if there is one, and (B, L)."""
    shape = (inputs if ids is None else ids).shape
    return ((inputs.shape[0],), shape[1:3]) if cohort else ((), shape[:2])


def _work_size(sequences: int, length: int, hidden: int, pool: int, dtype: torch.dtype) -> int:
    """Numbers kept per direction: for each step four gates and a state; where the greatest stood."""
    padded = -(-hidden // native.lanes(dtype)) * native.lanes(dtype)
    return sequences * padded * (length * 5 + (pool == MAX))


class _Call:
    """The sizes and addresses that both passes share. ``keep`` holds tensors whose addresses are in use."""

    def __init__(
        self,
        inputs: Tensor,
        ids: Tensor | None,
        lengths: Tensor,
        weights: Sequence[Tensor],
        gru: bool,
        pool: int,
        cohort: bool,
    ) -> None:
        self.front, (self.sequences, self.length) = _front(inputs, ids, cohort)
        self.clients = inputs.shape[0] if cohort else 1
        self.directions = len(weights) // 4
        self.inputs, self.hidden = inputs.shape[-1], weights[1].shape[-1]
        self.rows = inputs.shape[-2] if ids is not None else 0
        self.keep = [per_client(t, cohort) for t in (lengths, inputs, *weights)]
        if ids is not None:
            self.keep.append(per_client(ids, cohort))
        (lengths, lengths_stride), (inputs, stride) = self.keep[:2]
        source = (inputs.data_ptr(), stride)
        pairs = self.keep[2 : 2 + len(weights)]
        unused = [0] * (8 - len(pairs))
        self.words = [
            gru,
            inputs.dtype == torch.float64,
            torch.get_num_threads(),
            native.load().level,
            max(pool, LAST),
            self.clients,
            self.directions,
            self.sequences,
            self.length,
            self.inputs,
            self.hidden,
            self.rows,
            lengths.data_ptr(),
            lengths_stride,
            *(
                (*source, 0, 0, 0, 0)
                if ids is None
                else (0, 0, self.keep[-1][0].data_ptr(), self.keep[-1][1], *source)
            ),
            *[t.data_ptr() for t, _ in pairs],
            *unused,
            *[stride for _, stride in pairs],
            *unused,
        ]

    def run(self, backward: bool, pointers: list[int]) -> None:
        code = native.call("recurrent", backward, self.words + pointers)
        if code == native.BAD_LENGTH:
            raise DataError(
                f"lengths must lie between 1 and {self.length}, the longest that the inputs have room for"
            )
        if code == native.BAD_ID:
            raise DataError(f"ids must lie between 0 and {self.rows - 1}, the last row of the table")


def forward(
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: Sequence[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the forward pass.

    Args:
        inputs: (B, L, I), or the table (V, I) where ``ids`` (B, L) are given.
        lengths: (B,) int64.
        weights: for each direction w_ih (K*H, I), w_hh (K*H, H), b_ih (K*H,), b_hh (K*H,).
        pool: OUTPUT, LAST, MEAN or MAX.
        keep: whether a backward pass may follow.

    Returns:
        output (B, L, D*H) if ``pool`` is OUTPUT, else empty; last states, means or maxima (B, D*H); and what the
        backward pass needs.
    """
    c = _Call(inputs, ids, lengths, weights, gru, pool, cohort)
    width = c.directions * c.hidden
    output = inputs.new_empty(*c.front, *((c.sequences, c.length, width) if pool == OUTPUT else (0,)))
    pooled = inputs.new_empty(*c.front, c.sequences, width)
    size = _work_size(c.sequences, c.length, c.hidden, pool, inputs.dtype)
    work = inputs.new_empty(*c.front, c.directions, size if keep else 0)
    c.run(False, [output.data_ptr(), pooled.data_ptr(), work.data_ptr(), *[0] * 11])
    return output, pooled, work


def backward(
    grad_output: Tensor | None,
    grad_pooled: Tensor | None,
    work: Tensor,
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: Sequence[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    """Runs the backward pass; shapes as in ``forward``.

    Returns:
        The gradients of the weights in their order, then, with ``input_grad``, of ``inputs``.
    """
    c = _Call(inputs, ids, lengths, weights, gru, pool, cohort)
    grad_output = None if grad_output is None or pool != OUTPUT else grad_output.contiguous()
    grad_pooled = None if grad_pooled is None else grad_pooled.contiguous()
    work = work.contiguous()
    chunks = native.chunks(c.sequences)
    copies = c.directions * (1 if ids is None else chunks)
    several = () if chunks == 1 else (chunks,)
    grads = [torch.empty((*several, *w.shape), dtype=w.dtype) for w in weights]
    if input_grad:
        grads.append(torch.empty((copies, *inputs.shape), dtype=inputs.dtype))
        unwritten = copies if chunks > 1 else 1  # one chunk writes the same rows of all copies
        grads[-1][:unwritten].zero_()
    pointers = [0, 0, work.data_ptr(), native.address(grad_output), native.address(grad_pooled)]
    pointers.append(grads[-1].data_ptr() if input_grad else 0)
    pointers += [t.data_ptr() for t in grads[: len(weights)]] + [0] * (8 - len(weights))
    c.run(True, pointers)
    if chunks == 1:
        return [*grads[: len(weights)], *(t[0] for t in grads[len(weights) :])]
    return [t[0] for t in grads]


# The two passes as custom operations, for torch.func (vmap above all) and for tracing.


@torch.library.custom_op("fedkeep::recurrent", mutates_args=(), device_types="cpu")
def recurrent(
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass; see ``forward``."""
    return forward(inputs, ids, lengths, weights, gru, pool, cohort)


@torch.library.custom_op("fedkeep::recurrent_backward", mutates_args=(), device_types="cpu")
def recurrent_backward(
    grad_output: Tensor | None,
    grad_pooled: Tensor | None,
    work: Tensor,
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    """The backward pass; see ``backward``."""
    return backward(
        grad_output, grad_pooled, work, inputs, ids, lengths, weights, gru, pool, cohort, input_grad
    )


@recurrent.register_fake
def _(
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    front, (sequences, length) = _front(inputs, ids, cohort)
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    width = directions * hidden
    size = _work_size(sequences, length, hidden, pool, inputs.dtype)
    return (
        inputs.new_empty(*front, *((sequences, length, width) if pool == OUTPUT else (0,))),
        inputs.new_empty(*front, sequences, width),
        inputs.new_empty(*front, directions, size),
    )


@recurrent_backward.register_fake
def _(
    grad_output: Tensor | None,
    grad_pooled: Tensor | None,
    work: Tensor,
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
    input_grad: bool,
) -> list[Tensor]:
    return [w.new_empty(w.shape) for w in weights] + [inputs.new_empty(inputs.shape)] * input_grad


@recurrent.register_vmap
def _(
    info: Any,
    dims: tuple[Any, ...],
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    n = info.batch_size
    inputs, ids, lengths = (
        stacked(t, d, n, cohort) for t, d in zip((inputs, ids, lengths), dims[:3], strict=True)
    )
    weights = [stacked(w, d, n, cohort) for w, d in zip(weights, dims[3], strict=True)]
    found = recurrent(inputs, ids, lengths, weights, gru, pool, True)
    return tuple(unstacked(found, n, cohort)), (0, 0, 0)


@recurrent_backward.register_vmap
def _(
    info: Any,
    dims: tuple[Any, ...],
    grad_output: Tensor | None,
    grad_pooled: Tensor | None,
    work: Tensor,
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    cohort: bool,
    input_grad: bool,
) -> tuple[list[Tensor], list[int]]:
    n = info.batch_size
    single = (grad_output, grad_pooled, work, inputs, ids, lengths)
    tensors = [stacked(t, d, n, cohort) for t, d in zip(single, dims[:6], strict=True)]
    weights = [stacked(w, d, n, cohort) for w, d in zip(weights, dims[6], strict=True)]
    found = recurrent_backward(*tensors, weights, gru, pool, True, input_grad)
    return unstacked(found, n, cohort), [0] * len(found)


def _keep(ctx: Any, work: Tensor, arguments: tuple[Any, ...]) -> None:
    inputs, ids, lengths, ctx.gru, ctx.pool, ctx.cohort, *weights = arguments
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(work)
    ctx.save_for_backward(work, inputs, ids, lengths, *weights)


def _gradients(ctx: Any, grad_output: Tensor | None, grad_pooled: Tensor | None) -> tuple[Tensor | None, ...]:
    work, inputs, ids, lengths, *weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad[0]
    given = (grad_output if ctx.pool == OUTPUT else None, grad_pooled, work, inputs, ids, lengths)
    how = (ctx.gru, ctx.pool, ctx.cohort, wanted)
    if torch.is_grad_enabled():  # the gradient may be differentiated again
        found = list(Gradient.apply(*given, *how, *weights))  # type: ignore[no-untyped-call]
    else:
        found = _backward([*given, weights, *how])
    grad_inputs = found.pop() if wanted else None
    return grad_inputs, None, None, None, None, None, *found


def _backward(arguments: list[Any]) -> list[Tensor]:
    return (recurrent_backward if traced() else backward)(*arguments)


class Gradient(torch.autograd.Function):
    """``backward``, differentiable; the arguments are the same, weights last."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        """See ``backward``."""
        given, how, weights = arguments[:6], arguments[6:10], arguments[10:]
        return tuple(_backward([*given, list(weights), *how]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the derivative reads."""
        grad_output, grad_pooled, _, *given = inputs[:6]
        ctx.how = inputs[6:10]
        ctx.save_for_backward(grad_output, grad_pooled, *given, *inputs[10:])

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates the layer in PyTorch alone, twice."""
        *given, table, ids, lengths = ctx.saved_tensors[:5]
        gru, pool, cohort, input_grad = ctx.how
        own = [*ctx.saved_tensors[5:], *([table] if input_grad else [])]
        some = [g is not None for g in given]

        def layer(ids: Tensor | None, lengths: Tensor, table: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
            weights = list(own[:-1] if input_grad else own)
            results = pure.run(own[-1] if input_grad else table, ids, lengths, weights, gru, pool, True)
            return tuple(r for r, is_given in zip(results, some, strict=True) if is_given)

        dims = (None if ids is None else 0, *[0] * (2 + len(own)))
        run = torch.func.vmap(layer, dims) if cohort else layer
        there = [g for g in given if g is not None]
        found = list(second(lambda *own: run(ids, lengths, table, *own), own, there, wanted))
        of_weights = [found.pop(0) for _ in ctx.saved_tensors[5:]]
        of_inputs = found.pop(0) if input_grad else None
        of_grads = [found.pop(0) if is_given else None for is_given in some]
        return (*of_grads, None, of_inputs, *[None] * 6, *of_weights)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n, (gru, pool, cohort, input_grad) = info.batch_size, arguments[6:10]
        tensors = zip((*arguments[:6], *arguments[10:]), (*dims[:6], *dims[10:]), strict=True)
        own = [stacked(t, d, n, cohort) for t, d in tensors]
        found = Gradient.apply(*own[:6], gru, pool, True, input_grad, *own[6:])  # type: ignore[no-untyped-call]
        return tuple(unstacked(found, n, cohort)), (0,) * len(found)


class Eager(torch.autograd.Function):
    """The plain way, with a fraction of the dispatch cost of the ways that torch.func understands."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See ``forward``."""
        inputs, ids, lengths, gru, pool, cohort, *weights = arguments
        found = forward(inputs, ids, lengths, weights, gru, pool, cohort)
        _keep(ctx, found[2], arguments)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, *grads[:2])


class Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile, on the custom operations; a cohort's vmap alone is the plain way."""

    @staticmethod
    def forward(
        inputs: Tensor,
        ids: Tensor | None,
        lengths: Tensor,
        gru: bool,
        pool: int,
        cohort: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``forward``."""
        found: tuple[Tensor, Tensor, Tensor] = recurrent(
            inputs, ids, lengths, list(weights), gru, pool, cohort
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keeps what the backward pass reads."""
        _keep(ctx, output[2], inputs)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_pooled: Tensor | None, _: Any
    ) -> tuple[Tensor | None, ...]:
        """See ``backward``."""
        return _gradients(ctx, grad_output, grad_pooled)

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        inputs: Tensor,
        ids: Tensor | None,
        lengths: Tensor,
        gru: bool,
        pool: int,
        cohort: bool,
        *weights: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n = info.batch_size
        tensors = zip((inputs, ids, lengths, *weights), (*dims[:3], *dims[6:]), strict=True)
        inputs, ids, lengths, *several = (stacked(t, d, n, cohort) for t, d in tensors)
        found = _differentiable(inputs, ids, lengths, gru, pool, True, *several)
        return tuple(unstacked(found, n, cohort)), (0, 0, 0)


def _differentiable(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``forward``; the arguments are those of ``Transformed.forward``."""
    found: tuple[Tensor, Tensor, Tensor] = (Transformed if traced() else Eager).apply(*arguments)  # type: ignore[no-untyped-call]
    return found


def run(
    inputs: Tensor, ids: Tensor | None, lengths: Tensor, weights: list[Tensor], gru: bool, pool: int
) -> tuple[Tensor, Tensor]:
    """Returns the first two results of ``forward``, differentiable, under vmap of a whole cohort."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (inputs, *weights))
    if not traced() and not differentiable:
        return forward(inputs, ids, lengths, weights, gru, pool, cohort=False, keep=False)[:2]
    return _differentiable(inputs, ids, lengths, gru, pool, False, *weights)[:2]


def traced() -> bool:
    """Whether values are not plain tensors now: inside torch.func or torch.compile."""
    return functorch_active() or torch.compiler.is_compiling()


def functorch_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def usable(inputs: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels can take these tensors: on the CPU, all float32 or all float64, and a library in use."""
    dtype = inputs.dtype
    return (
        native.available()
        and dtype in (torch.float32, torch.float64)
        and inputs.device.type == "cpu"
        and all(w.dtype == dtype and w.device.type == "cpu" for w in weights)
    )
