"""``fedkeep evaluate``: judge a finished run again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from fedkeep.cli.output import metrics_table, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RoundOption, RunArgument, at_round
from fedkeep.core.errors import ConfigError, DataError, did_you_mean
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    import pyarrow as pa

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
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write every user's result there; .parquet or .csv."),
    ] = None,
    new: Annotated[
        Path | None,
        typer.Option(
            "--new",
            metavar="FILE",
            help="Judge the users of this file, on all of its rows, as fedkeep personalize --new has fitted them.",
        ),
    ] = None,
    round: RoundOption = "best",
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Judge every user's model, as it predicts, at the run's best round. RUN is the folder that fedkeep run wrote."""
    from fedkeep.data import SPLITS
    from fedkeep.experiments.load import load_run

    if split not in SPLITS:
        raise DataError(
            f"--split wants one of {', '.join(SPLITS)}; got {split!r}.{did_you_mean(split, SPLITS)}"
        )
    if out is not None and (out.suffix not in (".parquet", ".csv") or not out.parent.is_dir()):
        raise ConfigError(
            f"--out wants a file that ends in .parquet or .csv, in a folder that is there; got {out}."
        )
    loaded = at_round(load_run(run, data_folder=data, device=device), round)
    warn_of_unfinished([run])
    if new is not None:
        loaded, split = of_file(loaded, run, new), "test"
    metrics = loaded.evaluate(split, stage=cast("Stage", stage))
    metrics_table(f"{run}: after {loaded.moment}{_marked(stage)}", {split: metrics})
    if per_client:
        show_clients(loaded, split, cast("Stage", stage))
    if out is not None:
        write_frame(loaded.clients_frame(split, stage=cast("Stage", stage)), out)


def of_file(run: Run, folder: Path, file: Path, split: Literal["train", "test"] = "test") -> Run:
    """Return a run on a file's rows, all of them of a split, whose clients are the file's users.

    Raises:
        ConfigError: one of them has no values of its own yet.
    """
    import numpy as np

    from fedkeep.data.ids import SomeIds
    from fedkeep.experiments.load import rows_of_run

    rows = rows_of_run(folder, run.data, file)
    start, end = rows.offsets[:-1], rows.offsets[1:]
    middle = end if split == "train" else start
    rows.bounds = np.stack([start, middle, middle, end], 1)
    found = run.on(rows)
    if lacking := [client for client in found.held_out if client not in found.fitted]:
        raise ConfigError(
            f"{lacking[0]!r} of {file} has no values of its own yet. Fit them first: fedkeep personalize {folder} --new FILE"
            f"{'' if split == 'train' else ', of other rows'}."
        )
    found.clients = SomeIds(rows.ids, np.arange(len(rows)))
    return found


def write_frame(frame: pa.Table, out: Path) -> None:
    """Write a table of pyarrow as Parquet or CSV, by the file's ending; all of it or nothing."""
    from fedkeep.core.files import write_whole
    from fedkeep.report.tables import to_csv

    if out.suffix == ".csv":
        write_whole(out, to_csv(frame.to_pylist()).encode())
        return
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(frame, sink)
    write_whole(out, sink.getvalue())


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
