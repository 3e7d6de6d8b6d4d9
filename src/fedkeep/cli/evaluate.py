"""``fedkeep evaluate``: judge a finished run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedkeep.cli.output import metrics_table, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RoundOption, RunArgument, at_round
from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run, Stage


def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "test",
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            help="own: what users predict with. before: without a last step of the method's own. shared: the shared part.",
        ),
    ] = "own",
    per_client: Annotated[bool, typer.Option("--per-client", help="Show every user too.")] = False,
    round: RoundOption = "best",
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Judge every user's model, as it predicts, at the run's best round. RUN is the folder that fedkeep run wrote."""
    from fedkeep.data import SPLITS
    from fedkeep.experiments.build import data_folder
    from fedkeep.experiments.load import load_run

    if split not in SPLITS:
        raise DataError(
            f"--split wants one of {', '.join(SPLITS)}; got {split!r}.{did_you_mean(split, SPLITS)}"
        )
    loaded = at_round(load_run(run, data_folder=data_folder(data), device=device), round)
    warn_of_unfinished([run])
    metrics = loaded.evaluate(split, stage=cast("Stage", stage))
    metrics_table(f"{run}: after {loaded.moment}{_marked(stage)}", {split: metrics})
    if per_client:
        show_clients(loaded, split, cast("Stage", stage))


def _marked(stage: str) -> str:
    return {"own": "", "before": ", before the method's last step"}.get(stage, ", the shared part alone")


def show_clients(run: Run, split: str, stage: Stage = "own") -> None:
    """Print a table with a row for every user."""
    frame = run.clients_frame(split, stage=stage)
    names = frame.column_names[2:]
    rows = [
        [row["client"], f"{row['examples']:,}", *(number(row[name], name) for name in names)]
        for row in frame.to_pylist()
    ]
    show_table(f"Users, on {split}", ["User", "Examples", *map(metric_name, names)], rows)
