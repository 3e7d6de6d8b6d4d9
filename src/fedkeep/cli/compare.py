"""Many runs: ``fedkeep compare`` with several methods and seeds, ``sweep`` with trials of settings, ``reproduce`` of a paper."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedkeep.cli.output import complain, console, looks, note, redrawn, say, show_table
from fedkeep.cli.settings import (
    MOST_SEEDS,
    ConfigArgument,
    DataOption,
    JobsOption,
    MetricOption,
    OnOption,
    SetOption,
    SlurmOption,
    YesOption,
    ask_if_long,
    find_config,
    needs,
    place_of,
    seen_from,
)
from fedkeep.cli.usage import ONE_OF
from fedkeep.core.errors import ConfigError, raising
from fedkeep.report.wording import duration

if TYPE_CHECKING:
    from fedkeep.experiments.forecast import JobStatus
    from fedkeep.experiments.places import Place, State
    from fedkeep.report.standings import FoundComparison
    from fedkeep.report.text_tables import TextTable


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
        typer.Option(
            "--status",
            help="Run nothing: watch which runs are done, run, failed or wait; Ctrl-C ends the look alone.",
        ),
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
    if status:
        with place_of(on, folder, jobs, slurm, look=True) as place:
            redrawn(_looks(partial(comparing.status, plans), place, jobs))
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
    with may_stop("runs"), place_of(on, folder, jobs, slurm) as place:
        if several:
            all_of, page = comparing.run_all(plans, jobs or 1, on=place)
        else:
            made, page = comparing.run(plans[0], jobs or 1, on=place)
    if several:
        _show_all(all_of)
    else:
        _show(made)
    say(f"Page: {page}")
    say(f"Tables: {folder / 'tables'}" + ("" if several else f", figures: {folder / 'figures'}"))


@contextmanager
def may_stop(what: str) -> Iterator[None]:
    """Say after Ctrl-C what is kept, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt as stop:
        complain(f"Stopped. Call the same command again to go on; finished {what} and rounds are kept.")
        raise typer.Exit(130) from stop


def _looks(
    look: Callable[[Mapping[str, State]], Sequence[JobStatus]], place: Place | None, workers: int | None
) -> Iterator[tuple[list[str], Sequence[str], list[list[str]]]]:
    """Yield how jobs stand, for ``redrawn``: on a terminal until all have ended or Ctrl-C, elsewhere once."""
    from fedkeep.experiments.forecast import summary
    from fedkeep.experiments.places import POLL

    order, news = ("running", "failed", "waiting", "done"), list[str]()
    for _ in looks(POLL, once=not console().is_interactive):
        jobs = look({} if place is None else place.states())
        news += [] if place is None else place.news()
        rows = [
            [job.name, job.state, f"{job.done} of {job.total}" if job.total else ""]
            for job in sorted(jobs, key=lambda job: order.index(job.group))
        ]
        yield [*summary(jobs, workers, time.time()), *news], ("run", "state", "rounds"), rows
        if all(job.over for job in jobs):
            return


def _show_all(found: Mapping[str, FoundComparison]) -> None:
    from fedkeep.report.across import by_data, side_by_side
    from fedkeep.report.standings import said, unlike

    for name, one in found.items():
        for line in (*one.notes, *unlike(one), *(said(c) for c in one.compared)):
            say(f"{name}: {line}")
    shown = side_by_side(by_data(found))
    show_table("All data sets", shown.columns, _starred(shown), note=shown.note.replace("Bold", "With *", 1))


def _starred(table: TextTable) -> list[list[str]]:
    return [
        [f"{cell} *" if (i, j) in table.bold else cell for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]


def _show(found: FoundComparison) -> None:
    from fedkeep.report.standings import gains_table, not_beating, said, unlike
    from fedkeep.report.worth_page import few

    say(*found.notes, found.how, *unlike(found))
    for c in found.compared:
        shown = found.table(c)
        show_table(said(c), shown.columns, _starred(shown), note=shown.note.replace("Bold", "With *", 1))
        say(*few(c.users, len(c.seeds)))
    for table, _ in (*([found.ranking] if found.ranking else []), *found.further.values()):
        show_table(table.title, table.columns, _starred(table), note=table.note.replace("Bold", "With *", 1))
    if found.gains:
        gains = gains_table(found.gains)
        show_table("Against references", gains.columns, gains.rows, note=gains.note.partition(" Bold")[0])
    say(*not_beating(found.gains))


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")] if text else []
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            "--methods wants different names between commas, e.g. fedavg,furl; got {text!r}.",
            text=text,
        )
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
        raise ConfigError(
            "--seeds wants how many seeds, e.g. 5, or which, e.g. 0,1,2; got {text!r}.", text=text
        )
    return list(range(count))


EXAMPLE = "--range 'method.optimizer.learning_rate={low=0.01,high=1.0,log=true}'"


@needs("optuna", "Optuna", "sweep")
def sweep(
    config: ConfigArgument,
    space: Annotated[
        Path | None,
        typer.Option(
            "--space",
            metavar="FILE",
            help="A TOML file with a range for every setting to choose.",
            rich_help_panel=ONE_OF,
        ),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=RANGE",
            help="A range as TOML, e.g. method.optimizer.learning_rate={low=0.01,high=1.0,log=true} or "
            "method.batch_size={choices=[8,32]}. May be repeated.",
            rich_help_panel=ONE_OF,
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="Methods, e.g. fedavg,furl; by default that of CONFIG.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, metavar="N", help="Trials of each method.")] = 20,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, max=MOST_SEEDS, metavar="K", help="Seeds that each trial runs with."),
    ] = 1,
    status: Annotated[
        bool,
        typer.Option(
            "--status",
            help="Run nothing: watch which trials are done, run, failed or wait; Ctrl-C ends the look alone.",
        ),
    ] = False,
    prune: Annotated[
        Literal["median", "halving", "none"],
        typer.Option("--prune", help="How trials that fall behind on valid are ended early."),
    ] = "median",
    jobs: JobsOption = None,
    on: OnOption = "local",
    slurm: SlurmOption = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The sweep's folder; by default sweeps/NAME.")
    ] = None,
    data: DataOption = None,
    overrides: SetOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Replace the configuration's seed; trials follow from it.")
    ] = None,
    yes: YesOption = False,
) -> None:
    """Choose settings by what they give on valid, with equally many trials for every method.

    Stopped, it goes on when called again; called with more trials, it adds what is missing.
    """
    from fedkeep.experiments import sweeps
    from fedkeep.experiments.config import parse_overrides

    found = find_config(config, overrides, seed)
    names = [found.config.method.kind] if methods is None else _names(methods)
    for one in ranges or []:
        if "=" not in one:
            raise ConfigError(
                "--range wants KEY=RANGE, e.g. {example}; got {one!r}.", example=EXAMPLE, one=one
            )
    given = parse_overrides(ranges or [])
    if space is None and not given:
        raise ConfigError(
            "Nothing is to be searched. Give a range (in quotes), e.g. {example}, or a file of ranges: --space FILE.",
            example=EXAMPLE,
        )
    spaces = sweeps.read_space(space, given, names)
    made = sweeps.plan(
        found.config,
        spaces,
        seen_from(on, out or Path("sweeps") / found.label),
        trials=trials,
        seeds=seeds,
        prune=prune,
        folder=seen_from(on, found.data_folder(data)),
    )
    if status:
        with place_of(on, made.out, jobs, slurm, look=True) as place:
            redrawn(_looks(partial(sweeps.status, made), place, jobs))
        return
    for method, own in spaces.items():
        for key, chosen_from in own.ranges.items():
            note(f"{method}: {key}: {chosen_from}")
    ask_if_long(
        made.seconds / (jobs or 1),
        f"This sweep would take at least {duration(made.seconds / (jobs or 1))}, by its trials.",
        yes,
    )
    if found.config.privacy is not None:
        complain("Note: every trial spends its own ε, and the choice among them is counted in none.")
    with may_stop("trials"), place_of(on, made.out, jobs, slurm) as place:
        sweeps.run(made, jobs or 1, on=place)
    results = sweeps.results(made)
    path = sweeps.write(made, results)
    shown = sweeps.table(made, results)
    show_table(f"Sweep of {found.config.name or found.label}", shown.columns, shown.rows, 2, shown.note)
    for r in results:
        if r.number is not None:
            say(f"Best of {r.method}: {made.out / sweeps.best_name(r.method)}")
    say(f"Results: {path}")
    if none := [r.method for r in results if r.number is None]:
        complain(f"Nothing is chosen for {', '.join(none)}: no trial came to its end.")
        raise typer.Exit(1)


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which one; fedkeep list shows them.")],
    data: DataOption = None,
    scale: Annotated[
        Literal["quick", "medium", "full"],
        typer.Option("--scale", help="quick takes minutes, medium about an hour, full hours."),
    ] = "quick",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of results.")] = Path(
        "results"
    ),
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Seeds to run, e.g. 0,1,2; by default the reproduction's own."),
    ] = None,
    jobs: JobsOption = None,
    on: OnOption = "local",
    slurm: SlurmOption = "",
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

    out = seen_from(on, out)
    request = reproductions.Request(
        seen_from(on, data_folder(data)),
        out,
        scale,
        parse_seeds(seeds),
        jobs or 1,
        only=tuple(only or ()),
        finished=finished,
        changes=parse_overrides(settings or []),
    )
    with may_stop("runs"), place_of(on, out, jobs, slurm) as place:
        path = reproductions.reproduce(name, replace(request, on=place))
    say(f"Results: {path}")


def parse_seeds(text: str | None) -> list[int] | None:
    """Return ``"0,1,2"`` as ``[0, 1, 2]``.

    Raises:
        ConfigError: something else stands there, or a seed twice.
    """
    if text is None:
        return None
    with raising(
        ConfigError,
        "--seeds wants whole numbers between commas, e.g. 0,1,2; got {text!r}.",
        ValueError,
        text=text[:80],
    ):
        seeds = [int(word) for word in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise ConfigError("--seeds names a seed twice: {text!r}.", text=text)
    return seeds
