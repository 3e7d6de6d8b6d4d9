"""What a transport must do, and one in this process, for tests and campaigns: real bytes, a virtual clock, faults by a seed.

There time stands still but in ``wait``, so that hours of deadlines pass in no time and a run repeats to the bit.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.packet import Packet


@dataclass(frozen=True)
class Reply:
    """What came of a message.

    Attributes:
        ticket: the message's, as ``Transport.send`` returned it.
        packet: the node's reply; None: there is none.
        reason: why there is none.
    """

    ticket: str
    packet: Packet | None = None
    reason: str = ""


class Transport(Protocol):
    """Carries packets between the server and nodes. It may lose, delay, repeat or damage any of them."""

    def nodes(self) -> Sequence[str]:
        """Return the nodes that are there now; a node that was restarted may have another name."""

    def key(self, node: str) -> str:
        """Return what stands for a node's key, by the link and not by the node's word; empty: it knows none."""

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Send packets to nodes without waiting; return a ticket for each. A message may arrive more than once."""

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """Return what has come for these tickets since the last call; it may be nothing."""

    def now(self) -> float:
        """Return the time in seconds, from any beginning; it never goes back."""

    def wait(self, seconds: float) -> None:
        """Let this much time pass, or less if a reply comes."""


Serve = Callable[[Packet], Packet]


class Died(BaseException):
    """A node's process was killed; raised inside ``Serve`` it takes the node away without an answer."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How badly messages travel; each probability is of one way, by itself.

    Attributes:
        lose: of a message that never arrives, without a sign.
        corrupt: of a message of which a byte is changed on its way.
        duplicate: of a message that arrives twice.
        delay: of a message that takes up to ``latest`` seconds longer, so that others overtake it.
        latest: in seconds.
    """

    lose: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    latest: float = 100.0


@dataclass
class _MemoryNode:
    serve: Serve
    free: float = 0.0  # when it has done what it was sent


@dataclass(order=True)
class _Due:
    when: float
    number: int
    action: Callable[[], None] = field(compare=False)


class MemoryTransport:
    """Nodes in this process.

    Args:
        nodes: by name, what answers a packet.
        seed: all faults follow from it.
        weather: how messages travel.
        takes: seconds that a node needs for a packet, given its name and the packet; it serves one after the other.
        most_bytes: the largest message that is carried; None: any.
        keys: by name of a node, what stands for its key; those that are not named have none.

    Attributes:
        carried: kind, node and number of bytes of every message sent, in order.
        deaths: names of nodes that died while they served, in order.
        on_death: called with a node's name after it died, e.g. to let another one ``join`` later.
    """

    def __init__(
        self,
        nodes: Mapping[str, Serve],
        *,
        seed: int = 0,
        weather: Weather = Weather(),
        takes: Callable[[str, Packet], float] = lambda name, packet: 0.0,
        most_bytes: int | None = None,
        keys: Mapping[str, str] = {},
    ) -> None:
        self._nodes = {name: _MemoryNode(serve) for name, serve in nodes.items()}
        self._draw, self.weather, self._takes = np.random.default_rng(seed), weather, takes
        self.most_bytes, self.keys = most_bytes, dict(keys)
        self._now, self._due, self._numbers = 0.0, list[_Due](), itertools.count()
        self._inbox: dict[str, list[Reply]] = {}
        self.carried: list[tuple[str, str, int]] = []
        self.deaths: list[str] = []
        self.on_death: Callable[[str], None] = lambda name: None

    def nodes(self) -> Sequence[str]:
        """Return the nodes that are there now."""
        return list(self._nodes)

    def key(self, node: str) -> str:
        """Return what stands for a node's key."""
        return self.keys.get(node, "")

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Send packets.

        Raises:
            ConfigError: a packet is larger than this transport carries; nothing is sent.
        """
        ready = [(node, str(packet.header["kind"]), packet.to_bytes()) for node, packet in messages]
        for node, kind, content in ready:
            if self.most_bytes is not None and len(content) > self.most_bytes:
                raise ConfigError(
                    "The message {kind!r} to node {node!r} has {count:,} bytes, and this transport carries at "
                    "most {most_bytes:,}. Let a node have fewer clients, or take a smaller model.",
                    kind=kind,
                    node=node,
                    count=len(content),
                    most_bytes=self.most_bytes,
                )
        tickets = []
        for node, kind, content in ready:
            ticket = f"{next(self._numbers)}"
            tickets.append(ticket)
            self.carried.append((kind, node, len(content)))
            self._travel(content, lambda found, n=node, t=ticket: self._arrive(n, t, found))  # type: ignore[misc]
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """Return what has come for these tickets since the last call."""
        return [reply for ticket in tickets for reply in self._inbox.pop(ticket, [])]

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def wait(self, seconds: float) -> None:
        """Let time pass until a reply comes, at most so many seconds."""
        end, waiting = self._now + seconds, sum(map(len, self._inbox.values()))
        while self._due and self._due[0].when <= end:
            due = heapq.heappop(self._due)
            self._now = max(self._now, due.when)
            due.action()
            later = (
                not self._due or self._due[0].when > self._now
            )  # all that comes at this instant comes together
            if later and sum(map(len, self._inbox.values())) > waiting:
                return
        self._now = end

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something when so much time has passed."""
        heapq.heappush(self._due, _Due(self._now + seconds, next(self._numbers), action))

    def join(self, name: str, serve: Serve) -> None:
        """Let a node be there from now on."""
        self._nodes[name] = _MemoryNode(serve, self._now)

    def leave(self, name: str) -> None:
        """Let a node be gone: what was sent to it, or it was about to answer, is lost."""
        self._nodes.pop(name, None)

    def _travel(self, content: bytes, arrive: Callable[[bytes], None]) -> None:
        weather, draw = self.weather, self._draw
        for _ in range(1 + (draw.random() < weather.duplicate)):
            if draw.random() < weather.lose:
                continue
            found = bytearray(content)
            if draw.random() < weather.corrupt:
                found[int(draw.integers(len(found)))] ^= 1 << int(draw.integers(8))
            late = draw.random() * weather.latest if draw.random() < weather.delay else 0.0
            self.after(late, lambda found=bytes(found): arrive(found))  # type: ignore[misc]

    def _arrive(self, name: str, ticket: str, content: bytes) -> None:
        node = self._nodes.get(name)
        if node is None:
            self._put(ticket, Reply(ticket, None, f"node {name!r} is not there"))
            return
        if node.free > self._now:  # it is busy
            self.after(node.free - self._now, lambda: self._arrive(name, ticket, content))
            return
        try:
            packet = Packet.from_bytes(content)
        except UploadError as error:
            self._put(ticket, Reply(ticket, None, str(error)))
            return
        node.free = self._now + self._takes(name, packet)
        try:
            answer = node.serve(packet).to_bytes()
        except Died:
            self.leave(name)
            self.deaths.append(name)
            self._put(ticket, Reply(ticket, None, f"node {name!r} is not there"))
            self.on_death(name)
            return
        self.after(node.free - self._now, lambda: self._answer(name, node, ticket, answer))

    def _answer(self, name: str, node: _MemoryNode, ticket: str, answer: bytes) -> None:
        if self._nodes.get(name) is node:
            self._travel(answer, lambda found: self._back(ticket, found))

    def _back(self, ticket: str, content: bytes) -> None:
        try:
            self._put(ticket, Reply(ticket, Packet.from_bytes(content)))
        except UploadError as error:
            self._put(ticket, Reply(ticket, None, str(error)))

    def _put(self, ticket: str, reply: Reply) -> None:
        self._inbox.setdefault(ticket, []).append(reply)
