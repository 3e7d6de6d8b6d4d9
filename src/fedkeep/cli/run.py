"""``fedkeep run``: train a configuration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import complain, metrics_table, say, show_table
from fedkeep.cli.settings import (
    ConfigArgument,
    DataOption,
    FoundConfig,
    OnOption,
    SetOption,
    SlurmOption,
    YesOption,
    ask_if_long,
    find_config,
    place_of,
    seen_from,
)
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.report.wording import lower_is_better, metric_inline, metric_name, number

if TYPE_CHECKING:
    from fedkeep.engines import Engine
    from fedkeep.experiments.run import Run


def run(
    config: ConfigArgument,
    data: DataOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run's folder; by default runs/NAME-SEED.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in its folder; CONFIG may be that folder.")
    ] = False,
    continue_from: Annotated[
        Path | None,
        typer.Option(
            "--continue-from",
            metavar="RUN",
            help="Go on from this run on new data, e.g. next month's file; --out names the new run's folder.",
        ),
    ] = None,
    overrides: SetOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Replace the configuration's seed.")] = None,
    yes: YesOption = False,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Processes at most; by default one a core. Changes no result.",
        ),
    ] = None,
    on: OnOption = "local",
    slurm: SlurmOption = "",
    track: Annotated[
        list[str] | None,
        typer.Option(
            "--track",
            metavar="NAME",
            help="Tell tensorboard, mlflow, wandb or package.module:Class of every record. May be repeated.",
        ),
    ] = None,
) -> None:
    """Train a configuration; every round is saved, so a run that was stopped can go on.

    CONFIG is a TOML file, a built-in name (fedkeep list shows them), or the folder of a run.

    Next month's file: fedkeep run CONFIG --continue-from runs/may --set data.path=june.csv --out runs/june

    On a cluster, in a folder that all its machines see: --on slurm sends the run as one job, --on ray spreads its clients.
    """
    from fedkeep.experiments.build import run_config

    if track:
        overrides = [*(overrides or []), f"run.trackers={json.dumps(track)}"]
    found = find_config(config, overrides, seed, resume=resume)
    if continue_from is not None and out is None:
        raise ConfigError("--continue-from begins a new run. Name its folder: --out DIR.")
    folder = out or found.folder or Path("runs") / f"{found.label}-{found.config.seed}"
    if on == "slurm" or slurm:
        if continue_from is not None:
            raise ConfigError(
                "--on slurm begins a run or goes on with it; --continue-from runs here, or --on ray."
            )
        folder, there = seen_from(on, folder), seen_from(on, found.data_folder(data))
        finished = _as_a_job(found, folder, there, on, slurm, resume)
    else:
        try:
            finished = run_config(
                found.config,
                engine=_spread(on, folder, found, data, workers),
                folder=found.data_folder(data),
                out=folder,
                resume=resume,
                continue_from=continue_from,
                text=found.text,
                workers=workers,
                tell=say,
                agree=lambda ahead: ask_if_long(ahead.seconds, f"This run would take {ahead}.", yes),
            )
        except KeyboardInterrupt as stop:
            complain(_stopped(folder, data))
            raise typer.Exit(130) from stop
    if finished.method.adapt.everyone and not finished.fitted:
        finished.fit(workers=workers or 1)
    show_result(finished, found)
    if finished.engine_reason:
        say(f"Engine: {finished.engine}, because {finished.engine_reason}.")
    say(f"Run folder: {folder}")


def _spread(
    on: str, folder: Path, found: FoundConfig, data: Path | None, workers: int | None
) -> Engine | None:
    """Return what trains clients on a cluster; None: they train here."""
    if on == "local":
        return None
    from fedkeep.experiments.places import executors
    from fedkeep.remote.cluster import ClusterWorkers

    on_gpus = found.config.run.device.startswith("cuda")
    return ClusterWorkers(executors(on, on_gpus, workers), folder, found.data_folder(data), workers)


def _as_a_job(found: FoundConfig, folder: Path, data: Path | None, on: str, slurm: str, resume: bool) -> Run:
    """Let Slurm compute a whole run, wait for it, and return it."""
    from fedkeep.experiments.comparing import FAULT, Cell
    from fedkeep.experiments.load import load_run
    from fedkeep.experiments.long_jobs import run_long_jobs

    cell = Cell(found.label, found.config, folder, data)
    if cell.begun and not resume:
        raise RunError(
            "{folder} holds a run. Go on with it by --resume, or name another folder: --out DIR.",
            folder=folder,
        )
    cell.check()
    beside = folder.with_name(f"{folder.name}-job")  # its own folder must be empty when it begins
    with place_of(on, beside, None, slurm) as place:
        run_long_jobs([cell], on=place, stand=lambda cell: cell.stand)
    if (fault := folder / FAULT).exists():
        raise RunError("{folder}: {fault}", folder=folder, fault=fault.read_text(encoding="utf-8").strip())
    return load_run(folder, data_folder=data)


def show_result(run: Run, found: FoundConfig) -> None:
    """Print the metrics at the best epoch."""
    from fedkeep.experiments.drive import SHARED
    from fedkeep.experiments.learned import remarks, simplest, summarize
    from fedkeep.experiments.personalize.fine_tuning import scores_of
    from fedkeep.report.runs import read_sealed_analyses
    from fedkeep.tasks import tasks_in

    task = tasks_in(run.data.meta)[0]
    metric = task.headline
    best = summarize(run.history, metric, lower_is_better(metric))
    name = found.config.name or found.label
    if best is None:
        say(
            f"{name}: {run.round} rounds, nothing was judged (evaluate_every = 0, or no valid and test examples). Models "
            f"are those of the last round."
        )
        return
    known = run.data.meta.get("best")
    notes = (
        [f"Best possible {metric_inline(metric)} on test: {number(known, metric)}"]
        if known is not None
        else []
    )
    if simple := simplest(run):
        one, each = (number(value, simple.metric) for value in (simple.one, simple.each))
        notes.append(
            f"Without a model, {metric_inline(simple.metric)} on test: {one} by one answer for all, {each} by each user's own"
        )
    chosen = f"the best by {metric_inline(metric)} on valid" if best.valid else "the last; there is no valid"
    if best.valid and math.isnan(best.valid.get(metric, math.nan)):
        chosen = f"the last; {metric_inline(metric)} is not defined on valid"
    last = run.method.adapt.everyone
    test = "test, before the last step" if last else "test"
    columns = {"valid": best.valid, test: best.test} if best.valid else {test: best.test}
    if run.last is not run:
        spot = (run.last.round, "test", metric, None)
        ends = [r.value for r in run.history if (r.round, r.split, r.metric, r.client) == spot]
        notes.append("evaluate and export take this epoch; with --round last the last one.")
        if ends and not last:
            notes.append(
                f"After the last epoch {metric_inline(metric)} on test is {number(ends[0], metric)}."
            )
    then = [r for r in run.history if r.split == SHARED and r.client is None and r.round == best.round]
    shared = {r.metric: r.value for r in then}
    if shared:
        columns["test, shared part"] = shared
    epoch, epochs = (round(each, 2) for each in (best.epoch, run.last.epoch))
    metrics_table(f"{name}: epoch {epoch:g} of {epochs:g}, {chosen}", columns, "\n".join(notes))
    if last:
        splits = [s for s in ("valid", "test") if run.data.counts(s)[run.clients.positions].any()]
        metrics_table(f"{name}: the same, after each user's last step", {s: run.evaluate(s) for s in splits})
    if found.config.ranking is not None and run.folder is not None:
        ranking = read_sealed_analyses(run.folder / "analyses.json")[0]["ranking"]
        rows = [
            [metric_name(metric), *(number(v, metric) for v in values)] for metric, *values in ranking["rows"]
        ]
        show_table(ranking["title"], list(ranking["columns"]), rows, note=ranking["note"])
    say(*remarks(run, best))
    tuned = scores_of(run.history)
    if tuned is not None:
        before, after = tuned.curve[0], tuned.last
        say(
            f"Fine-tuned on each user, mean over users: {number(before, 'accuracy')} before, "
            f"{number(after, 'accuracy')} after, {number(tuned.mean, 'accuracy')} on average over the tests (Ap)."
        )


def _stopped(folder: Path, data: Path | None) -> str:
    if not (folder / "run.json").exists():
        return "Stopped before the first round. Nothing was written."
    try:
        round = read_commit(folder, read_info(folder)).round
    except RunError:
        round = 0
    given = f"--data {_quoted(data)} " if data is not None else ""
    return f"Stopped after round {round}. Go on with: fedkeep run {_quoted(folder)} {given}--resume"


def _quoted(path: Path) -> str:
    text = path.as_posix()
    return f'"{text}"' if " " in text else text
