"""``fedkeep export``: clients' personalised models as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, warn_of_unfinished
from fedkeep.cli.settings import DataOption, RoundOption, RunArgument, at_round
from fedkeep.core.errors import ConfigError


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the models.")],
    client: Annotated[
        list[str] | None, typer.Option("--client", metavar="ID", help="Whose model. May be repeated.")
    ] = None,
    everyone: Annotated[
        bool, typer.Option("--all", help="Every client that took part in federation.")
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
