"""``fedkeep start``: a configuration for a table or a folder of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import complain, say
from fedkeep.core.errors import ConfigError


def start(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="PLACE",
            help="A table (CSV, TSV, JSON lines, Parquet or Excel), or a folder: a table for each client, images, or LEAF's files.",
        ),
    ],
    client: Annotated[
        str | None, typer.Option("--client", metavar="COLUMN", help="The column that says whose each row is.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="The column to predict.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The configuration; by default beside PLACE.")
    ] = None,
) -> None:
    """Look at a table or a folder, and write a configuration for it: its columns, the task, a model and a method.

    The table's kinds of columns are proposed; what cannot be used is left out and named, with what to do.
    """
    from fedkeep.core.files import write_whole
    from fedkeep.experiments.starting import folder_toml, start_of, toml_of

    table = table if table.name not in ("", "..") else table.resolve()
    path = out or table.with_name(f"{table.name.split('.')[0]}.toml")
    if path.exists():
        other = path.with_name(f"{path.stem}-2.toml")
        raise ConfigError(f"{path} is there already. Remove it, or write another beside it: --out {other}")
    if path.resolve().parent != table.resolve().parent:
        raise ConfigError(f"The configuration stands beside its data; {path} is in another folder.")
    if table.is_dir() and (whole := folder_toml(table)) is not None:
        text, lines = whole
        write_whole(path, text.encode())
        for line in (*lines, f"Wrote {path}. Next: fedkeep run {shlex.quote(str(path))}"):
            say(line)
        return
    found = start_of(table, client, label)
    write_whole(path, toml_of(found).encode())
    what = {"regression": "a number"}.get(found.task, "classes")
    say(
        f"Whose each row is: {found.client!r} ({found.clients:,} different). Predicted: {found.label!r}, {what}"
        f"{'' if label else ' (a guess; another: --label COLUMN)'}."
    )
    if found.series:
        say(f"Read by the model: the series {', '.join(map(repr, found.series))}.")
    elif found.text is not None:
        say(f"Read by the model: the texts {found.text!r}.")
    else:
        kinds = [f"{name} ({one.kind})" for name, one in found.fields.items()]
        say(f"Features: {', '.join(kinds)}.")
    for name, why in found.left.items():
        say(f"Left out: {name!r}: {why}")
    if found.unlabelled:
        say(f"Left out: {found.unlabelled:,} rows without a label.")
    for fault in found.faults:
        complain(fault)
    say(f"Wrote {path}. Next: fedkeep run {shlex.quote(str(path))}")
    if found.faults:
        raise typer.Exit(2)
