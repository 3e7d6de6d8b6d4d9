"""``fedkeep device run``: this machine as a node of a federation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.device import device
from fedkeep.cli.extras import needs_flower
from fedkeep.cli.output import say

__all__ = ["device", "run"]


@device.command("run", epilog="Example: fedkeep device run node.toml")
@needs_flower
def run(
    config: Annotated[Path, typer.Argument(metavar="NODE.toml", help="The device's own configuration.")],
) -> None:
    """Take part in a federation: wait for orders, train on this device's data, keep what is private here.

    The ClientApp that runs is the installed fedkeep's. Code that a project brings is not even unpacked, and a project
    that no trusted key has signed (link.trusted) is refused.
    """
    from fedkeep.flower.processes import WATCH
    from fedkeep.flower.supernode import SuperNode
    from fedkeep.remote.node_config import build_node, states_folder

    node = build_node(config)
    supernode = SuperNode.read(config, states_folder(config) / "flower")
    supernode.check()
    say(
        f"{len(node.clients)} clients, e.g. {node.clients[0]}. Joining {supernode.link.address}; Ctrl-C ends it."
    )
    sys.stdout.flush()
    command = [sys.executable, str(WATCH), *supernode.command()]
    os.execve(sys.executable, command, supernode.environment())
