"""A model in two steps without any change to it: its head, found by name, and the features that the head is given.

Features are caught where the head is called, and changed ones are put in there, in the model's own forward pass; so
what follows the head (a gather, a pool, a log-softmax) is computed as the model computes it. Both work by a pre-hook
that stands there for one pass, also under ``torch.func``'s transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_choice

Pool = Literal["mean", "first", "last"]
FOUND = "_head_found"
"""The attribute of a model that holds its head; plain, so that copies and pickles have it too."""
STEPS = ("features", "head", "rest")
"""What a model with a found head can be asked for beside ``forward``."""
FEATURES = "<features>"
"""Under which the steps ``head`` and ``rest`` are given features; no column has such a name."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where a model ends.

    Attributes:
        layer: the name of its last layer that has parameters, or of a part that ends with it. Before it is found: a
            pattern of names.
        last: whether what it gives is what the model gives. Elsewise the model's forward is computed up to its head
            once more for each change of the features, without gradients.
        pool: what of features of a sequence, (B, T, F), terms that want (B, F) are given: the ``"mean"`` over positions
            that are no padding, or the ``"first"`` or ``"last"`` of these. Of other axes, e.g. an image's, it is the
            mean.
    """

    layer: str
    last: bool = False
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        check_choice("pool must be", self.pool, ("mean", "first", "last"), MethodError)


def found_head(module: nn.Module) -> Head | None:
    """Return the head that was found for a model; None: the model has two steps of its own, or none."""
    head: Head | None = getattr(module, FOUND, None)
    return head


def step_of(module: nn.Module, head: Head, step: str, put: Tensor | None, run: Callable[[], Any]) -> Any:
    """Return what a step of a model gives.

    Args:
        module: the model.
        head: its head.
        step: ``"features"``: what the head is given, features last; ``"head"``: what the head alone makes of these;
            ``"rest"``: what the model gives where its head is given these.
        put: the features of ``head`` and ``rest``.
        run: calls the model.

    Raises:
        MethodError: ``forward`` does not call its head.
    """
    layer = module.get_submodule(head.layer)
    if step == "features":
        return features_last(layer, caught(layer, run, head.layer))
    assert put is not None
    put = put.movedim(-1, 1) if is_convolution(layer) else put
    return layer(put) if step == "head" else put_in(layer, put, run, head.layer)


def features_last(layer: nn.Module, features: Tensor) -> Tensor:
    """Return features with their own axis behind all others; a convolution has it behind the examples'."""
    return features.movedim(1, -1) if is_convolution(layer) else features


def is_convolution(layer: nn.Module) -> bool:
    """Tell whether a layer's features stand on its second axis."""
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)


class _Caught(BaseException):
    """Ends a forward pass where its head is called; no ``except Exception`` of the model's holds it up."""


@contextmanager
def _before(layer: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def caught(layer: nn.Module, run: Callable[[], Any], name: str) -> Tensor:
    """Return what a layer is given where ``run`` calls its model; the call ends there, but while torch exports it.

    An exporter notes which module it is inside, and would not note that an exception leaves one.
    """
    given: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append(the_tensor(args, kwargs, name))
        if not torch.compiler.is_exporting():
            raise _Caught

    with _before(layer, catch), suppress(_Caught):
        run()
    if given:
        return given[0]
    raise MethodError(
        "The model's forward did not call its head, {name!r}. {advice}", name=name, advice=ADVICE
    )


def put_in(layer: nn.Module, features: Tensor, run: Callable[[], Any], name: str) -> Any:
    """Return what ``run`` gives where a layer is given other features; what comes before it has no gradient."""
    graded = torch.is_grad_enabled()

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        torch.set_grad_enabled(graded)
        the_tensor(args, kwargs, name)
        if args:
            return (features, *args[1:]), kwargs
        return args, {n: features if isinstance(v, Tensor) else v for n, v in kwargs.items()}

    with _before(layer, put), torch.set_grad_enabled(False):
        return run()


def the_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Tensor:
    """Return the one tensor that a head is given.

    Raises:
        MethodError: it is given another number of tensors, or something else first.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    if len(tensors) != 1 or (args and tensors[0] is not args[0]):
        raise MethodError(
            "The head {name!r} wants one tensor, its features; it is given {count}. {advice}",
            name=name,
            count=len(tensors),
            advice=ADVICE,
        )
    return tensors[0]


ADVICE = "Say which layer is the head: method.but(head='NAME'), e.g. 'decoder'."
