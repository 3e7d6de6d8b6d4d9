"""``fedkeep evaluate``: judge a finished run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import metrics_table, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RunArgument
from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run


def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "test",
    per_client: Annotated[bool, typer.Option("--per-client", help="Show every user too.")] = False,
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Judge every user's own model after the run's last round. RUN is the folder that fedkeep run wrote."""
    from fedkeep.data import SPLITS
    from fedkeep.experiments.build import data_folder
    from fedkeep.experiments.load import load_run

    if split not in SPLITS:
        raise DataError(
            f"--split wants one of {', '.join(SPLITS)}; got {split!r}.{did_you_mean(split, SPLITS)}"
        )
    loaded = load_run(run, data_folder=data_folder(data), device=device)
    warn_of_unfinished([run])
    metrics = loaded.evaluate(split)
    metrics_table(f"{run}: after round {loaded.round}", {split: metrics})
    if per_client:
        show_clients(loaded, split)


def show_clients(run: Run, split: str) -> None:
    """Print a table with a row for every user."""
    for judged in run.judge((run.personal,), split):
        metric = judged.task.client_metric
        rows = [
            [client, f"{count:,}", number(value, metric)]
            for client, (value, count) in judged.per_client(run.personal).items()
        ]
        show_table(f"Users, on {split}", ["User", "Examples", metric_name(metric)], rows)
