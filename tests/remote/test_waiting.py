"""What a server says while it waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.methods import Sent
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import Exchange, ExchangeRules
from fedkeep.remote.messages import ClientOrder
from fedkeep.remote.nodes import Nodes, WaitingNotice, wait_for_clients
from fedkeep.remote.transport import MemoryTransport
from tests.remote.test_nodes import HELLO, device


def test_it_is_said_after_30_seconds_and_then_after_twice_as_long_up_to_ten_minutes() -> None:
    clock = [100.0]
    telling = WaitingNotice(lambda: clock[0])
    said = []
    while clock[0] < 3000.0:
        said += [telling.waited] if telling.due() else []
        clock[0] += 1.0
    assert said == [30, 90, 210, 450, 930, 1530, 2130, 2730]


def waited(transport: MemoryTransport, wanted: int, patience: float, events: Events) -> Nodes:
    nodes = Nodes(transport, HELLO, events)
    wait_for_clients(
        nodes,
        "are there",
        lambda: sum(len(here.clients) for here in nodes.here.values()),
        wanted=wanted,
        patience=patience,
        poll=1.0,
    )
    return nodes


def test_a_server_that_waits_for_clients_says_how_many_are_there_and_who_has_not_answered() -> None:
    transport = MemoryTransport(
        {"x": device("a", "b"), "y": device("c")}, takes=lambda name, packet: 1000.0 if name == "y" else 0.0
    )
    events = Events(transport.now)
    with pytest.raises(ConfigError, match="Wanted 3 clients that are there, got 2 in 100 s"):
        waited(transport, 3, 100.0, events)
    assert [(event.seconds, event.text) for event in events.said if event.kind == "waiting"] == [
        (30.0, "2 of 3 clients are there; waiting for 30 s. No answer yet from node 'y' for 30 s."),
        (90.0, "2 of 3 clients are there; waiting for 90 s. No answer yet from node 'y' for 28 s."),
    ]  # after 61 seconds it is taken to be gone, and asked again at the next look


def test_that_a_node_left_is_said_with_how_many_clients_are_missing_now() -> None:
    transport = MemoryTransport({"x": device("a", "b"), "y": device("c")})
    events, wait = Events(transport.now), transport.wait

    def leaves(seconds: float) -> None:
        wait(seconds)
        if transport.now() == 5.0:
            transport.leave("y")

    transport.wait = leaves  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="got 2 in 20 s"):
        waited(transport, 4, 20.0, events)
    assert [(event.seconds, event.kind, event.text) for event in events.said[2:]] == [
        (5.0, "left", "Node 'y': it is not there any more."),
        (5.0, "waiting", "2 of 4 clients are there; waiting for 5 s."),
    ]


def test_a_round_that_gets_no_answer_says_who_is_awaited_ever_more_seldom() -> None:
    transport = MemoryTransport({"A": device("one"), "B": device("two")}, takes=lambda name, packet: 1e9)
    nodes: Any = SimpleNamespace(
        transport=transport, place={"one": "A", "two": "B"}, look=lambda: None, refusal=lambda client: None
    )
    rules: Any = ExchangeRules(run="r", fingerprint="", encoding="", split=None, tasks=(), again=600.0)  # type: ignore[arg-type]
    orders = {
        client: ClientOrder(round=4, client=client, sent=Sent(params={}, state={}))
        for client in ("one", "two", "three")
    }
    exchange = Exchange(rules, nodes, Events(transport.now), 4, 1, orders, deadline=1000.0)
    exchange.finish()
    said = [(event.seconds, event.text) for event in exchange.events.said if event.kind == "waiting"]
    who = "no answer from 'A', 'B'; on no node: 'three'"
    assert said == [
        (60.0, f"Round 4: waiting for 3 of 3 clients for 60 s: {who}."),
        (180.0, f"Round 4: waiting for 3 of 3 clients for 180 s: {who}."),
        (420.0, f"Round 4: waiting for 3 of 3 clients for 420 s: {who}."),
        (900.0, f"Round 4: waiting for 3 of 3 clients for 900 s: {who}; orders were sent again 2 times."),
    ]
