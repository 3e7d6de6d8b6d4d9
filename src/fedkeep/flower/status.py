"""How the server app is, in a file beside its run: Flower swallows what an app prints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedkeep.core.errors import RunError
from fedkeep.core.files import write_whole

State = Literal["starting", "running", "finished", "failed"]


@dataclass(frozen=True)
class Status:
    """What the server app says.

    Attributes:
        state: whether it goes on.
        text: for people: the last round, or the error.
        process: its number on this machine; 0: not known.
    """

    state: State = "starting"
    text: str = ""
    process: int = 0


def write_status(path: Path | None, status: Status) -> None:
    """Write a status; None: nobody wants to know. A disk that is full costs the status alone."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(asdict(status)).encode())
    except RunError:
        return


def read_status(path: Path) -> Status:
    """Return what was written last; a file that is not there yet says ``starting``."""
    try:
        found = json.loads(path.read_bytes())
        return Status(**found)
    except (FileNotFoundError, ValueError, TypeError):
        return Status()
