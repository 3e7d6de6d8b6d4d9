"""What server and device must have the same, part by part, so that a difference can be named before the first order."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import fedkeep
from fedkeep.core.describe import describe
from fedkeep.core.describe import digest as tensors_digest
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.engines.first_values import declared
from fedkeep.methods import Method
from fedkeep.nn.accelerate import swaps_of


@cache
def code() -> str:
    """Return fedkeep's version and the SHA-256 of the Python files of the package that runs."""
    root, found = Path(fedkeep.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()}|{len(content)}|".encode() + content)
    return f"{fedkeep.__version__} {found.hexdigest()}"


def parts(
    module: nn.Module, method: Method, initial: Mapping[str, Any], encoding: Mapping[str, Any]
) -> dict[str, str]:
    """Return a digest of each part of an experiment; no seed and no data is in them.

    Args:
        module: the model as the method trains it (``Method.made_for``).
        method: the method.
        initial: the module's first values.
        encoding: of the data, as JSON.
    """
    values = dict(initial)
    halves = method.split.halves(module)
    uploads = {**halves.federated(values), **declared(method, Net(module))}
    return {
        "code": code(),
        "own code": sha256_of(own_code(module, method)),
        "method": sha256_of(describe(method)),
        "layers": sha256_of(repr(module)),
        "accelerated layers": sha256_of(swaps_of(module).swapped),
        "initial values": tensors_digest(values),
        "frozen values": halves.frozen_digest(values),
        "split": sha256_of([halves.private_names, halves.federated_names, halves.frozen_names]),
        "uploads": sha256_of(_shapes(uploads)),
        "encoding": sha256_of(encoding),
    }


def own_code(module: nn.Module, method: Method) -> dict[str, str]:
    """Return, by module, the SHA-256 of the files that the model's classes and the method's functions are in.

    Not of fedkeep's, torch's and Python's own, nor of what these files import.
    """
    names = {type(layer).__module__ for layer in module.modules()} | set(_modules_of(method))
    found = {}
    for name in sorted(names - {"__main__"}):  # functions of the script that runs are refused on devices
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        top = name.partition(".")[0]
        if file.endswith(".py") and top not in {"fedkeep", "torch"} and top not in sys.stdlib_module_names:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            found[name] = sha256_of(lines)
    return found


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the names of the modules of all classes and functions in a value."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _modules_of(each)
    elif isinstance(value, functools.partial):
        yield from _modules_of([value.func, value.args, value.keywords])
    elif isinstance(value, type) or inspect.isroutine(value):
        yield str(value.__module__)
    elif dataclasses.is_dataclass(value):
        yield type(value).__module__
        yield from _modules_of([getattr(value, field.name) for field in dataclasses.fields(value)])


def sha256_of(value: Any) -> str:
    """Return the SHA-256 of plain data: of its JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest(parts: Mapping[str, str]) -> str:
    """Return the one digest of all parts."""
    return sha256_of(dict(parts))


def differing(wanted: Mapping[str, str], got: Mapping[str, str]) -> str:
    """Return which parts differ, or an empty text: ``"method, split"``."""
    return ", ".join(name for name in dict.fromkeys([*wanted, *got]) if wanted.get(name) != got.get(name))


def _shapes(values: Params) -> list[list[object]]:
    return [[name, str(value.dtype), list(value.shape)] for name, value in sorted(values.items())]
