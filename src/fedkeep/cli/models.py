"""Clients' models: ``fedkeep export`` writes them, ``predict`` asks them of new examples, ``recommend`` of items."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedkeep.cli.output import say, show_table, warn_of_unfinished
from fedkeep.cli.results import of_file
from fedkeep.cli.settings import DataOption, DeviceOption, RoundOption, RunArgument, at_round
from fedkeep.cli.usage import ONE_OF
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    from fedkeep.engines.use import Predicted, Prediction


RowsOption = Annotated[
    Path,
    typer.Option("--data", metavar="FILE", help="A table of new examples: CSV, TSV, JSON lines or Parquet."),
]
ModelOfOption = Annotated[
    str | None, typer.Option("--client", metavar="ID", help="Whose model predicts every row.")
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", metavar="COLUMN", help="The column of users; by default as in training."),
]
SharedOption = Annotated[
    bool,
    typer.Option("--shared", help="Predict rows of users without a model here by the shared part alone."),
]
TableOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write there, not to standard output: a line for each row of --data, in its order.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write a JSON object a row, not CSV.")]


def predict(
    models: Annotated[Path, typer.Argument(metavar="MODELS", help="The folder that fedkeep export wrote.")],
    data: RowsOption,
    client: ModelOfOption = None,
    user: UserOption = None,
    shared: SharedOption = False,
    out: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the rows of a table by exported models: labels with probabilities, or numbers.

    FILE has the columns that were trained on; where it has labels too, how well they are met is said. Each row is predicted by the model of the user
    that its column of users names, or all by one: --client ID. With --shared a table needs no column of users.

    Further examples: fedkeep predict models --data new.csv --out predicted.csv, and
    fedkeep predict models --data new.parquet --shared --json
    """
    from fedkeep.experiments.personalize.exported import Exported
    from fedkeep.experiments.predicting import predict_table, scored

    check_asked(client, user, shared, out)
    exported = Exported(models)
    found = predict_table(exported, data, client=client, user=user, shared=shared)
    write_predictions(found, out, as_json)
    for score in scored(exported, data, found):
        plural = "" if score.rows == 1 else "s"
        of = f" of {score.label}" if score.label else ""
        told = f"{metric_name(score.metric)}{of} on {score.rows:,} row{plural} with a label: {number(score.value, score.metric)}"
        typer.echo(told, err=True)


def check_asked(client: str | None, user: str | None, shared: bool, out: Path | None) -> None:
    """Raise ConfigError where options don't go together, or nothing can be written."""
    if client is not None and (shared or user is not None):
        raise ConfigError("--client names the model of every row. Leave out --user and --shared.")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):  # before minutes of work are lost
        fault = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ConfigError("--out wants a file in a folder that is there; {fault}.", fault=fault)


def write_predictions(found: Sequence[Predicted], out: Path | None, as_json: bool) -> None:
    """Write predictions to a file, or to standard output."""
    from fedkeep.core.files import write_whole

    text = "".join(map(_line, found)) if as_json else _csv(found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text.encode())


def _line(row: Predicted) -> str:
    from fedkeep.experiments.predicting import as_json

    return json.dumps(as_json(row), ensure_ascii=False, allow_nan=False) + "\n"


def _csv(rows: Sequence[Predicted]) -> str:
    text, columns = io.StringIO(), ["client", *(name for each in rows[0].tasks for name in _cells(each))]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = {name: value for each in row.tasks for name, value in _cells(each).items()}
        writer.writerow({"client": row.client or "", **cells})
    return text.getvalue()


def _cells(said: Prediction) -> dict[str, Any]:
    """Return a prediction's cells by column: ``prediction`` and ``p(LABEL)``, of several numbers ``prediction.NAME``, all
    of them after ``TASK.`` where there are several tasks.
    """
    before = "" if said.task is None else f"{said.task}."
    value: Any = said.value
    if isinstance(value, list) and not said.probabilities:
        names = said.names or range(len(value))
        return {f"{before}prediction.{name}": number for name, number in zip(names, value, strict=True)}
    value = "|".join(value) if isinstance(value, list) else value  # as a table's reader takes several labels
    shares = {f"{before}p({label})": p for label, p in said.probabilities.items()}
    return {f"{before}prediction": value} | shares


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the models.")],
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="ID", help="Whose model. May be repeated.", rich_help_panel=ONE_OF),
    ] = None,
    everyone: Annotated[
        bool,
        typer.Option("--all", help="Every client that took part in federation.", rich_help_panel=ONE_OF),
    ] = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX files too, each compared with torch's numbers.")
    ] = False,
    round: RoundOption = "best",
    data: DataOption = None,
) -> None:
    """Write clients' models, as fedkeep evaluate judges them: what they share once, and what is each client's own.

    Load one with fedkeep.load_model(DIR, ID). RUN is the folder that fedkeep run wrote; nothing in it changes.
    """
    from fedkeep.experiments.load import load_run

    if bool(client) == everyone:
        raise ConfigError("Say whose models: --client ID, which may be repeated, or --all.")
    loaded = at_round(load_run(run, data_folder=data), round)
    warn_of_unfinished([run])
    ids = loaded.export(out, client, onnx=onnx)
    say(
        f"{out}: {len(ids)} model{'s' if len(ids) > 1 else ''} of {loaded.method.name}, after {loaded.moment}."
    )
    say(f"Load one: fedkeep.load_model({str(out)!r}, {ids[0]!r})")


def recommend(
    run: RunArgument,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="ID", help="A user; by default all in federation. May be repeated."),
    ] = None,
    new: Annotated[
        Path | None,
        typer.Option(
            "--new",
            metavar="FILE",
            help="The users of this file, whom fedkeep personalize --new has fitted; its rows are what they have.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many items a user is shown.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the lists there, as CSV.")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="Whose items are looked for: valid or test.")
    ] = "test",
    liked: Annotated[
        float | None,
        typer.Option(
            "--liked",
            help="Of ratings, the least that counts; by default that of the run's [ranking], or each.",
        ),
    ] = None,
    round: RoundOption = "best",
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Rank all items for each user, but those that it has; say where those stand that it took afterwards.

    RUN is a run on data with a column of items. All items are ranked, not a sample of them. With --out every user's
    list is written; with --client or --new and without --out it is shown.

    Somebody new: fedkeep personalize RUN --new rows.csv, then fedkeep recommend RUN --new rows.csv
    """
    import pyarrow.csv

    from fedkeep.core.files import write_whole
    from fedkeep.experiments.load import load_run

    loaded = at_round(load_run(run, data_folder=data, device=device), round)
    warn_of_unfinished([run])
    later = [name for name in client or () if name in loaded.fitted and loaded.data.ids.position(name) < 0]
    if new is None and later:
        raise ConfigError(
            "{later!r} came after training, and {run} does not keep which items it has. Name the file: --new FILE.",
            later=later[0],
            run=run,
        )
    if new is not None:
        loaded = of_file(loaded, run, new, "train")  # nothing is left to look for
    else:
        found = loaded.full_ranking(split, ks=(n,), liked=liked, clients=client)
        ranked = [[metric_name(metric), number(value, metric)] for metric, value in found.metrics.items()]
        title = f"{run}: full ranking, on {split}, after {loaded.moment}"
        show_table(title, ["Metric", "Mean over users"], ranked, note=found.told)
    lists = loaded.recommend(client, n)
    if out is not None:
        text = io.BytesIO()
        pyarrow.csv.write_csv(lists, text)
        write_whole(out, text.getvalue())
        say(f"Lists: {out}")
    elif client or new is not None:
        shown = [
            [row["client"], str(row["rank"]), str(row["item"]), f"{row['score']:.3f}"]
            for row in lists.to_pylist()
        ]
        show_table("Recommended", ["User", "Rank", "Item", "Score"], shown)
