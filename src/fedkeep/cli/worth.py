"""``fedkeep worth``: what personalisation was worth, for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, MetricOption


def worth(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs; those that differ in their seed only are one model."
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against", metavar="RUN", help="A reference's run, of the same seed. May be repeated."
        ),
    ] = None,
    metric: MetricOption = None,
    references: Annotated[
        bool,
        typer.Option(
            "--references",
            help="Compare with each user's most frequent training label too, of a ranking with what all users took "
            "most often; reads the data.",
        ),
    ] = False,
    data: DataOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every user's gain.")] = False,
) -> None:
    """Say what personalisation was worth, and who gains and who loses, from the runs' test examples.

    References are the shared part alone, where the runs kept it (run.evaluate_shared), and --against; without --against
    those of RUN... that are fedavg, local or fine_tuned.
    """
    from fedkeep.experiments.worth import worth_of
    from fedkeep.report.page import finite
    from fedkeep.report.worth import limits, plain, sentences, tenths, worth_table

    found = worth_of(runs, against or (), metric, references=references, data_folder=data)
    warn_of_unfinished(dict.fromkeys([*runs, *(against or ())]))
    if as_json:
        typer.echo(
            json.dumps(finite([plain(c) for c in found]), ensure_ascii=False, indent=1, allow_nan=False)
        )
        return
    for comparison in found:
        say(f"{comparison.title}:")
        for sentence in (*sentences(comparison), *tenths(comparison), *limits(comparison.found)):
            say(f"  {sentence}")
        say("")
    shown = worth_table(found)
    show_table("All comparisons", shown.columns, shown.rows, left=shown.left, note=shown.note)
