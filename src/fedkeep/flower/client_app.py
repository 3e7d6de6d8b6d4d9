"""THE ClientApp, for every method: it hands each message to this device's node and sends back what the node answers."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.core.errors import FedkeepError
from fedkeep.flower.nodes import node_of
from fedkeep.flower.wire import from_records, to_records
from fedkeep.remote import Packet

app = ClientApp()


@app.query()
def serve(message: Message, context: Context) -> Message:
    """Answer a message; what is malformed, and a device that cannot serve, is answered by a reason."""
    try:
        packet = from_records(message.content)
        node = node_of(context)
        try:
            reply = node.serve(packet)
        finally:
            node.release()  # the next message may be another process's
    except FedkeepError as error:
        reply = Packet({"kind": "refused", "run": "", "reason": str(error)})
    return Message(to_records([reply])[0], reply_to=message)
