"""All that fedkeep takes from inside Flower. Any version may change it; ``tests/flower/test_inner.py`` says what is relied on.

Everything else is ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``, Flower's commands, and what its node writes
(``watch``). Nothing is imported before it is used: a process that is started for a message must first say that it lives.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SERVER, CLIENT = "flwr.superlink.runtime.run_serverapp", "flwr.supernode.runtime.run_clientapp"
NODE, NODE_LINK = "flwr.supernode.start_client_internal", "flwr.supernode.fleet_http_connection"
EXEC, LAUNCH = (
    "flwr.supercore.superexec.run_superexec",
    "flwr.supercore.superexec.executor.subprocess_executor",
)
LINK = "flwr.superlink.main"
PULLING = "flwr.supercore.inflatable.inflatable_utils"
PULLS, AGAIN = ("pull_objects", "pull_and_inflate_object_from_tree"), "initial_backoff"
"""What asks for a message's objects, and by which of its defaults it waits for one that is not there yet."""
AGAIN_AFTER = 0.1
"""Seconds that a server app, a node and its processes wait for such an object at first."""
REPLACED = {
    LINK: ("create_app",),
    SERVER: ("make_task_heartbeat_fn_http",),
    CLIENT: ("install_from_fab", "get_project_dir", "get_load_client_app_fn", "push_task_output"),
    NODE: ("subprocess", "time"),
    NODE_LINK: ("FleetHttpClient",),
    EXEC: ("time",),
    LAUNCH: ("subprocess",),
}
"""What is replaced: what a link answers; in the modules that run apps, a server app's own signs of life, how a bundle becomes an app, how a
node and its SuperExec start processes and wait, and how a node says that it is there."""


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


def run_link() -> None:
    """Do what the command ``flower-superlink`` does."""
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


def run_node() -> None:
    """Do what the command ``flower-supernode`` does."""
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def run_exec() -> None:
    """Do what the command ``flower-superexec`` does."""
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


def leave_exit_handlers() -> None:
    """Forget what Flower was to do at this process's end: in a forked child it is the parent's to do."""
    from flwr.supercore.exit.exit_handler import registered_exit_handlers

    registered_exit_handlers.clear()


def announcing(address_of: Callable[[], int | None], note: Callable[[int], None]) -> type:
    """Return Flower's client of a link; a node that was here before says first that it is gone.

    Args:
        address_of: returns the number under which the link may still take an earlier process of this node to be there.
        note: is given the number under which the link knows it now.
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from fedkeep.flower.watch import UNSIGNED, tell

    class Announcing(FleetHttpClient):
        def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802
            if (before := address_of()) is not None:
                with contextlib.suppress(
                    httpx.HTTPStatusError
                ):  # it is gone already, or the link is a new one
                    self.DeactivateNode(DeactivateNodeRequest(node_id=before))
            try:
                answer = super().ActivateNode(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == httpx.codes.UNAUTHORIZED:  # Flower's ends without a word
                    tell(f"{UNSIGNED}\n", sys.stderr)
                raise
            note(answer.node_id)
            return answer

    return Announcing


def run_server_app() -> None:
    """Do what the command ``flwr-serverapp`` does."""
    from flwr.superlink.cli import flwr_serverapp

    flwr_serverapp()


def run_client_app() -> None:
    """Do what the command ``flwr-clientapp`` does."""
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


def replace(module: str, name: str, ours: Any) -> Any:
    """Put a function, or what has those that are called, in the place of one of ``REPLACED``, and return that.

    Raises:
        RunError: there is none.
    """
    there = importlib.import_module(module)  # by its whole name: Flower's packages name functions so, too
    if not hasattr(there, name):
        refuse(f"{module} has no {name}")
    before = getattr(there, name)
    setattr(there, name, ours)
    return before


def ask_again_after(seconds: float) -> None:
    """Let this process, and its forks, ask again so soon for a message's object that is not there yet; then ever later.

    A message is told of before its objects have come, to nodes as to their processes and to a server app, so that most
    rounds wait for some.
    Flower waits one second, and then two.

    Raises:
        RunError: nothing waits so.
    """
    there = importlib.import_module(PULLING)
    for name in PULLS:
        defaults = getattr(getattr(there, name, None), "__kwdefaults__", None) or {}
        if AGAIN not in defaults:
            refuse(f"{PULLING}.{name} has no {AGAIN}")
        defaults[AGAIN] = seconds


def refuse(why: str) -> NoReturn:
    """Raise RunError: this Flower is another than is relied on."""
    from fedkeep.core.errors import RunError

    raise RunError(
        "This version of Flower loads apps in another way than 1.41 and 1.42 ({why}). Install one of these.",
        why=why,
    )
