"""``fedkeep report``: one self-contained page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say
from fedkeep.core.errors import RunError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, compared on one page.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to write report.html, .md and .json; by default the run's folder, for several runs ./report.",
        ),
    ] = None,
    title: Annotated[
        str, typer.Option("--title", help="The heading; made from the runs' names by default.")
    ] = "",
) -> None:
    """Write one page with tables, curves and maps of one run or several (RUN...); it opens offline."""
    from fedkeep.report.page import write_report

    folder = out or (runs[0] if len(runs) == 1 else Path("report"))
    try:
        page = write_report(runs, folder, title)
    except OSError as error:
        raise RunError(f"Cannot write the report into {folder}: {error.strerror or error}.") from error
    say(f"Page: {page}")
