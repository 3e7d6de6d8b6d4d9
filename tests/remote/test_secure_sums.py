"""Secure sums across machines: what they make equals a simulation's, whatever dies or is said twice; what is refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Method, averaging, methods, simulate
from fedkeep.core.errors import ConfigError, LostError, UploadError
from fedkeep.core.params import Params
from fedkeep.methods import SecureSums, securely
from fedkeep.privacy.secure import Keys
from fedkeep.remote import Packet
from fedkeep.remote.device_file import DeviceFile, file_of, sum_of
from fedkeep.remote.masking import VECTOR
from fedkeep.remote.memory import Died, Weather
from fedkeep.remote.node import Node
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.server import serve_run
from fedkeep.remote.wire import Answers, Ask, ClientOrder
from tests.remote.federations import Devices, federation
from tests.remote.hand import RUN, Hand
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import Logits, classes, everyone, on_server, same_bits

UNIFORM = averaging(by="uniform")
PLAIN = {
    "furl": methods.furl("user", server=UNIFORM),
    "fedavg": methods.fedavg(server=UNIFORM),
    "scaffold": methods.scaffold(server=UNIFORM),
}
DATA = classes((4, 6, 5, 4, 6, 5, 4))
OPTIONS: dict[str, Any] = {"rounds": 3, "cohort": 4, "seed": 3, "sampling": "independent"}
SUMS = SecureSums(clip=100.0, bits=64)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return Logits().double()


def made(name: str, sums: SecureSums | None = SUMS) -> Method:
    return PLAIN[name] if sums is None else securely(PLAIN[name], sums)


def devices_of(
    name: str, folder: Path, sums: SecureSums | None = SUMS, nodes: int = 3, **options: Any
) -> Devices:
    def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[torch.nn.Module, Method]:
        return model(), made(name, sums)

    return Devices("furl", folder, nodes, data=DATA, experiment=experiment, **options)


def served(devices: Devices, folder: Path, **changes: Any) -> Params:
    given = {"evaluate_every": 0, "clients": len(DATA), **OPTIONS, **changes}
    build = {"build": lambda encoding: devices.experiment("", encoding)}
    serve_run(
        federation("furl", **given, **build), devices.transport, folder / "run", progress=False, pause=5.0
    )
    return server_of(folder / "run")


def simulated(name: str, sums: SecureSums | None = SUMS) -> Any:
    return simulate(
        model(), made(name, sums), DATA, evaluate_every=0, engine="sequential", progress=False, **OPTIONS
    )


def events(folder: Path) -> list[str]:
    lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_equals_a_simulations_to_the_bit_by_two_messages_a_round(name: str, tmp_path: Path) -> None:
    devices, asked = devices_of(name, tmp_path), list[int]()
    send = devices.transport.send

    def counting(messages: Any) -> list[str]:
        given = list(messages)
        asked.extend([len(given)] if any(packet.header["kind"] == "work" for _, packet in given) else [])
        return send(given)

    devices.transport.send = counting  # type: ignore[method-assign]
    found, expected = served(devices, tmp_path), simulated(name)
    kept = devices.kept(ledger_of(tmp_path / "run"))
    devices.close()
    assert same_bits(found, on_server(expected))
    assert same_bits(kept, everyone(expected.private, len(DATA)))
    plain = on_server(simulated(name, None))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)
    assert len(asked) == 2 + 2 * OPTIONS["rounds"] + 1  # keys and shares once, two a round, and the last word


def test_no_change_of_a_client_leaves_its_device_in_the_clear(tmp_path: Path) -> None:
    """Every vector that leaves differs from the plain one nearly everywhere, in its high bits too."""
    devices, seen = devices_of("furl", tmp_path), list[torch.Tensor]()
    for node in devices.nodes:
        for name, value in _tapped(devices, node, seen):
            assert VECTOR in name, (name, value)
    served(devices, tmp_path)
    devices.close()
    assert len(seen) == 3 * 4
    size = sum(v.numel() for n, v in on_server(simulated("furl")).items() if "/" not in n) + 1
    for one in seen:
        assert one.shape == (size,)
        assert one.dtype == torch.int64
        high = (
            one.numpy() >> 56
        ) & 0xFF  # a plain one has 0 or 255 here, as its numbers are far below the bound
        assert np.isin(high, (0, 255)).mean() < 0.5
    assert len({one.numpy().tobytes() for one in seen}) == len(seen)


def _tapped(devices: Devices, node: Node, seen: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    serve, other = node.serve, list[tuple[str, torch.Tensor]]()

    def tapped(packet: Packet) -> Packet:
        answer = serve(packet)
        for name, value in answer.tensors.items():
            if name.endswith(VECTOR):
                seen.append(value.clone())
            elif "/deltas/" in name or "/rows/" in name:
                raise AssertionError(name)
        return answer

    node.serve = tapped  # type: ignore[method-assign]
    place = devices.nodes.index(node)
    devices.transport.join(f"node-{place}", tapped)
    return other


@pytest.mark.parametrize("seed", range(3))
def test_what_is_lost_said_twice_late_or_damaged_on_its_way_changes_nothing(
    seed: int, tmp_path: Path
) -> None:
    weather = Weather(lose=0.1, corrupt=0.05, duplicate=0.3, delay=0.3, latest=40.0)
    devices = devices_of("scaffold", tmp_path, seed=seed, weather=weather)
    _mortal(devices, seed, 0.08)
    found = served(devices, tmp_path)
    devices.close()
    assert same_bits(found, on_server(simulated("scaffold")))
    assert devices.transport.deaths or seed


def _mortal(devices: Devices, seed: int, often: float) -> None:
    """Let nodes die before or after they serve a message; they come back as another process."""
    draw, start = np.random.default_rng(seed), devices.start

    def dying(node: Node) -> Node:
        serve = node.serve

        def mortal(packet: Packet) -> Packet:
            if draw.random() < often:
                raise Died
            answer = serve(packet)
            if draw.random() < often:
                raise Died
            return answer

        node.serve = mortal  # type: ignore[method-assign]
        return node

    devices.start = lambda number: dying(start(number))  # type: ignore[method-assign]
    for number, node in enumerate(devices.nodes):
        devices.transport.join(f"node-{number}", dying(node).serve)


STEPS = ["keys", "shares", "masked", "revealed"]


@pytest.mark.parametrize("step", STEPS)
def test_who_drops_out_at_a_step_is_missed_and_the_sum_is_of_the_others(step: str, tmp_path: Path) -> None:
    """One client goes as it is asked for a step of round 1; plain sums of the others are the reference.

    Keys of round 1 are asked for with the vector of round 0, so that is missed too.
    """
    found = {}
    for name, sums in (("secure", SUMS), ("plain", None)):
        devices = devices_of("fedavg", tmp_path / name, sums, nodes=len(DATA))
        wanted = step if sums else "trains"
        gone = _goes_at(devices, wanted, 0 if (step, sums) == ("keys", None) else 1)
        policy = RoundPolicy(deadline=100.0)
        found[name] = served(devices, tmp_path / name, policy=policy, cohort=7, rounds=2)
        devices.close()
        assert len(gone) == 1
    if step == "revealed":  # its vector is in the sum already, and the others unmask it
        devices = devices_of("fedavg", tmp_path / "all", None, nodes=len(DATA))
        found["plain"] = served(devices, tmp_path / "all", cohort=7, rounds=2)
        devices.close()
    torch.testing.assert_close(found["secure"], found["plain"], rtol=0, atol=1e-12)


def _goes_at(devices: Devices, step: str, round: int) -> list[str]:
    """Let the node of client 2 go for good as it is asked for a step of the sum of a round."""
    gone = list[str]()
    node, name = devices.nodes[2], "node-2"
    serve, asked = node.serve, Counter[str]()

    def going(packet: Packet) -> Packet:
        for order in packet.header.get("orders", ()):
            steps = [ask["step"] for ask in order.get("asks", ())] + ["trains"] * (
                order["train"] and not order.get("asks")
            )
            asked.update(steps)
            if step in steps and asked[step] == round + 1:
                gone.append(name)
                raise Died
        return serve(packet)

    devices.transport.on_death = lambda name: None
    devices.transport.join(name, going)
    return gone


def test_a_round_with_too_few_is_tried_again_with_new_keys_until_they_are_back(tmp_path: Path) -> None:
    devices = devices_of("fedavg", tmp_path, nodes=2, back=400.0)
    serve, count = devices.nodes[1].serve, itertools.count()

    def dying(packet: Packet) -> Packet:
        masked = any(
            ask["step"] == "masked" for o in packet.header.get("orders", ()) for ask in o.get("asks", ())
        )
        if masked and next(count) == 1:
            raise Died
        return serve(packet)

    devices.transport.join("node-1", dying)
    devices.transport.on_death = lambda name: devices.transport.after(400.0, lambda: devices.restart(name))
    found = served(devices, tmp_path, policy=RoundPolicy(deadline=100.0))
    devices.close()
    assert same_bits(found, on_server(simulated("fedavg")))
    assert any(
        "The round's secure sum failed." in text and "is tried again" in text for text in events(tmp_path)
    )


@pytest.mark.parametrize("message", range(9))
def test_a_server_that_is_killed_at_any_message_goes_on_to_the_same_end(message: int, tmp_path: Path) -> None:
    devices = devices_of("furl", tmp_path)
    send, count = devices.transport.send, itertools.count()

    def stopping(messages: Any) -> list[str]:
        given = list(messages)
        if any(packet.header["kind"] == "work" for _, packet in given) and next(count) == message:
            raise Died
        return send(given)

    devices.transport.send = stopping  # type: ignore[method-assign]
    with pytest.raises(Died):
        served(devices, tmp_path)
    found = served(devices, tmp_path)
    devices.close()
    assert same_bits(found, on_server(simulated("furl")))


# A device, by hand


class Alone:
    """Clients a, b and c on one node, and what a server would ask them."""

    def __init__(self, folder: Path, sums: SecureSums | None = SUMS) -> None:
        self.data = classes((6, 6, 6))
        self.hand = Hand(model, made("fedavg", sums), self.data)
        self.names = [str(client) for client in self.data.ids]
        self.folder = folder
        self.start()
        self.hand.meet(self.node)

    def start(self) -> None:
        self.node = self.hand.node(self.folder, [0, 1, 2])

    def ask(self, asks: Mapping[str, Sequence[Ask]], attempt: int, train: bool = False) -> Answers:
        orders = [
            ClientOrder(order=self.hand.first_order(client), train=train, asks=tuple(each))
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
    alone.node.close()


def test_a_training_without_a_mask_is_refused_and_a_mask_where_none_is_agreed(tmp_path: Path) -> None:
    alone = Alone(tmp_path / "a")
    plain = alone.hand.order(alone.hand.first_order(alone.names[0]))
    for wrong in (
        plain,
        ClientOrder(order=plain.order, train=True, asks=(Ask(step="keys", sum=1, given={"clients": "3"}),)),
    ):
        said = alone.hand.node(tmp_path / "x", [0])
        said.close()
        packet = _say(alone, wrong)
        assert packet.header["kind"] == "refused"
        assert "it trains for a masked vector alone" in packet.header["reason"]
    alone.node.close()
    other = Alone(tmp_path / "b", None)
    packet = _say(
        other, ClientOrder(order=plain.order, train=False, asks=(Ask(step="keys", sum=1, given={}),))
    )
    assert "asks for steps of a secure sum, and the method has none" in packet.header["reason"]
    other.node.close()


def _say(alone: Alone, order: ClientOrder) -> Packet:
    from fedkeep.remote.wire import work_packet

    return alone.hand.say(alone.node, work_packet(alone.hand.work([order], 0, 5)))


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
    alone.node.close()


def _new_keys() -> str:
    draw = np.random.default_rng(0)
    return Keys.from_bytes(draw.bytes(96)).to_bytes().hex()


def test_a_number_out_of_range_leaves_neither_vector_nor_its_value(tmp_path: Path) -> None:
    """The bound is of the change; the text of the refusal, which could tell a value, stays on the device."""
    alone = Alone(tmp_path)
    told = list[str]()
    alone.node.tell = told.append
    boxes = alone.boxes(alone.keys())
    broken = {name: {other: box[:-2] + "00" for other, box in each.items()} for name, each in boxes.items()}
    answers = alone.masked(broken)
    assert not vectors(answers)
    faults = {str(one.fault) for one in answers.answers}
    assert all("Its own log says why." in text for text in faults)
    assert told
    alone.node.close()


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
    paths[1].write_bytes(b"damaged")
    answers = alone.revealed(alone.names)
    assert type(answers.answers[1].fault) is LostError
    assert answers.answers[0].fault is None
    alone.node.close()
    file = DeviceFile(path, "ann")
    file.forget(alone.names[:1])
    file.close()
    assert [one.exists() for one in paths] == [False, True, True]
    from fedkeep.remote.device_file import remove

    remove(path)
    assert [one.exists() for one in paths] == [False, False, False]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": RoundPolicy(over_selection=1.5)}, "rounds.over_selection"),
        ({"policy": RoundPolicy(mode="buffered", buffer=2)}, "rounds.mode"),
        ({"cohort": 1}, "at least 2 clients in every cohort"),
        ({"cohort": 3, "sampling": "shuffled"}, "at least 2 clients in every cohort"),
        ({"sampling": "poisson"}, "at least 2 clients in every cohort"),
    ],
)
def test_rounds_in_which_no_sum_can_be_made_are_refused(changes: Any, said: str, tmp_path: Path) -> None:
    devices = devices_of("fedavg", tmp_path)
    with pytest.raises(ConfigError, match=said):
        served(devices, tmp_path, **changes)
    devices.close()
    assert not (tmp_path / "run").exists()


def test_an_upload_that_is_no_vector_is_refused_and_the_others_are_summed(tmp_path: Path) -> None:
    devices = devices_of("fedavg", tmp_path, nodes=len(DATA))
    serve = devices.nodes[2].serve

    def lying(packet: Packet) -> Packet:
        answer = serve(packet)
        changed = {n: (v[:-1] if n.endswith(VECTOR) else v) for n, v in answer.tensors.items()}
        return Packet(answer.header, changed)

    devices.transport.join("node-2", lying)
    served(devices, tmp_path, cohort=7, rounds=1)
    devices.close()
    assert any("it is no masked vector" in text for text in events(tmp_path))
