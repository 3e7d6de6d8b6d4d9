"""Cases by one who had not seen the tool: modules and methods that leak, and harmless ones, each with how it is read.

A case says its name, whether it leaks, what it does, its model, method and data, and how the secret is read off what
leaves. Module-level state (a cache, a mutable default) is emptied by calling ``model`` anew: it is part of the leak.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from fedkeep import methods

GROUPS = ("buffers", "gradients", "losses", "optout", "state", "protocol", "heads")


def cases() -> Iterator[Mapping[str, Any]]:
    """Yield all."""
    for group in GROUPS:
        module = importlib.import_module(f"tests.evidence.blind.{group}")
        yield from (getattr(module, name)() for name in vars(module) if name.startswith("case_"))


def method_of(case: Mapping[str, Any]) -> Any:
    """Return a case's method: of a function, or of a name among ``fedkeep.methods`` with arguments."""
    made = case["method"]
    return getattr(methods, made[0])(*made[1], **made[2]) if isinstance(made, tuple) else made()
