"""First steps: ``fedkeep demo`` on generated text, ``fedkeep start`` on a table or a folder of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import complain, note, say, show_table
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import difference, duration, number


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
    from fedkeep.tasks import of_numbers

    if table.suffix == ".toml":
        raise ConfigError(
            "{table} is a configuration, no table. To train it: fedkeep run {quoted}",
            table=table,
            quoted=shlex.quote(str(table)),
        )
    table = table if table.name not in ("", "..") else table.resolve()
    path = out or table.with_name(f"{table.name.split('.')[0]}.toml")
    if path.exists():
        other = path.with_name(f"{path.stem}-2.toml")
        raise ConfigError(
            "{path} is there already. Remove it, or write another beside it: --out {other}",
            path=path,
            other=other,
        )
    if path.resolve().parent != table.resolve().parent:
        raise ConfigError(
            "--out wants a file in {folder}, beside the data; got {path}.",
            folder=table.resolve().parent,
            path=path,
        )
    if table.is_dir() and (whole := folder_toml(table)) is not None:
        text, lines = whole
        write_whole(path, text.encode())
        say(*lines, f"Wrote {path}. Next: fedkeep run {shlex.quote(str(path))}")
        return
    found = start_of(table, client, label)
    write_whole(path, toml_of(found).encode())
    what = "a number" if of_numbers(found.task) else "classes"
    say(
        f"Whose each row is: {found.client!r} ({found.clients:,} different). Predicted: {found.label!r}, {what}"
        f"{'' if label else ' (a guess; another: --label COLUMN)'}."
    )
    if found.series:
        say(f"Read by the model: the series {', '.join(map(repr, found.series))}.")
    elif found.item is not None:
        say(f"Read by the model: who rates which {found.item!r}.")
    elif found.text is not None:
        say(f"Read by the model: the texts {found.text!r}.")
    else:
        kinds = [f"{name} ({one.kind})" for name, one in found.fields.items()]
        say(f"Features: {', '.join(kinds)}.")
    for name, why in found.left.items():
        say(f"Left out: {name!r}: {why}")
    if found.repeated:
        say(
            f"{found.repeated:,} rows are as one above. Of copies one may train and one test: keep one of each, unless each "
            "happened."
        )
    if found.unlabelled:
        say(f"Left out: {found.unlabelled:,} rows without a label.")
    complain(*found.faults)
    say(f"Wrote {path}. Next: fedkeep run {shlex.quote(str(path))}")
    if found.faults:
        raise typer.Exit(2)


ENOUGH = 0.02


def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="A new folder; by default runs/demo, runs/demo-2, …"),
    ] = None,
) -> None:
    """Train with and without private user vectors on generated text: a table and a page in about a minute."""
    import torch

    from fedkeep.experiments.demo import demo_folder, run_demo
    from fedkeep.report.page import write_report

    folder = demo_folder(out)
    torch.set_num_threads(1)  # tensors this small only lose time over several threads
    found = run_demo(folder, say=note)
    rows = [
        [r.method, number(r.accuracy, "accuracy"), number(r.best, "accuracy"), duration(r.seconds)]
        for r in found.rows.values()
    ]
    show_table(
        "Generated text of many users: the label depends on text and user",
        ["Method", "Test accuracy", "Best possible", "Time"],
        rows,
        note="Best possible: expected, with all probabilities known (for Global FL: not the user); "
        "the drawn test examples may give a point more.",
    )
    say(f"Personalized FL is {_apart(found.gain)} Global FL and {_apart(-found.lacking)} the best possible.")
    if not found.lacking <= ENOUGH:
        say("It has not come near enough; train longer: fedkeep run demo/personalized-fl --set run.epochs=40")
    page = write_report([r.folder for r in found.rows.values()], folder, title="fedkeep demo")
    say(f"Page: {page.resolve()}")


def _apart(gap: float) -> str:
    points = difference(abs(gap), "accuracy").lstrip("+")
    return f"{points} {'above' if gap > 0 else 'below'}"
