"""Secure sums across machines: what they make equals a simulation's, whatever dies or is said twice; what is refused."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Method, averaging, methods, simulate
from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.params import Params
from fedkeep.engines.round import decode
from fedkeep.methods import SecureSums, securely
from fedkeep.remote import Packet, client_ledger
from fedkeep.remote.masking import VECTOR
from fedkeep.remote.node import Node
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.secure_fleet import RemoteMean
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died, Weather
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import Logits, classes, everyone, on_server, same_bits

UNIFORM = averaging(by="uniform")
PLAIN = {
    "furl": methods.furl("user", server=UNIFORM),
    "fedavg": methods.fedavg(server=UNIFORM),
    "mr_mtl": methods.mr_mtl(server=UNIFORM),
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


@functools.cache
def simulated(name: str, sums: SecureSums | None = SUMS) -> Any:
    return simulate(
        model(), made(name, sums), DATA, evaluate_every=0, engine="sequential", progress=False, **OPTIONS
    )


def events(folder: Path) -> list[str]:
    lines = (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize(("name", "threshold"), [("furl", 1.0), ("fedavg", 2 / 3), ("mr_mtl", 2 / 3)])
def test_a_run_equals_a_simulations_to_the_bit_by_two_messages_a_round(
    name: str, threshold: float, tmp_path: Path
) -> None:
    sums = replace(SUMS, threshold=threshold)
    devices, asked = devices_of(name, tmp_path, sums), list[int]()
    send = devices.transport.send

    def counting(messages: Any) -> list[str]:
        given = list(messages)
        asked.extend([len(given)] if any(packet.header["kind"] == "work" for _, packet in given) else [])
        return send(given)

    devices.transport.send = counting  # type: ignore[method-assign]
    found, expected = served(devices, tmp_path), simulated(name, sums)
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_what_is_lost_said_twice_late_or_damaged_on_its_way_changes_nothing(
    seed: int, tmp_path: Path
) -> None:
    weather = Weather(lose=0.1, corrupt=0.05, duplicate=0.3, delay=0.3, latest=40.0)
    devices = devices_of("mr_mtl", tmp_path, seed=seed, weather=weather)
    _mortal(devices, seed, 0.08)
    found = served(devices, tmp_path)
    devices.close()
    assert same_bits(found, on_server(simulated("mr_mtl")))
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
COHORTS = {"cohort": 7, "rounds": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Params]:
    """Return what plain sums give where one client goes as it trains in a round, or nobody does."""

    @functools.cache
    def summed(lost: int | None) -> Params:
        folder = tmp_path_factory.mktemp("plain")
        devices = devices_of("fedavg", folder, None, nodes=len(DATA))
        gone = [] if lost is None else _goes_at(devices, "trains", lost)
        found = served(devices, folder, policy=RoundPolicy(deadline=100.0, minimum=1), **COHORTS)
        devices.close()
        assert len(gone) == (lost is not None)
        return found

    return summed


@pytest.mark.parametrize("step", STEPS)
def test_who_drops_out_at_a_step_is_missed_and_the_sum_is_of_the_others(
    step: str, tmp_path: Path, plain: Callable[[int | None], Params]
) -> None:
    """One client goes as it is asked for a step of round 1; plain sums of the others are the reference.

    Keys of round 1 are asked for with the vector of round 0, so that is missed too.
    """
    devices = devices_of("fedavg", tmp_path, nodes=len(DATA))
    gone = _goes_at(devices, step, 1)
    found = served(devices, tmp_path, policy=RoundPolicy(deadline=100.0, minimum=1), **COHORTS)
    devices.close()
    assert len(gone) == 1
    # Where it is asked to reveal, its vector is in the sum already, and the others unmask it.
    lost = {"keys": 0, "revealed": None}.get(step, 1)
    torch.testing.assert_close(found, plain(lost), rtol=0, atol=1e-12)


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
    found = served(devices, tmp_path, policy=RoundPolicy(deadline=100.0, minimum=1))
    devices.close()
    assert same_bits(found, on_server(simulated("fedavg")))
    assert any(
        "The round's secure sum failed." in text and "is tried again" in text for text in events(tmp_path)
    )


@pytest.mark.parametrize("moved", [-3600, 3600])
def test_a_server_whose_clock_was_set_is_followed_at_once(
    moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = devices_of("furl", tmp_path)
    send, count = devices.transport.send, itertools.count()

    def stopping(messages: Any) -> list[str]:
        if next(count) in (7, 70):  # and it needs far fewer to the end
            raise Died
        return send(messages)

    clock = SimpleNamespace(time_ns=lambda: 1_700_000_000 * 10**9)
    monkeypatch.setattr(client_ledger, "time", clock)
    devices.transport.send = stopping  # type: ignore[method-assign]
    with pytest.raises(Died):
        served(devices, tmp_path)
    clock.time_ns = lambda: (1_700_000_000 + moved) * 10**9
    found = served(devices, tmp_path)
    devices.close()
    assert same_bits(found, on_server(simulated("furl")))
    assert not any("is tried again" in text for text in events(tmp_path))


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


def test_an_upload_that_weighs_less_than_nothing_is_refused_and_the_others_are_summed(tmp_path: Path) -> None:
    devices = devices_of("fedavg", tmp_path, nodes=len(DATA))
    serve = devices.nodes[2].serve

    def lying(packet: Packet) -> Packet:
        answer = serve(packet)
        for one in answer.header.get("answers", ()):
            one["upload"] = one["upload"] and [one["upload"][0], -7.0]
        return answer

    devices.transport.join("node-2", lying)
    served(devices, tmp_path, cohort=7, rounds=1)
    devices.close()
    assert "The upload of client 'user-2' was refused: its weight is -7.0." in events(tmp_path)


@pytest.mark.parametrize("weight", [-5.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_beside_a_masked_vector(weight: float) -> None:
    method = made("fedavg")
    masked = method.on_server(reduce=RemoteMean(method.server.reduce, None))  # type: ignore[arg-type]
    upload = method.split.arrived({VECTOR: torch.zeros(3, dtype=torch.int64)}, weight, {})
    with pytest.raises(UploadError, match="^The upload of client 'a' was refused: its weight is"):
        decode(masked, {}, upload, "a")


def test_who_sent_no_shares_has_not_taken_part(tmp_path: Path) -> None:
    """Two clients fail at the first step `shares`; the next round, which they are in too, asks them for keys."""
    devices = devices_of("fedavg", tmp_path)
    serve, count = devices.nodes[1].serve, itertools.count()

    def failing(packet: Packet) -> Packet:
        answer = serve(packet)
        steps = {ask["step"] for order in packet.header.get("orders", ()) for ask in order.get("asks", ())}
        if steps != {"shares"} or next(count):
            return answer
        lost = [{**one, "upload": None, "fault": ["lost", "disk full"]} for one in answer.header["answers"]]
        return Packet({**answer.header, "answers": lost, "made": {}}, answer.tensors)

    devices.transport.join("node-1", failing)
    served(devices, tmp_path, cohort=7, rounds=2, policy=RoundPolicy(minimum=7))
    devices.close()
    said = events(tmp_path)
    assert any("Round 0 does not count: 5 of 7 clients took part" in text for text in said)
    for client in devices.nodes[1].clients:
        assert said.count(f"Client {client!r} sent no shares of this sum.") == 1
    assert not any("had not answered" in text for text in said)
