"""``fedkeep list``: what there is to choose from."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from itertools import takewhile

from fedkeep.cli.output import say, show_table
from fedkeep.experiments.reproductions import reproductions


def list_all() -> None:
    """Show methods, models, readers, built-in configurations, reproductions, engines and kernels."""
    from fedkeep import kernels
    from fedkeep.experiments.build import MODELS, offered_methods
    from fedkeep.experiments.config import builtin_names, builtin_text
    from fedkeep.experiments.plugins import INSTALL_PAPERS
    from fedkeep.experiments.simulate import ENGINES
    from fedkeep.experiments.sources import offered_readers

    _show(
        "Methods (method.kind)",
        {name: about(inspect.getmodule(make)) for name, make in offered_methods().items()},
    )
    _show("Models (model.kind)", {name: about(make) for name, make in MODELS.items()})
    _show(
        "Readers and generators (data.reader)",
        {name: about(reader.read) for name, reader in offered_readers().items()},
    )
    _show(
        "Configurations (fedkeep run NAME)", {name: _comment(builtin_text(name)) for name in builtin_names()}
    )
    known = reproductions()
    _show("Reproductions (fedkeep reproduce NAME)", {name: one.about for name, one in known.items()})
    if not known:
        say(f"{INSTALL_PAPERS}\n")
    _show(
        "Engines (run.engine)",
        {"auto": "Picks the fastest that fits."} | {n: about(make) for n, make in ENGINES.items()},
    )
    say(f"Kernels: {kernels.status()}")


def about(thing: object) -> str:
    """Return what a function's result, a class or a module is for: the first paragraph of its docstring."""
    text = inspect.getdoc(thing)
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
