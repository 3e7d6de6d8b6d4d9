"""``fedkeep deploy``: a whole federation on this machine, in one command."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from fedkeep.cli.output import say
from fedkeep.cli.settings import ConfigOption, SetOption, find_config, needs_flower


@needs_flower
def deploy(
    local: Annotated[
        int, typer.Option("--local", metavar="N", min=1, help="How many nodes on this machine.")
    ],
    config: ConfigOption,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Its folder; by default deployments/NAME.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The folder of real data, as for fedkeep run."),
    ] = None,
    overrides: SetOption = None,
    port: Annotated[int, typer.Option("--port", help="Of the link; by default a free one.")] = 0,
    only: Annotated[
        Literal["", "judge", "adapt"],
        typer.Option(
            "--only",
            metavar="judge|adapt",
            help="Train nothing: measure what an earlier deployment in DIR left, or let its clients adapt to it.",
        ),
    ] = "",
) -> None:
    """Try a federation out on this machine: keys, a link with TLS, N nodes, a training to its end; then all stops.

    The clients of CONFIG's data are dealt out to the nodes. Called again with the same folder it goes on where it was.
    """
    from fedkeep.flower.local import federation, judged, local_of, train
    from fedkeep.report.page import write_report

    found = find_config(config, overrides)
    folder = out or Path("deployments") / found.label
    place = local_of(folder, found.text, found.data_folder(data), local, port)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with federation(place, say) as (link, _):
            train(place, link, say, {"only": only})
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in judged(place.run, only):
        say(line)
    page = write_report([place.run], folder)
    say(f"Everything is stopped. The run: {folder / 'run'}. Its page: {page}")


def _stop(number: int, frame: FrameType | None) -> None:
    """Let a request to end take the way of Ctrl-C, on which everything is stopped."""
    raise KeyboardInterrupt
