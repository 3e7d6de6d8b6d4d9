"""``fedkeep sweep``: the best settings of methods, with equally many trials for each."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import complain, note, say, show_table
from fedkeep.cli.settings import (
    MOST_SEEDS,
    ConfigArgument,
    DataOption,
    JobsOption,
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
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import duration

EXAMPLE = "--range method.optimizer.learning_rate={low=0.01,high=1.0,log=true}"


class Prune(StrEnum):
    """How trials are ended early."""

    median = "median"
    halving = "halving"
    none = "none"


@needs("optuna", "Optuna", "sweep")
def sweep(
    config: ConfigArgument,
    space: Annotated[
        Path | None,
        typer.Option("--space", metavar="FILE", help="A TOML file with a range for every setting to choose."),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=RANGE",
            help="A range as TOML, e.g. method.optimizer.learning_rate={low=0.01,high=1.0,log=true} or "
            "method.batch_size={choices=[8,32]}. May be repeated.",
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
    prune: Annotated[
        Prune, typer.Option("--prune", help="How trials that fall behind on valid are ended early.")
    ] = Prune.median,
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
            raise ConfigError(f"--range wants KEY=RANGE, e.g. {EXAMPLE}; got {one[:80]!r}.")
    given = parse_overrides(ranges or [])
    if space is None and not given:
        raise ConfigError(
            f"The space is empty: nothing is to be chosen. Name a file with --space, or a range, e.g. {EXAMPLE}."
        )
    spaces = sweeps.read_space(space, given, names)
    made = sweeps.plan(
        found.config,
        spaces,
        seen_from(on, out or Path("sweeps") / found.label),
        trials=trials,
        seeds=seeds,
        prune=prune.value,
        folder=seen_from(on, found.data_folder(data)),
    )
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
    try:
        sweeps.run(made, jobs or 1, on=place_of(on, made.out, jobs, slurm))
    except KeyboardInterrupt as stop:
        complain("Stopped. Call the same command again to go on; finished trials and rounds are kept.")
        raise typer.Exit(130) from stop
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


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(
            f"--methods wants different names between commas, e.g. fedavg,furl; got {text[:80]!r}."
        )
    return names
