"""Which node a ClientApp speaks for: the one that the device's configuration describes, or a simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context

from fedkeep.core.errors import ConfigError
from fedkeep.flower.supernode import NODE_CONFIG


def node_of(context: Context) -> Any:
    """Return the node of a context."""
    place = context.node_config.get(NODE_CONFIG)
    raise ConfigError(f"not yet: {Path(str(place))}")
