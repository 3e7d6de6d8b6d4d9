"""What a transport must do: tell which nodes are there, carry packets to them, and bring what they reply."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedkeep.remote.messages import Packet


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
        ...

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Send packets to nodes without waiting; return a ticket for each. A message may arrive more than once."""
        ...

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """Return what has come for these tickets since the last call; it may be nothing."""
        ...

    def now(self) -> float:
        """Return the time in seconds, from any beginning; it never goes back."""
        ...

    def wait(self, seconds: float) -> None:
        """Let this much time pass, or less if a reply comes."""
        ...
