"""A device's steps of secure sums: each is answered once, on its disk first; what is refused; promises that are broken."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core import files
from fedkeep.core.errors import LostError, SecureSumError, UploadError
from fedkeep.methods import SecureSums
from fedkeep.privacy.secure.secure_messages import Keys
from fedkeep.remote import Packet, device_file, masking
from fedkeep.remote.device_file import DeviceFile, file_of, remove, sum_of
from fedkeep.remote.masking import VECTOR, Masking
from fedkeep.remote.messages import Answers, Ask, ClientOrder, packet_of
from fedkeep.remote.secure_fleet import SecureFleet
from tests.remote import test_secure_sums
from tests.remote.hand import RUN, Hand
from tests.remote.test_secure_sums import SUMS, made, model
from tests.tiny import classes


class Alone:
    """Clients a, b and c on one node, and what a server would ask them."""

    def __init__(self, folder: Path, sums: SecureSums | None = SUMS) -> None:
        self.data = classes((6, 6, 6))
        self.hand = Hand(model, made("fedavg", sums), self.data)
        self.names = [str(client) for client in self.data.ids]
        self.folder = folder
        self.told: list[str] = []
        """What the device's owner is told."""
        self.start()
        self.hand.meet(self.node)

    def start(self) -> None:
        self.node = self.hand.node(self.folder, [0, 1, 2])
        self.node.tell = self.told.append

    def ask(self, asks: Mapping[str, Sequence[Ask]], attempt: int, train: bool = False) -> Answers:
        orders = [
            ClientOrder(**vars(self.hand.first_order(client)), train=train, asks=tuple(each))
            for client, each in asks.items()
        ]
        return self.hand.ask(self.node, self.hand.work(orders, 0, attempt))

    def keys(self, number: int = 1, attempt: int = 1, clients: str = "3") -> dict[str, str]:
        asks = {name: [Ask(step="keys", sum=number, given={"clients": clients})] for name in self.names}
        made = self.ask(asks, attempt).made
        return {name: made[name]["keys"]["keys"] for name in made}

    def boxes(self, keys: Mapping[str, str], number: int = 1, attempt: int = 2) -> dict[str, dict[str, str]]:
        asks = {name: [Ask(step="shares", sum=number, given=keys)] for name in self.names}
        made = self.ask(asks, attempt).made
        return {
            to: {name: made[name]["shares"][to] for name in self.names if name != to} for to in self.names
        }

    def masked(self, boxes: Mapping[str, Mapping[str, str]], number: int = 1, attempt: int = 3) -> Answers:
        asks = {name: [Ask(step="masked", sum=number, given=boxes[name])] for name in self.names}
        return self.ask(asks, attempt, train=True)

    def revealed(self, names: Sequence[str], number: int = 1, attempt: int = 4) -> Answers:
        given = dict.fromkeys(names, "")
        return self.ask({n: [Ask(step="revealed", sum=number, given=given)] for n in self.names}, attempt)


def vectors(answers: Answers) -> list[torch.Tensor]:
    return [one.upload.deltas[VECTOR] for one in answers.answers if one.upload is not None]


def test_the_same_message_gets_the_same_answer_and_another_none(tmp_path: Path) -> None:
    """Also from a process that was started between."""
    alone = Alone(tmp_path)
    keys = alone.keys()
    alone.node.close()
    alone.start()
    assert alone.keys() == keys
    boxes = alone.boxes(keys)
    assert alone.boxes(keys) == boxes
    first = alone.masked(boxes)
    alone.node.close()
    alone.start()
    again = alone.masked(boxes)
    assert len(vectors(first)) == 3
    assert all(map(torch.equal, vectors(first), vectors(again)))
    for answers in (
        alone.masked(boxes, attempt=7),
        alone.masked({n: dict(list(b.items())[:1]) for n, b in boxes.items()}),
    ):
        assert not vectors(answers)
        assert {type(one.fault) for one in answers.answers} == {UploadError}
    once = alone.revealed(alone.names).made
    assert alone.revealed(alone.names).made == once
    assert alone.revealed(alone.names[:2]).made == {}, "two lists of survivors would unmask one client"
    assert not vectors(alone.masked(boxes))


def test_a_training_without_a_mask_is_refused_and_a_mask_where_none_is_agreed(tmp_path: Path) -> None:
    alone = Alone(tmp_path / "a")
    plain = alone.hand.order(alone.hand.first_order(alone.names[0]))
    for wrong in (
        plain,
        replace(plain, asks=(Ask(step="keys", sum=1, given={"clients": "3"}),)),
    ):
        said = alone.hand.node(tmp_path / "x", [0])
        said.close()
        packet = _say(alone, wrong)
        assert packet.header["kind"] == "refused"
        assert "it trains for a masked vector alone" in packet.header["reason"]
    alone.node.close()
    other = Alone(tmp_path / "b", None)
    packet = _say(other, replace(plain, train=False, asks=(Ask(step="keys", sum=1, given={}),)))
    assert "asks for steps of a secure sum, and the method has none" in packet.header["reason"]


def _say(alone: Alone, order: ClientOrder) -> Packet:
    return alone.hand.say(alone.node, packet_of(alone.hand.work([order], 0, 5)))


def test_steps_out_of_turn_with_too_many_too_few_or_old_keys_are_refused(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    keys = alone.keys(5)
    assert alone.keys(4, attempt=2) == {}, "numbers of sums never go back"
    assert alone.keys(5, attempt=9) == {}, "the same sum by another message"
    more = {**keys, "x": _new_keys(), "y": _new_keys()}
    assert alone.ask({alone.names[0]: [Ask(step="shares", sum=5, given=more)]}, 3).made == {}
    assert alone.ask({alone.names[0]: [Ask(step="shares", sum=5, given={"a": "no hex"})]}, 3).made == {}
    few = {alone.names[0]: keys[alone.names[0]]}
    assert alone.ask({alone.names[0]: [Ask(step="shares", sum=5, given=few)]}, 3).made == {}
    assert not vectors(alone.masked({name: {} for name in alone.names}, 5)), "before shares"
    boxes = alone.boxes(keys, 5, attempt=4)
    assert len(vectors(alone.masked(boxes, 5, attempt=6))) == 3
    alone.keys(6, attempt=7), alone.keys(8, attempt=8)
    assert alone.revealed(alone.names, 5, attempt=9).made == {}, "two later sums have begun"


@pytest.mark.parametrize("clients", ["abc", "3.0", "-3", "1", "", "9" * 30, "9" * 5000])
def test_a_number_of_clients_that_is_none_is_refused_and_the_others_are_served(
    clients: str, tmp_path: Path
) -> None:
    alone = Alone(tmp_path)
    first, second, _ = alone.names
    asks = {first: {"clients": clients}, second: {"clients": "3"}}
    made = alone.ask({n: [Ask(step="keys", sum=1, given=given)] for n, given in asks.items()}, 1).made
    assert list(made) == [second]
    assert alone.told == [
        f"A sum begins with at least 2 clients, fewer than 10^9; the server said {clients[:20]!r}."
    ]


def test_more_keys_than_were_to_begin_are_refused_also_where_the_threshold_is_high_enough(
    tmp_path: Path,
) -> None:
    """Numbers of more clients than the range is made for could wrap."""
    alone = Alone(tmp_path)
    keys = alone.keys(clients="2")
    asks = {name: [Ask(step="shares", sum=1, given=keys)] for name in alone.names}
    assert alone.ask(asks, 2).made == {}
    fewer = {name: keys[name] for name in alone.names[:2]}
    asks = {name: [Ask(step="shares", sum=1, given=fewer)] for name in alone.names[:2]}
    assert len(alone.ask(asks, 3).made) == 2


def test_a_client_that_sends_the_keys_of_an_earlier_round_sits_out(tmp_path: Path) -> None:
    devices = test_secure_sums.devices_of("fedavg", tmp_path, nodes=len(test_secure_sums.DATA))
    serve, first = devices.nodes[2].serve, list[Any]()

    def repeating(packet: Packet) -> Packet:
        answer = serve(packet)
        for steps in answer.header.get("made", {}).values():
            if "keys" in steps:
                first.append(steps["keys"])
                steps["keys"] = first[0]
        return answer

    devices.transport.join("node-2", repeating)
    test_secure_sums.served(devices, tmp_path, cohort=7, rounds=2)
    devices.close()
    assert len(first) == 2
    said = "The step 'keys' of client 'user-2': A mask key is used twice: 'user-2' sent a key of an earlier round"
    assert sum(text.startswith(said) for text in test_secure_sums.events(tmp_path)) == 1


def _new_keys() -> str:
    draw = np.random.default_rng(0)
    return Keys.from_bytes(draw.bytes(96)).to_bytes().hex()


def test_a_number_out_of_range_leaves_neither_vector_nor_its_value(tmp_path: Path) -> None:
    """The bound is of the change; the text of the refusal, which could tell a value, stays on the device."""
    alone = Alone(tmp_path)
    boxes = alone.boxes(alone.keys())
    broken = {name: {other: box[:-2] + "00" for other, box in each.items()} for name, each in boxes.items()}
    answers = alone.masked(broken)
    assert not vectors(answers)
    faults = {str(one.fault) for one in answers.answers}
    assert all("Its own log says why." in text for text in faults)
    assert alone.told


def test_shares_that_unmask_a_sum_leave_also_where_the_next_sum_is_refused(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.masked(alone.boxes(alone.keys()))
    few = dict(list(alone.keys(2, attempt=4).items())[:1])
    name, given = alone.names[0], dict.fromkeys(alone.names, "")
    asks = [Ask(step="revealed", sum=1, given=given), Ask(step="shares", sum=2, given=few)]
    answers = alone.ask({name: asks}, 5)
    assert type(answers.answers[0].fault) is UploadError
    assert list(answers.made[name]) == ["revealed"]
    assert len(answers.made[name]["revealed"]) == 3


def test_secrets_are_the_owners_alone_and_go_with_the_state(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    boxes = alone.boxes(alone.keys())
    alone.masked(boxes)
    alone.node.close()
    path = file_of(tmp_path, RUN)
    paths = [sum_of(path, name) for name in alone.names]
    assert all(one.stat().st_mode & 0o077 == 0 for one in paths)
    size = [one.stat().st_size for one in paths]
    alone.start()
    alone.revealed(alone.names)
    assert all(one.stat().st_size < before for one, before in zip(paths, size, strict=True))
    assert "sealing" not in Packet.from_bytes(paths[0].read_bytes()).header["sums"]["1"]["answered"]
    assert Packet.from_bytes(paths[0].read_bytes()).header["sums"]["1"]["secrets"] is None
    alone.node.close()
    file = DeviceFile(path, "ann")
    file.forget(alone.names[:1])
    file.close()
    assert [one.exists() for one in paths] == [False, True, True]
    remove(path)
    assert [one.exists() for one in paths] == [False, False, False]


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_damaged_secrets_cost_the_sum_that_they_are_of_alone(content: bytes | None, tmp_path: Path) -> None:
    """The client's answer to its training is lost; the next sum, whose keys the same message asks for, has it again."""
    alone = Alone(tmp_path)
    boxes, name = alone.boxes(alone.keys()), alone.names[1]
    path = sum_of(file_of(tmp_path, RUN), name)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:] if content is None else content)
    keys = Ask(step="keys", sum=2, given={"clients": "3"})
    asks = {n: [Ask(step="masked", sum=1, given=boxes[n]), keys] for n in alone.names}
    answers = alone.ask(asks, 3, train=True)
    assert [type(one.fault) for one in answers.answers] == [type(None), LostError, type(None)]
    assert "They are removed: it sits out the sums that they were of" in alone.told[-1]
    assert len(alone.told) == 2, "once, beside why it took no step"
    assert not vectors(alone.ask({name: asks[name][:1]}, 3, train=True)), "no mask is made twice"
    boxes = alone.boxes({n: answers.made[n]["keys"]["keys"] for n in alone.names}, 2, attempt=4)
    assert len(vectors(alone.masked(boxes, 2, attempt=5))) == 3
    assert set(alone.revealed(alone.names, 2, attempt=6).made) == set(alone.names)


def test_secrets_that_can_neither_be_read_nor_removed_are_told_without_a_path(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.keys()
    path = sum_of(file_of(tmp_path, RUN), alone.names[0])
    path.unlink()
    path.mkdir()
    answers = alone.ask({alone.names[0]: [Ask(step="keys", sum=2, given={"clients": "3"})]}, 2)
    assert type(answers.answers[0].fault) is LostError
    assert str(tmp_path) not in str(answers.answers[0].fault)
    assert f"Check the rights, or remove {path.name}." in alone.told[-1]


def test_a_full_disk_costs_a_step_until_there_is_space_and_the_owner_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(tmp_path)
    keys = alone.keys()
    asks = {alone.names[0]: [Ask(step="shares", sum=1, given=keys)]}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(files, "_replace", full)
        answers = alone.ask(asks, 2)
    assert type(answers.answers[0].fault) is LostError
    assert "No space left on device. It takes no step until they can: free some space" in alone.told[-1]
    assert len(alone.ask(asks, 2).made[alone.names[0]]["shares"]) == 2


def test_a_client_says_whose_shares_it_cannot_open(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    boxes = alone.boxes(alone.keys())
    first, _, third = alone.names
    boxes[first][third] = boxes[first][third][:-2] + ("00" if boxes[first][third][-2:] != "00" else "01")
    answers = alone.masked(boxes)
    assert len(vectors(answers)) == 2
    assert {name: made for name, made in answers.made.items() if "masked" in made} == {
        first: {"masked": {third: ""}}
    }


# Does a test notice? Each promise is broken by a line.

BROKEN: dict[str, tuple[Any, str, Any, Any]] = {
    "a device trains for a masked vector alone": (
        Masking,
        "check",
        lambda self, one: None,
        test_a_training_without_a_mask_is_refused_and_a_mask_where_none_is_agreed,
    ),
    "each step is answered once": (
        Masking,
        "_check_same",
        lambda *_: None,
        test_the_same_message_gets_the_same_answer_and_another_none,
    ),
    "what is answered is on the disk": (
        Masking,
        "_write",
        lambda *_: None,
        test_the_same_message_gets_the_same_answer_and_another_none,
    ),
    "secrets of old sums go": (
        masking,
        "LIVE",
        9,
        test_steps_out_of_turn_with_too_many_too_few_or_old_keys_are_refused,
    ),
    "what is no vector is refused": (
        SecureFleet,
        "taken",
        lambda self, answer: answer,
        test_secure_sums.test_an_upload_that_is_no_vector_is_refused_and_the_others_are_summed,
    ),
    "secrets are forgotten with the state": (
        device_file,
        "sum_of",
        lambda path, client: path.with_name("none"),
        test_secrets_are_the_owners_alone_and_go_with_the_state,
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_noticed(promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, other, test = BROKEN[promise]
    monkeypatch.setattr(place, name, other)
    with pytest.raises((AssertionError, KeyError, SecureSumError)):
        test(tmp_path)
