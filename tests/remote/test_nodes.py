"""Who is there, what it said, and where each client is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from fedkeep.remote import Packet
from fedkeep.remote.client_ledger import Listed
from fedkeep.remote.events import Events
from fedkeep.remote.messages import PROTOCOL, Encode, EncodingFits, Hello, Here, Refused, packet_of
from fedkeep.remote.nodes import Nodes
from fedkeep.remote.transport import MemoryTransport, Reply

HELLO = Hello(protocol=PROTOCOL, run="r", code="c", experiment="e", seed=0)
ENCODE = Encode(run="r", hello=HELLO, encoding={}, fingerprint={})


def device(*clients: str, run: str = "r", refuses: str = "") -> Any:
    """Return a device that has these clients."""

    def serve(packet: Packet) -> Packet:
        if packet.header["kind"] == "hello":
            return packet_of(Here(run=run, clients=list(clients)))
        if refuses:
            return packet_of(Refused(run=run, reason=refuses))
        return packet_of(EncodingFits(run=run, clients={client: {"train": 3} for client in clients}))

    return serve


def met(transport: MemoryTransport, seconds: float = 10.0, **options: Any) -> Nodes:
    nodes = Nodes(transport, HELLO, Events(transport.now), **options)
    nodes.encode(ENCODE)
    passed(nodes, seconds)
    return nodes


def passed(nodes: Nodes, seconds: float = 10.0) -> None:
    for _ in range(int(seconds)):
        nodes.look()
        nodes.transport.wait(1.0)
    nodes.look()


def said(nodes: Nodes, kind: str) -> list[str]:
    return [event.text for event in nodes.events.said if event.kind == kind]


def test_nodes_are_asked_once_and_their_clients_have_a_place() -> None:
    transport = MemoryTransport({"x": device("a", "b"), "y": device("c")})
    nodes = met(transport)
    assert nodes.place == {"a": "x", "b": "x", "c": "y"}
    assert nodes.counts["a"] == {"train": 3}
    assert [kind for kind, _, _ in transport.carried] == ["hello", "hello", "encoding", "encoding"]
    assert said(nodes, "joined") == ["Node 'x' has 2 clients.", "Node 'y' has 1 clients."]


def test_a_node_that_joins_later_is_told_everything() -> None:
    transport = MemoryTransport({"x": device("a")})
    nodes = met(transport)
    transport.join("y", device("b"))
    passed(nodes)
    assert nodes.place == {"a": "x", "b": "y"}


def test_clients_of_a_node_that_left_have_no_place_until_they_turn_up() -> None:
    transport = MemoryTransport({"x": device("a")})
    nodes = met(transport)
    transport.leave("x")
    passed(nodes)
    assert nodes.place == {}
    transport.join("x.1", device("a"))
    passed(nodes)
    assert nodes.place == {"a": "x.1"}
    assert said(nodes, "moved") == ["Client 'a' is on node 'x.1'."]


def test_a_client_under_a_new_name_is_there_once_the_old_one_is_silent() -> None:
    transport = MemoryTransport({"x": device("a")})
    nodes = met(transport, patience=20.0)
    transport.join("y", device("a"))
    inner = transport._nodes["x"].serve
    transport._nodes["x"].serve = lambda packet: transport.leave("x") or inner(packet)  # type: ignore[func-returns-value]
    passed(nodes, 60.0)
    assert nodes.place == {"a": "y"}
    assert nodes.twice == {}


def test_a_client_on_two_nodes_that_both_answer_is_declared_twice_and_stays_where_it_was() -> None:
    transport = MemoryTransport({"x": device("a", "b")})
    nodes = met(transport)
    transport.join("y", device("b", "c"))
    passed(nodes)
    assert nodes.place == {"a": "x", "b": "x", "c": "y"}
    assert list(nodes.twice) == ["b"]
    assert nodes.twice["b"] == (
        "Client 'b' is declared on two nodes, 'x' and 'y'. A client has one private state: take it out of one node's "
        "configuration."
    )


def test_a_client_that_its_old_node_has_no_more_is_on_the_new_one() -> None:
    """Its owner has taken it out of one configuration and put it into another."""
    transport = MemoryTransport({"x": device("a", "b")})
    nodes = met(transport)
    transport._nodes["x"].serve = device("a")
    transport.join("y", device("b", "c"))
    passed(nodes)
    assert nodes.place == {"a": "x", "b": "y", "c": "y"}
    assert nodes.twice == {}
    assert said(nodes, "moved") == ["Client 'b' is on node 'y'."]


KEYS = {"x": "one", "x.1": "one", "y": "two"}


class TestKeys:
    """A client belongs to the key that first brought it; the link knows keys, and no node's word counts."""

    def test_a_claim_by_another_key_is_refused_by_name_once_and_stops_nobody(self) -> None:
        transport = MemoryTransport({"x": device("a", "b")}, keys=KEYS)
        nodes = met(transport)
        transport.join("y", device("b", "c"))
        passed(nodes)
        nodes.ask_anew("y")
        passed(nodes)
        assert nodes.place == {"a": "x", "b": "x", "c": "y"}
        assert nodes.twice == {}
        (told,) = said(nodes, "refused")
        assert told.startswith("Node 'y' claims client 'b', which belongs to another key.")
        hellos = [node for kind, node, _ in transport.carried if kind == "hello"]
        assert hellos == ["x", "y", "y"], "the owner is not asked for what another claims"

    @pytest.mark.parametrize("claims", [device("a"), device("a", refuses="No."), "unfit"])
    def test_while_its_owner_is_away_a_client_is_waited_for_and_nobodys(self, claims: Any) -> None:
        if claims == "unfit":
            claims = changing(device("a"), "fits", clients={}, unfit=["a"])
        transport = MemoryTransport({"x": device("a")}, keys=KEYS)
        nodes = met(transport)
        transport.leave("x")
        transport.join("y", claims)
        passed(nodes)
        assert nodes.place == {}
        assert nodes.refusal("a") is None
        transport.join("x.1", device("a"))
        passed(nodes)
        assert nodes.place == {"a": "x.1"}

    def test_a_key_that_has_a_client_twice_is_told(self) -> None:
        nodes = met(MemoryTransport({"x": device("a"), "x.1": device("a")}, keys=KEYS))
        assert list(nodes.twice) == ["a"]

    def test_who_owned_a_client_before_owns_it_whoever_comes_first(self) -> None:
        transport = MemoryTransport({"y": device("a")}, keys=KEYS)
        nodes = Nodes(transport, HELLO, Events(transport.now))
        nodes.owners = {"a": "one"}
        nodes.encode(ENCODE)
        passed(nodes)
        assert nodes.place == {}
        transport.join("x", device("a"))
        passed(nodes)
        assert nodes.place == {"a": "x"}


class TestListed:
    """Where the owner lists clients by node, by names and globs, nothing else counts."""

    LISTED = Listed({"one": ("a", "n-*"), "two": ("b", "s-*", "n-7")})

    def test_who_comes_first_does_not_count_and_a_claim_is_told_once_by_name(self) -> None:
        transport = MemoryTransport({"y": device("a", "n-1", "b", "s-1")}, keys=KEYS)
        nodes = met(transport, listed=lambda: self.LISTED)
        assert nodes.place == {"b": "y", "s-1": "y"}
        nodes.ask_anew("y")
        passed(nodes)
        told = said(nodes, "refused")
        assert [("'a'" in line, "'n-1'" in line, "another node" in line) for line in told] == [
            (True, False, True),
            (False, True, True),
        ]
        transport.join("x", device("a", "n-1"))
        passed(nodes)
        assert nodes.place == {"b": "y", "s-1": "y", "a": "x", "n-1": "x"}
        assert nodes.owners == {"b": "two", "s-1": "two", "a": "one", "n-1": "one"}

    def test_a_client_that_is_named_is_met_by_no_glob(self) -> None:
        nodes = met(
            MemoryTransport({"x": device("n-7"), "y": device("n-7")}, keys=KEYS), listed=lambda: self.LISTED
        )
        assert nodes.place == {"n-7": "y"}

    def test_a_client_of_two_nodes_globs_or_of_none_is_nobodys_and_stops_nobody(self) -> None:
        listed = Listed({"one": ("n*", "a"), "two": ("*1",)})
        nodes = met(MemoryTransport({"x": device("n1", "a", "c")}, keys=KEYS), listed=lambda: listed)
        assert nodes.place == {"a": "x"}
        several, none = said(nodes, "refused")
        assert ("'n1'" in several, "several nodes" in several) == (True, True)
        assert ("'c'" in none, "no node" in none) == (True, True)

    def test_an_impostor_takes_no_part_and_is_not_told_of_the_encoding(self) -> None:
        keys = {**KEYS, "z": "three"}
        transport = MemoryTransport({"z": device("a"), "x": device("a")}, keys=keys)
        nodes = met(transport, listed=lambda: self.LISTED)
        assert nodes.place == {"a": "x"}
        assert set(nodes.here) == {"x"}
        assert set(nodes.refusals) == {"z"}
        assert [node for kind, node, _ in transport.carried if kind == "encoding"] == ["x"]

    def test_the_list_of_now_counts_more_than_who_owned_a_client_before(self) -> None:
        transport = MemoryTransport({"y": device("b")}, keys=KEYS)
        nodes = Nodes(transport, HELLO, Events(transport.now), listed=lambda: self.LISTED)
        nodes.owners = {"b": "one"}
        nodes.encode(ENCODE)
        passed(nodes)
        assert (nodes.place, nodes.owners) == ({"b": "y"}, {"b": "two"})


def test_why_a_node_took_no_part_is_forgotten_once_it_is_gone() -> None:
    """Back under its name, its clients are waited for, and not given up for what it said before."""
    transport = MemoryTransport({"x": device("a", refuses="Its disk is full."), "y": device("b")})
    nodes = met(transport)
    transport.leave("x")
    passed(nodes, 2.0)
    assert nodes.refusals == {}
    transport.join("x", device("a"))
    nodes.look()
    assert nodes.refusal("a") is None
    passed(nodes)
    assert nodes.place == {"a": "x", "b": "y"}


def test_a_node_that_refuses_takes_no_part_and_says_why() -> None:
    nodes = met(MemoryTransport({"x": device("a", refuses="Its model is another."), "y": device("b")}))
    assert nodes.place == {"b": "y"}
    assert nodes.refusals == {"x": "Its model is another."}
    assert nodes.refusal("a") == "Its model is another."
    assert nodes.refusal("b") is None
    assert nodes.refusal("nobody") is None
    assert said(nodes, "refused") == ["Node 'x' takes no part: Its model is another."]


def test_a_node_that_answers_for_another_run_or_nonsense_takes_no_part() -> None:
    transport = MemoryTransport(
        {"x": device("a", run="other"), "y": lambda packet: Packet({"kind": "here", "run": "r"})}
    )
    nodes = met(transport)
    assert nodes.place == {}
    assert nodes.refusals["x"] == "it answers for another run."
    assert nodes.refusals["y"].startswith("A message 'here' was refused: clients")


def test_a_node_that_could_not_read_what_came_names_no_run_and_is_shown_with_its_reason() -> None:
    refused = packet_of(Refused(run="", reason="A message cannot be read."))
    nodes = met(MemoryTransport({"x": lambda packet: refused}))
    assert nodes.refusals == {"x": "A message cannot be read."}
    other = packet_of(Refused(run="other", reason="Its model is another."))
    nodes = met(MemoryTransport({"x": lambda packet: other}))
    assert nodes.refusals == {"x": "it answers for another run."}


def test_a_node_that_does_not_answer_is_asked_anew() -> None:
    transport = MemoryTransport({"x": device("a")}, takes=lambda name, packet: 35.0)
    nodes = met(transport, 30.0, patience=20.0)
    assert said(nodes, "left") == ["Node 'x': it did not answer for 20 s."]
    assert [kind for kind, _, _ in transport.carried] == ["hello", "hello"]


def test_a_node_that_needs_longer_than_the_patience_for_each_answer_gets_more_time_until_it_fits() -> None:
    """Asked anew in the same time it would never be in time: it serves one message after the other."""
    transport = MemoryTransport({"x": device("a")}, takes=lambda name, packet: 35.0)
    nodes = met(transport, 150.0, patience=20.0)
    assert said(nodes, "left") == [f"Node 'x': it did not answer for {wait} s." for wait in (20, 40)]
    assert nodes.place == {"a": "x"}
    nodes.ask_anew("x")  # which forgets how long it took
    passed(nodes, 30.0)
    assert said(nodes, "left")[2:] == ["Node 'x': it did not answer for 20 s."]


def test_a_node_that_fitted_once_is_asked_as_soon_as_before_when_it_refuses_anew() -> None:
    full, hellos = [True], list[float]()
    fits, refuses = device("a"), device("a", refuses="Its disk is full.")

    def serve(packet: Packet) -> Packet:
        if packet.header["kind"] == "hello":
            hellos.append(transport.now())
        return (refuses if full[0] else fits)(packet)

    transport = MemoryTransport({"x": serve})
    nodes = met(transport, 75.0, patience=20.0)
    full[0] = False
    passed(nodes, 90.0)
    assert nodes.place == {"a": "x"}
    full[0], before = True, len(hellos)
    nodes.ask_anew("x")
    passed(nodes, 30.0)
    assert len(hellos) == before + 2


def changing(inner: Any, kind: str, **header: Any) -> Any:
    """Return a device that answers a message otherwise."""

    def serve(packet: Packet) -> Packet:
        answer = inner(packet)
        return Packet({**answer.header, **header}) if answer.header["kind"] == kind else answer

    return serve


@pytest.mark.parametrize(
    ("kind", "header", "said"),
    [
        (
            "fits",
            {"clients": {"bad\0id": {"train": 1}}},
            "Client 0: A client id is a text of 1 to 200 printable",
        ),
        ("here", {"clients": ["a", "bad\0id"]}, "Client 1: A client id is a text of 1 to 200 printable"),
        ("here", {"clients": ["e\u0301"]}, "its ids of clients are not in Unicode's normal form C"),
        ("here", {"clients": ["a", "a"]}, "Client ids must be unique; 'a'"),
        ("fits", {"clients": {"a": {"train": -1}}}, "its numbers of examples make no sense"),
        ("fits", {"clients": {"a": {"train": 2**63}}}, "its numbers of examples make no sense"),
        ("fits", {"clients": {"a": {"train": 10**400}}}, "its numbers of examples make no sense"),
        ("here", {"summary": {"x": 1}}, "Its summary is no summary, or is damaged"),
    ],
)
def test_what_is_no_id_no_number_or_no_summary_keeps_its_own_node_out(
    kind: str, header: dict[str, Any], said: str
) -> None:
    nodes = met(MemoryTransport({"x": changing(device("a"), kind, **header), "y": device("b")}))
    assert nodes.place == {"b": "y"}
    assert list(nodes.refusals) == ["x"]
    assert nodes.refusals["x"].startswith(said)
    assert list(nodes.here) == (["x", "y"] if kind == "fits" else ["y"])


def test_a_node_that_refused_is_asked_again_ever_more_seldom_until_it_fits() -> None:
    full, heard = [True], list[tuple[float, str]]()
    fits, refuses = device("a"), device("a", refuses="Its disk is full.")

    def serve(packet: Packet) -> Packet:
        heard.append((transport.now(), packet.header["kind"]))
        return (refuses if full[0] else fits)(packet)

    transport = MemoryTransport({"x": serve})
    nodes = met(transport, 75.0, patience=20.0)
    assert [kind for _, kind in heard] == ["hello", "encoding"] * 3
    asked = [when for when, kind in heard if kind == "hello"]
    assert [later - when for when, later in itertools.pairwise(asked)] == [
        pytest.approx(22, abs=2),
        pytest.approx(42, abs=2),
    ]
    assert nodes.refusal("a") == "Its disk is full."
    assert said(nodes, "refused") == ["Node 'x' takes no part: Its disk is full."]
    full[0] = False
    passed(nodes, 90.0)
    assert nodes.place == {"a": "x"}
    assert nodes.refusals == {}
    assert nodes.refusal("a") is None
    passed(nodes, 100.0)
    assert [kind for _, kind in heard] == ["hello", "encoding"] * 4


class Failing(MemoryTransport):
    """Carries no message to the node while it fails, e.g. as it takes the project for a stranger's."""

    fails = True

    def receive(self, tickets: Sequence[str]) -> list[Reply]:
        return (
            [Reply(ticket, reason="no key that it trusts has signed these files.") for ticket in tickets]
            if self.fails
            else list(super().receive(tickets))
        )


def test_a_node_that_fails_at_once_says_why_and_is_asked_ever_more_seldom() -> None:
    heard: list[float] = []

    def serve(packet: Packet) -> Packet:
        return device("a")(packet)

    transport = Failing({"x": serve})
    sent = transport.send

    def send(messages: Sequence[tuple[str, Packet]]) -> list[str]:
        heard.extend(transport.now() for _ in messages)
        return sent(messages)

    transport.send = send  # type: ignore[method-assign]
    nodes = met(transport, 80.0, patience=20.0)
    assert [later - when for when, later in itertools.pairwise(heard)] == [
        pytest.approx(pause, abs=2) for pause in (5, 10, 20)
    ]
    assert nodes.reasons == {"x": "no key that it trusts has signed these files."}
    assert said(nodes, "refused") == [
        "Node 'x' does not answer: no key that it trusts has signed these files."
    ]
    assert said(nodes, "left") == []
    transport.fails = False
    passed(nodes, 90.0)
    assert nodes.place == {"a": "x"}
    assert nodes.reasons == {}
