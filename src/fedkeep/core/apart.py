"""What a training method adds to a user's model, held apart while the model computes.

A ``Sequential`` calls all that it has, and other models go over ``children()`` or ``parameters()``: they must meet what
is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

ADDED = "_added_by_method"
"""The attribute of a model that names what was added; plain, so that copies and pickles have it too."""


def added_to(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the direct parts and parameters that a method has added to a model."""
    names: tuple[str, ...] = getattr(module, ADDED, ())
    return names


def mark_added(module: nn.Module, names: Sequence[str]) -> None:
    """Note names of direct parts and parameters that a method has added."""
    setattr(module, ADDED, (*added_to(module), *names))


@contextmanager
def without_added(module: nn.Module) -> Iterator[None]:
    """Take what was added out of a module for a while; afterwards it is back in its place, behind the model's own."""
    places: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
    taken = [(place, n, place.pop(n)) for n in added_to(module) for place in places if n in place]
    try:
        yield
    finally:
        for place, name, value in taken:
            place[name] = value
