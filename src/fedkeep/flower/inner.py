"""All that fedkeep takes from inside Flower. Any version may change it; ``tests/flower/test_inner.py`` says what is relied on.

Everything else is ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``, Flower's commands, and what its node writes
(``watch``). Nothing is imported before it is used: a process that is started for a message must first say that it lives.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SERVER, CLIENT = "flwr.superlink.runtime.run_serverapp", "flwr.supernode.runtime.run_clientapp"
REPLACED = {
    SERVER: ("make_task_heartbeat_fn_http",),
    CLIENT: ("install_from_fab", "get_project_dir", "get_load_client_app_fn", "push_task_output"),
}
"""What is replaced in the modules that run apps: a server app's own signs of life, and how a bundle becomes an app."""


def nested_bytes(records: Any) -> list[bytes]:
    """Return the bytes that Flower sends of records: theirs, and of each object inside them."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return [part.deflate() for part in get_all_nested_objects(records).values()]


def bundle_of(project: Path) -> bytes:
    """Return a project as Flower packs it. It reads ``FLWR_HOME`` where it is imported.

    Raises:
        ValueError, OSError: it is none.
    """
    from flwr.cli.build import build_fab_from_disk

    made: bytes = build_fab_from_disk(project)
    return made


def commands() -> set[str]:
    """Return the commands that a node or link may start for a bundle."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    return set(TASK_TYPE_TO_COMMAND.values())


def run_server_app() -> None:
    """Do what the command ``flwr-serverapp`` does."""
    from flwr.superlink.cli import flwr_serverapp

    flwr_serverapp()


def run_client_app() -> None:
    """Do what the command ``flwr-clientapp`` does."""
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


def replace(module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Put a function in the place of one of ``REPLACED``, and return that.

    Raises:
        RunError: there is none.
    """
    there = importlib.import_module(module)  # by its whole name: Flower's packages name functions so, too
    if not hasattr(there, name):
        refuse(f"{module} has no {name}")
    before: Callable[..., Any] = getattr(there, name)
    setattr(there, name, function)
    return before


def refuse(why: str) -> NoReturn:
    """Raise RunError: this Flower is another than is relied on."""
    from fedkeep.core.errors import RunError

    raise RunError(
        f"This version of Flower loads apps in another way than 1.41 and 1.42 ({why}). Install one of these."
    )
