"""Messages of a node that follow one another: what one has left undone, or agreed on anew, counts for the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import Phase, methods
from fedkeep.data import FederatedData
from fedkeep.data.ids import PackedIds
from fedkeep.engines import Order
from fedkeep.methods import Sent
from fedkeep.remote.messages import LEAVES, EncodingFits, Refused, message_of, packet_of
from fedkeep.remote.node import MOST_RUNS, Node
from fedkeep.store import Line
from tests.remote.hand import RUN, Hand, only
from tests.tiny import Logits, classes

DATA = classes(kind="f4")
FURL = methods.furl("user", local=Phase(batch_size=4))


@pytest.fixture
def hand() -> Hand:
    return Hand(Logits, FURL, DATA)


def test_a_message_that_failed_leaves_nothing_that_the_next_one_makes_durable(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = hand.met(tmp_path, [0, 1], on_missing="anew")
    hand.ask(node, hand.work([hand.order(hand.first_order("user-0"))], 0, 5))
    store = node._runs[RUN].store
    before = store.file.versions("user-0")
    for number, wanted in enumerate((Line(1, 5), Line(3, 6)), 7):  # one that is there, one that is not
        hand.ledger = {"user-0": wanted}

        def failing(*_: Any) -> Any:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr("fedkeep.remote.serving._judged", failing)
            work = hand.work([hand.order(hand.first_order("user-0", 1))], 1, number)
            assert "ZeroDivisionError" in message_of(hand.say(node, packet_of(work)), Refused).reason
        hand.ask(node, hand.work([hand.order(hand.first_order("user-1", 1))], 1, number + 10))
        assert store.file.versions("user-0") == before


def test_what_was_agreed_on_first_counts_for_a_process_that_starts_later(hand: Hand, tmp_path: Path) -> None:
    node = hand.met(tmp_path, [0])
    work = hand.work([hand.order(hand.first_order("user-0"))], 0, 5)
    hand.ask(node, work)
    before = hand.left[-1]
    refused = message_of(hand.say(node, hand.encode(hello=hand.hello(seed=9))), Refused)
    assert "what differs: seed" in refused.reason
    node.close()
    again = hand.node(tmp_path, [0])
    hand.ask(again, work)
    again.close()
    assert hand.left[-1] == before


def test_orders_of_different_parts_of_the_run_are_refused(hand: Hand, tmp_path: Path) -> None:
    """One schedule is followed in a message."""
    node = hand.met(tmp_path, [0, 1, 2])
    early, late = (replace(hand.first_order(f"user-{k}"), progress=p) for k, p in enumerate((0.1, 0.9)))
    judged = hand.order(hand.first_order("user-2"), train=False, judge=(only(),))
    work = hand.work([hand.order(early), hand.order(late), judged], 0, 5)
    assert message_of(hand.say(node, packet_of(work)), Refused).reason == (
        "A message was refused: the orders to train must have one progress; got 0.1 and 0.9."
    )
    assert hand.ask(node, hand.work([hand.order(late), judged], 0, 6)).answers[0].upload is not None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"linear.bias": torch.zeros(4)}, "'linear.bias' wants (3,), is (4,)"),
        ({"user": torch.zeros(3)}, "unknown ['user']"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_also_where_nobody_trains(
    hand: Hand, tmp_path: Path, wrong: Mapping[str, torch.Tensor], said: str
) -> None:
    node = hand.met(tmp_path, [0])
    params = {**hand.first_order("user-0").sent.params, **wrong}
    order = Order(round=0, client="user-0", sent=Sent(params=params))
    work = hand.work([hand.order(order, train=False, judge=(only(),))], 0, 5)
    assert said in message_of(hand.say(node, packet_of(work)), Refused).reason


def test_training_examples_are_not_judged_whatever_the_server_asks(tmp_path: Path) -> None:
    """Of those that opted out the sums would tell the number, and the loss by any model that the server makes up."""
    hand = Hand(Logits, FURL, classes(kind="f4", opted_in=True))
    node = hand.met(tmp_path, [0])
    order = hand.order(hand.first_order("user-0"), train=False, judge=(only(),))
    message = packet_of(hand.work([order], 0, 5))
    message.header["orders"][0]["judge"][0]["split"] = "train"  # type: ignore[index]
    refused = message_of(hand.say(node, message), Refused)
    assert refused.reason.startswith(
        "A message 'work' was refused: orders.0.judge.0.split: Input should be 'valid' or"
    )


@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("judged_too", [False, True])
def test_opted_out_examples_are_in_no_sum_unless_the_owner_says_so(
    tmp_path: Path, leaves: Any, judged_too: bool
) -> None:
    """Whatever they are, what the node says of judging has the same bits; of one client all of them opted out."""
    first = classes(kind="f4", opted_in=True, valid=6, test=9)
    first.columns["opted_in"][first.rows(1)] = False
    others = first.columns["x"].copy()
    others[~first.columns["opted_in"]] *= -7
    said, counts = list[bytes](), []
    for number, columns in enumerate((first.columns, {**first.columns, "x": others})):
        data = FederatedData(columns, first.offsets, first.ids, first.bounds, first.meta)
        hand = Hand(Logits, FURL, data, seed=3)
        node = hand.node(tmp_path / str(number), range(3), leaves=leaves, judge_opted_out=judged_too)
        counts.append(hand.say(node, hand.encode()).header["clients"])
        orders = [
            hand.order(hand.first_order(f"user-{k}"), train=False, judge=(only(), only("valid")))
            for k in range(3)
        ]
        answers = hand.ask(node, replace(hand.work(orders, 0, 5), leaves=leaves))
        assert [one.count for _, one in answers.judged] == [
            sum(known[split] for known in counts[-1].values())
            for split in ("test", "valid")  # type: ignore[union-attr]
        ]
        said.append(hand.left[-1])
        node.close()
    assert counts[0] == counts[1]
    assert (counts[0]["user-1"]["test"] == 9) is judged_too  # type: ignore[index, call-overload]
    assert (said[0] != said[1]) is judged_too


def test_a_message_to_many_clients_looks_each_of_them_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 30
    data = classes(counts=(3,) * count, kind="f4")
    hand = Hand(Logits, methods.fedavg(local=Phase(batch_size=4)), data)
    node, read, listed = hand.node(tmp_path, range(count)), list[Any](), list[bool]()
    one, all_of = PackedIds.__getitem__, Node.clients.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(PackedIds, "__getitem__", lambda ids, client: read.append(client) or one(ids, client))
    monkeypatch.setattr(Node, "clients", property(lambda node: listed.append(True) or all_of(node)))
    versions = {f"user-{k}": Line() for k in range(count)}
    message_of(hand.say(node, hand.encode(versions=versions)), EncodingFits)
    assert len(listed) <= 3
    read.clear()
    orders = [hand.order(hand.first_order(f"user-{k}"), train=False) for k in range(count)]
    assert {answer.fault for answer in hand.ask(node, hand.work(orders, 0, 5)).answers} == {None}
    assert len(read) <= 3 * count


def test_runs_that_are_not_asked_for_any_more_are_let_go_of_and_served_if_they_are(tmp_path: Path) -> None:
    hands = [Hand(Logits, FURL, DATA, run=f"run-{number}") for number in range(MOST_RUNS + 1)]
    node = hands[0].node(tmp_path, [0])
    for hand in hands:
        hand.meet(node)
    first = hands[0]
    assert list(node._runs) == [hand.run for hand in hands[1:]]
    for attempt in (5, 6):
        work = first.work([first.order(first.first_order("user-0"))], 0, attempt)
        assert first.ask(node, work).answers[0].upload is not None
        assert list(node._runs)[-1] == first.run
        assert len(node._runs) == MOST_RUNS


def test_a_file_is_let_go_of_where_a_message_fails_and_the_next_one_settles_its_examples(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[bool]()

    def failing(*_: Any) -> None:
        calls.append(True)
        raise ZeroDivisionError

    node, other = hand.node(tmp_path, [0]), hand.node(tmp_path, [0])
    work = hand.work([hand.order(hand.first_order("user-0"))], 0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(Node, "_settle", failing)
        assert "ZeroDivisionError" in message_of(hand.say(node, hand.encode()), Refused).reason
    message_of(hand.say(other, hand.encode()), EncodingFits)
    other.close()
    hand.meet(node)
    node.release()
    with monkeypatch.context() as patch:
        patch.setattr(Node, "_settle", failing)
        for _ in range(2):
            assert "ZeroDivisionError" in message_of(hand.say(node, packet_of(work)), Refused).reason
    assert len(calls) == 3, "at each message until it has come through"
    hand.ask(other, work)
    other.close()
    hand.ask(node, work)


def test_a_node_is_closed_between_messages(hand: Hand, tmp_path: Path) -> None:
    node = hand.met(tmp_path, [0])
    closing = threading.Thread(target=node.close)
    with node._turn:
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join()
    assert node._runs == {}
