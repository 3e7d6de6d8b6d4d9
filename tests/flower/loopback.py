"""A grid in one process: each message through Flower's own form on the wire, there and back, and no server between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

Serve = Callable[[Message, Context], Message]


class Loopback:
    """Flower's ``Grid`` as far as ``GridTransport`` uses it.

    Attributes:
        carried: the bytes of every object that travelled, in both directions, by its hash.
        sent: how many objects went out, each counted once per push.
    """

    def __init__(self, serve: Serve, contexts: Sequence[Context]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.serve, self.contexts = serve, {context.node_id: context for context in contexts}
        self.keys: dict[int, bytes] = {}
        self.began: dict[int, str] = {}
        self.carried: dict[str, bytes] = {}
        self.replies: dict[str, Message] = {}

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                node_id=node,
                public_key=self.keys.get(node, b"key %d" % node),
                last_activated_at=self.began.get(node, ""),
            )
            for node in self.contexts
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        ticket = message.object_id
        arrived = self.travel(message)
        try:
            reply = self.serve(arrived, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001  as Flower's flwr-clientapp does
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=arrived)
        self.replies[ticket] = self.travel(reply)
        return ticket

    def travel(self, message: Message) -> Message:
        ticket = message.object_id
        contents = {name: value.deflate() for name, value in get_all_nested_objects(message).items()}
        self.carried |= contents
        arrived: Any = inflate_object_from_contents(ticket, dict(contents))
        arrived.metadata.__dict__["_message_id"] = ticket
        return arrived

    def pull_messages(self, tickets: Iterable[str]) -> list[Message]:
        return [self.replies.pop(ticket) for ticket in list(tickets) if ticket in self.replies]


def context(node: int = 7, **config: Any) -> Context:
    """Return a node's context, as Flower makes it."""
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
