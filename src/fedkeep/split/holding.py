"""A module held still: whatever probes leave in its attributes and buffers is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class Held:
    """A context in which a module can be run, and its attributes set back to what they were at the start.

    Inside, the module is in training mode and holds copies of its tensors that are no parameters; afterwards it has its
    own again. Noticed are attributes and buffers of the module and its submodules, and dicts,
    lists and sets in them; what other objects or a closure remember is not put back.

    Args:
        module: to hold.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> Self:
        self._first = [(part, dict(vars(part))) for part in self.module.modules()]
        self._own = [(part, _contained(first)) for part, first in self._first]
        self._start = self._copies(self._own)
        self.anew()
        return self

    def anew(self) -> None:
        """Give the module the attributes that it had at the start, and training mode."""
        self._put(self._copies(self._start))
        self.module.train()

    def __exit__(self, *error: object) -> None:
        self._put(self._own)

    def _put(self, states: list[tuple[nn.Module, dict[str, Any]]]) -> None:
        """Give every part its attributes, dicts as the objects that they were: a ``Net`` knows where buffers stand."""
        for (part, first), (_, state) in zip(self._first, states, strict=True):
            vars(part).clear()
            for name, value in state.items():
                if type(place := first.get(name)) is dict:
                    place.clear()
                    place.update(value)
                    value = place
                vars(part)[name] = value

    def _copies(
        self, found: list[tuple[nn.Module, dict[str, Any]]]
    ) -> list[tuple[nn.Module, dict[str, Any]]]:
        tensors: dict[int, Tensor] = {}  # what is one tensor stays one
        return [(part, self._copied(value, tensors)) for part, value in found]

    def _copied(self, value: Any, tensors: dict[int, Tensor]) -> Any:
        """Return a copy of containers with copies of tensors, parameters aside."""

        def copied(each: Any) -> Any:
            if not isinstance(each, Tensor) or isinstance(each, nn.Parameter):
                return each
            if id(each) not in tensors:
                tensors[id(each)] = each.detach().clone()
            return tensors[id(each)]

        return _contained(value, copied)


def _contained(value: Any, each: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a copy of containers, with what a function makes of each thing in them; of sets the same things."""
    if type(value) is dict:
        return {key: _contained(v, each) for key, v in value.items()}
    if type(value) is list:
        return [_contained(v, each) for v in value]
    return set(value) if type(value) is set else each(value)
