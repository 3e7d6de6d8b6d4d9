"""Which nodes are there, what each said of itself, and on which of them each client is.

A node is told of the run (``hello``), then of its encoding; from its answer ``fits`` on its clients take part. A node
that was restarted may have another name, and then its clients are on that one. A node that refuses, as its disk may be
full, is asked again.

A client belongs to the node that the run's owner lists it for; where nothing is listed, to the key that first brought it,
as the link knows keys. A node with another key that claims it is told of once; it is never asked for that client, and
stops nobody. Where the link knows no keys, all nodes are alike.

Waiting for clients is said soon after it began, and then ever more seldom.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedkeep.core.errors import ConfigError, DataError, UploadError, raising
from fedkeep.core.packet import Packet
from fedkeep.data.ids import check_ids
from fedkeep.data.preparation import Summary
from fedkeep.remote.client_ledger import Listed
from fedkeep.remote.events import Events
from fedkeep.remote.messages import (
    UNFIT,
    Encode,
    EncodingFits,
    Hello,
    Here,
    Message,
    Refused,
    message_of,
    packet_of,
)
from fedkeep.remote.transport import Transport

MOST_DOUBLINGS = 6
"""How often the time doubles until a node that goes on refusing, or not answering, is asked again."""
SOON = 5.0
"""Seconds until a node that failed is asked again: it may be about to start."""


@dataclass
class _KnownNode:
    state: Literal["asked", "here", "encoding", "fits", "refused", "failed"]
    ticket: str = ""
    since: float = 0.0
    here: Here | None = None
    fits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()
    """Its clients whose data cannot be used; it is asked again whether they can."""
    foreign: tuple[str, ...] = ()
    """What is wrong with its claims to clients of another key."""
    claims: dict[str, str] = field(default_factory=dict)
    """Clients that another node, named here, has too: it is asked whether it is still there."""
    pause: float = 0.0
    """Seconds until it is asked again after it has refused; twice as many each time, one time after the other."""


class Nodes:
    """The nodes of a run.

    Args:
        transport: reaches them.
        hello: the first message to each.
        events: a log of which nodes come and go.
        patience: seconds until a node that does not answer, or refused, is asked again, and 5 until one that failed;
            after each further time twice as long, until it fits.
        listed: returns which clients are whose, by the owner's word, as it is now; None: whoever brings a client first
            has it. It is asked whenever a node comes.

    Attributes:
        place: by client, its node.
        owners: by client, the key that it belongs to.
        counts: by client, its numbers of examples by partition.
        twice: clients that two nodes have, and what is wrong with that.
        refusals: by node, why it takes no part.
        failures: by node that cannot answer, or is busy, what came in place of an answer.
    """

    def __init__(
        self,
        transport: Transport,
        hello: Hello,
        events: Events,
        *,
        patience: float = 60.0,
        listed: Callable[[], Listed | None] = lambda: None,
    ) -> None:
        self.transport, self.hello, self.events, self.patience = transport, hello, events, patience
        self._listed, self.listed = listed, listed()
        self.place: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self._claimed: set[tuple[str, str]] = set()  # key and client of claims that were told of
        self.counts: dict[str, Mapping[str, int]] = {}
        self.twice: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self._nodes: dict[str, _KnownNode] = {}
        self._waits: dict[str, float] = {}  # by node that was silent: seconds that it has now to answer
        self._encode: Encode | None = None

    @property
    def here(self) -> dict[str, Here]:
        """What each node that is there said of itself."""
        return {name: node.here for name, node in self._nodes.items() if node.here is not None}

    @property
    def reasons(self) -> dict[str, str]:
        """Why nodes take no part, refusals and failures, or clients of theirs."""
        unfit = {name: " ".join(map(_unfit, node.unfit)) for name, node in self._nodes.items() if node.unfit}
        claims = {name: " ".join(node.foreign) for name, node in self._nodes.items() if node.foreign}
        return {**unfit, **claims, **self.failures, **self.refusals}

    def refusal(self, client: str) -> str | None:
        """Return why a client takes no part; None where it has a place, or nobody has told of it."""
        if client in self.place:
            return None
        if any(client in node.unfit for node in self._nodes.values()):
            return UNFIT
        here = self.here
        name = next(
            (
                n
                for n in self.refusals
                if n in here and client in here[n].clients and self._may_have(n, client)
            ),
            None,
        )
        return None if name is None else self.refusals[name]

    @property
    def waiting(self) -> bool:
        """Whether a node has still to answer, or is asked again soon as it failed."""
        return any(
            node.ticket or (node.state == "failed" and node.pause < self.patience)
            for node in self._nodes.values()
        )

    @property
    def unanswered(self) -> dict[str, float]:
        """By node that has still to answer, when it was asked."""
        return {name: node.since for name, node in self._nodes.items() if node.ticket}

    def encode(self, message: Encode) -> None:
        """Tell every node from now on how data become numbers; of versions it hears those of its own clients."""
        self._encode = message
        for name, node in self._nodes.items():
            if node.state == "here":
                self._send_encoding(name, message)

    def look(self) -> None:
        """See who is there and hear what they say."""
        names = self.transport.nodes()
        for name in [name for name in self._nodes if name not in names]:
            self.forget(name, "it is not there any more")
            self._waits.pop(name, None)
        for name in names:
            if name not in self._nodes:
                self._nodes[name] = _KnownNode("asked")
                self._send(name, "asked", self.hello)
        asked = {node.ticket: name for name, node in self._nodes.items() if node.ticket}
        for reply in self.transport.receive(list(asked)) if asked else ():
            name = asked[reply.ticket]
            if name in self._nodes and self._nodes[name].ticket == reply.ticket:
                self._hear(name, reply.packet, reply.reason)
        for name, node in list(self._nodes.items()):
            passed = self.transport.now() - node.since
            wait = self._waits.get(name, self.patience)
            if node.ticket and passed > wait:  # a busy device would be asked anew, and never be in time
                self._waits[name] = self._longer(wait)
                self.forget(name, f"it did not answer for {wait:g} s")
            elif (
                (node.state in ("refused", "failed") or node.unfit)
                and not node.ticket
                and passed > node.pause
            ):
                self._send(name, "asked", self.hello)

    def ask_anew(self, name: str) -> None:
        """Start over with a node: it has forgotten the run, e.g. as it was restarted."""
        if name in self._nodes:
            self._unplace(name)
            self._send(name, "asked", self.hello)

    def forget(self, name: str, why: str) -> None:
        """Take a node to be gone; if it is there, the next look starts over with it."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self.events.note("left", f"Node {name!r}: {why}.", node=name)
        self.refusals.pop(name, None)
        self.failures.pop(name, None)
        self._unplace(name)
        for client, other in node.claims.items():
            self._put(client, other)

    def _unplace(self, name: str) -> None:
        for client in [client for client, place in self.place.items() if place == name]:
            del self.place[client]

    def _send(self, name: str, state: Literal["asked", "encoding"], message: Message) -> None:
        node = self._nodes[name]
        node.state, node.since = state, self.transport.now()
        (node.ticket,) = self.transport.send([(name, packet_of(message))])

    def _send_encoding(self, name: str, message: Encode) -> None:
        clients = self.here[name].clients
        own = {client: message.versions[client] for client in clients if client in message.versions}
        self._send(name, "encoding", replace(message, versions=own))

    def _hear(self, name: str, packet: Packet | None, reason: str) -> None:
        node = self._nodes[name]
        node.ticket = ""
        if packet is None and node.here is None:
            self._failed(name, reason)
            return
        if packet is None:
            self.forget(name, reason)
            return
        try:
            run, refused = packet.header.get("run"), packet.header.get("kind") == "refused"
            if run != self.hello.run and not (
                refused and run == ""
            ):  # one that could not read what came names none
                raise UploadError("it answers for another run.")
            if refused:
                said = message_of(packet, Refused)
                (self._failed if said.busy else self._refused)(name, said.reason)
            elif node.state == "asked":
                self._is_here(name, node, message_of(packet, Here))
            else:
                self._fits(name, node, message_of(packet, EncodingFits))
        except UploadError as error:
            self._refused(name, str(error))

    def _refused(self, name: str, reason: str) -> None:
        known = self.refusals.get(name)
        self._pauses(name, "refused", self.patience)
        self.failures.pop(name, None)
        self.refusals[name] = reason
        self._unplace(name)
        if reason != known:
            self.events.note("refused", f"Node {name!r} takes no part: {reason}", node=name)

    def _failed(self, name: str, reason: str) -> None:
        """A node that is not known yet cannot answer, its answer was damaged, or it is still at something else."""
        known = self.failures.get(name)
        self._pauses(name, "failed", SOON)
        self.failures[name] = reason
        if reason != known:
            self.events.note("refused", f"Node {name!r} does not answer: {reason}", node=name)

    def _pauses(self, name: str, state: Literal["refused", "failed", "fits"], pause: float) -> None:
        node = self._nodes[name]
        node.state, node.since = state, self.transport.now()
        node.pause = max(pause, self._longer(node.pause))

    def _longer(self, seconds: float) -> float:
        longest: float = self.patience * 2**MOST_DOUBLINGS
        return min(2 * seconds, longest)

    def _is_here(self, name: str, node: _KnownNode, here: Here) -> None:
        _check_ids(here.clients)
        _check_summary(here, self.hello.secure is not None)
        self.listed = self._listed()
        if self.listed is not None:
            here = replace(here, clients=self._own(name, here.clients))
            if not here.clients:
                raise UploadError("the project lists none of its clients for it.")
        if node.here is None:
            self.events.note("joined", f"Node {name!r} has {len(here.clients)} clients.", node=name)
        node.state, node.here = "here", here
        for client, other in node.claims.items():
            if client not in here.clients:
                self._put(client, other)
                continue
            self.twice[client] = (
                f"Client {client!r} is declared on two nodes, {name!r} and {other!r}. A client has one private state: "
                f"take it out of one node's configuration."
            )
            self.events.note("refused", self.twice[client], node=other, client=client)
        node.claims = {}
        if self._encode is not None:
            self._send_encoding(name, self._encode)

    def _fits(self, name: str, node: _KnownNode, fits: EncodingFits) -> None:
        _check_ids([*fits.clients, *fits.unfit])
        if not all(0 <= count < 2**63 for counts in fits.clients.values() for count in counts.values()):
            raise UploadError("its numbers of examples make no sense.")
        unfit = tuple(client for client in fits.unfit if self._may_have(name, client))
        for client in [client for client in unfit if client not in node.unfit]:
            self.events.note("refused", _unfit(client), node=name, client=client)
        self._waits.pop(name, None)
        own = {client: fits.clients[client] for client in self._own(name, fits.clients)}
        node.fits, node.unfit = own, unfit
        self._pauses(name, "fits", self.patience)
        if not unfit:
            node.pause = 0.0
        self.refusals.pop(name, None)
        self.failures.pop(name, None)
        for client in own:
            other = self.place.get(client, name)
            if other == name or other not in self._nodes:
                self._put(client, name)
            else:  # it may be the same device under another name: is the other one still there?
                self._nodes[other].claims[client] = name
                self._send(other, "asked", self.hello)

    def _may_have(self, name: str, client: str) -> bool:
        """Tell whether a client is listed for a node; with no list, whether it is nobody's yet or belongs to its key."""
        key = self.transport.key(name)
        if self.listed is not None:
            return self.listed.key(client) == key
        return self.owners.get(client, key) == key

    def _own(self, name: str, clients: Iterable[str]) -> list[str]:
        """Return those of a node's clients that belong to its key, as they do from now on if they are nobody's yet."""
        key, own = self.transport.key(name), []
        for client in clients:
            if self._may_have(name, client):
                self.owners[client] = key
                own.append(client)
            elif (key, client) not in self._claimed:
                self._claimed.add((key, client))
                whose = "belongs to another key"
                if self.listed is not None:
                    whose = f"the project lists for {self.listed.instead(client)}"
                claim = f"Node {name!r} claims client {client!r}, which {whose}. It is not asked for it."
                self._nodes[name].foreign += (claim,)
                self.events.note("refused", claim, node=name, client=client)
        return own

    def _put(self, client: str, name: str) -> None:
        node = self._nodes.get(name)
        if node is None or client not in node.fits:
            return
        if client in self.counts and self.place.get(client) != name:
            self.events.note("moved", f"Client {client!r} is on node {name!r}.", node=name, client=client)
        self.place[client], self.counts[client] = name, node.fits[client]


def _unfit(client: str) -> str:
    return f"Client {client!r} takes no part: {UNFIT}"


def _check_ids(clients: Iterable[str]) -> None:
    """Raise UploadError where one is no client's id, is not written as ids are, or stands there twice."""
    given = list(clients)
    with raising(UploadError, "{why}", DataError):
        same = list(check_ids(given)) == given
    if not same:
        raise UploadError("its ids of clients are not in Unicode's normal form C.")


def _check_summary(here: Here, secure: bool) -> None:
    """Raise UploadError where what a node tells of its data is no summary."""
    if here.summary is not None:
        with raising(UploadError, "{why}", DataError):
            told = Summary.from_json(json.dumps(here.summary), "Its summary")
            if secure and told != told.blank:
                raise UploadError("it tells numbers of its data in the clear, where secure sums were wanted.")


FIRST, MOST = 30.0, 600.0
"""Seconds of waiting after which that is said, and the most until it is said again; the time doubles each time."""
SOME = 3  # names that a line holds


@dataclass
class WaitingNotice:
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
    end, telling = now() + patience, WaitingNotice(now)
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
            "Wanted {wanted} clients that {what}, got {there} in {patience:g} s. Start more devices, or ask for fewer "
            "clients.{refusals}",
            wanted=wanted,
            what=what,
            there=there,
            patience=patience,
            refusals=refusals,
        )


def some_of(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
    return ", ".join(map(repr, sorted(names)[:SOME])) + more


def _silent(nodes: Nodes) -> list[str]:
    now, since = nodes.transport.now(), nodes.unanswered
    names = sorted(since, key=lambda name: since[name])[:SOME]
    return [f"No answer yet from node {name!r} for {now - since[name]:.0f} s." for name in names]
