"""``fedkeep prove``: by which ways what must stay on a device reaches what leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import complain, say, show_table
from fedkeep.cli.settings import ConfigArgument, DataOption, SetOption, find_config
from fedkeep.core.errors import ConfigError


def prove(
    config: ConfigArgument,
    data: DataOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write a page there: proof.html, .md and .json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Follow what must stay through a client's round, and say by which ways it reaches what leaves.

    CONFIG is a TOML file, a built-in name (fedkeep list shows them), or the folder of a run. Exit code 1: something
    leaves by a way that nobody has declared, or cannot be followed. A few examples of a few clients are used.
    """
    from fedkeep.audit import PROTOCOL
    from fedkeep.audit.report import not_covered
    from fedkeep.experiments.build import build_data, build_method, build_model, settled
    from fedkeep.prove import prove as run_prove
    from fedkeep.prove.findings import HIDDEN, claims, content, paths, summary, table
    from fedkeep.report.page import write_content

    found = find_config(config, overrides)
    if found.config.run.centralised:
        raise ConfigError(
            "Centralised training has all data in one place: nothing leaves a device. Set run.centralised = false."
        )
    folder = found.data_folder(data)
    examples = build_data(found.config, folder)
    asked = settled(found.config, examples)
    model, method = build_model(asked, examples, folder), build_method(asked.method)
    allow = PROTOCOL if found.config.audit is None else found.config.audit.allow
    name = found.config.name or found.label
    proof = run_prove(model, method, examples, seed=found.config.seed, allow=allow, name=name)
    page = None if out is None else write_content(content(proof), out / "proof.html")
    if as_json:
        typer.echo(json.dumps(proof.plain(), indent=2))
    else:
        shown = table(proof.items)
        show_table(f"{proof.name}: what leaves", shown.columns, shown.rows, shown.left, summary(proof))
        for line in paths(proof.items):
            complain(f"✗ {line}")
        for line in (*claims(proof), *proof.notes, HIDDEN):
            say(f"· {line}")
        scope = not_covered()
        show_table(scope.title, scope.columns, scope.rows, scope.left)
        if page is not None:
            say(f"Page: {page}")
    if not proof.ok:
        raise typer.Exit(1)
