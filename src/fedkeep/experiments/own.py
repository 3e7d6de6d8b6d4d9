"""Models and methods of one's own, which a configuration names as ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_type_hints

from fedkeep.core.errors import ConfigError


def is_own(kind: str) -> bool:
    """Tell whether a name is one of a module, not of what fedkeep or a package offers."""
    return ":" in kind


def imported(place: str, kind: str) -> Any:
    """Return what a name ``package.module:name`` stands for.

    Raises:
        ConfigError: it cannot be imported; ``place`` is the key that names it.
    """
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = " Name the folder of the file in PYTHONPATH."
            if not f"{module}.".startswith(f"{error.name}."):
                hint = f" {module} imports it. Install it, or name the folder of its file in PYTHONPATH."
        raise ConfigError(f"{place}: {kind!r} cannot be imported: {error}.{hint}") from error


def says_it_returns(found: Any, kind: type) -> bool:
    """Tell whether something is a function whose annotation says that it returns a kind."""
    if not inspect.isfunction(found):
        return False
    try:
        made = get_type_hints(found).get("return")
    except (NameError, TypeError):  # it names types that are not there when it runs
        return False
    return isinstance(made, type) and issubclass(made, kind)
