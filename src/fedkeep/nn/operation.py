"""A layer with native passes as one operation of PyTorch: autograd (any number of times), torch.func, tracing.

``torch.func.vmap`` over clients is one call of the native passes, which take a cohort.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

Tensors = Sequence[Any]
"""Each a tensor, or None for one that isn't there."""
How = Sequence[int]


def traced() -> bool:
    """Whether values are not plain tensors now: inside torch.func or torch.compile."""
    return functorch_active() or torch.compiler.is_compiling()


def functorch_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Operation(ABC):
    """A layer's passes on the CPU; calling it runs the layer.

    Throughout, ``tensors`` are the layer's parameters, its input, and what has no gradient (lengths, say); ``how``
    are its settings. With ``cohort`` every tensor has a leading axis of clients; one that all share may be expanded.

    Attributes:
        name: of the custom operations ``fedkeep::NAME`` and ``fedkeep::NAME_backward``, for torch.func (vmap above
            all) and for tracing.
        others: how many of ``tensors`` have no gradient, and are the last.
    """

    name: ClassVar[str]
    others: ClassVar[int] = 0

    def __init__(self) -> None:
        self.custom, self.custom_backward = _custom(self)

    def keeps_result(self, how: How) -> bool:
        """Tell whether the backward pass reads the result; else the forward pass gives one tensor more, for it."""
        return False

    @abstractmethod
    def forward(self, tensors: Tensors, how: How, cohort: bool, keep: bool = True) -> list[Tensor]:
        """Run the forward pass.

        Returns:
            The results; last what the backward pass reads, which may be empty unless ``keep``.
        """

    @abstractmethod
    def backward(
        self, grads: Tensors, kept: Tensor, tensors: Tensors, how: How, cohort: bool, input_grad: bool
    ) -> list[Tensor]:
        """Run the backward pass.

        Args:
            grads: of the results; None for zeros, though not all are None.
            kept: the last tensor that ``forward`` gave.
            tensors: as ``forward`` had them; ``how`` and ``cohort`` too.
            input_grad: whether the gradient of the input is wanted.

        Returns:
            The gradients of the parameters, and of the input where it is wanted.
        """

    @abstractmethod
    def empty(self, tensors: Tensors, how: How, cohort: bool) -> list[Tensor]:
        """Return what ``forward`` returns with any values."""

    @abstractmethod
    def empty_gradients(self, tensors: Tensors, how: How, cohort: bool, input_grad: bool) -> list[Tensor]:
        """Return what ``backward`` returns with any values."""

    @abstractmethod
    def pure(self, tensors: Tensors, how: How) -> list[Tensor]:
        """Return the results by PyTorch's operations alone, which torch.func can transform."""

    def __call__(self, how: How, *tensors: Tensor | None) -> Sequence[Tensor]:
        """Run the layer, differentiable, under vmap for a whole cohort; the results are first in what is returned."""
        wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if wanted or traced():
            return differentiable(self, how, False, tensors)
        return self.forward(tensors, how, False, keep=False)


def differentiable(layer: Operation, how: How, cohort: bool, tensors: Tensors) -> tuple[Tensor, ...]:
    """What ``Operation.forward`` gives, differentiable."""
    way = Transformed if traced() else Eager
    found: tuple[Tensor, ...] = way.apply(layer, how, cohort, *tensors)  # type: ignore[no-untyped-call]
    return found


def _keep(ctx: Any, arguments: tuple[Any, ...], found: Sequence[Tensor]) -> None:
    ctx.layer, ctx.how, ctx.cohort, *tensors = arguments
    ctx.set_materialize_grads(False)
    if not ctx.layer.keeps_result(ctx.how):
        ctx.mark_non_differentiable(found[-1])
    ctx.save_for_backward(found[-1], *tensors)


def _gradients(ctx: Any, grads: Tensors) -> tuple[Tensor | None, ...]:
    kept, *tensors = ctx.saved_tensors
    none = (None, None, None)
    grads = grads if ctx.layer.keeps_result(ctx.how) else grads[:-1]
    if all(g is None for g in grads):
        return (*none, *[None] * len(tensors))
    place = len(tensors) - ctx.layer.others - 1
    input_grad = ctx.needs_input_grad[3 + place]

    def run(*grads: Tensor | None) -> Sequence[Tensor]:
        if torch.is_grad_enabled():  # the gradient may be differentiated again
            how = (ctx.layer, ctx.how, ctx.cohort, input_grad, len(grads))
            found: tuple[Tensor, ...] = Gradient.apply(*how, kept, *grads, *tensors)  # type: ignore[no-untyped-call]
            return found
        return _backward(ctx.layer, grads, kept, tensors, ctx.how, ctx.cohort, input_grad)

    found = one_by_one(run, grads)
    return (*none, *found, *[None] * (len(tensors) - len(found)))


def one_by_one(run: Callable[..., Sequence[Tensor]], grads: Tensors) -> Sequence[Tensor]:
    """Return what ``run`` makes of gradients; of those of ``is_grads_batched``, which lie nowhere, of one at a time."""
    batched = [g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads]
    if not any(batched):
        return run(*grads)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    whole = [torch._remove_batch_dim(g, level, 0, 0) if b else g for g, b in zip(grads, batched, strict=True)]
    count = len(whole[batched.index(True)])
    each = [run(*(g[k] if b else g for g, b in zip(whole, batched, strict=True))) for k in range(count)]
    return [torch._add_batch_dim(torch.stack(parts), 0, level) for parts in zip(*each, strict=True)]


def _backward(layer: Operation, *arguments: Any) -> list[Tensor]:
    found: list[Tensor] = (layer.custom_backward if traced() else layer.backward)(*arguments)
    return found


class Eager(torch.autograd.Function):
    """The plain way, with a fraction of the dispatch cost of the ways that torch.func understands."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """See ``Operation.forward``; the arguments are those of ``differentiable``, the tensors one by one."""
        layer, how, cohort, *tensors = arguments
        found = tuple(layer.forward(tensors, how, cohort))
        _keep(ctx, arguments, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """See ``Operation.backward``."""
        return _gradients(ctx, grads)


class Transformed(torch.autograd.Function):
    """The same for torch.func and torch.compile, on the custom operations; a cohort's vmap alone is the plain way."""

    @staticmethod
    def forward(layer: Operation, how: How, cohort: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """See ``Operation.forward``."""
        return tuple(layer.custom(tensors, how, cohort))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the backward pass reads."""
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """See ``Operation.backward``."""
        return _gradients(ctx, grads)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], layer: Operation, how: How, cohort: bool, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n = info.batch_size
        several = _stacked(tensors, dims[3:], n, cohort)
        found = unstacked(differentiable(layer, how, True, several), n, cohort)
        return tuple(found), (0,) * len(found)


class Gradient(torch.autograd.Function):
    """The backward pass, differentiable: its derivative is PyTorch's, of the pure layer."""

    @staticmethod
    def forward(
        layer: Operation,
        how: How,
        cohort: bool,
        input_grad: bool,
        results: int,
        kept: Tensor,
        *both: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """See ``Operation.backward``; ``both`` are the gradients of so many results, and the layer's tensors."""
        grads, tensors = list(both[:results]), list(both[results:])
        return tuple(_backward(layer, grads, kept, tensors, how, cohort, input_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps what the derivative reads."""
        ctx.layer, ctx.how, ctx.cohort, _, ctx.results, _, *both = inputs
        ctx.save_for_backward(*both)
        ctx.found = len(output)

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiates the pure layer twice."""
        grads, tensors = ctx.saved_tensors[: ctx.results], ctx.saved_tensors[ctx.results :]
        given = [g is not None for g in grads]

        def layer(*tensors: Tensor | None) -> tuple[Tensor, ...]:
            results = ctx.layer.pure(tensors, ctx.how)
            return tuple(r for r, is_given in zip(results, given, strict=True) if is_given)

        dims = tuple(None if t is None else 0 for t in tensors)
        run = torch.func.vmap(layer, dims) if ctx.cohort else layer
        own, rest = tensors[: ctx.found], tensors[ctx.found :]
        there = [g for g in grads if g is not None]
        found = second(lambda *own: run(*own, *rest), own, there, wanted)
        of_own, of_there = found[: ctx.found], iter(found[ctx.found :])
        of_grads = [next(of_there) if is_given else None for is_given in given]
        return (*[None] * 6, *of_grads, *of_own, *[None] * len(rest))

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        layer: Operation,
        how: How,
        cohort: bool,
        input_grad: bool,
        results: int,
        *tensors: Tensor | None,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Runs what vmap maps over as a cohort."""
        n = info.batch_size
        several = _stacked(tensors, dims[5:], n, cohort)
        found = Gradient.apply(layer, how, True, input_grad, results, *several)  # type: ignore[no-untyped-call]
        return tuple(unstacked(found, n, cohort)), (0,) * len(found)


def _stacked(tensors: Tensors, dims: Sequence[int | None], clients: int, cohort: bool) -> list[Any]:
    return [stacked(t, d, clients, cohort) for t, d in zip(tensors, dims, strict=True)]


def _custom(layer: Operation) -> tuple[Any, Any]:
    """A layer's passes as custom operations."""

    def forward(tensors: Sequence[Tensor | None], how: Sequence[int], cohort: bool) -> list[Tensor]:
        return layer.forward(tensors, how, cohort)

    def backward(
        grads: Sequence[Tensor | None],
        kept: Tensor,
        tensors: Sequence[Tensor | None],
        how: Sequence[int],
        cohort: bool,
        input_grad: bool,
    ) -> list[Tensor]:
        return layer.backward(grads, kept, tensors, how, cohort, input_grad)

    name = f"fedkeep::{layer.name}"
    custom = torch.library.custom_op(name, forward, mutates_args=(), device_types="cpu")
    custom_backward = torch.library.custom_op(
        f"{name}_backward", backward, mutates_args=(), device_types="cpu"
    )
    custom.register_fake(layer.empty)
    custom_backward.register_fake(lambda grads, kept, *others: layer.empty_gradients(*others))
    for operation in (custom, custom_backward):
        operation.register_vmap(partial(_several, operation))
    return custom, custom_backward


def _several(operation: Any, info: Any, dims: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
    """Run what vmap maps over, of a forward or a backward pass, as a cohort."""
    n = info.batch_size
    place = (
        1 if len(arguments) == 3 else 3
    )  # of the settings: behind the tensors, or behind grads, kept and tensors
    given, (how, cohort, *rest) = arguments[:place], arguments[place:]
    several = [
        stacked(t, d, n, cohort) if isinstance(t, Tensor) else _stacked(t, d, n, cohort)
        for t, d in zip(given, dims[:place], strict=True)
    ]
    found = operation(*several, how, True, *rest)
    return unstacked(found, n, cohort), [0] * len(found)


def stacked(tensor: Any, dim: int | None, clients: int, cohort: bool) -> Any:
    """An argument under vmap as one with a client axis in front; an axis that is there already is merged."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1) if cohort else tensor


def per_client(tensor: Tensor, cohort: bool) -> tuple[Tensor, int]:
    """The tensor with each client's values contiguous, and the distance from client to client in elements."""
    if not cohort:
        return tensor.contiguous(), 0
    if tensor.shape[0] and not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def unstacked(tensors: Sequence[Tensor], clients: int, cohort: bool) -> list[Tensor]:
    """Results under vmap with the axis of vmap in front again."""
    return [t.reshape(clients, t.shape[0] // clients, *t.shape[1:]) if cohort else t for t in tensors]


def second(
    layer: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    wanted: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run the backward pass of a layer's backward pass, computed by PyTorch from the layer in plain operations.

    (``once_differentiable`` would not do: ``torch.autograd.grad`` through it finds no way to the inputs, and gives a
    gradient without the second-order part rather than an error.)

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
