"""THE ServerApp, for every method: fedkeep's server over Flower's grid; it resumes by itself where it was stopped."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.core.errors import FedkeepError
from fedkeep.flower.project import bundled
from fedkeep.flower.served import federation_of
from fedkeep.flower.status import Status, write_status
from fedkeep.flower.transport import LIMIT, GridTransport
from fedkeep.remote.continued import check_on_change
from fedkeep.remote.server import serve_run

app = ServerApp()
POLL = 2.0
"""Seconds between two looks for nodes. A node that has not answered a hello after 60 of them is asked again; as each
message starts a process there, a busy device needs a minute."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train what the project's configuration says."""
    settings = context.run_config
    path = Path(str(settings["status"])) if settings["status"] else None

    def tell(text: str) -> None:
        write_status(path, Status("running", text, os.getpid()))

    try:
        federation = federation_of(bundled(str(settings["config"])).read_text(encoding="utf-8"))
        if settings["clients"]:
            federation = replace(federation, clients=int(settings["clients"]))
        if settings["continue-from"]:
            folder, on_change = Path(str(settings["continue-from"])), check_on_change(settings["on-change"])
            federation = replace(federation, continue_from=folder, on_change=on_change)
        transport = GridTransport(grid, limit=int(settings["limit"]) or LIMIT)
        tell("The server app has started.")
        serve_run(
            federation, transport, Path(str(settings["out"])), patience=float(settings["patience"]),
            keep_rounds=int(settings["keep-rounds"]), judge_only=bool(settings["judge-only"]), progress=False,
            poll=POLL,
        )  # fmt: skip
    except FedkeepError as error:
        write_status(path, Status("failed", str(error), os.getpid()))
        raise
    write_status(path, Status("finished", "The training is finished.", os.getpid()))
