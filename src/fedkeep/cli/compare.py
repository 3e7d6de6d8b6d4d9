"""``fedkeep compare``: several methods with several seeds, in one table, one page and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import complain, note, say, show_table
from fedkeep.cli.reproduce import parse_seeds
from fedkeep.cli.settings import (
    MOST_SEEDS,
    DataOption,
    JobsOption,
    MetricOption,
    OnOption,
    SetOption,
    SlurmOption,
    YesOption,
    ask_if_long,
    find_config,
    place_of,
    seen_from,
)
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import duration

if TYPE_CHECKING:
    from fedkeep.experiments.comparing import Plan
    from fedkeep.report.standings import Found
    from fedkeep.report.tables import Table


def compare(
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG...",
            help="TOML files or built-in names. The first on its data gives the settings of --methods; another on the "
            "same data is run as it is, where its method is named there. Several data sets come into one table.",
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
    jobs: JobsOption = None,
    on: OnOption = "local",
    slurm: SlurmOption = "",
    status: Annotated[
        bool,
        typer.Option("--status", help="Run nothing: show which runs are done, run, wait or were stopped."),
    ] = False,
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
    groups: Annotated[
        Path | None,
        typer.Option(
            "--groups",
            metavar="FILE",
            help="Show groups of users apart: a table with a row a user, its id and one or more columns of groups.",
        ),
    ] = None,
    metric: MetricOption = None,
    data: DataOption = None,
    overrides: SetOption = None,
    yes: YesOption = False,
) -> None:
    """Run every method with every seed, and write one comparison: page, tables and figures.

    Stopped, it goes on when called again; called with more methods or seeds, it runs what is missing.

    On a cluster: fedkeep compare CONFIG --methods all --on slurm --slurm "--time=2:00:00", in a folder that all nodes see.
    """
    from fedkeep.experiments import comparing

    found = [find_config(named, overrides) for named in configs]
    labels = [one.label for one in found]
    names = [
        Path(c).stem if labels.count(one.label) > 1 else one.label
        for c, one in zip(configs, found, strict=True)
    ]
    sets = comparing.data_sets(
        [(n, one.config, seen_from(on, one.data_folder(data))) for n, one in zip(names, found, strict=True)]
    )
    named = "-".join(sets)[:80] if len(sets) > 1 else found[0].label
    folder = seen_from(on, out or Path("comparisons") / named)
    grouped = comparing.read_groups(groups) if groups else None
    plans = comparing.plans(
        sets,
        _names(methods),
        _seeds(seeds),
        folder,
        references=references,
        metric=metric,
        tune=tune,
        groups=grouped,
    )
    several = len(plans) > 1
    place = place_of(on, folder, jobs, slurm)
    if status:
        _show_status(comparing.status(plans, {} if place is None else place.states()), plans)
        return
    for plan in plans:
        tried = f", after {tune} trials of each" if tune else ""
        every = len(plan.cells) + sum(map(len, plan.trials.values()))
        where = f"{plan.among}: " if several else ""
        for line in plan.left_out:
            note(f"{where}Left out, {line}")
        note(
            f"{where}{len(plan.variants)} methods × {len(plan.seeds)} seeds{tried}: {len(plan.missing)} of {every} "
            "runs to do."
        )
    seconds = sum(plan.seconds for plan in plans) / (jobs or 1)
    ask_if_long(seconds, f"This comparison would take at least {duration(seconds)}, by its runs.", yes)
    try:
        if several:
            all_of, page = comparing.run_all(plans, jobs or 1, on=place)
        else:
            made, page = comparing.run(plans[0], jobs or 1, on=place)
    except KeyboardInterrupt as stop:
        complain("Stopped. Call the same command again to go on; finished runs and rounds are kept.")
        raise typer.Exit(130) from stop
    if several:
        _show_all(all_of)
    else:
        _show(made)
    say(f"Page: {page}")
    say(f"Tables: {folder / 'tables'}" + ("" if several else f", figures: {folder / 'figures'}"))


def _show_status(rows: Sequence[tuple[str, str, str]], plans: Sequence[Plan]) -> None:
    show_table("Runs", ["run", "state", "rounds"], [list(row) for row in rows])
    states = Counter(state for _, state, _ in rows)
    say(", ".join(f"{count} {state}" for state, count in states.most_common()) + ".")
    if seconds := sum(plan.seconds for plan in plans):
        say(f"What is left would take about {duration(seconds)} here, run after run.")


def _show_all(found: Mapping[str, Found]) -> None:
    from fedkeep.report.across import by_data, side_by_side
    from fedkeep.report.standings import said, unlike

    for name, one in found.items():
        for line in (*one.notes, *unlike(one), *(said(c) for c in one.compared)):
            say(f"{name}: {line}")
    shown = side_by_side(by_data(found))
    show_table("All data sets", shown.columns, _starred(shown), note=shown.note.replace("Bold", "With *", 1))


def _starred(table: Table) -> list[list[str]]:
    return [
        [f"{cell} *" if (i, j) in table.bold else cell for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]


def _show(found: Found) -> None:
    from fedkeep.report.standings import gains_table, not_beating, said, unlike
    from fedkeep.report.worth import few

    for line in (*found.notes, found.how, *unlike(found)):
        say(line)
    for c in found.compared:
        shown = found.table(c)
        show_table(said(c), shown.columns, _starred(shown), note=shown.note.replace("Bold", "With *", 1))
        for line in few(c.users, len(c.seeds)):
            say(line)
    for table, _ in (*([found.ranking] if found.ranking else []), *found.further.values()):
        show_table(table.title, table.columns, _starred(table), note=table.note.replace("Bold", "With *", 1))
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
