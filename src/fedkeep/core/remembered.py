"""What a module can change of its attributes without assigning them: containers, tensors, random generators."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

EVERY_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
CONTAINERS = (dict, list, set, deque)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Attribute(NamedTuple):
    """An attribute of a layer, or an item of a container in one.

    Attributes:
        owner, key: what has it, and as what: ``owner[key]`` replaces it, of a tuple's item the tuple.
        name: in messages, e.g. ``layer.cache['last']``.
        value: it.
    """

    owner: Any
    key: Any
    name: str
    value: Any


def attributes(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[Attribute]:
    """Yield the attributes of layers that not every module has, and what stands in containers there, by name."""
    seen = set[int]()
    for prefix, layer in layers:
        for name, value in [(n, v) for n, v in vars(layer).items() if n not in EVERY_MODULES]:
            full = f"{prefix}.{name}" if prefix else name
            yield from _with_items(Attribute(vars(layer), name, full, value), seen)


def _with_items(found: Attribute, seen: set[int]) -> Iterator[Attribute]:
    yield found
    value = found.value
    if not isinstance(value, (*CONTAINERS, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in items:
        fixed = isinstance(value, set | tuple)
        owner, place = (found.owner, found.key) if fixed else (value, key)
        yield from _with_items(Attribute(owner, place, f"{found.name}[{key!r}]", item), seen)


class Remembered:
    """Containers, tensors and generators that layers have from the start.

    Args:
        layers: by name.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        found = {each.name: each.value for each in attributes(layers)}
        self.containers = list({id(v): v for v in found.values() if isinstance(v, CONTAINERS)}.values())
        self.tensors = {
            n: v for n, v in found.items() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)
        }
        self.generators = {n: v for n, v in found.items() if isinstance(v, GENERATORS)}

    def contents(self) -> list[Any]:
        """Return copies of the containers."""
        return [each.copy() for each in self.containers]

    def put_back(self, contents: list[Any]) -> None:
        """Let the containers have what they had."""
        for each, before in zip(self.containers, contents, strict=True):
            each.clear()
            (each.extend if isinstance(each, list | deque) else each.update)(before)

    def positions(self) -> Mapping[str, bytes]:
        """Return how far each generator has come."""
        return {
            n: v.get_state().numpy().tobytes() if isinstance(v, torch.Generator) else pickle.dumps(v)
            for n, v in self.generators.items()
        }
