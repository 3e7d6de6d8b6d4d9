"""The ClientApp, one for all methods: it hands each message to this device's node and returns the node's answer.

The node is the one that the device's configuration describes, or one of a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.config import read_config
from fedkeep.experiments.sources import build_source
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.flower.project import NODE_CONFIG, bundled
from fedkeep.remote import Packet
from fedkeep.remote.agreement import RefusalError, refusal
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.node_config import build_node, experiment
from fedkeep.remote.own_data import of_clients

app = ClientApp()
AT_HAND = 64  # nodes that one process of a simulation keeps
signed: Mapping[str, Any] | None = None
"""What may be trained here, as ``Node.signed``; ``guard`` says it for each message."""


@app.query()
def serve(message: Message, context: Context) -> Message:
    """Answer a message."""
    return answered(message, lambda packet: _bound(node_of(context)))


def _bound(node: Node) -> Node:
    node.signed = signed
    return node


def answered(message: Message, find: Callable[[Packet], Node]) -> Message:
    """Let the node that a packet is for answer a message; what is malformed, or cannot be served, gets a reason.

    Nothing is raised: Flower would send an error's text, which may hold data.
    """
    packet = Packet({})
    try:
        packet = from_records(message.content)
        node = find(packet)
        try:
            records = to_records([node.serve(packet)])
        finally:
            node.release()  # the next message may be another process's
    except Exception as error:  # noqa: BLE001  also a fault in a reader of the device's own
        records = to_records([refusal(error, packet, log)])
    return Message(records[0], reply_to=message)


def node_of(context: Context) -> Node:
    """Return the node of a context; a process that serves several messages keeps it.

    Raises:
        RefusalError: no configuration is named.
        ConfigError, DataError: the configuration is wrong, or there is a fault in the data.
    """
    place = context.node_config.get(NODE_CONFIG)
    if place is not None:
        return _configured(Path(str(place)))
    if "partition-id" not in context.node_config:
        raise RefusalError(
            "This node has no configuration. Start it with fedkeep device run NODE.toml, or with --node-config "
            "'{node_config}=\"/path/of/node.toml\"'.",
            node_config=NODE_CONFIG,
        )
    settings = context.run_config
    number, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return _simulated(bundled(str(settings["config"])), Path(str(settings["devices"])), number, count)


@lru_cache(maxsize=AT_HAND)
def _configured(path: Path) -> Node:
    return build_node(path, tell=log)


@lru_cache(maxsize=AT_HAND)
def _simulated(config: Path, folder: Path, number: int, count: int) -> Node:
    """Return a node of a simulation: its clients are every ``count``-th of the experiment's own data."""
    settings, _ = read_config(config)
    source = build_source(settings.data, settings.seed)
    clients = [str(client) for client in source.ids][number::count]
    if not clients:
        raise ConfigError(
            "There are {clients} clients and {nodes} nodes; a node has at least one client.",
            clients=len(source.ids),
            nodes=count,
        )
    owner = f"supernode {number} of {count}"  # of another number it would have other clients
    terms = OwnerTerms(owner=owner, simulated_noise=True)
    return Node(of_clients(source, clients, "the node"), folder / str(number), terms, experiment, tell=log)


def log(text: str) -> None:
    """Say it on the device: SuperNode keeps what its ClientApp prints."""
    print(text, flush=True)  # noqa: T201
