import httpx
import pytest
import torch
from flwr.app import Message, RecordDict

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.flower.grid import GridTransport
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.remote import Packet
from tests.flower.loopback import Loopback, context


def echo(message, context):
    packet = from_records(message.content)
    if packet.header["kind"] == "break":
        raise RuntimeError("broken")
    if packet.header["kind"] == "garble":
        return Message(RecordDict(), reply_to=message)
    header = {**packet.header, "node": str(context.node_id)}
    return Message(to_records([Packet(header, packet.tensors)])[0], reply_to=message)


def transport(**options):
    grid = Loopback(echo, [context(7), context(8)])
    return GridTransport(grid, **options), grid


def test_a_packet_goes_to_its_node_and_the_reply_comes_back_once():
    carrier, _ = transport()
    assert carrier.nodes() == ["7", "8"]
    model = torch.randn(4)
    tickets = carrier.send(
        [(node, Packet({"kind": "work", "round": 3}, {"w": model})) for node in ("7", "8")]
    )
    replies = carrier.receive(tickets)
    assert [reply.ticket for reply in replies] == tickets
    assert [reply.packet.header["node"] for reply in replies] == ["7", "8"]
    assert all(torch.equal(reply.packet.tensors["w"], model) for reply in replies)
    assert carrier.receive(tickets) == []


def test_what_a_device_breaks_or_garbles_is_a_reason():
    carrier, _ = transport()
    tickets = carrier.send([("7", Packet({"kind": "break"})), ("8", Packet({"kind": "garble"}))])
    broken, garbled = carrier.receive(tickets)
    assert (broken.packet, broken.reason) == (None, "Flower: <class 'RuntimeError'>:<'broken'> (code 2)")
    assert (garbled.packet, garbled.reason) == (
        None,
        "A message was not made by this version of fedkeep: it holds [].",
    )


def test_the_model_travels_once_for_several_nodes():
    carrier, grid = transport()
    model = torch.randn(1000)
    carrier.send([(node, Packet({"kind": "garble", "to": node}, {"w": model})) for node in ("7", "8")])
    assert sum(model.numpy().tobytes() in content for content in grid.carried.values()) == 1


def test_a_message_beyond_the_limit_is_refused_before_anything_is_sent():
    carrier, grid = transport(limit=100)
    with pytest.raises(ConfigError, match="A message of 104 bytes to.*8.*100"):
        carrier.send(
            [("7", Packet({"kind": "work"})), ("8", Packet({"kind": "work"}, {"w": torch.zeros(26)}))]
        )
    assert grid.carried == {}


@pytest.mark.parametrize("pushed", [[], [None, None]])
def test_a_message_that_the_link_does_not_take_is_told_once(pushed, monkeypatch):
    carrier, grid = transport()
    monkeypatch.setattr(grid, "push_messages", lambda messages: pushed)
    tickets = carrier.send([("7", Packet({"kind": "work"})), ("8", Packet({"kind": "work"}))])
    first, second = carrier.receive(tickets)
    assert first.reason == "The link did not take the message to node 7; the node may just have left."
    assert (first.packet, second.packet, carrier.receive(tickets)) == (None, None, [])


def test_nothing_is_pushed_and_pulled_for_nothing():
    carrier, grid = transport()
    grid.push_messages = grid.pull_messages = None
    assert carrier.send([]) == carrier.receive([]) == []


def test_time_never_goes_back_and_waiting_is_short(monkeypatch):
    carrier, _ = transport()
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    before = carrier.now()
    carrier.wait(1000)
    carrier.wait(-1)
    assert slept == [0.2, 0.0]
    assert carrier.now() >= before


def test_a_link_that_needs_long_for_a_look_has_as_long_without_one(monkeypatch):
    clock, slept = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        "time.sleep", lambda seconds: (slept.append(seconds), clock.__setitem__(0, clock[0] + seconds))
    )
    carrier, _ = transport()
    for took in (0.01, 1.5, 0.01, 30.0):
        clock[0] += took
        carrier.wait(2.0)
    assert slept == pytest.approx([0.2, 1.5, 0.2, 2.0])


BOTH = [(node, Packet({"kind": "work", "to": node})) for node in ("7", "8")]


@pytest.mark.parametrize("taken", [[True, False], [False, True]])
def test_where_the_link_takes_one_message_of_two_each_ticket_is_that_of_its_node(taken, monkeypatch):
    carrier, grid = transport()
    monkeypatch.setattr(
        grid,
        "push_messages",
        lambda messages: [grid._push(m) if yes else None for m, yes in zip(messages, taken, strict=True)],
    )
    tickets = carrier.send(BOTH)
    replies = {reply.ticket: reply for reply in carrier.receive(tickets)}
    for ticket, yes, node in zip(tickets, taken, ("7", "8"), strict=True):
        if yes:
            assert replies[ticket].packet.header["node"] == node
        else:
            assert f"did not take the message to node {node}" in replies[ticket].reason


def test_where_the_link_returns_fewer_tickets_than_messages_those_are_of_the_first(monkeypatch):
    carrier, grid = transport()
    monkeypatch.setattr(grid, "push_messages", lambda messages: [grid._push(messages[0])])
    tickets = carrier.send(BOTH)
    replies = {reply.ticket: reply for reply in carrier.receive(tickets)}
    assert replies[tickets[0]].packet.header["node"] == "7"
    assert "did not take the message to node 8" in replies[tickets[1]].reason


def many(monkeypatch, *faulty):
    """Send 20 messages, of whose groups the numbered ones meet a fault; return carrier, tickets and the groups' nodes."""
    nodes = range(100, 120)
    grid = Loopback(echo, [context(node) for node in nodes])
    carrier, groups, push = GridTransport(grid), [], grid.push_messages

    def pushed(messages):
        groups.append([message.metadata.dst_node_id for message in messages])
        if len(groups) - 1 in faulty:
            httpx.Response(500, request=httpx.Request("POST", "https://link")).raise_for_status()
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", pushed)
    model = torch.randn(100)
    packets = [(str(node), Packet({"kind": "work", "to": node}, {"w": model})) for node in nodes]
    return carrier, carrier.send(packets), groups


def test_messages_are_pushed_a_few_at_a_time_so_that_their_objects_follow_them_soon(monkeypatch):
    """Flower tells all nodes of a push of their messages, and pushes what is in these afterwards, one after the other."""
    carrier, tickets, groups = many(monkeypatch)
    assert groups == [list(range(100, 108)), list(range(108, 116)), list(range(116, 120))]
    replies = carrier.receive(tickets)
    assert [reply.ticket for reply in replies] == tickets
    assert [reply.packet.header["node"] for reply in replies] == list(map(str, range(100, 120)))


def test_a_fault_at_some_messages_loses_no_others(monkeypatch):
    carrier, tickets, groups = many(monkeypatch, 1)
    assert len(groups) == 3
    replies = {reply.ticket: reply for reply in carrier.receive(tickets)}
    for ticket, node in zip(tickets, range(100, 120), strict=True):
        if node in groups[1]:
            assert f"did not take the message to node {node};" in replies[ticket].reason
        else:
            assert replies[ticket].packet.header["node"] == str(node)


def test_a_ticket_of_our_own_is_not_asked_of_the_link(monkeypatch):
    carrier, grid = transport()
    asked, pull = [], grid.pull_messages
    monkeypatch.setattr(grid, "push_messages", lambda messages: [None, grid._push(messages[1])])
    monkeypatch.setattr(grid, "pull_messages", lambda tickets: asked.extend(tickets) or pull(tickets))
    tickets = carrier.send(BOTH)
    carrier.receive(tickets)
    assert asked == tickets[1:]


def test_a_message_lives_as_long_as_is_wanted(monkeypatch):
    carrier, grid = transport(lifetime=77.0)
    pushed = []
    monkeypatch.setattr(grid, "push_messages", lambda messages: pushed.extend(messages) or [])
    carrier.send(BOTH)
    assert [message.metadata.ttl for message in pushed] == [77.0, 77.0]


def test_deadlines_do_not_follow_the_time_of_day(monkeypatch):
    carrier, _ = transport()
    before = carrier.now()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert before <= carrier.now() < before + 5


def failing(status, monkeypatch, grid, *names):
    """Let the link answer requests with an HTTP status, as Flower's grid raises it."""

    def fail(*_):
        request = httpx.Request("POST", "https://link/v1/runtime")
        httpx.Response(status, request=request).raise_for_status()

    for name in names:
        monkeypatch.setattr(grid, name, fail)


def test_a_node_is_known_by_the_key_that_the_link_has_of_it():
    carrier, _ = transport()
    assert [carrier.key(node) for node in carrier.nodes()] == [b"key 7".hex(), b"key 8".hex()]
    assert carrier.key("9") == ""


CALLS = ("get_nodes", "push_messages", "pull_messages")


def test_a_fault_of_the_link_ends_no_run(monkeypatch):
    """Flower 1.41 answers 500 where its database stays locked for five seconds."""
    carrier, grid = transport()
    carrier.nodes()
    tickets = carrier.send(BOTH)
    with monkeypatch.context() as patch:
        failing(500, patch, grid, *CALLS)
        assert carrier.nodes() == ["7", "8"]
        assert carrier.receive(tickets) == []
        lost = carrier.send(BOTH)
    assert [reply.packet.header["node"] for reply in carrier.receive(tickets)] == ["7", "8"]
    assert "did not take the message to node 7" in carrier.receive(lost)[0].reason


def test_a_link_that_has_nothing_but_faults_is_told_in_words(monkeypatch):
    carrier, grid = transport()
    failing(500, monkeypatch, grid, *CALLS)
    now = carrier.now()
    for passed in (1000.0, 1590.0):
        monkeypatch.setattr(carrier, "now", lambda passed=passed: now + passed)
        assert carrier.nodes() == []
    monkeypatch.setattr(carrier, "now", lambda: now + 1610.0)
    with pytest.raises(RunError, match="nothing but faults for 600 s .*500"):
        carrier.receive(["1"])


def test_a_link_that_does_not_want_this_server_any_more_is_not_asked_again(monkeypatch):
    carrier, grid = transport()
    failing(403, monkeypatch, grid, *CALLS)
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        carrier.nodes()


def test_nodes_are_called_by_the_names_of_their_keys_and_one_that_came_back_is_gone_for_a_look():
    grid = Loopback(echo, [context(7), context(8)])
    grid.keys = {7: b"a", 8: b"b", 9: b"a", 10: b"b"}
    carrier = GridTransport(grid, names={b"a".hex(): "north"})
    assert carrier.nodes() == ["north", "8"]
    grid.contexts = {9: context(9), 8: context(8)}
    assert carrier.nodes() == ["8"]
    assert sorted(carrier.nodes()) == ["8", "north"]
    (reply,) = carrier.receive(carrier.send([("north", Packet({"kind": "work"}))]))
    assert reply.packet.header["node"] == "9"
    grid.contexts |= {10: context(10)}
    grid.keys[10] = b"a"
    assert sorted(carrier.nodes()) == ["8", "north", "north (10)"]
    assert carrier.key("north (10)") == carrier.key("north")
    del grid.contexts[9]
    assert sorted(carrier.nodes()) == ["8", "north (10)"]


@pytest.mark.parametrize("away", [False, True], ids=["at once", "away for a look"])
def test_what_a_node_was_sent_before_it_was_started_again_is_told_as_lost_once(away):
    """The link takes a node that is there again to be the same: nobody would answer, and nobody ask again."""
    carrier, grid = transport()
    carrier.nodes()
    first, other = carrier.send([(node, Packet({"kind": "work"})) for node in ("7", "8")])
    if away:
        there = grid.contexts.pop(7)
        assert carrier.nodes() == ["8"]
        grid.contexts = {7: there, **grid.contexts}
    grid.began[7] = "2026-01-01T00:00:00"
    assert sorted(carrier.nodes()) == ["7", "8"]
    lost, kept = carrier.receive([first, other])
    assert (lost.ticket, lost.packet, lost.reason) == (first, None, "The node was started again")
    assert (kept.ticket, kept.reason) == (other, "")
    assert sorted(carrier.nodes()) == ["7", "8"]
    (again,) = carrier.send([("7", Packet({"kind": "work"}))])
    assert carrier.receive([again])[0].packet is not None
