"""A copy of a module that is wired to itself: its functions look at the copy, and its tensors have their hooks.

``copy.deepcopy`` copies layers, tensors and bound methods. It hands functions on as they are, so a closure over the
module would go on to compute with the original. And it leaves out hooks on parameters, which change gradients.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from fedkeep.core.buffers import EVERY_MODULES
from fedkeep.core.errors import MethodError

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Attributes of a layer that hold functions by number."""
TENSORS = ("_modules", "_parameters", "_buffers")
"""Attributes of a layer that hold layers and tensors by name."""


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which nothing computes with the original.

    Raises:
        MethodError: something in it can't be copied, and what; or a parameter has a hook that is never called.
    """
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in _made_anew(model)}
    memo |= {id(value): type(value)() for value in _empty(model)}
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise MethodError(
            "The model can't be copied, and fedkeep trains a copy of it{what}: {error}. Set the attribute to None "
            "before, let forward make what it needs, or keep it outside the model.",
            what=_uncopied(model),
            error=error,
        ) from error
    wiring = _Wiring(memo)
    for layer in made.modules():
        for owner, key, value in _functions(layer):
            owner[key] = wiring.of(value)
    for (name, old), new in zip(model.named_parameters(), made.parameters(), strict=True):
        if getattr(old, "_post_accumulate_grad_hooks", None):
            raise MethodError(
                "The parameter {name!r} has a hook for when its gradient has been accumulated, and in fedkeep "
                "gradients are not. Use register_hook, which is given the gradient.",
                name=name,
            )
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(wiring.of(hook))  # type: ignore[no-untyped-call]
    return made


def _made_anew(model: nn.Module) -> Iterator[Tensor]:
    """Yield weights that a hook computes from parameters at each call: ``torch.nn.utils.prune``'s and weight_norm's."""
    for layer in model.modules():
        for hook in layer._forward_pre_hooks.values():
            name = getattr(hook, "_tensor_name", getattr(hook, "name", None))
            if isinstance(name, str) and isinstance(value := vars(layer).get(name), Tensor):
                yield value


def _empty(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Yield the layers' empty dictionaries, a dozen each, which ``copy.deepcopy`` is slow at."""
    for layer in model.modules():
        yield from (v for v in vars(layer).values() if type(v) in (dict, OrderedDict) and not v)


def holds_beside(module: nn.Module) -> bool:
    """Tell whether a layer of the user's holds one of the module's tensors in a list, a closure or the like, too.

    Other tensors that are put in their place are not seen there.
    """
    wiring = _Wiring({id(value): value for value in (*module.parameters(), *module.buffers())})
    return any(
        wiring.known(value)
        for layer in module.modules()
        if not type(layer).__module__.startswith(("torch.", "fedkeep."))
        for name, value in vars(layer).items()
        if name not in EVERY_MODULES
    )


def _functions(layer: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield functions and partial functions of a layer, as ``owner[key]``."""
    places: list[Any] = [vars(layer), *(vars(layer)[name] for name in HOOKS)]
    seen = set[int]()
    while places:
        place = places.pop()
        if id(place) in seen:
            continue
        seen.add(id(place))
        for key, value in list(place.items() if isinstance(place, dict) else enumerate(place)):
            if isinstance(value, FunctionType | functools.partial):
                yield place, key, value
            elif isinstance(value, dict | list) and value and key not in TENSORS:
                places.append(value)


class _Wiring:
    """Functions that look at copies in place of originals.

    Args:
        memo: what ``copy.deepcopy`` has copied, by the original's id.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that looks at the copies; the function itself, if it looks at nothing copied."""
        if isinstance(function, functools.partial):
            return functools.partial(
                self.of(function.func),
                *map(self._seen, function.args),
                **{name: self._seen(value) for name, value in function.keywords.items()},
            )
        if not isinstance(function, FunctionType) or not self._looks(function):
            return function
        if id(function) in self.memo and self.memo[id(function)] is not function:
            made: Callable[..., Any] = self.memo[id(function)]
            return made
        cells = tuple(CellType() for _ in function.__closure__ or ())
        new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        self.memo[id(function)] = new  # it may look at itself
        functools.update_wrapper(new, function, updated=("__dict__",))
        del vars(new)["__wrapped__"]
        new.__defaults__ = tuple(map(self._seen, function.__defaults__)) if function.__defaults__ else None
        new.__kwdefaults__ = {n: self._seen(v) for n, v in (function.__kwdefaults__ or {}).items()} or None
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if _filled(old):
                cell.cell_contents = self._seen(old.cell_contents)
        return new

    def _seen(self, value: Any) -> Any:
        """Return a value as the copy is to see it."""
        if isinstance(value, nn.Module | Tensor):
            return self.memo.get(id(value), value)
        if isinstance(value, FunctionType | functools.partial):
            return self.of(value)
        if getattr(value, "__self__", None) is not None and id(value.__self__) in self.memo:
            return copy.deepcopy(value, self.memo)  # a bound method
        if isinstance(value, dict | list | tuple) and any(map(self.known, _items(value))):
            return copy.deepcopy(value, self.memo)
        return value

    def known(self, value: Any) -> bool:
        """Tell whether a value is one that was copied with the model, or a function that looks at one."""
        if isinstance(value, nn.Module | Tensor):
            return id(value) in self.memo
        if isinstance(value, FunctionType):
            return self._looks(value)
        if isinstance(value, functools.partial):
            return any(map(self.known, (value.func, *value.args, *value.keywords.values())))
        if isinstance(value, dict | list | tuple):
            return any(map(self.known, _items(value)))
        return id(getattr(value, "__self__", None)) in self.memo

    def _looks(self, function: FunctionType, asked: frozenset[int] = frozenset()) -> bool:
        given = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        given += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        asked |= {id(function)}
        return any(
            id(value) not in asked
            and (self._looks(value, asked) if isinstance(value, FunctionType) else self.known(value))
            for value in given
        )


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _uncopied(model: nn.Module) -> str:
    for name, layer in model.named_modules():
        for attribute, value in vars(layer).items():
            if attribute == "_modules":
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - whatever a value of the user raises
                of = f" of the layer {name!r}" if name else ""
                return f"; its attribute {attribute!r}{of} is a {type(value).__name__}"
    return ""
