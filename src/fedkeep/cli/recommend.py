"""``fedkeep recommend``: each user's best items, and how well those stand that it took."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RoundOption, RunArgument, at_round
from fedkeep.report.wording import metric_name, number


def recommend(
    run: RunArgument,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="ID", help="A user; by default all in federation. May be repeated."),
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
    list is written; with --client and without --out it is shown.

    Further example: fedkeep recommend RUN --client anna --n 5
    """
    import pyarrow.csv

    from fedkeep.core.files import write_whole
    from fedkeep.experiments.load import load_run

    loaded = at_round(load_run(run, data_folder=data, device=device), round)
    warn_of_unfinished([run])
    found = loaded.full_ranking(split, ks=(n,), liked=liked, clients=client)
    rows = [[metric_name(metric), number(value, metric)] for metric, value in found.metrics.items()]
    items = sum(map(len, found.ranks.values()))
    note = f"{items:,} items of {found.clients:,} users, each among all that the user had not seen."
    if found.cold_items:
        note += f" Nobody had {found.cold_items:,} of them in training: of these {found.cold_recall:.1%} are found."
    if found.cold_clients:
        note += f" {found.cold_clients:,} users have no training example."
    show_table(
        f"{run}: full ranking, on {split}, after {loaded.moment}",
        ["Metric", "Mean over users"],
        rows,
        note=note,
    )
    lists = loaded.recommend(client, n)
    if out is not None:
        text = io.BytesIO()
        pyarrow.csv.write_csv(lists, text)
        write_whole(out, text.getvalue())
        say(f"Lists: {out}")
    elif client:
        shown = [
            [row["client"], str(row["rank"]), str(row["item"]), f"{row['score']:.3f}"]
            for row in lists.to_pylist()
        ]
        show_table("Recommended", ["User", "Rank", "Item", "Score"], shown)
