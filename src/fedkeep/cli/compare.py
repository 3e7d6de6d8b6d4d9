"""``fedkeep compare``: several methods with several seeds, in one table, one page and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import complain, note, say, show_table
from fedkeep.cli.reproduce import parse_seeds
from fedkeep.cli.settings import DataOption, MetricOption, SetOption, find_config
from fedkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from fedkeep.report.standings import Found

MOST_SEEDS = 1000


def compare(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="TOML files or built-in names, on the same data. The first gives the settings of --methods; one whose "
            "method is named there is run as it is.",
        ),
    ],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Methods, e.g. fedavg,furl,ditto (fedkeep list); all: every one that fits; by default those of CONFIG.",
        ),
    ] = "",
    seeds: Annotated[
        str, typer.Option("--seeds", help="How many, e.g. 5 for 0 to 4; or which, e.g. 3,5,8.")
    ] = "3",
    references: Annotated[
        bool,
        typer.Option(
            "--references/--no-references",
            help="Run local training and FedAvg with fine-tuning along, and compare all with these, with counting, and "
            "with the shared part alone.",
        ),
    ] = True,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Runs at a time, each in a process of its own.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The comparison's folder; by default comparisons/NAME."),
    ] = None,
    tune: Annotated[
        int,
        typer.Option(
            "--tune",
            metavar="N",
            min=0,
            help="Trials of each method before its seeds: of rates, and of its strength (lam, mu); the best on valid stays.",
        ),
    ] = 0,
    metric: MetricOption = None,
    data: DataOption = None,
    overrides: SetOption = None,
) -> None:
    """Run every method with every seed, and write one comparison: page, tables and figures.

    Stopped, it goes on when called again; called with more methods or seeds, it runs what is missing.
    """
    from fedkeep.experiments import comparing

    found = [find_config(named, overrides) for named in configs]
    folder = out or Path("comparisons") / found[0].label
    plan = comparing.plan(
        [one.config for one in found],
        _names(methods),
        _seeds(seeds),
        folder,
        folder=found[0].data_folder(data),
        references=references,
        metric=metric,
        tune=tune,
    )
    for line in plan.left_out:
        note(f"Left out, {line}")
    tried = f", after {tune} trials of each" if tune else ""
    every = len(plan.cells) + sum(map(len, plan.trials.values()))
    note(
        f"{len(plan.variants)} methods × {len(plan.seeds)} seeds{tried}: {len(plan.missing)} of {every} runs to do."
    )
    try:
        made, page = comparing.run(plan, jobs)
    except KeyboardInterrupt as stop:
        complain("Stopped. Call the same command again to go on; finished runs and rounds are kept.")
        raise typer.Exit(130) from stop
    _show(made)
    say(f"Page: {page}")
    say(f"Tables: {folder / 'tables'}, figures: {folder / 'figures'}")


def _show(found: Found) -> None:
    from fedkeep.report.standings import gains_table, not_beating, said
    from fedkeep.report.worth import few

    for line in (*found.notes, found.how):
        say(line)
    for c in found.compared:
        shown = found.table(c)
        rows = [
            [f"{cell} *" if (i, j) in shown.bold else cell for j, cell in enumerate(row)]
            for i, row in enumerate(shown.rows)
        ]
        show_table(said(c), shown.columns, rows, note=shown.note.replace("Bold", "With *", 1))
        for line in few(c.users, len(c.seeds)):
            say(line)
    if found.gains:
        gains = gains_table(found.gains)
        show_table("Against references", gains.columns, gains.rows, note=gains.note.partition(" Bold")[0])
    for line in not_beating(found.gains):
        say(line)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"--methods names {twice!r} twice.")
    return names


def _seeds(text: str) -> list[int]:
    """Return ``"3"`` as ``[0, 1, 2]``, and ``"3,5"`` as these.

    Raises:
        ConfigError: something else stands there, or a seed twice.
    """
    if "," in text:
        return parse_seeds(text.removesuffix(",")) or []
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_SEEDS:
        raise ConfigError(f"--seeds wants how many seeds, e.g. 5, or which, e.g. 0,1,2; got {text[:80]!r}.")
    return list(range(count))
