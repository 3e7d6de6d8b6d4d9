"""What stands in for ``flwr-clientapp`` on a device: the installed ClientApp, and no code of a delivered bundle.

Flower unpacks a bundle, puts it first on the path and imports the app that it names, so a bundle with a module named
``fedkeep`` would be trusted with everything on the device. Here the bundle is checked for its signature and not even
unpacked. The node then trains what was signed, and no other experiment that a server names. ``fedkeep device run`` puts
commands that run this file before Flower's own; those that would run other apps of a bundle refuse.

Flower drops a process that is silent for too long, and to import torch takes long on a busy device. So this is run as a
file, and imports fedkeep only when a message is there: by then Flower's heartbeat beats.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

TRUSTED = "FEDKEEP_TRUSTED"
"""Environment variable: the public keys whose projects are answered, separated as in ``PATH``."""
COMMAND = "flwr-clientapp"
_signed: dict[str, Any] = {}
"""``Node.signed`` of this process's message: nothing until a bundle has been found signed."""


def install(folder: Path) -> None:
    """Write into a folder, which is to be the first of ``PATH``, every command that SuperExec may start for a bundle.

    Raises:
        RunError: this version of Flower starts apps in another way.
    """
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    commands = set(TASK_TYPE_TO_COMMAND.values())
    if COMMAND not in commands:
        _refuse_flower("it has no command flwr-clientapp")
    folder.mkdir(parents=True, exist_ok=True)
    for command in sorted(commands):
        words = shlex.join([sys.executable, "-P", os.path.abspath(__file__), command])
        path = folder / command
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        path.chmod(0o755)


def main() -> None:
    """Serve one message by the installed ClientApp; the first argument is the command that is stood in for."""
    command = sys.argv.pop(1)
    if command != COMMAND:
        sys.exit(f"This device runs fedkeep's ClientApp alone; {command} was not started.")
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    _replace(runtime, "install_from_fab", lambda content, **_: _check(content))
    _replace(runtime, "get_project_dir", lambda *_: Path(os.devnull))
    _replace(runtime, "get_load_client_app_fn", lambda **_: lambda *_: _app())
    flwr_clientapp()


def _check(content: bytes) -> None:
    from fedkeep.flower.served import experiments_in
    from fedkeep.flower.signed import check_signed

    trusted = [Path(path) for path in os.environ.get(TRUSTED, "").split(os.pathsep) if path]
    _signed.update(experiments_in(check_signed(content, trusted)))


def _app() -> Any:
    from fedkeep.flower import client_app

    client_app.signed = _signed
    return client_app.app


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    if not hasattr(module, name):
        _refuse_flower(f"{module.__name__} has no {name}")
    setattr(module, name, function)


def _refuse_flower(why: str) -> NoReturn:
    from fedkeep.core.errors import RunError

    raise RunError(f"This version of Flower loads apps in another way than 1.41 ({why}). Install flwr 1.41.")


if __name__ == "__main__":
    main()
