"""Adapting across machines: every client's values have the simulation's bits, are durable there, and do not leave."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import Method, Phase, methods, simulate
from fedkeep.core.errors import ConfigError, FailedError, LostError, MethodError, RunError
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params
from fedkeep.core.records import Record, from_line
from fedkeep.engines import Adaptation
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.experiments.run import Run
from fedkeep.methods import SecureSums, securely
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.remote.device_file import DeviceFile, file_of
from fedkeep.remote.device_store import DeviceStore
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.messages import ClientOrder, Judging, Refused, message_of, packet_of
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died, Weather
from tests.engines.test_conformance import CASES, COHORT, ROUNDS, SEED, best, trained
from tests.remote.federations import Devices, federation
from tests.remote.hand import Hand
from tests.remote.test_conformance import assert_near, server_of
from tests.remote.test_node_conformance import seen
from tests.tiny import Logits, classes, on_server, same_bits

EXPERTS = "plain experts"
BREAK = ("mixture", "a client sits out")
"""Cases of which a client's adapting breaks in a simulation, too: at a mini-batch of one example, at infinity."""
ADAPTING = [case for case, what in CASES.items() if what.method.adapt.phases and case not in BREAK]
FEW = ("fine_tuned", EXPERTS, "fedbabu", "per_fedavg", "furl", "fedpac", "knn_per")
TABLE = [
    pytest.param(case, kind, marks=() if case in FEW and kind == "float64" else pytest.mark.slow)
    for case in ADAPTING
    for kind in ("float32", "float64")
]


def served(case: str, devices: Devices, folder: Path, kind: str = "float64", **changes: Any) -> list[Record]:
    options = {k: changes.pop(k) for k in ("only",) if k in changes}
    what = federation(case, kind, **changes)
    return serve_run(what, devices.transport, folder / "run", progress=False, again=50.0, **options)


def adapted(devices: Devices) -> dict[str, Params]:
    """Return what is on the disks of all devices, whose processes have ended."""
    devices.close()
    found = {}
    for number in range(devices.count):
        folder = devices.folder / str(number)
        (path,) = folder.glob("*.db")
        file = DeviceFile(file_of(folder, path.stem), "ann")
        found |= {client: file.adapted_values(row) for client, row in file.adapted().items()}
        file.close()
    return found


def in_a_simulation(run: Run) -> dict[str, Params]:
    found = adapt_clients(run, progress=False)
    return {str(client): found.own(client) for client in run.data.ids}


def assert_same(found: Mapping[str, Params], expected: Mapping[str, Params]) -> None:
    assert found.keys() == expected.keys()
    assert [client for client in expected if not same_bits(found[client], expected[client])] == []


@pytest.mark.parametrize(("case", "kind"), TABLE)
def test_clients_adapt_to_the_bits_of_a_simulation_after_the_server_was_started_again(
    case: str, kind: str, tmp_path: Path
) -> None:
    run = best(case, kind)
    devices = Devices(case, tmp_path / "devices", nodes=3)
    served(case, devices, tmp_path, kind, evaluate_adapted=True)
    records = served(case, devices, tmp_path, kind, evaluate_adapted=True, only="adapt")
    left = len(devices.transport.carried)
    assert_same(adapted(devices), in_a_simulation(run))
    judged = {r.metric: r.value for r in records if r.split == "test/adapted" and r.client is None}
    for metric, value in adapt_clients(run, progress=False).evaluate("test").items():
        if metric in judged:
            assert math.isclose(judged[metric], value, abs_tol=1e-6) or math.isnan(value)
    lines = (tmp_path / "run" / "adapted.jsonl").read_text().splitlines()
    assert list(map(from_line, lines)) == records
    assert left == len(devices.transport.carried)


def test_nothing_of_it_leaves_but_sums(tmp_path: Path) -> None:
    case = EXPERTS
    devices = Devices(case, tmp_path / "devices", nodes=2)
    served(case, devices, tmp_path, evaluate_adapted=True)
    content: list[bytes] = []
    for node in devices.nodes:
        serve = node.serve

        def listened(packet: Packet, serve: Any = serve) -> Packet:
            answer = serve(packet)
            content.append(answer.to_bytes())
            return answer  # type: ignore[no-any-return]

        name = next(n for n, number in devices.names.items() if devices.nodes[number] is node)
        devices.transport.join(name, listened)
    assert served(case, devices, tmp_path, evaluate_adapted=True, only="adapt")
    left = b"".join(content)
    values = adapted(devices)
    assert left
    assert [(c, n) for c, own in values.items() for n, v in own.items() if seen(v, left)] == []


PROTECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "secure sums": ({"sampling": "independent"}, {"leaves": "sums"}),
    "noise": (
        {
            "sampling": "poisson",
            "privacy": DifferentialPrivacy(noise=1.1, clip=0.05, delta=1e-3, heaviest=9.0, noise_seed=5),
        },
        {"cohort_seed": SEED},
    ),
}
"""What protects uploads: options of a run, and of one across machines alone."""


@pytest.mark.parametrize("protection", PROTECTED)
@pytest.mark.parametrize("case", ["fine_tuned", EXPERTS, "fedbabu"])
def test_under_protection_clients_adapt_to_the_bits_of_a_simulation(
    case: str, protection: str, tmp_path: Path
) -> None:
    def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
        torch.manual_seed(0)
        method = CASES[case].method
        sums = SecureSums(clip=0.05, heaviest=9.0, bits=64)
        return CASES[case].model().double(), securely(method, sums) if protection == "secure sums" else method

    options, across = PROTECTED[protection]
    run = simulate(
        *experiment("", {}),
        CASES[case].data,
        seed=SEED,
        engine="sequential",
        cohort=COHORT,
        rounds=ROUNDS,
        evaluate_every=2,
        progress=False,
        **options,
    )
    devices = Devices(case, tmp_path / "devices", nodes=3, experiment=experiment)
    changes = {"build": lambda encoding: experiment("", encoding), **options, **across}
    served(case, devices, tmp_path, evaluate_adapted=True, **changes)
    records = served(case, devices, tmp_path, evaluate_adapted=True, only="adapt", **changes)
    assert_same(adapted(devices), in_a_simulation(run))
    assert same_bits(server_of(tmp_path / "run"), on_server(run.last))
    expected = adapt_clients(run, progress=False).evaluate("test")
    judged = {r.metric: r.value for r in records if r.split == "test/adapted" and r.client is None}
    assert judged["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-12)
    unprotected = in_a_simulation(best(case, "float64"))
    assert not any(same_bits(unprotected[client], own) for client, own in in_a_simulation(run).items())


@pytest.mark.parametrize("case", ["fine_tuned", EXPERTS, "fedbabu", "furl"])
def test_with_messages_lost_doubled_damaged_and_late(case: str, tmp_path: Path) -> None:
    weather = Weather(lose=0.1, corrupt=0.1, duplicate=0.2, delay=0.3)
    devices = Devices(case, tmp_path / "devices", nodes=3, seed=5, weather=weather)
    served(case, devices, tmp_path)
    assert served(case, devices, tmp_path, only="adapt") == []
    assert_same(adapted(devices), in_a_simulation(best(case, "float64")))


@pytest.mark.parametrize("killed", [1, 2])
def test_a_device_that_is_killed_adapts_or_has_adapted(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before what it has adapted to is on its disk, and after that, before its answer."""
    case = "fine_tuned"
    devices = Devices(case, tmp_path / "devices", nodes=2)
    served(case, devices, tmp_path)
    flush = DeviceStore.flush

    def dies(store: DeviceStore) -> None:
        if killed == 2:
            flush(store)
        monkeypatch.setattr(DeviceStore, "flush", flush)
        raise Died

    monkeypatch.setattr(DeviceStore, "flush", dies)
    served(case, devices, tmp_path, only="adapt")
    assert len(devices.transport.deaths) == 1
    assert_same(adapted(devices), in_a_simulation(best(case, "float64")))


class Fragile(nn.Module):
    """Fails at three examples a mini-batch once it is told to."""

    failing = False

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.head = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Fragile.failing and torch.is_grad_enabled() and len(x) == 3:
            raise ValueError("row 3: Anna Smith")
        return self.head(x)


def test_where_the_model_fails_on_a_device_the_others_come_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = classes(counts=(5, 9, 3, 7))
    method = methods.fine_tuned(local=Phase(batch_size=16))

    def experiment(text: str, encoding: Any) -> Any:
        return Fragile(), method

    devices = Devices("", tmp_path / "devices", 2, data=data, experiment=experiment)
    told: list[str] = []
    for node in devices.nodes:
        node.tell = told.append
    what = {"build": lambda encoding: experiment("", encoding), "clients": 4, "rounds": 2, "text": ""}
    served("fine_tuned", devices, tmp_path, **what)
    run = simulate(Fragile(), method, data, rounds=2, cohort=4, seed=3, evaluate_every=2)
    expected = in_a_simulation(run)
    monkeypatch.setattr(Fragile, "failing", True)
    served("fine_tuned", devices, tmp_path, **what, only="adapt")
    gone = [str(c) for k, c in enumerate(data.ids) if len(data.rows(k, "train")) == 3]
    assert gone
    assert_same(adapted(devices), {c: v for c, v in expected.items() if c not in gone})
    assert any("Anna Smith" in text for text in told)
    lines = (tmp_path / "run" / "events.jsonl").read_text()
    assert "Anna Smith" not in lines
    events = [event for event in map(json.loads, lines.splitlines()) if "has not adapted" in event["text"]]
    assert [event["client"] for event in events] == gone


@pytest.mark.parametrize("leaves", ["sums", "clients"])
def test_evaluate_adapted_gives_the_records_of_a_simulation(leaves: str, tmp_path: Path) -> None:
    """Judging comes one round late: adapting names the ledger's lines as of the round that is judged."""
    for case in ("furl", EXPERTS):
        options: dict[str, Any] = {"evaluate_every": 1, "evaluate_adapted": True}
        expected = trained(case, "float64", engine="sequential", **options).history
        devices = Devices(case, tmp_path / case, nodes=2)
        found = served(case, devices, tmp_path / case, leaves=leaves, **options)
        devices.close()
        assert {r.split for r in found} >= {"test", "test/adapted"}
        if leaves == "clients":
            assert_near(found, expected, "float64")


def test_a_method_without_adaptation_and_a_run_that_is_not_there(tmp_path: Path) -> None:
    devices = Devices("fedavg", tmp_path / "devices")
    with pytest.raises(RunError, match="no run to adapt"):
        served("fedavg", devices, tmp_path, only="adapt")
    with pytest.raises(ConfigError, match="evaluate_adapted"):
        served("fedavg", devices, tmp_path, evaluate_adapted=True)
    served("fedavg", devices, tmp_path / "other")
    with pytest.raises(ConfigError, match="'fedavg' has no phases of adaptation"):
        served("fedavg", devices, tmp_path / "other", only="adapt")


# One node, by hand.

FURL = methods.furl("user", local=Phase(batch_size=4))
DATA = classes()


@pytest.fixture
def hand(tmp_path: Path) -> Any:
    made = Hand(Logits, FURL, DATA, seed=3)
    made.meet(made.node(tmp_path, range(3), leaves="clients", judge_adapted=True))
    yield made
    made.close()


def order(hand: Hand, client: int = 0, **changes: Any) -> ClientOrder:
    asked = hand.order(hand.first_order(str(DATA.ids[client])), train=False)
    return replace(asked, **{"adapt": True, **changes})


def on_disk(hand: Hand, tmp_path: Path) -> dict[str, Any]:
    hand.nodes[0].release()
    file = DeviceFile(file_of(tmp_path, hand.run), "ann")
    rows = file.adapted()
    file.close()
    return rows


@pytest.mark.parametrize(
    "choice", [{"examples": 2}, {"begin": "initial"}, {"phases": []}, {"adapt": {"examples": 2}}]
)
def test_a_device_takes_no_choice_of_examples_or_parameters_from_a_server(
    hand: Hand, tmp_path: Path, choice: dict[str, Any]
) -> None:
    packet = packet_of(hand.work([order(hand)], 0, 5))
    (asked,) = packet.header["orders"]
    changed = Packet({**packet.header, "orders": [{**asked, **choice}]}, packet.tensors)
    assert message_of(hand.say(hand.nodes[0], changed), Refused).reason
    assert on_disk(hand, tmp_path) == {}


def test_a_device_is_judged_on_no_training_examples(hand: Hand, tmp_path: Path) -> None:
    packet = packet_of(hand.work([order(hand)], 0, 5))
    (asked,) = packet.header["orders"]
    judge = [{"split": "train", "models": ["adapted"]}]
    changed = Packet({**packet.header, "orders": [{**asked, "judge": judge}]}, packet.tensors)
    assert message_of(hand.say(hand.nodes[0], changed), Refused).reason
    assert on_disk(hand, tmp_path) == {}


def test_unless_its_owner_says_so_a_device_lets_no_adapted_model_be_judged(tmp_path: Path) -> None:
    hand = Hand(Logits, FURL, DATA, seed=3)
    hand.meet(hand.node(tmp_path, range(3)))
    judge = (Judging(split="test", models=("own", "adapted")),)
    said = hand.say(hand.nodes[0], packet_of(hand.work([order(hand, judge=judge)], 0, 5)))
    assert "device.judge_adapted" in message_of(said, Refused).reason
    assert on_disk(hand, tmp_path) == {}
    found = hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 6))
    (answer,) = found.answers
    assert (answer.fault, answer.upload, math.isnan(answer.loss), found.judged) == (None, None, True, ())
    assert set(on_disk(hand, tmp_path)) == {str(DATA.ids[0])}


@pytest.mark.parametrize(
    "how",
    [
        Adaptation(examples=2),
        Adaptation(begin="default"),
        Adaptation(begin="initial", name="local"),
        Adaptation(adapt=FURL.adapt),
        Adaptation(split="train"),
    ],
)
def test_nor_does_a_fleet_send_one(how: Adaptation) -> None:
    with pytest.raises(MethodError, match="adapt as their method says"):
        Fleet.adapt(None, [], how)  # type: ignore[arg-type]


def test_the_same_order_again_gives_the_same_and_is_not_done_again(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = (Judging(split="test", models=("own", "adapted")),)
    work = hand.work([order(hand, judge=judge)], 0, 5)
    first = hand.ask(hand.nodes[0], work)
    row = on_disk(hand, tmp_path)
    monkeypatch.setattr("fedkeep.engines.device.one_by_one", None)
    monkeypatch.setattr("fedkeep.engines.adapt.fit", None)
    again = hand.ask(hand.nodes[0], work)
    assert on_disk(hand, tmp_path) == row
    tables = [dict(answers.judged)["test"].tallies for answers in (first, again)]
    assert (tables[0].loss == tables[1].loss).all()


def test_a_late_message_changes_nothing(hand: Hand, tmp_path: Path) -> None:
    hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 5))
    row = on_disk(hand, tmp_path)
    (answer,) = hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 4)).answers
    assert isinstance(answer.fault, LostError)
    assert on_disk(hand, tmp_path) == row
    hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 6))
    (client,) = on_disk(hand, tmp_path)
    assert on_disk(hand, tmp_path)[client].attempt == 6


def test_what_is_judged_is_of_that_round_or_nothing(hand: Hand) -> None:
    judge = (Judging(split="test", models=("adapted",)),)
    alone = order(hand, adapt=False, judge=judge)
    (answer,) = hand.ask(hand.nodes[0], hand.work([alone], 0, 4)).answers
    assert isinstance(answer.fault, LostError), "it has not adapted"
    hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 5))
    found = hand.ask(hand.nodes[0], hand.work([alone], 0, 6))
    assert found.answers[0].fault is None
    assert [judged.models for _, judged in found.judged] == [("adapted",)]
    later = replace(alone, round=1)
    (answer,) = hand.ask(hand.nodes[0], hand.work([later], 1, 7)).answers
    assert isinstance(answer.fault, LostError)


def test_damaged_values_are_named_and_adapting_mends_them(hand: Hand, tmp_path: Path) -> None:
    hand.ask(hand.nodes[0], hand.work([order(hand), order(hand, 1)], 0, 5))
    hand.nodes[0].release()
    file = DeviceFile(file_of(tmp_path, hand.run), "ann")
    with file.writing():
        file._file.query("UPDATE adapted SET version = 7 WHERE client = ?", (str(DATA.ids[0]),))
    file.close()
    judge = (Judging(split="test", models=("adapted",)),)
    asked = [order(hand, k, adapt=False, judge=judge) for k in (0, 1)]
    one, other = hand.ask(hand.nodes[0], hand.work(asked, 0, 6)).answers
    assert isinstance(one.fault, LostError)
    assert other.fault is None
    (answer,) = hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 7)).answers
    assert answer.fault is None
    assert hand.ask(hand.nodes[0], hand.work(asked[:1], 0, 8)).answers[0].fault is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of file sizes")
@pytest.mark.parametrize("most", [100, 9_000])
def test_on_a_full_disk_nothing_is_half_done_and_what_there_was_stays(
    most: int, hand: Hand, tmp_path: Path
) -> None:
    hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 5))
    row = on_disk(hand, tmp_path)
    work = hand.work([order(hand), order(hand, 1)], 0, 6)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        said = hand.ask(hand.nodes[0], work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    faults = [answer.fault for answer in said.answers]
    assert all(isinstance(fault, LostError) and "cannot be written" in str(fault) for fault in faults)
    assert on_disk(hand, tmp_path) == row
    assert all(
        answer.fault is None for answer in hand.ask(hand.nodes[0], work).answers
    )  # there is space again
    assert len(on_disk(hand, tmp_path)) == 2


def test_a_model_that_fails_says_no_more_than_that(hand: Hand) -> None:
    method = hand.method.adapting(phases=())
    (running,) = hand.nodes[0]._runs.values()
    running.job = replace(running.job, method=method)
    (answer,) = hand.ask(hand.nodes[0], hand.work([order(hand)], 0, 5)).answers
    assert isinstance(answer.fault, FailedError)
