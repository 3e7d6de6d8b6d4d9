"""The public surface: each name that ``import fedkeep`` offers, with its arguments.

    python -m tests.surface > tests/surface.txt

A line that is gone, or whose arguments are others, is a change that breaks users' programs: it waits for the next major
version. A new line is a new promise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import fedkeep
from fedkeep.experiments.run_settings import RunSettings

SETTINGS = {one.name for one in fields(RunSettings)}


def arguments(found: Any) -> str:
    """Return the arguments of what can be called, without types; one that may be left out ends in ``=``.

    Where they hold all settings of a run, one word stands for these: tests/experiments/test_run_settings.py has them.
    """
    try:
        given = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # a class of C, or one that takes what its parent takes
        return "(...)"
    settings = SETTINGS if {one.name for one in given} >= SETTINGS else set()
    shown = []
    for one in given:
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        if one.kind is one.KEYWORD_ONLY and not any(s.startswith("*") for s in shown):
            shown.append("*")
        if one.name in settings:
            shown += [] if "RunSettings=" in shown else ["RunSettings="]
            continue
        shown.append(f"{star}{one.name}{'' if star or one.default is one.empty else '='}")
    return f"({', '.join(name for name in shown if name != 'self')})"


def members(name: str, found: type) -> Iterator[str]:
    """Yield a class's own public methods and properties."""
    for key, value in sorted(vars(found).items()):
        if key.startswith("_"):
            continue
        bare = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(bare):
            yield f"{name}.{key}{arguments(getattr(found, key))}"
        elif hasattr(value, "__get__") and not inspect.isclass(value):
            yield f"{name}.{key}"


def lines(module: ModuleType = fedkeep) -> Iterator[str]:
    """Yield a line for each public name of a module and of those that it offers."""
    for key in sorted(module.__all__):
        found, name = getattr(module, key), f"{module.__name__}.{key}"
        if inspect.ismodule(found):
            yield from lines(found) if hasattr(found, "__all__") else [name]
        elif inspect.isclass(found):
            yield name + arguments(found)
            yield from members(name, found)
        else:
            yield name + (arguments(found) if callable(found) else "")


if __name__ == "__main__":
    print("\n".join(lines()))  # noqa: T201
