"""The ServerApp, one for all methods: fedkeep's server over Flower's grid; it resumes by itself after a stop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from pydantic import BaseModel, ConfigDict, Field

from fedkeep.core.allocator import give_large_back
from fedkeep.core.errors import FedkeepError
from fedkeep.core.run_files import read_info
from fedkeep.experiments.config import read_text
from fedkeep.experiments.config_tables import made_of
from fedkeep.experiments.progress import Stand, tell_elsewhere
from fedkeep.flower.grid import LIMIT, GridTransport
from fedkeep.flower.local_federation import ServerStatus, State, judged, write_status
from fedkeep.flower.project import bundled
from fedkeep.flower.served import federation_of
from fedkeep.flower.signed import NODES, listed_in, node_names
from fedkeep.remote.events import LOG
from fedkeep.remote.migration import OnChange
from fedkeep.remote.served_run import Only, serve_run

app = ServerApp()
POLL = 2.0
"""A node that has not answered a hello after 60 times so many seconds is asked again; as each message starts a process
there, a busy device needs a minute. Looks for nodes are nearer: ``GridTransport`` waits 0.2 seconds at most."""


EVERY = 10.0
"""Seconds, at least, between two lines about finished rounds."""
say = logging.getLogger("flwr").info  # what Flower's logger is told is shown by flwr run --stream


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """What ``new_project`` writes there, which says what each is; ``"3"`` is no number, ``"false"`` is no ``false``."""

    model_config = ConfigDict(frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-"))

    config: Text
    out: Text
    status: str
    clients: Count
    limit: Annotated[int, Field(ge=0, le=LIMIT)]
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    only: Only
    keep_rounds: Count
    continue_from: str
    on_change: OnChange

    @property
    def run(self) -> Path:
        """The folder of the server's run."""
        return Path(self.out)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings that Flower gives the server app.

    Raises:
        ConfigError: one is missing, or its value doesn't fit; all faults are named.
    """
    where = "The settings of the server app (tool.flwr.app.config, --run-config)"
    found: Settings = made_of(Settings, given, where)
    return found


class RoundLog:
    """Says how many rounds are finished, in the log that ``flwr run --stream`` shows."""

    def __init__(self) -> None:
        self.last = -EVERY

    def __call__(self, stand: Stand) -> None:
        """Say it, unless that has just been done."""
        if time.monotonic() >= self.last + EVERY:
            self.last = time.monotonic()
            say(f"{stand.title}: {stand.done:g} of {stand.total} rounds are finished.")


class NodeLog(logging.Handler):
    """Says there, and in the status, which nodes join, refuse and leave."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say(record.getMessage())
        self.tell(record.getMessage())


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train what the project's configuration says."""
    status = context.run_config.get("status")
    path = Path(status) if status and isinstance(status, str) else None

    def tell(state: State, text: str) -> None:
        write_status(path, ServerStatus(state, text, os.getpid()))

    try:
        give_large_back()
        settings = settings_of(context.run_config)
        tell("running", "The server app has started.")
        _serve(grid, settings, lambda text: tell("running", text))
    except FedkeepError as error:
        tell("failed", str(error))
        say(f"Error: {error}")
        raise error.with_traceback(None) from None  # Flower writes it as a traceback: a short one
    except Exception as error:
        tell("failed", f"{type(error).__name__}: {error}")
        raise
    done = {"": "training", "judge": "judging", "adapt": "adapting"}[settings.only]
    for line in judged(settings.run, settings.only):
        say(line)
    missed = "" if settings.only else " ".join(["", *read_info(settings.run).get("attendance", ())])
    say(f"The {done} is finished.{missed} The run: {settings.out}")
    tell("finished", f"The {done} is finished.{missed}")


def _serve(grid: Grid, settings: Settings, tell: Callable[[str], None]) -> None:
    federation = federation_of(read_text(bundled(settings.config)), settings.config)
    if settings.clients:
        federation = replace(federation, clients=settings.clients)
    if settings.continue_from:
        older = Path(settings.continue_from)
        federation = replace(federation, continue_from=older, on_change=settings.on_change)
    project = bundled(settings.config).parent
    names = node_names(project / NODES)
    federation = replace(federation, listed=listed_in(project, names))
    tell_elsewhere(RoundLog())
    LOG.setLevel(logging.INFO)
    LOG.handlers = [NodeLog(tell)]
    serve_run(
        federation,
        GridTransport(grid, limit=settings.limit or LIMIT, names=names),
        settings.run,
        patience=settings.patience,
        keep_rounds=settings.keep_rounds,
        only=settings.only,
        poll=POLL,
    )
