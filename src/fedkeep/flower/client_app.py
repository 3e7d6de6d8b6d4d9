"""The ClientApp, one for all methods: it hands each message to this device's node and returns the node's answer."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.core.errors import FedkeepError
from fedkeep.flower.nodes import node_of
from fedkeep.flower.wire import from_records, to_records
from fedkeep.remote import Packet
from fedkeep.remote.node import Node

app = ClientApp()


@app.query()
def serve(message: Message, context: Context) -> Message:
    """Answer a message."""
    return answered(message, lambda packet: node_of(context))


def answered(message: Message, find: Callable[[Packet], Node]) -> Message:
    """Let the node that a packet is for answer a message; what is malformed, or cannot be served, gets a reason."""
    try:
        packet = from_records(message.content)
        node = find(packet)
        try:
            reply = node.serve(packet)
        finally:
            node.release()  # the next message may be another process's
    except FedkeepError as error:
        reply = Packet({"kind": "refused", "run": "", "reason": str(error)})
    return Message(to_records([reply])[0], reply_to=message)
