"""What stands in for ``flwr-clientapp`` on a device: the installed ClientApp, and no code of a delivered bundle.

Flower unpacks a bundle, puts it first on the path and imports the app that it names, so a bundle with a module named
``fedkeep`` would be trusted with everything on the device. Here the bundle is checked for its signature and not even
unpacked. ``fedkeep device run`` puts commands of this module before Flower's own; those that would run other apps of a
bundle refuse.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError
from fedkeep.flower.signed import check_signed

TRUSTED = "FEDKEEP_TRUSTED"
"""Environment variable: the public keys whose projects are answered, separated as in ``PATH``."""
COMMAND = "flwr-clientapp"


def install(folder: Path) -> None:
    """Write into a folder, which is to be the first of ``PATH``, every command that SuperExec may start for a bundle.

    Raises:
        RunError: this version of Flower starts apps in another way.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    commands = set(TASK_TYPE_TO_COMMAND.values())
    if COMMAND not in commands:
        raise RunError(_other_flower("it has no command flwr-clientapp"))
    folder.mkdir(parents=True, exist_ok=True)
    for command in sorted(commands):
        call = "main()" if command == COMMAND else f"refuse({command!r})"
        code = f"from fedkeep.flower import guard; guard.{call}"
        path = folder / command
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -c "{code}" "$@"\n')
        path.chmod(0o755)


def main() -> None:
    """Serve one message by the installed ClientApp."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    from fedkeep.flower.client_app import app

    trusted = [Path(path) for path in os.environ.get(TRUSTED, "").split(os.pathsep) if path]
    _replace(runtime, "install_from_fab", lambda content, **_: check_signed(content, trusted))
    _replace(runtime, "get_project_dir", lambda *_: Path(os.devnull))
    _replace(runtime, "get_load_client_app_fn", lambda **_: lambda *_: app)
    flwr_clientapp()


def refuse(command: str) -> None:
    """End: a device runs no other apps."""
    sys.exit(f"This device runs fedkeep's ClientApp alone; {command} was not started.")


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        raise RunError(_other_flower(f"{module.__name__} has no {name}"))
    setattr(module, name, function)


def _other_flower(why: str) -> str:
    return f"This version of Flower loads apps in another way than 1.41 ({why}). Install flwr 1.41."
