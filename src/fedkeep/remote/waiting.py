"""Waiting for clients, and saying so: soon after the waiting began, and then ever more seldom."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fedkeep.core.errors import ConfigError
from fedkeep.remote.nodes import Nodes

FIRST, MOST = 30.0, 600.0
"""Seconds of waiting after which that is said, and the most until it is said again; the time doubles each time."""
SOME = 3  # names that a line holds


@dataclass
class Telling:
    """When to say that something is waited for.

    Attributes:
        now: the clock.
        pause: seconds until it is said first.
        began: when the waiting began.
    """

    now: Callable[[], float]
    pause: float = FIRST
    began: float = field(init=False)
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.now()
        self._next = self.began + self.pause

    @property
    def waited(self) -> float:
        """Seconds since the waiting began."""
        return self.now() - self.began

    def due(self) -> bool:
        """Return whether it is to be said now; then it is not again for twice as long as before."""
        if self.now() < self._next:
            return False
        self.pause = min(2 * self.pause, MOST)
        self._next = self.now() + self.pause
        return True


def wait_for_clients(
    nodes: Nodes, what: str, count: Callable[[], int], *, wanted: int, patience: float, poll: float
) -> None:
    """Wait until enough clients are there and every node has answered.

    Args:
        nodes: of the run.
        what: what the clients are or do, for people.
        count: how many are or do so now.
        wanted: how many must.
        patience: seconds after which it is given up.
        poll: seconds between two looks.

    Raises:
        ConfigError: there are too few, or a client is on two nodes.
    """
    now = nodes.transport.now
    end, telling = now() + patience, Telling(now)
    nodes.look()
    there = count()
    while (there < wanted or nodes.waiting) and not nodes.twice and now() < end:
        nodes.transport.wait(poll)
        nodes.look()
        fewer, there = count() < there, count()
        if (telling.due() or fewer) and (there < wanted or nodes.waiting):
            silent = "".join(f" {one}" for one in _silent(nodes))
            said = f"{there} of {wanted} clients {what}; waiting for {telling.waited:.0f} s.{silent}"
            nodes.events.note("waiting", said)
    if nodes.twice:
        raise ConfigError(next(iter(nodes.twice.values())))
    if there < max(1, wanted):
        refusals = "".join(f"\n  Node {n!r}: {why}" for n, why in nodes.reasons.items())
        raise ConfigError(
            f"Wanted {wanted} clients that {what}, got {there} in {patience:g} s. Start more devices, or ask for fewer "
            f"clients.{refusals}"
        )


def some_of(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
    return ", ".join(map(repr, sorted(names)[:SOME])) + more


def _silent(nodes: Nodes) -> list[str]:
    now, since = nodes.transport.now(), nodes.unanswered
    names = sorted(since, key=lambda name: since[name])[:SOME]
    return [f"No answer yet from node {name!r} for {now - since[name]:.0f} s." for name in names]
