"""``fedkeep recommend``: each user's best items, and how well those stand that it took."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.evaluate import of_file
from fedkeep.cli.output import say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RoundOption, RunArgument, at_round
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run


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
        typer.Option("--liked", help="Of ratings, the least that counts; by default each rated item does."),
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
            f"{later[0]!r} came after training, and {run} does not keep which items it has. Name the file: --new FILE."
        )
    if new is not None:
        loaded = of_file(loaded, run, new, "train")  # nothing is left to look for
    else:
        _show_ranking(loaded, run, n, split, liked, client)
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


def _show_ranking(
    loaded: Run, run: Path, n: int, split: str, liked: float | None, client: list[str] | None
) -> None:
    found = loaded.full_ranking(split, ks=(n,), liked=liked, clients=client)
    rows = [[metric_name(metric), number(value, metric)] for metric, value in found.metrics.items()]
    show_table(
        f"{run}: full ranking, on {split}, after {loaded.moment}",
        ["Metric", "Mean over users"],
        rows,
        note=found.told,
    )
