"""The ServerApp, one for all methods: fedkeep's server over Flower's grid; it resumes by itself after a stop."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.progress import Stand, tell_elsewhere
from fedkeep.flower.local import judged
from fedkeep.flower.project import bundled
from fedkeep.flower.served import federation_of
from fedkeep.flower.status import Status, write_status
from fedkeep.flower.transport import LIMIT, GridTransport
from fedkeep.remote.continued import check_on_change
from fedkeep.remote.events import LOG
from fedkeep.remote.server import serve_run

app = ServerApp()
POLL = 2.0
"""A node that has not answered a hello after 60 times so many seconds is asked again; as each message starts a process
there, a busy device needs a minute. Looks for nodes are nearer: ``GridTransport`` waits 0.2 seconds at most."""


EVERY = 10.0
"""Seconds, at least, between two lines about finished rounds."""
say = logging.getLogger("flwr").info  # what Flower's logger is told is shown by flwr run --stream


class Rounds:
    """Says how many rounds are finished, in the log that ``flwr run --stream`` shows."""

    def __init__(self) -> None:
        self.last = -EVERY

    def __call__(self, stand: Stand) -> None:
        """Say it, unless that has just been done."""
        if time.monotonic() >= self.last + EVERY:
            self.last = time.monotonic()
            say(f"{stand.title}: {stand.done:g} of {stand.total} rounds are finished.")


class Told(logging.Handler):
    """Says there, too, which nodes join, refuse and leave."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say(record.getMessage())


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
        tell_elsewhere(Rounds())
        LOG.setLevel(logging.INFO)
        LOG.handlers = [Told()]
        serve_run(
            federation, transport, Path(str(settings["out"])), patience=float(settings["patience"]),
            keep_rounds=int(settings["keep-rounds"]), judge_only=bool(settings["judge-only"]), poll=POLL,
        )  # fmt: skip
    except FedkeepError as error:
        write_status(path, Status("failed", str(error), os.getpid()))
        say(f"Error: {error}")
        raise error.with_traceback(None) from None  # Flower writes it as a traceback: a short one
    done = "The judging is" if settings["judge-only"] else "The training is"
    for line in judged(Path(str(settings["out"]))) if settings["judge-only"] else ():
        say(line)
    say(f"{done} finished. The run: {settings['out']}")
    write_status(path, Status("finished", f"{done} finished.", os.getpid()))
