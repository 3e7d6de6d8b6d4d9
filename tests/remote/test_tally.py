"""A server that asks for more than was agreed on gets nothing; what was asked is counted once, whatever happens."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep import Phase, methods
from fedkeep.core.errors import StoreError
from fedkeep.engines import Order
from fedkeep.flower.served import experiments_in, federation_of
from fedkeep.methods import Sent
from fedkeep.remote.device_file import Counts, DeviceFile, LogLine, file_of
from fedkeep.remote.device_tally import Limits, SignedWords, Tally, smallest_block
from fedkeep.remote.messages import Answers, Refused, Work, message_of
from fedkeep.remote.node import Node
from fedkeep.remote.view import served
from tests.flower.small import CONFIG
from tests.remote.hand import RUN, Hand, only
from tests.tiny import Logits, classes

FURL = methods.furl("user", local=Phase(batch_size=4))
DATA = classes(kind="f4")  # three test examples a client


@pytest.fixture
def hand() -> Hand:
    return Hand(Logits, FURL, DATA)


def work(
    hand: Hand, attempt: int, clients: str, *, train: bool = False, judge: bool = True, scale: float = 1.0
) -> Work:
    params = {
        n: v * scale
        for n, v in hand.method.split.halves(hand.net.module).federated(hand.net.initial()).items()
    }
    judging = (only(),) if judge else ()
    orders = [
        hand.order(
            Order(round=0, client=f"user-{c}", sent=Sent(params=params, state={})), train=train, judge=judging
        )
        for c in clients
    ]
    return hand.work(orders, 0, attempt)


def asked(hand: Hand, node: Node, *given: Any, **more: Any) -> Answers | str:
    packet = hand.say(node, work(hand, *given, **more))
    if packet.header["kind"] == "refused":
        return message_of(packet, Refused).reason
    return message_of(packet, Answers, hand.method.split)


def counted(folder: Path) -> dict[str, Counts]:
    with closing(DeviceFile(file_of(folder, RUN), None)) as file:
        return file.counts()


@pytest.mark.parametrize(("kind", "train"), [("trainings", True), ("judgings", False)])
def test_no_client_does_more_than_its_owner_agreed_to(
    hand: Hand, tmp_path: Path, kind: str, train: bool
) -> None:
    node = hand.met(tmp_path, [0, 1], **{kind: 2})
    for attempt in (1, 2):
        assert isinstance(asked(hand, node, attempt, "01", train=train, judge=not train), Answers)
    before = counted_closed(node, tmp_path)
    found = asked(hand, node, 3, "0", train=train, judge=not train)
    assert isinstance(found, str)
    assert f"at most 2 {kind}" in found
    assert "user-0" in found
    assert counted_closed(node, tmp_path) == before


def counted_closed(node: Node, folder: Path) -> dict[str, Counts]:
    node.release()
    return counted(folder)


def test_a_message_that_comes_again_counts_once_and_one_that_differs_does_not_pass_for_it(
    hand: Hand, tmp_path: Path
) -> None:
    node = hand.met(tmp_path, [0], judgings=1)
    for _ in range(3):
        assert isinstance(asked(hand, node, 1, "0"), Answers)
    assert "at most 1 judgings" in str(asked(hand, node, 1, "0", scale=2.0))  # the same attempt, other values
    assert counted_closed(node, tmp_path) == {"user-0": Counts(0, 1, 0)}


def test_another_process_of_the_device_counts_on(hand: Hand, tmp_path: Path) -> None:
    for attempt, fine in ((1, True), (2, False)):
        node = hand.met(tmp_path, [0], trainings=1)
        assert isinstance(asked(hand, node, attempt, "0", train=True, judge=False), Answers) == fine
        node.close()


def test_what_was_signed_bounds_what_a_server_asks_and_the_owner_may_say_less(
    hand: Hand, tmp_path: Path
) -> None:
    for own, most in ((None, 3), (1, 1), (9, 3)):
        node = hand.node(tmp_path / str(own), [0], trainings=own)
        node.signed = {"text": SignedWords(preparation={}, limits=Limits(trainings=3))}
        hand.meet(node)
        fine = [isinstance(asked(hand, node, k, "0", train=True, judge=False), Answers) for k in range(1, 6)]
        assert fine == [k < most for k in range(5)]


def test_the_rounds_of_a_signed_configuration_are_what_is_agreed_on() -> None:
    def limits(text: str) -> Limits:
        return experiments_in({"config.toml": text.encode()})[federation_of(text).text].limits

    assert limits(CONFIG) == Limits(trainings=13, judgings=16, adaptations=10)
    assert limits(CONFIG.replace("rounds = 3", "rounds = 30")).trainings == 60
    epochs = CONFIG.replace("rounds = 3", "epochs = 3")
    assert limits(epochs) == Limits(
        trainings=13
    )  # judged every two rounds, of which the owner knows no number
    assert limits(epochs.replace("evaluate_every = 2", "")).judgings == 22


def test_an_answer_that_cannot_be_noted_does_not_leave(hand: Hand, tmp_path: Path, monkeypatch: Any) -> None:
    node = hand.met(tmp_path, [0])

    def full(*_: object) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(DeviceFile, "put_asked", full)
    found = asked(hand, node, 1, "0", train=True)
    assert not isinstance(found, str)
    assert found.judged == ()
    assert found.answers[0].upload is None


class TestSums:
    def sums(self, hand: Hand, node: Node, *asks: str) -> list[int]:
        """Return of how many examples the sums were that left, one after the other; 0: none did."""
        found = []
        for attempt, clients in enumerate(asks, 1):
            answers = asked(hand, node, attempt, clients)
            assert all(one.fault is None for one in answers.answers)
            found.append(sum(judged.count for _, judged in answers.judged))
        return found

    @pytest.mark.parametrize(
        ("asks", "told"),
        [
            (("0",), (0,)),
            (("01",), (6,)),
            (("012", "01"), (9, 0)),
            (("0123", "01", "23"), (12, 6, 6)),
            (("01", "23", "02"), (6, 6, 0)),
            (("01", "01", "01"), (6, 6, 6)),
        ],
    )
    def test_neither_sums_nor_their_differences_tell_of_few(
        self, hand: Hand, tmp_path: Path, asks: tuple[str, ...], told: tuple[int, ...]
    ) -> None:
        node = hand.met(tmp_path, [0, 1, 2, 3], least_examples=6, leaves="clients")
        assert self.sums(hand, node, *asks) == list(told)

    def test_a_client_that_is_lost_on_purpose_does_not_lay_another_bare(
        self, hand: Hand, tmp_path: Path
    ) -> None:
        node = hand.met(tmp_path, [0, 1], least_examples=6)
        good = work(hand, 1, "01")
        lost = [good.orders[0], type(good.orders[1])(**{**vars(good.orders[1]), "version": 7, "attempt": 9})]
        answers = message_of(hand.say(node, hand.work(lost, 0, 2)), Answers)
        assert answers.answers[1].fault is not None
        assert answers.judged == ()

    def test_their_owner_sees_how_models_do_also_where_no_sum_leaves(
        self, hand: Hand, tmp_path: Path
    ) -> None:
        node = hand.met(tmp_path, [0, 1], least_examples=100)
        found = asked(hand, node, 1, "01", train=True)
        assert isinstance(found, Answers)
        assert found.judged == ()
        node.release()
        with closing(DeviceFile(file_of(tmp_path, RUN), None)) as file:
            (line,) = file.log()
        assert [(one.split, one.of) for one in line.scores] == [("test", 6), ("train", 2)]
        assert line.scores[1].value == pytest.approx(sum(one.loss for one in found.answers) / 2)
        assert (line.uploads, line.examples) == (2, 0)

    @given(
        st.lists(
            st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1), min_size=1, max_size=4
        )
    )
    def test_the_smallest_block_is_that_of_the_examples_themselves(self, sums: list[dict[str, int]]) -> None:
        blocks: dict[tuple[bool, ...], int] = {}
        for client in "abcd":
            for example in range(4):
                inside = tuple(example < one.get(client, 0) for one in sums)
                blocks[inside] = blocks.get(inside, 0) + 1
        blocks.pop((False,) * len(sums), None)
        assert smallest_block(sums) == min(blocks.values())


@pytest.mark.parametrize(
    ("trainings", "judgings", "adaptations", "round", "asked"),
    [
        (2, 1, 0, "round 4", "2 clients to train, 1 client to be judged on test"),
        (0, 1, 0, "after round 3", "1 client to be judged on test"),
        (0, 0, 1, "after round 3", "1 client to adapt"),
        (0, 0, 0, "round 4", "for a step of a sum"),
    ],
)
def test_a_message_is_told_by_the_round_that_it_is_of(
    trainings: int, judgings: int, adaptations: int, round: str, asked: str
) -> None:
    line = LogLine(0.0, 3, trainings, judgings, adaptations, "test", (), 0, 0, 9)
    assert served(line)[1:] == (round, asked, "no values, 9 B")


def tally_of(counts: dict[str, int], least: int) -> Tally:
    """Return the tally of a run that has asked for nothing yet."""
    file, asked = cast(Any, SimpleNamespace(sums=lambda split: [])), cast(Any, SimpleNamespace(sums=[]))
    return Tally(file, Limits(), least, asked, lambda split: counts)


@pytest.mark.parametrize(("least", "admitted"), [(1, True), (2, True), (3, False)])
def test_a_sum_of_two_examples_leaves_where_two_are_enough(least: int, admitted: bool) -> None:
    tally = tally_of({"a": 2, "b": 0}, least)
    assert tally.admits("test", ["a", "b"]) is admitted
    assert len(tally.asked.sums) == (least == 2)


def test_a_sum_of_one_example_does_not_leave_where_two_are_wanted() -> None:
    assert not tally_of({"a": 1}, 2).admits("test", ["a"])


def test_a_sum_over_nobodys_examples_leaves_as_it_tells_of_none() -> None:
    assert tally_of({"b": 0}, 2).admits("test", ["b"])


def test_sums_of_one_message_differ_by_as_many_examples_as_those_of_two() -> None:
    tally = tally_of({"a": 3, "b": 1}, 2)
    assert tally.admits("test", ["a", "b"])
    assert not tally.admits("test", ["a"])
    assert tally.admits("valid", ["a"])  # other examples
