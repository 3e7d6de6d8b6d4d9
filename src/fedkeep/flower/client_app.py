"""The ClientApp, one for all methods: it hands each message to this device's node and returns the node's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.flower.node_context import log, node_of
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.remote import Packet
from fedkeep.remote.agreement import refusal
from fedkeep.remote.node import Node

app = ClientApp()
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
