"""``fedkeep list`` shows what there is to choose from, ``fedkeep explain`` what a key of a configuration means."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table
from fedkeep.cli.settings import DataOption, SetOption, find_config


def list_all(
    fits: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="CONFIG",
            help="Show instead which methods fit the model and data of a configuration, and what would be private.",
        ),
    ] = None,
    data: DataOption = None,
    overrides: SetOption = None,
) -> None:
    """Show methods, models, readers, built-in configurations, reproductions, and engines."""
    if fits is not None:
        show_fitting(fits, data, overrides)
        return
    from fedkeep.experiments.build import MODELS, offered_methods
    from fedkeep.experiments.plugins import INSTALL_PAPERS, builtin_names, builtin_text
    from fedkeep.experiments.reproductions import reproductions
    from fedkeep.experiments.simulate import ENGINES
    from fedkeep.experiments.sources import offered_readers

    methods = {name: _of_docstring(inspect.getmodule(make)) for name, make in offered_methods().items()}
    _show("Methods (method.kind)", methods)
    _show("Models (model.kind)", {name: _of_docstring(model) for name, model in MODELS.items()})
    readers = {name: _of_docstring(reader.read) for name, reader in offered_readers().items()}
    _show("Readers and generators (data.reader)", readers)
    _show(
        "Configurations (fedkeep run NAME)", {name: _comment(builtin_text(name)) for name in builtin_names()}
    )
    known = {name: one.about for name, one in reproductions().items()}
    _show("Reproductions (fedkeep reproduce NAME)", known)
    if not known:
        say(f"{INSTALL_PAPERS}\n")
    engines = {name: _of_docstring(engine) for name, engine in ENGINES.items()}
    _show("Engines (run.engine)", {"auto": "Picks the fastest that fits."} | engines)


def show_fitting(named: str, data: Path | None, overrides: list[str] | None) -> None:
    """Show for every method what would be private with a configuration's model and data, or why it does not fit."""
    from fedkeep.core.errors import FedkeepError
    from fedkeep.experiments.build import build_data
    from fedkeep.experiments.variants import all_fitted

    found = find_config(named, overrides)
    folder = found.data_folder(data)
    each = dict(all_fitted(found.config, build_data(found.config, folder), folder))
    fit = {name: one.private for name, one in each.items() if not isinstance(one, FedkeepError)}
    _show(f"{len(fit)} of {len(each)} methods fit {named}; private is", fit)
    for name, error in each.items():
        if name not in fit:
            say(f"{name}: {error}")


def _of_docstring(thing: object) -> str:
    """Return the first paragraph of a docstring as one line without marks."""
    first = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("``", "").replace("\n", " ")
    return re.sub(r":\w+:`([^`]*)`", r"\1", first)


def _comment(text: str) -> str:
    """Return the first sentence of a configuration's opening comment; without one, the configuration's name."""
    lines = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    if not lines:
        return str(tomllib.loads(text).get("name", ""))
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.lstrip("# ") for line in lines))[0]


def _show(title: str, entries: Mapping[str, str]) -> None:
    show_table(title, ["", ""], [[name, text] for name, text in entries.items()], left=2)


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="A key, a table or a kind, whole or its last parts: run.epochs, optimizer, method.fedrep. Without it, all "
            "tables.",
        ),
    ] = None,
) -> None:
    """Say what a key of a configuration means: its type, default and unit, and which commands read it."""
    from fedkeep.cli.keys import Key, explained, tables

    if key is None:
        rows = [[name or "(the file)", ", ".join(table.keys)] for name, table in tables().items()]
        show_table("Tables of a configuration, and their keys", ["", ""], rows, left=2)
        return
    for name, found, read_by in explained(key):
        if isinstance(found, Key):
            given = f"default {found.default}" if found.default else "must be given"
            say(f"{name}: {found.type}, {given}")
            say(f"  {_plain(found.about)}")
        else:
            say(f"[{name}]")
            say(_plain(found.about))
            if found.keys:
                rows = [[k, one.type, one.default, _plain(one.about)] for k, one in found.keys.items()]
                show_table("Keys", ["key", "type", "default", "meaning"], rows, left=4)
        say(f"  Read by {read_by}.\n")


def _plain(text: str) -> str:
    return text.replace("``", "").replace(":func:", "").replace(":meth:", "").replace(":class:", "")
