"""Packets over Flower's ``Grid``: pushed and pulled by us, as ``Grid.send_and_receive`` sleeps three seconds a look."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedkeep.core.errors import ConfigError, RunError, UploadError, first_line
from fedkeep.core.params import nbytes
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.remote import Packet, Reply

ASK = "query"
"""The type of every message: one ClientApp function answers all of them."""
LIMIT = 2_147_483_647
"""Bytes of one message: Flower's limit for what it sends in one piece (``MAX_PROTOBUF_STREAM_MESSAGE_LENGTH``)."""
GROUP = 8
"""Messages that are pushed at a time. Flower tells all their nodes of them first and pushes what is in them afterwards, one
after the other; until then a node asks for it in vain, and each time costs the link as much as any request."""
POLL = 0.2  # seconds between two looks for replies
Answer = TypeVar("Answer")
BORNE = 600.0  # seconds in which the link may answer every request with a fault of its own


class GridTransport:
    """The server's end of Flower.

    Args:
        grid: Flower's, as the ServerApp is given it.
        limit: bytes of the largest message; a proxy before the link may allow less than Flower.
        lifetime: seconds after which a message that nobody has fetched is dropped by the link.
        names: what people call nodes, by their keys; one without a name is called by Flower's number.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        limit: int = LIMIT,
        lifetime: float = 12 * 3600,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.grid, self.limit, self.lifetime, self.names = grid, limit, lifetime, names or {}
        self._numbers: dict[str, int] = {}  # by name
        self._unsent: dict[str, str] = {}
        self._began: dict[int, str] = {}  # when the node of a number came last
        self._sent: dict[str, int] = {}  # by ticket, to which number
        self._keys: Mapping[str, str] = {}
        self._woke = time.monotonic()  # when it waited last
        self._faulty: float | None = None  # since when the link has answered nothing but faults

    def nodes(self) -> Sequence[str]:
        """Return the nodes that the link takes to be there, by name; a second one of a key has its number, too.

        One that came back under another number is gone for one look, as what it was sent before is lost. Where one was
        started again under its number, that is told of each message that it was sent before.
        """
        known = tuple((n, key, self._began.get(n, "")) for n, key in self._known())
        found = self._asked(
            lambda: ((n.node_id, n.public_key.hex(), n.last_activated_at) for n in self.grid.get_nodes()),
            known,
        )
        there = [(number, key) for number, key, _ in found]
        for number, _, began in found:
            if self._began.get(number, began) != began:
                lost = [ticket for ticket, to in self._sent.items() if to == number]
                self._unsent |= dict.fromkeys(lost, "The node was started again")
        self._began |= {number: began for number, _, began in found}  # of one that is away for a look, too
        before, self._numbers, self._keys = {n: name for name, n in self._numbers.items()}, {}, {}
        for number, key in sorted(
            there, key=lambda node: node[0] not in before
        ):  # who is known keeps its name
            name = before.get(number, self.names.get(key, str(number)))
            name = f"{name} ({number})" if name in self._keys else name
            self._numbers[name], self._keys[name] = number, key
        names = before.values()
        return [name for name, number in self._numbers.items() if number in before or name not in names]

    def _known(self) -> list[tuple[int, str]]:
        return [(self._numbers[name], key) for name, key in self._keys.items()]

    def key(self, node: str) -> str:
        """Return what stands for the key by which the link knows a node."""
        return self._keys.get(node, "")

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Push packets, a few at a time.

        Raises:
            ConfigError: one is beyond the limit, so that no device would ever get it.
            UploadError: one cannot be written.
        """
        named = list(messages)
        for node, packet in named:
            self._check_size(node, packet)
        made = [
            Message(
                records,
                self._number(node),
                ASK,
                ttl=self.lifetime,
                group_id=str(packet.header.get("round", "")),
            )
            for (node, packet), records in zip(named, to_records(p for _, p in named), strict=True)
        ]
        tickets: list[str | None] = []
        while made:
            group, made = made[:GROUP], made[GROUP:]  # what was pushed is held no longer
            pushed = self._asked(partial(self.grid.push_messages, group))
            missing = len(group) - len(pushed)  # all, where a proxy found them too large: Flower returns []
            tickets += [*pushed, *[None] * missing]
        for ticket, (node, _) in zip(tickets, named, strict=True):
            if ticket:
                self._sent[ticket] = self._number(node)
        return [ticket or self._refused(node) for ticket, (node, _) in zip(tickets, named, strict=True)]

    def _number(self, node: str) -> int:
        return self._numbers[node] if node in self._numbers else int(node)

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """Pull what has come; an error of Flower's, and what cannot be read, is a reply's reason."""
        replies = [Reply(t, reason=self._unsent.pop(t)) for t in tickets if t in self._unsent]
        known = {reply.ticket for reply in replies}
        waiting = [ticket for ticket in tickets if ticket not in known]
        if waiting:
            replies += [_reply(m) for m in self._asked(lambda: self.grid.pull_messages(waiting))]
        for reply in replies:
            self._sent.pop(reply.ticket, None)
        return replies

    def now(self) -> float:
        """Return the seconds of a clock that never goes back, whatever happens to the time of day."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until the next look: as long as the last took, so that a busy link has half of its time."""
        time.sleep(max(0.0, min(seconds, max(POLL, time.monotonic() - self._woke))))
        self._woke = time.monotonic()

    def _asked(self, ask: Callable[[], Iterable[Answer]], otherwise: Sequence[Answer] = ()) -> list[Answer]:
        """Return what the link answers, and for some minutes ``otherwise`` while it has a fault, as a busy database.

        Flower tries again after 502 to 504, and not after 500. A message that is lost so is sent again, as any other.

        Raises:
            RunError: it has had nothing but faults for ``BORNE`` seconds.
        """
        try:
            answer = list(ask())
        except httpx.HTTPStatusError as error:
            if not error.response.is_server_error:
                raise
            self._faulty = self.now() if self._faulty is None else self._faulty
            if self.now() > self._faulty + BORNE:
                raise RunError(
                    "The link has answered nothing but faults for {borne:g} s ({why}). Its log says "
                    "why. Mend it and give the same command again: the run goes on after its last finished round.",
                    borne=BORNE,
                    why=first_line(error),
                ) from error
            return list(otherwise)
        self._faulty = None
        return answer

    def _check_size(self, node: str, packet: Packet) -> None:
        size = nbytes(packet.tensors)
        if size > self.limit:
            raise ConfigError(
                "A message of {size:,} bytes to node {node} is beyond the limit of {limit:,} bytes. Put fewer "
                "clients on a node, or train a smaller model.",
                size=size,
                node=node,
                limit=self.limit,
            )

    def _refused(self, node: str) -> str:
        ticket = f"unsent-{uuid.uuid4()}"
        self._unsent[ticket] = (
            f"The link did not take the message to node {node}; the node may just have left."
        )
        return ticket


def _reply(message: Message) -> Reply:
    ticket = message.metadata.reply_to_message_id
    if message.has_error():
        return Reply(ticket, reason=f"Flower: {message.error.reason} (code {message.error.code})")
    try:
        return Reply(ticket, from_records(message.content))
    except UploadError as error:
        return Reply(ticket, reason=str(error))
