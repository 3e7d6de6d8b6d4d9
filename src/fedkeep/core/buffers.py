"""What a forward pass may change of its own module: buffers, tables with a bounded norm, and what attributes hold.

Containers, tensors and random generators in attributes can change without being assigned.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.declared import declared
from fedkeep.core.errors import MethodError, SplitError
from fedkeep.core.seeds import others_draw, position

EVERY_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
CONTAINERS = (dict, list, set, deque)
THEIRS = ("torch", "numpy", "fedkeep")
"""Packages whose objects keep what they have in their own ways."""
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
            yield from _with_items(Attribute(vars(layer), name, _joined(prefix, name), value), seen)


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

    def positions(self) -> Mapping[str, bytes]:
        """Return how far each generator has come."""
        return {
            n: v.get_state().numpy().tobytes() if isinstance(v, torch.Generator) else pickle.dumps(v)
            for n, v in self.generators.items()
        }


class TensorPlace(NamedTuple):
    """Where a tensor stands in a module.

    Attributes:
        name: its name in the module.
        tensors: its layer's buffers or parameters.
        leaf: its name among these.
    """

    name: str
    tensors: dict[str, Any]
    leaf: str

    @property
    def now(self) -> Tensor | None:
        """What stands there."""
        return self.tensors.get(self.leaf)

    def check(self, value: Tensor, given: Tensor | None) -> None:
        """Raise MethodError unless what ``forward`` gives a buffer that training updates has the buffer's shape."""
        if given is None or given.shape != value.shape:
            other = None if given is None else tuple(given.shape)
            raise MethodError(
                "forward gives the buffer {buffer!r}, which training updates, another shape: {got} in place "
                "of {wanted}.",
                buffer=self.name,
                got=other,
                wanted=tuple(value.shape),
            )


Layers = Sequence[tuple[str, nn.Module]]
"""Layers by name."""


def with_buffers(module: nn.Module) -> Layers:
    """Return the layers that have buffers of their own, by name."""
    return [
        (n, layer) for n, layer in module.named_modules() if layer._buffers and type(layer._buffers) is dict
    ]


def with_attributes(module: nn.Module) -> Layers:
    """Return what may assign attributes in ``forward``: of PyTorch's and fedkeep's layers those alone with caches."""
    theirs = ("torch.nn.", "fedkeep.")
    return [
        (n, m)
        for n, m in module.named_modules()
        if m._non_persistent_buffers_set or not type(m).__module__.startswith(theirs)
    ]


def buffers_of(layers: Layers) -> list[TensorPlace]:
    """Return where the buffers of layers stand, also those that are None as yet."""
    return [
        TensorPlace(_joined(n, leaf), layer._buffers, leaf) for n, layer in layers for leaf in layer._buffers
    ]


def written(module: nn.Module, layers: Layers, first: Mapping[str, str]) -> dict[str, TensorPlace]:
    """Return what a forward pass may write into in evaluation too, by its (first) name.

    These are parameters of layers with ``max_norm``, which renormalise the rows that they look up; and buffers that
    are declared as updated.

    Args:
        module: the model.
        layers: those of it that have buffers.
        first: the first names of tensors that stand in several places.
    """
    found: list[TensorPlace] = []
    buffers = {place.name: place for place in buffers_of(layers)}
    for prefix, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None:
            own = [leaf for leaf, value in layer._parameters.items() if value is not None]
            found += [TensorPlace(_joined(prefix, leaf), layer._parameters, leaf) for leaf in own]
        names = [_joined(prefix, name) for name in declared(layer).updated_buffers]
        found += [buffers[name] for name in names if name in buffers]
    return {first.get(place.name, place.name): place for place in found}


def is_batched(value: Tensor | None) -> bool:
    """Tell whether a tensor is of several clients or examples: what ``torch.func.vmap`` maps over."""
    return value is not None and torch._C._functorch.is_batchedtensor(value)


class Still:
    """A module as it is, and afterwards again: a context around what runs it for a client.

    What ``forward`` assigns to a buffer or to another attribute, e.g. a counter, would go on to the next client, and so
    would what it changes in a list or a dict. Buffers that are not persistent may be assigned, as caches are that grow.
    Errors are layers with parameters that ``forward`` makes, and numbers drawn from a generator of the module's own.

    Args:
        modules: those that may assign attributes.
        layers: those with buffers.
        remembered: what they have from the start that may change unassigned.
        who: who trains, for messages; then a persistent buffer that is assigned, and any tensor that is written in
            place, is an error. None: nobody.
        draws: whether drawing from ``random`` or ``numpy.random`` is an error.
        moved: the buffers that are trained, which may be written.
    """

    def __init__(
        self,
        modules: Layers,
        layers: Layers,
        remembered: Remembered,
        who: object = None,
        draws: bool = False,
        moved: Collection[str] = (),
    ) -> None:
        self.modules, self.layers, self.remembered = modules, layers, remembered
        self.who, self.draws, self.moved = who, draws, moved

    def __enter__(self) -> Self:
        self.before = [dict(layer._buffers) for _, layer in self.layers]
        self.attributes = [vars(module).copy() for _, module in self.modules]
        self.made = [(module._modules.copy(), set(module._parameters)) for _, module in self.modules]
        self.contents, self.positions = self.remembered.contents(), self.remembered.positions()
        if self.who is not None:
            self.versions = [_versions(own) for own in self.before]
            self.plain = _versions(self.remembered.tensors)
        self.place = position() if self.draws else ()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        changed = [] if self.who is None else self._written()
        made = self._unmade()
        for (_, module), attributes in zip(self.modules, self.attributes, strict=True):
            if not same(vars(module), attributes):
                for name in vars(module).keys() - EVERY_MODULES - attributes.keys():
                    del vars(module)[name]
                vars(module).update({n: v for n, v in attributes.items() if n not in EVERY_MODULES})
        for container, before in zip(self.remembered.containers, self.contents, strict=True):
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(before)
        for (prefix, layer), before in zip(self.layers, self.before, strict=True):
            now, passing = layer._buffers, layer._non_persistent_buffers_set
            if same(now, before):
                continue
            assigned = [leaf for leaf in now.keys() | before.keys() if now.get(leaf) is not before.get(leaf)]
            now.clear()
            now.update(before)
            changed += [(_joined(prefix, leaf), True) for leaf in assigned if leaf not in passing]
        if kind is not None:
            return
        who = self.who or "The model"
        if made:
            raise MethodError(
                "{who}: forward made {layer!r}, which has parameters: they would be neither trained nor "
                "sent. Make it in __init__, for instance by running the model once on an example before it "
                "is given to fedkeep.",
                who=who,
                layer=made[0],
            )
        if changed and self.who is not None:
            name, persistent = min(changed)
            raise SplitError(
                "{who}: {why}", who=who, why=frozen_changed(name) if persistent else passing_changed(name)
            )
        moved = [n for n, now in self.remembered.positions().items() if now != self.positions[n]]
        if moved:
            raise MethodError(
                "{who}: forward drew random numbers from {generator!r}, a generator of the module's own, "
                "which goes on to the next client. Draw from torch's own in training, e.g. torch.rand(()); "
                "the seed governs it.",
                who=who,
                generator=moved[0],
            )
        if self.draws and position() != self.place and not others_draw():
            raise MethodError(
                "{who}: the model or its loss drew random numbers from random or numpy.random, which the "
                "run's seed does not govern. Draw from torch alone, e.g. torch.rand(()).",
                who=who,
            )

    def _unmade(self) -> list[str]:
        """Take away layers and parameters that were made meanwhile; return the names of those with parameters."""
        found = []
        for (prefix, module), (layers, parameters) in zip(self.modules, self.made, strict=True):
            if module._parameters.keys() != parameters:
                new = module._parameters.keys() - parameters
                found += [_joined(prefix, leaf) for leaf in new]
                for leaf in new:
                    del module._parameters[leaf]
            if not same(module._modules, layers):
                new_layers = ((n, v) for n, v in module._modules.items() if v and v is not layers.get(n))
                found += [_joined(prefix, n) for n, v in new_layers if any(True for _ in v.parameters())]
                module._modules.clear()
                module._modules.update(layers)
        return found

    def _written(self) -> list[tuple[str, bool]]:
        """Return the tensors that were written in place, and whether they are persistent buffers."""
        plain, now = self.remembered.tensors, _versions(self.remembered.tensors)
        return [(n, False) for n, one, other in zip(plain, now, self.plain, strict=True) if one != other] + [
            (_joined(prefix, leaf), leaf not in layer._non_persistent_buffers_set)
            for (prefix, layer), before, versions in zip(self.layers, self.before, self.versions, strict=True)
            if (now := _versions(before)) != versions
            for leaf, one, other in zip(before, now, versions, strict=True)
            if one != other and _joined(prefix, leaf) not in self.moved
        ]


class Veil:
    """A context that takes back what a module's functions write meanwhile beside its parameters and buffers.

    That is what they assign to attributes of any layer that is none of fedkeep's, and what changes in containers, arrays, tensors, closures and
    objects of the user's own there, also in those that ``forward`` has made itself. So nobody sees it afterwards.

    Args:
        module: the model.
        names: its tensors that training may change; these stay as they become.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self.module, self.names = module, names

    def __enter__(self) -> Self:
        every = self.module.named_modules()
        layers = [(n, layer) for n, layer in every if not type(layer).__module__.startswith("fedkeep.")]
        self.still = Still(layers, with_buffers(self.module), Remembered(()))
        self.still.__enter__()
        self.contents: list[tuple[Any, Any]] = []
        self.values: list[tuple[Any, Any]] = []
        buffers = [v for n, v in self.module.named_buffers() if n not in self.names]
        own = [v for _, layer in layers for n, v in vars(layer).items() if n not in EVERY_MODULES]
        for value in _reached([*own, *buffers]):
            if isinstance(value, Tensor):
                if value.layout is torch.strided and not is_batched(value):
                    self.values.append((value, value.detach().clone()))
            elif isinstance(value, np.ndarray):
                self.values.append((value, value.copy()))
            elif isinstance(value, CellType):
                with suppress(ValueError):  # it is empty
                    self.contents.append((value, value.cell_contents))
            else:
                self.contents.append((value, value.copy()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.still.__exit__(kind, *error)
        for place, before in self.contents:
            if isinstance(place, CellType):
                place.cell_contents = before
            elif isinstance(place, dict):
                if place.keys() != before.keys() or not same(place, before):
                    place.clear()
                    place.update(before)
            else:
                place.clear()
                (place.extend if isinstance(place, list | deque) else place.update)(before)
        with torch.no_grad():
            for value, before in self.values:
                if isinstance(value, Tensor):
                    alike = (value == before) | ((value != value) & (before != before))  # NaN too
                    if not bool(alike.all()):
                        value.copy_(before)
                elif not np.array_equal(value, before):
                    value[...] = before


def _reached(values: Iterable[Any]) -> Iterator[Any]:
    """Yield containers, arrays, tensors, cells of closures and dicts of the user's own objects, from these on."""
    left, seen = list(values), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, nn.Module | nn.Parameter):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            yield value
        elif isinstance(value, CONTAINERS):
            yield value
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, tuple | frozenset):
            left += value
        elif isinstance(value, CellType):
            with suppress(ValueError):  # it is empty
                left.append(value.cell_contents)
            yield value
        elif isinstance(value, functools.partial):
            left += [value.func, value.args, value.keywords]
        elif isinstance(value, MethodType):
            left += [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            left += [*(value.__closure__ or ()), vars(value)]
        elif _is_the_users(value):
            left.append(vars(value))


def _is_the_users(value: object) -> bool:
    """Tell whether something is an object of a class of the user's, with attributes of its own."""
    room = type(value).__module__.partition(".")[0]
    theirs = room in THEIRS or room in sys.stdlib_module_names
    return isinstance(value, SimpleNamespace) or (hasattr(value, "__dict__") and not theirs)


def frozen_changed(name: str) -> str:
    """Say that training changed a frozen tensor, and what to do."""
    return (
        f"training changed {name!r}, which is frozen: it would be another on every client. If a pattern of frozen "
        f"names it, narrow the pattern, or hold its layer in eval(). If forward is to change it, as a slow copy or a "
        f"queue, let it be a buffer (register_buffer; a parameter without gradient is none), and end the __init__ of its "
        f"module with fedkeep.declare(self, updated_buffers=[{name.rpartition('.')[2]!r}]), with all others that forward "
        f"changes; then it is federated, or private where a pattern says so."
    )


def passing_changed(name: str) -> str:
    """Say that training wrote into a tensor that is no persistent buffer, and what to do."""
    return (
        f"training wrote into {name!r}, which is no persistent buffer: it would go on to the next client. Make it one "
        f"by register_buffer, and end the __init__ of its module with fedkeep.declare(self, updated_buffers=[its name]); "
        f"or assign another tensor, if it is a cache: each client starts with the first one."
    )


def _joined(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _versions(tensors: Mapping[str, Tensor | None]) -> list[int]:
    """Return how often each was written in place."""
    try:
        return [0 if value is None else value._version for value in tensors.values()]
    except RuntimeError:  # made in inference mode, they do not tell
        return [0] * len(tensors)


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two dicts hold the very same things, in the same order."""
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))
