"""Orders on their way: each client's judging is in one sum, or an event says that it is in none."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedkeep.core.errors import DroppedError, LostError
from fedkeep.core.packet import Packet
from fedkeep.engines import Order
from fedkeep.methods import Sent
from fedkeep.remote import exchange as module
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import Exchange, ExchangeRules
from fedkeep.remote.messages import Answers, ClientAnswer, ClientOrder, Judging, Refused, packet_of
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Reply
from fedkeep.split import Split


class Transport:
    """Keeps what is sent, and gives what is put into its inbox."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Packet]] = []
        self.inbox: list[tuple[str, Packet | None]] = []

        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds

    def send(self, messages: Sequence[tuple[str, Packet]]) -> list[str]:
        new = [(str(len(self.sent) + k), node, packet) for k, (node, packet) in enumerate(messages)]
        self.sent += new
        return [ticket for ticket, _, _ in new]

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        found, self.inbox = self.inbox, []
        return [Reply(ticket, packet) for ticket, packet in found]


class Failing(Transport):
    """Answers every message with an error, e.g. as the app on the device dies."""

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        return [Reply(ticket, None, "Flower: it died") for ticket in tickets]


def test_who_was_judged_on_a_new_node_is_not_in_the_old_ones_sum_too(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, place = Transport(), {"one": "A", "two": "A"}
    nodes: Any = SimpleNamespace(
        transport=transport, place=place, look=lambda: None, refusal=lambda client: None
    )
    judge = (Judging(split="test", models=("own",)),)
    orders = {
        client: ClientOrder(round=0, client=client, sent=Sent(params={}, state={}), train=False, judge=judge)
        for client in place
    }
    monkeypatch.setattr(module, "check_answers", lambda *_: None)
    monkeypatch.setattr(module, "message_of", lambda packet, *_: packet.header["answers"])
    rules: Any = ExchangeRules(run="r", fingerprint="", encoding="", split=None, tasks=())  # type: ignore[arg-type]
    events = Events(transport.now)
    one = Exchange(rules, nodes, events, 0, 1, orders)
    place["two"] = "B"
    one.poll()
    assert [node for _, node, _ in transport.sent] == ["A", "B"]

    def answer(ticket: str, *clients: str) -> None:
        answers = tuple(ClientAnswer(client=client) for client in clients)
        judged: Any = (("test", clients),)
        found = Answers(run="r", round=0, attempt=1, answers=answers, judged=judged)
        transport.inbox.append((ticket, Packet({"kind": "answers", "answers": found})))

    answer("1", "two")
    one.poll()
    answer("0", "one", "two")
    one.finish()
    found: Any = one.judged
    assert found == [("test", ("two",))]
    assert [event.text for event in events.said if event.kind == "lost"] == [
        "Node 'A' judged one together with clients that another node has judged; left out."
    ]


def test_a_node_that_fails_at_each_order_is_asked_ever_more_seldom() -> None:
    transport, forgot = Failing(), list[str]()
    nodes: Any = SimpleNamespace(
        transport=transport,
        place={"one": "A"},
        look=lambda: None,
        refusal=lambda client: None,
        forget=lambda name, why: forgot.append(why),
    )
    order = Order(round=0, client="one", sent=Sent(params={}, state={}))
    rules: Any = ExchangeRules(run="r", fingerprint="", encoding="", split=None, tasks=(), again=60.0)  # type: ignore[arg-type]
    one = Exchange(
        rules, nodes, Events(transport.now), 0, 1, {"one": ClientOrder(**vars(order))}, deadline=300.0
    )
    one.finish()
    assert transport.time == 300.0
    assert len(transport.sent) == 9  # at 0, 0, 4, 12, 28, 60, 120, 180 and 240 seconds
    assert set(forgot) == {"Flower: it died"}


def asked(transport: Transport, place: dict[str, str]) -> Exchange:
    """Return an exchange with client "one" over nodes that only say where it is."""
    nodes: Any = SimpleNamespace(
        transport=transport,
        place=place,
        look=lambda: None,
        refusal=lambda client: None,
        forget=lambda name, why: None,
        ask_anew=lambda name: None,
    )
    rules: Any = ExchangeRules(run="r", fingerprint="", encoding="", split=None, tasks=(), again=60.0)  # type: ignore[arg-type]
    order = ClientOrder(round=0, client="one", sent=Sent(params={}, state={}))
    return Exchange(rules, nodes, Events(transport.now), 0, 1, {"one": order})


def test_that_clients_are_on_no_node_is_told_though_one_was_busy_before() -> None:
    transport, place = Transport(), {"one": "A"}
    one = asked(transport, place)
    transport.inbox.append(("0", packet_of(Refused(run="r", reason="at work", busy=True))))
    one.poll()
    place.clear()
    one.poll()
    said = [event.text for event in one.events.said]
    assert said == ["Node 'A' is busy with an earlier message: at work"], "it may be asked again soon"
    transport.wait(60.0)
    one.poll()
    assert one.events.said[-1].text == "1 clients are on no node, e.g. one; waiting for them."


def test_a_node_that_answers_between_two_failures_is_asked_again_at_once() -> None:
    """Only failures that follow one another put it off."""
    transport = Transport()
    one = asked(transport, {"one": "A"})
    for reply in (None, packet_of(Refused(run="r", reason="not yet")), None):
        transport.inbox.append((transport.sent[-1][0], reply))
        one.poll()
    assert (len(transport.sent), transport.time) == (4, 0.0)


def test_a_run_asks_again_as_the_rules_say() -> None:
    given = inspect.signature(serve_run).parameters
    assert (given["poll"].default, given["again"].default) == (ExchangeRules.poll, ExchangeRules.again)


def test_orders_that_nobody_answers_are_sent_again() -> None:
    transport = Transport()
    one = asked(transport, {"one": "A"})
    for seconds in (0.0, 59.0, 1.0, 119.0, 1.0):  # the first are waited for 60 s, the second twice as long
        transport.wait(seconds)
        one.poll()
    assert [node for _, node, _ in transport.sent] == ["A"] * 3


def test_who_was_dropped_or_is_still_gone_is_neither_asked_nor_waited_for() -> None:
    transport, place = Transport(), {"one": "A"}
    one = asked(transport, place)
    one.dropped = lambda: {"one"}
    one.finish()
    assert isinstance(one.answer("one").fault, DroppedError)
    again = asked(transport, place)
    again.gone = {"one"}
    again.poll()
    assert "one" in again.open  # it is back
    place.clear()
    again.finish()
    assert (transport.time, type(again.answer("one").fault)) == (0.0, LostError)


def test_a_shelf_has_room_again_for_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads go to a file only while others fill the memory that it may use."""
    one = Split().upload({"w": torch.zeros(4)}, {"w": torch.ones(4)}, 1.0)
    monkeypatch.setattr(module, "HELD", one.nbytes)
    shelf = module.Shelf()
    for name in ("ann", "ben"):
        shelf.put(name, one)
        assert shelf.take(name) is one
    shelf.put("ann", one)
    shelf.put("ben", one)
    there = shelf.take("ben")
    assert there is not one
    assert torch.equal(there.deltas["w"], one.deltas["w"])
