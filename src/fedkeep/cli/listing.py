"""``fedkeep list``: what there is to choose from."""

from __future__ import annotations

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
    from fedkeep.cli.listed import about_added, about_own
    from fedkeep.experiments.plugins import INSTALL_PAPERS, builtin_names, builtin_text

    methods = about_own("fedkeep.methods", "METHODS", of_module=True)
    _show("Methods (method.kind)", methods | about_added("fedkeep.methods", methods, of_module=True))
    _show("Models (model.kind)", about_own("fedkeep.experiments.build", "MODELS"))
    readers = about_own("fedkeep.experiments.sources", "READERS")
    _show("Readers and generators (data.reader)", readers | about_added("fedkeep.readers", readers))
    _show(
        "Configurations (fedkeep run NAME)", {name: _comment(builtin_text(name)) for name in builtin_names()}
    )
    known = about_added("fedkeep.reproductions", {})
    _show("Reproductions (fedkeep reproduce NAME)", known)
    if not known:
        say(f"{INSTALL_PAPERS}\n")
    engines = about_own("fedkeep.experiments.simulate", "ENGINES")
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


def _comment(text: str) -> str:
    """Return the first sentence of a configuration's opening comment; without one, the configuration's name."""
    lines = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    if not lines:
        return str(tomllib.loads(text).get("name", ""))
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.lstrip("# ") for line in lines))[0]


def _show(title: str, entries: Mapping[str, str]) -> None:
    show_table(title, ["", ""], [[name, text] for name, text in entries.items()], left=2)
