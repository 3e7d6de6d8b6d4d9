"""Descriptions of values as plain data: for a run's file, and to tell whether settings are the same, or of a kind."""

from __future__ import annotations

import dataclasses
import hashlib
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError


def describe(value: Any) -> Any:
    """Return ``value`` as JSON-able data: dataclasses by field, functions by name, mappings and sequences inside."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__name__)


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
    return [] if wanted == got else [f"{path}: {got!r} in the run, {wanted!r} now"]


def check_kind(name: str, given: object, kind: type, wanted: str) -> None:
    """Raise ConfigError unless an argument is of a kind, which ``wanted`` says in words."""
    if not isinstance(given, kind):
        raise ConfigError(f"{name} must be {wanted}; got {textwrap.shorten(repr(given), 80)}.")


def visible(text: str) -> str:
    r"""Return a text with what doesn't print written out (``\x1b``, ``\u202e``), so that no file drives a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\u00a0" else ascii(c)[1:-1] for c in text)
