"""``fedkeep explain``: what a key of a configuration means."""

from __future__ import annotations

from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table


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
