"""What a device agrees to: what was signed, secure sums alone if its owner says so, and a run that stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedkeep import Method, Phase, averaging, methods
from fedkeep.methods import SecureSums, securely
from fedkeep.remote import Packet, fingerprint
from fedkeep.remote.device_tally import SignedWords
from fedkeep.remote.messages import PROTOCOL, EncodingFits, Here, Message, Refused, message_of, packet_of
from fedkeep.remote.node import Node
from tests.remote.hand import RUN, Hand
from tests.tiny import Logits, classes, files

DATA = classes(kind="f4")
PLAIN = methods.furl("user", local=Phase(batch_size=4), server=averaging(by="uniform"))
SECURE = securely(PLAIN, SecureSums(clip=1.0))


def said(hand: Hand, node: Node, message: Message | Packet) -> str:
    return message_of(hand.say(node, message), Refused).reason


def bare(hand: Hand) -> Packet:
    """Return an order that asks for an upload without a mask."""
    return packet_of(hand.work([hand.order(hand.first_order("user-0"))], 0, 5))


@pytest.mark.parametrize(
    ("method", "changes", "differs"),
    [
        (PLAIN, {}, "method"),
        (securely(PLAIN, SecureSums(clip=99.0)), {}, "method"),
        (securely(PLAIN, SecureSums(clip=1.0, threshold=0.9)), {}, "method"),
        (methods.furl("user", private_scale="fedavg", local=Phase(batch_size=4)), {}, "method"),
        (SECURE, {"seed": 1}, "seed"),
    ],
)
def test_a_run_that_was_agreed_on_stays_what_it_was(
    method: Method, changes: dict[str, Any], differs: str, tmp_path: Path
) -> None:
    agreed = Hand(Logits, SECURE, DATA)
    other = Hand(Logits, method, DATA, changes={"experiment": "other", **changes})
    node = agreed.node(tmp_path, [0, 1])
    node.experiment = lambda text, encoding: (Logits(), method if text == "other" else SECURE)
    agreed.meet(node)
    before = node._runs[RUN]
    for _ in range(2):
        wanted = (
            f"The run {RUN!r} is not the one that this device has agreed on; what differs: {differs}. Go on"
        )
        assert said(other, node, other.encode()).startswith(wanted)
    assert "trains for a masked vector alone" in said(agreed, node, bare(agreed))
    assert node._runs[RUN] is before
    node.close()
    assert "trains for a masked vector alone" in said(
        agreed, node, bare(agreed)
    )  # as a process that starts later


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"code": "9.9 abc", "pace": 3}, "The server runs fedkeep 9.9 (source abc), this device "),
        ({"protocol": PROTOCOL + 1, "pace": 3}, f"The server speaks protocol {PROTOCOL + 1}, this device "),
        ({"pace": 3}, "A message 'hello' was refused: pace: Unexpected keyword argument."),
        ({"code": 3}, "A message 'hello' was refused: code: Input should be a valid string."),
    ],
)
def test_a_server_of_another_fedkeep_is_told_so_whatever_fields_its_messages_have(
    fields: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    hand = Hand(Logits, PLAIN, DATA)
    hello = packet_of(hand.hello()).header
    answer = said(hand, hand.node(tmp_path, [0]), Packet({**hello, **fields}))
    assert answer.startswith(wanted)
    assert files(tmp_path) == {}


def test_other_private_values_for_the_same_run_are_refused(tmp_path: Path) -> None:
    agreed, other = Hand(Logits, PLAIN, DATA), Hand(Logits, methods.furl("linear.bias"), DATA)
    node = agreed.met(tmp_path, [0])
    node.experiment = other.experiment
    assert "was made for other private values" in said(other, node, other.encode())


def test_a_run_goes_on_under_another_fedkeep_and_in_other_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(fingerprint, "code", lambda: "0.9 abc")
        before = Hand(Logits, PLAIN, DATA)
        node = before.met(tmp_path, [0])
        node.close()
    now = Hand(Logits, PLAIN, DATA, changes={"experiment": "the same, with more said"})
    assert message_of(now.say(now.node(tmp_path, [0]), now.encode()), EncodingFits)


def test_a_device_behind_a_guard_trains_what_was_signed_and_nothing_else(tmp_path: Path) -> None:
    rules = {"clients_a_word_here": 3}
    hand = Hand(Logits, PLAIN, DATA, changes={"experiment": "signed", "summarise": rules})
    node = hand.node(tmp_path, [0])
    node.signed = {"signed": SignedWords(preparation=rules), "signed too": SignedWords(preparation={})}
    assert message_of(hand.say(node, hand.hello()), Here).summary
    assert message_of(hand.say(node, hand.hello(experiment="signed too", summarise={})), Here)
    for changes, what in (
        ({"experiment": "another"}, "experiment"),
        ({"summarise": {"clients_a_word": 1}}, "preparation"),
    ):
        wanted = (
            f"and the {what} that the server names is not in the signed project. Put the configuration into"
        )
        assert wanted in said(hand, node, hand.hello(**changes))
        assert wanted in said(hand, node, hand.encode(hello=hand.hello(**changes)))
    assert files(tmp_path) == {}


def test_a_run_that_was_agreed_on_is_trained_by_its_own_signed_project_alone(tmp_path: Path) -> None:
    hand = Hand(Logits, PLAIN, DATA, changes={"experiment": "signed"})
    for signed, served in (({"signed": SignedWords(preparation={})}, True), ({}, False), (None, True)):
        node = hand.node(tmp_path, [0])
        node.signed = signed
        if signed:
            hand.meet(node)
        kind = hand.say(node, bare(hand)).header["kind"]
        assert kind == ("answers" if served else "refused")
        node.close()


def test_an_owner_may_want_secure_sums_alone(tmp_path: Path) -> None:
    plain, secure = Hand(Logits, PLAIN, DATA), Hand(Logits, SECURE, DATA)
    node = plain.node(tmp_path / "plain", [0], secure=True)
    wanted = "This device trains for secure sums alone (device.secure). Add a table [method.secure]."
    assert said(plain, node, plain.encode()) == wanted
    assert files(tmp_path) == {}
    secure.meet(secure.node(tmp_path / "secure", [0], secure=True))
    later = plain.met(tmp_path / "later", [0])
    later.close()
    assert said(plain, plain.node(tmp_path / "later", [0], secure=True), bare(plain)) == wanted
