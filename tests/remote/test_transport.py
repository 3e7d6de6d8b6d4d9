"""The transport in memory: packets travel as bytes, time passes in ``wait`` alone, faults follow from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.remote import Packet, Reply
from fedkeep.remote.transport import Died, MemoryTransport, Weather

ORDER = Packet({"kind": "work", "n": 1}, {"w": torch.ones(3)})


def echo(packet: Packet) -> Packet:
    return Packet({**packet.header, "kind": "answers"}, {n: v + 1 for n, v in packet.tensors.items()})


def replies(transport: MemoryTransport, tickets: Sequence[str], seconds: float) -> list[tuple[float, Reply]]:
    """Return all that comes in so much time, and when."""
    end, found = transport.now() + seconds, list[tuple[float, Reply]]()
    while transport.now() < end:
        transport.wait(end - transport.now())
        found += [(transport.now(), reply) for reply in transport.receive(tickets)]
    return found


def test_packets_are_copied_as_bytes_and_answered_after_a_nodes_time() -> None:
    transport = MemoryTransport({"a": echo}, takes=lambda name, packet: 2.5)
    (ticket,) = transport.send([("a", ORDER)])
    assert transport.receive([ticket]) == []
    ((when, reply),) = replies(transport, [ticket], 10.0)
    assert when == 2.5
    assert reply.packet.tensors["w"].tolist() == [2.0, 2.0, 2.0]
    assert ORDER.tensors["w"].tolist() == [1.0, 1.0, 1.0]
    assert transport.now() == 10.0
    assert transport.carried == [("work", "a", len(ORDER.to_bytes()))]


def test_a_node_serves_one_message_after_the_other() -> None:
    transport = MemoryTransport({"a": echo, "b": echo}, takes=lambda name, packet: 3.0)
    tickets = transport.send([("a", ORDER), ("a", ORDER), ("b", ORDER)])
    assert [when for when, _ in replies(transport, tickets, 10.0)] == [3.0, 3.0, 6.0]


def test_a_node_that_dies_answers_nothing_and_is_gone_until_it_joins() -> None:
    def dies(packet: Packet) -> Packet:
        raise Died

    told: list[str] = []
    transport = MemoryTransport({"a": dies})
    transport.on_death = told.append
    tickets = transport.send([("a", ORDER), ("a", ORDER)])
    found = [reply for _, reply in replies(transport, tickets, 1.0)]
    assert [reply.packet for reply in found] == [None, None]
    assert found[0].reason == "node 'a' is not there"
    assert (told, transport.deaths, transport.nodes()) == (["a"], ["a"], [])
    transport.join("a.1", echo)
    assert transport.nodes() == ["a.1"]


def test_an_answer_of_a_node_that_left_meanwhile_is_lost() -> None:
    transport = MemoryTransport({"a": echo}, takes=lambda name, packet: 5.0)
    tickets = transport.send([("a", ORDER)])
    transport.after(2.0, lambda: transport.leave("a"))
    assert replies(transport, tickets, 100.0) == []


@pytest.mark.parametrize(
    ("weather", "count", "whole"),
    [
        (Weather(lose=1.0), 0, 0),
        (Weather(duplicate=1.0), 4, 4),
        (Weather(corrupt=1.0), 1, 0),
        (Weather(), 1, 1),
    ],
)
def test_messages_are_lost_doubled_and_damaged_both_ways(weather: Weather, count: int, whole: int) -> None:
    transport = MemoryTransport({"a": echo}, weather=weather)
    tickets = transport.send([("a", ORDER)])
    found = [reply for _, reply in replies(transport, tickets, 1.0)]
    assert len(found) == count
    assert sum(reply.packet is not None for reply in found) == whole


def test_the_same_seed_gives_the_same_faults_and_another_other_ones() -> None:
    def heard(seed: int) -> Any:
        weather = Weather(lose=0.3, corrupt=0.2, duplicate=0.3, delay=0.5, latest=50.0)
        transport = MemoryTransport({"a": echo}, seed=seed, weather=weather)
        tickets = transport.send([("a", ORDER)] * 20)
        return [(when, r.ticket, r.packet is None) for when, r in replies(transport, tickets, 200.0)]

    assert heard(1) == heard(1)
    assert heard(1) != heard(2)


def test_a_message_beyond_the_limit_is_not_sent_nor_any_beside_it() -> None:
    transport = MemoryTransport({"a": echo}, most_bytes=len(ORDER.to_bytes()))
    large = Packet({"kind": "work"}, {"w": torch.ones(300)})
    with pytest.raises(ConfigError, match=r"^The message 'work' to node.*'a'.*1"):
        transport.send([("a", ORDER), ("a", large)])
    assert transport.carried == []
    transport.send([("a", ORDER)])
