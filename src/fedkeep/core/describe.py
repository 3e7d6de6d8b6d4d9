"""Descriptions of values as plain data: for a run's file, and to tell whether settings are the same, or of a kind."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import reprlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, FedkeepError


def describe(value: Any, at: str = "") -> Any:
    """Return ``value`` as JSON-able data: dataclasses by field, functions and classes by name, collections inside.

    What cannot be imported by its name is told apart by the hash of its source, if it is a function of the script that
    runs, or a dataclass.

    Args:
        value: plain values, dataclasses of such, functions importable by name.
        at: where it stands, for messages.

    Raises:
        ConfigError: a lambda, a function that closes over values, or an object that has no description, so that two
            that differ could not be told apart.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _named(type(value), at) | {n: describe(v, f"{at}.{n}" if at else n) for n, v in inside.items()}
    if isinstance(value, Mapping):
        return {str(k): describe(v, f"{at}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((describe(v, at) for v in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [describe(v, f"{at}[{k}]") for k, v in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, functools.partial):
        given = {"args": list(value.args), "keywords": value.keywords}
        return {"partial": describe(value.func, at), **describe(given, at)}
    if isinstance(value, type) or inspect.isroutine(value):
        found = _named(value, at)
        return found["kind"] if len(found) == 1 else found
    raise _undescribed(at, "a {got}", got=type(value).__qualname__)


def _named(value: Any, at: str) -> dict[str, str]:
    """Return the name of a function or class, and the hash of its source where the name is not enough."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__name__)
    kind = name if str(module).partition(".")[0] in ("fedkeep", "builtins") else f"{module}.{name}"
    if _importable(value, module, name) and module != "__main__":
        return {"kind": kind}
    whole = isinstance(value, type) or module == "__main__"
    functions = vars(value).values() if isinstance(value, type) else [value]
    written = [f for f in functions if inspect.isfunction(f) and not _generated(f)]
    closed = [f for f in written if _closes_over_values(f)]
    if "<lambda>" in name or closed or not whole:
        raise _undescribed(at, "the function {name!r}, which cannot be imported by its name", name=name)
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):  # typed in, not read from a file
        source = "".join(repr((f.__code__.co_code, f.__code__.co_names)) for f in written)
    return {"kind": kind, "source_sha256": hashlib.sha256(source.encode()).hexdigest()}


def _importable(value: Any, module: str | None, name: str) -> bool:
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _generated(function: Any) -> bool:
    """Tell whether a method was made by ``dataclass``, not written."""
    return function.__code__.co_filename in ("<string>", dataclasses.__file__, reprlib.__file__)


def _closes_over_values(function: Any) -> bool:
    return any(name != "__class__" for name in function.__code__.co_freevars)


def _undescribed(at: str, what: str, /, **facts: Any) -> ConfigError:
    return ConfigError(
        "{place} is "
        + what
        + ", so a run that is resumed or a device could not tell whether it has the same. Wanted: "
        "plain values, frozen dataclasses of plain values, or functions defined at the top of a module. Put what it "
        "computes into such a function, and its settings into the fields of a frozen dataclass with __call__.",
        place=at or "It",
        **facts,
    )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes, dtypes and values, in the order of names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        hasher.update(f"{name}|{tuple(value.shape)}|{value.dtype}|".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return hasher.hexdigest()


def differences(wanted: Any, got: Any, path: str = "") -> list[str]:
    """Return a line ``path: wanted x, got y`` for every place where two descriptions differ."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        lines = []
        for key in sorted(wanted.keys() | got.keys()):
            lines += differences(wanted.get(key), got.get(key), f"{path}.{key}" if path else str(key))
        return lines
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        pairs = enumerate(zip(wanted, got, strict=True))
        return [line for k, (one, other) in pairs for line in differences(one, other, f"{path}[{k}]")]
    return [] if wanted == got else [f"{path}: {got!r} in the run, {wanted!r} now"]


def check_same(lines: Sequence[str], error: type[FedkeepError], text: str, /, **facts: Any) -> None:
    """Raise ``error`` where there are lines of ``differences``; ``{lines}`` in its text stands for the first of them."""
    if lines:
        raise error(text, lines="\n  ".join(lines[:8]), **facts)


def check_kind(name: str, given: object, kind: type, wanted: str) -> None:
    """Raise ConfigError unless an argument is of a kind, which ``wanted`` says in words."""
    if not isinstance(given, kind):
        raise ConfigError(
            "{name} must be {wanted}; got {got}.{call}",
            name=name,
            wanted=wanted,
            got=textwrap.shorten(repr(given), 80),
            call=_to_call(given, kind),
        )


def _to_call(given: object, kind: type) -> str:
    """Return what to say of a class or a function in place of what it makes."""
    made = issubclass(given, kind) if inspect.isclass(given) else inspect.isfunction(given)
    what = "a class" if inspect.isclass(given) else "a function"
    return f" This is {what}: call it, {getattr(given, '__name__', '')}(...)." if made else ""
