"""``fedkeep list``: what there is to choose from."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any

from fedkeep.cli.output import say, show_table
from fedkeep.experiments.build import MODELS, READERS
from fedkeep.experiments.builtin import builtin_names, builtin_text
from fedkeep.experiments.engine import ENGINES
from fedkeep.methods import METHODS


def list_all() -> None:
    """Show methods, models, readers, built-in configurations, reproductions, engines and kernels."""
    from fedkeep import kernels
    from fedkeep.experiments.reproduce import REPRODUCTIONS

    _show("Methods (method.kind)", {name: about(make) for name, make in METHODS.items()})
    _show("Models (model.kind)", {name: about(make) for name, make in MODELS.items()})
    _show("Readers and generators (data.reader)", {name: about(make) for name, make in READERS.items()})
    _show(
        "Configurations (fedkeep run NAME)", {name: _comment(builtin_text(name)) for name in builtin_names()}
    )
    _show("Reproductions (fedkeep reproduce NAME)", REPRODUCTIONS)
    _show(
        "Engines (run.engine)",
        {"auto": "Picks the fastest that fits."} | {n: about(make) for n, make in ENGINES.items()},
    )
    say(f"Kernels: {kernels.status()}")


def about(thing: Callable[..., Any]) -> str:
    """Return what a function's result, or a class, is for: for a method its module's first line, else its own."""
    text = inspect.getdoc(inspect.getmodule(thing)) if thing in METHODS.values() else inspect.getdoc(thing)
    first = (text or "").split("\n\n")[0].replace("``", "").replace("\n", " ")
    return re.sub(r":\w+:`([^`]*)`", r"\1", first)


def _comment(text: str) -> str:
    """Return the first sentence of a configuration's opening comment; without one, the configuration's name."""
    lines = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    if not lines:
        return str(tomllib.loads(text).get("name", ""))
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.lstrip("# ") for line in lines))[0]


def _show(title: str, entries: Mapping[str, str]) -> None:
    show_table(title, ["", ""], [[name, text] for name, text in entries.items()], left=2)
