"""``fedkeep reproduce``: a paper's table and figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import complain, say
from fedkeep.cli.settings import DataOption, JobsOption, OnOption, place_of
from fedkeep.core.errors import ConfigError


class Scale(StrEnum):
    """How much is run."""

    quick = "quick"
    medium = "medium"
    full = "full"


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one; fedkeep list shows them.")],
    data: DataOption = None,
    scale: Annotated[
        Scale, typer.Option("--scale", help="quick takes minutes, medium about an hour, full hours.")
    ] = Scale.quick,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of results.")] = Path(
        "results"
    ),
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Seeds to run, e.g. 0,1,2; by default the reproduction's own."),
    ] = None,
    jobs: JobsOption = None,
    on: OnOption = "local",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Only runs whose names match, e.g. 'subreddit-words-*-1'; the others are left for another call. May "
            "be given several times.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting of every run, e.g. data.reader=reviews for other data; not all tables allow it. "
            "May be repeated.",
        ),
    ] = None,
    finished: Annotated[
        bool,
        typer.Option("--finished", help="Run nothing: write the results from the runs that are finished."),
    ] = False,
) -> None:
    """Run a paper's table and figures, beside the published numbers. Stopped, it goes on when called again."""
    from fedkeep.experiments import reproductions
    from fedkeep.experiments.build import data_folder
    from fedkeep.experiments.config import parse_overrides

    request = reproductions.Request(
        data_folder(data),
        out,
        scale.value,
        parse_seeds(seeds),
        jobs or 1,
        only=tuple(only or ()),
        finished=finished,
        changes=parse_overrides(settings or []),
        on=place_of(on, out, jobs),
    )
    try:
        path = reproductions.reproduce(name, request)
    except KeyboardInterrupt as stop:
        complain("Stopped. Call the same command again to go on; finished runs and rounds are kept.")
        raise typer.Exit(130) from stop
    say(f"Results: {path}")


def parse_seeds(text: str | None) -> list[int] | None:
    """Return ``"0,1,2"`` as ``[0, 1, 2]``.

    Raises:
        ConfigError: something else stands there, or a seed twice.
    """
    if text is None:
        return None
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--seeds wants whole numbers between commas, e.g. 0,1,2; got {text[:80]!r}."
        ) from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names a seed twice: {text!r}.")
    return seeds
