"""What ``torch.func.vmap`` tells and does otherwise than a model that is computed alone.

Tensors that vmap maps over say that they need no gradient: autograd works below it. A model that asks, e.g. to
penalise what is trained, would compute another loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fedkeep.core.padding import LOOKS_UP, looked_up


def _requires_grad(_: object, args: Sequence[Any], __: object) -> bool:
    """Tell whether a tensor requires a gradient, at any level of torch.func or below all of them."""
    value: Tensor = args[0]
    while is_functorch_wrapped_tensor(value):
        if value.requires_grad:
            return True
        value = get_unwrapped(value)
    return value.requires_grad


def _is_leaf(_: object, args: Sequence[Any], __: object) -> bool:
    """Tell whether a tensor is a leaf of autograd's graph, at every level of torch.func and below all of them."""
    value: Tensor = args[0]
    while is_functorch_wrapped_tensor(value):
        if not value.is_leaf:
            return False
        value = get_unwrapped(value)
    return value.is_leaf


ALONE: dict[Callable[..., Any], Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]] = {
    **dict.fromkeys(LOOKS_UP, looked_up),
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
}
"""What vmap answers otherwise, and what computes it as alone; one dict, as every operation is looked for in it."""


class AsAlone(TorchFunctionMode):
    """While it is active, a model under ``torch.func.vmap`` is told what it is told alone.

    No row of padding has a gradient, and tensors say whether they require one.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace lookups and questions, and call everything else."""
        if (alone := ALONE.get(func)) is not None:
            return alone(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
