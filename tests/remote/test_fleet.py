"""What a round over machines does about nodes and clients that are late, lost, refused, broken or somewhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fedkeep.core.errors import BusyError, ConfigError, RunError
from fedkeep.core.run_files import read_info
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.remote import Packet, RoundPolicy
from fedkeep.remote.agreement import refusal
from fedkeep.remote.attendance import attendance_of, drop, move
from fedkeep.remote.device_file import locked
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died, Weather
from tests.engines.test_conformance import reference
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import assert_near, ledger_of, server_of
from tests.tiny import everyone, on_server, same_bits

CASE = "the share of FedAvg"


def served(devices: Devices, folder: Path, *, again: float = 60.0, **changes: Any) -> list[Any]:
    return serve_run(
        federation(CASE, **changes), devices.transport, folder / "run", progress=False, again=again
    )


def assert_undisturbed(devices: Devices, folder: Path) -> None:
    """Assert that the run ended where a simulation does, the same clients having taken part."""
    expected = reference(CASE, "float32")
    assert same_bits(server_of(folder / "run"), on_server(expected))
    kept = devices.kept(ledger_of(folder / "run"))
    devices.close()
    assert same_bits(kept, everyone(expected.private, len(expected.data)))


def events(folder: Path, kind: str) -> list[str]:
    lines = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == kind]


def test_a_node_gets_one_message_a_round_for_all_of_its_clients_training_and_judging_together(
    tmp_path: Path,
) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path, evaluate_every=1)
    devices.close()
    work = [node for kind, node, _ in devices.transport.carried if kind == "work"]
    # three rounds of which the second and third judge what was before; one to judge at the end
    assert sorted(work) == ["node-0"] * 4 + ["node-1"] * 4


def test_who_was_never_asked_gets_no_message_at_the_end(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path, evaluate_every=0, rounds=1, cohort=1)
    devices.close()
    work = [node for kind, node, _ in devices.transport.carried if kind == "work"]
    assert work in (["node-0"] * 2, ["node-1"] * 2)  # to train, and that it is accepted


def test_the_global_model_travels_once_a_message(tmp_path: Path) -> None:
    sizes = {}
    for nodes in (1, 6):
        devices = Devices(CASE, tmp_path / str(nodes), nodes)
        served(devices, tmp_path / str(nodes), evaluate_every=0, cohort=6)
        devices.close()
        sizes[nodes] = max(size for kind, _, size in devices.transport.carried if kind == "work")
    assert sizes[1] < 3 * sizes[6]  # six clients' orders, one model


@pytest.mark.parametrize(
    "weather", [Weather(lose=0.2), Weather(corrupt=0.2), Weather(duplicate=0.5, delay=0.5)]
)
def test_messages_that_are_lost_damaged_doubled_or_overtaken_change_nothing(
    weather: Weather, tmp_path: Path
) -> None:
    devices = Devices(CASE, tmp_path, 3, seed=5, weather=weather)
    history = served(devices, tmp_path)
    assert_near(history, reference(CASE, "float32").history)
    assert_undisturbed(devices, tmp_path)


def dies_at(devices: Devices, kind: str, times: int, *, after: bool) -> None:
    """Let a node die once, as it has got a message of a kind for the n-th time, or before its answer leaves."""
    left = [times]
    inner = devices.start

    def start(number: int) -> Any:
        node = inner(number)
        serve = node.serve

        def dying(packet: Packet) -> Packet:
            left[0] -= packet.header["kind"] == kind
            now = left[0] == 0 and packet.header["kind"] == kind
            if now and not after:
                left[0] = -1
                raise Died
            answer = serve(packet)
            if now:
                left[0] = -1
                raise Died
            return answer

        node.serve = dying  # type: ignore[method-assign]
        return node

    devices.start = start  # type: ignore[method-assign]
    for number in range(devices.count):
        devices.restart(f"node-{number}")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("kind", "times"), [("hello", 2), ("encoding", 1), ("work", 1), ("work", 4), ("work", 6)]
)
def test_a_client_whose_node_dies_is_asked_again_where_it_turns_up(
    kind: str, times: int, after: bool, tmp_path: Path
) -> None:
    devices = Devices(CASE, tmp_path, 2)
    dies_at(devices, kind, times, after=after)
    served(devices, tmp_path)
    assert len(devices.transport.deaths) == 1
    if kind == "work":
        assert any("is on node" in text for text in events(tmp_path, "moved"))
    assert_undisturbed(devices, tmp_path)


@pytest.mark.parametrize("kind", ["encoding", "work"])
def test_a_node_that_is_busy_with_an_earlier_message_is_waited_for(kind: str, tmp_path: Path) -> None:
    """Flower serves a message that is said again beside the first, which has the run's file."""
    devices = Devices(CASE, tmp_path, 2)
    inner, left = devices.start, [4]

    def start(number: int) -> Any:
        node = inner(number)
        serve = node.serve

        def busy(packet: Packet) -> Packet:
            if number or packet.header["kind"] != kind or not left[0]:
                return serve(packet)
            left[0] -= 1
            with FileLock(str(tmp_path / "state.lock")), pytest.raises(BusyError) as error:
                locked(tmp_path / "state.db", 0.0)
            return refusal(error.value, packet, lambda text: None)

        node.serve = busy  # type: ignore[method-assign]
        return node

    devices.start = start  # type: ignore[method-assign]
    for number in range(devices.count):
        devices.restart(f"node-{number}")
    served(devices, tmp_path)
    assert left == [0]
    assert events(tmp_path, "lost") == []
    assert_undisturbed(devices, tmp_path)


def slow(name: str, packet: Packet) -> float:
    return 500.0 if name == "node-1" and packet.header["kind"] == "work" else 1.0


def test_a_client_that_is_late_sits_out_and_its_state_is_as_before(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2, takes=slow)
    history = served(devices, tmp_path, policy=RoundPolicy(deadline=100.0, minimum=1), evaluate_every=0)
    entries = ledger_of(tmp_path / "run")
    mine = {str(client) for client in devices.nodes[1].clients}
    assert {client for client, entry in entries.items() if entry.version == 0} >= mine
    devices.close()
    late = {r.round: r.value for r in history if r.metric == "late_clients"}
    assert late
    assert all(value > 0 for value in late.values())
    assert {r.round: r.value for r in history if r.metric == "lost_clients"} == late
    assert events(tmp_path, "late")[0].endswith("had not answered at the round's deadline.")


def test_a_node_that_left_costs_one_deadline_and_a_dropped_client_none(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    gone = [str(client) for client in devices.nodes[1].clients]
    devices.transport.on_death = lambda name: devices.transport.leave(name)
    dies_at(devices, "work", 1, after=False)
    policy = RoundPolicy(deadline=1000.0, minimum=0)
    served(devices, tmp_path, policy=policy, evaluate_every=0)
    assert 1000.0 < devices.transport.now() < 1300.0
    found = attendance_of(tmp_path / "run")
    assert set(found.missed) <= set(gone)
    drop(tmp_path / "run", gone)
    before = devices.transport.now()
    served(devices, tmp_path, policy=policy, evaluate_every=0, rounds=4)
    assert devices.transport.now() - before < 300.0
    assert "and was dropped" in attendance_of(tmp_path / "run").lines()[0]
    many = replace(
        attendance_of(tmp_path / "run"), taken=dict.fromkeys("abcdefg", 1), asked=dict.fromkeys("abcdefg", 2)
    )
    assert many.lines()[0].endswith("; 2 more clients missed rounds.")
    assert drop(tmp_path / "run", gone[:1], back=True) == set(gone[1:])
    with pytest.raises(ConfigError, match="No client"):
        drop(tmp_path / "run", [str(client) for client in devices.data.ids])
    with pytest.raises(ConfigError, match="'nobody' is none"):
        drop(tmp_path / "run", ["nobody"])


def test_over_selection_takes_the_first_answers(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 6, takes=slow)
    policy = RoundPolicy(over_selection=1.5)
    history = served(devices, tmp_path, policy=policy, evaluate_every=0, cohort=4, rounds=2)
    devices.close()
    assert {r.n for r in history if r.metric == "download_bytes"} == {4}  # of six that are asked
    assert "was not waited for: the first 4 answers are taken." in events(tmp_path, "late")[0]


def test_a_round_below_the_minimum_does_not_count_and_is_tried_again(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    devices.back = 300.0
    dies_at(devices, "work", 1, after=False)
    served(devices, tmp_path, policy=RoundPolicy(deadline=50.0, minimum=4))
    texts = events(tmp_path, "round")
    assert "does not count" in texts[0]
    assert texts[0].endswith("It is tried again in 10 s.")
    assert_undisturbed(devices, tmp_path)


def test_a_client_on_two_nodes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    twin = devices.start(1)
    twin.folder = tmp_path / "twin"
    devices.transport.join("node-9", twin.serve)
    with pytest.raises(ConfigError, match=r"^Client 'user-\d' is declared.*'node-1'.*'node-9'"):
        served(devices, tmp_path)
    devices.close()
    twin.close()
    assert not (tmp_path / "run").exists()


def test_an_order_beyond_the_transports_limit_is_said_clearly(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2, most_bytes=500)
    with pytest.raises(ConfigError, match=r"^The message '\w+' to node.*'node-0'"):
        served(devices, tmp_path)


def changed(packet: Packet, **header: Any) -> Packet:
    return Packet({**packet.header, **header}, packet.tensors)


WRONG: dict[str, tuple[Callable[[Packet], Packet], str]] = {
    "another run": (lambda p: changed(p, run="other"), "they are not to these orders"),
    "another round": (lambda p: changed(p, round=7), "they are not to these orders"),
    "another attempt": (lambda p: changed(p, attempt=7), "they are not to these orders"),
    "other clients": (
        lambda p: changed(
            p, answers=[{**a, "client": "nobody"} for a in p.header["answers"][:1]] + p.header["answers"][1:]
        ),
        "they are not to these orders",
    ),
    "no upload": (
        lambda p: Packet(
            {**p.header, "answers": [{**a, "upload": None} for a in p.header["answers"]]},
            {n: v for n, v in p.tensors.items() if not n.startswith("upload/")},
        ),
        "no upload came",
    ),
    "an unknown kind": (lambda p: changed(p, kind="surprise"), "it should be 'answers'"),
    "an upload of NaN": (
        lambda p: Packet(
            p.header, {n: v * torch.nan if n.startswith("upload/") else v for n, v in p.tensors.items()}
        ),
        "holds a NaN or an infinity.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_answers_that_are_not_to_the_orders_are_refused_and_the_others_count(
    name: str, tmp_path: Path
) -> None:
    twist, said = WRONG[name]
    devices = Devices(CASE, tmp_path, 2)
    inner = devices.nodes[1].serve

    def serve(packet: Packet) -> Packet:
        answer = inner(packet)
        return twist(answer) if answer.header["kind"] == "answers" else answer

    devices.transport.leave("node-1")
    devices.transport.join("node-1", serve)
    history = served(devices, tmp_path, evaluate_every=0, policy=RoundPolicy(deadline=1000.0, minimum=1))
    entries = ledger_of(tmp_path / "run")
    assert all(entries[str(client)].version == 0 for client in devices.nodes[1].clients)
    devices.close()
    assert any(said in text for text in events(tmp_path, "refused")), events(tmp_path, "refused")
    assert any(r.metric == "refused_clients" for r in history)


def test_results_of_judging_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 1)
    inner = devices.nodes[0].serve

    def serve(packet: Packet) -> Packet:
        answer = inner(packet)
        judged = [{**one, "split": "valid"} for one in answer.header.get("judged", ())]
        return changed(answer, judged=judged) if judged else answer

    devices.transport.leave("node-0")
    devices.transport.join("node-0", serve)
    served(devices, tmp_path, rounds=2, evaluate_every=1, policy=RoundPolicy(deadline=1000.0, minimum=0))
    devices.close()
    assert any(
        "a result of judging 'valid' that nobody asked for" in text for text in events(tmp_path, "refused")
    )


def twice(packet: Packet) -> Packet:
    first = {f"judged/1/{n[9:]}": v for n, v in packet.tensors.items() if n.startswith("judged/0/")}
    judged = [{**packet.header["judged"][0], "columns": number} for number in range(2)]
    return Packet({**packet.header, "judged": judged}, {**packet.tensors, **first})


def of_more_people(packet: Packet) -> Packet:
    return Packet(
        packet.header, {n: v + 9 if n.endswith("/people") else v for n, v in packet.tensors.items()}
    )


def finer(packet: Packet) -> Packet:
    name = packet.header["answers"][0]["client"]
    return changed(
        packet, judged=[{**one, "leaves": "clients", "clients": [name]} for one in packet.header["judged"]]
    )


@pytest.mark.parametrize("twist", [twice, of_more_people, finer])
def test_a_result_that_comes_twice_of_more_clients_or_finer_than_asked_is_refused(
    twist: Callable[[Packet], Packet], tmp_path: Path
) -> None:
    """One node would count more than its clients in what the server reports."""
    devices = Devices(CASE, tmp_path, 2)
    inner = devices.nodes[1].serve

    def serve(packet: Packet) -> Packet:
        answer = inner(packet)
        return twist(answer) if answer.header.get("judged") else answer

    devices.transport.leave("node-1")
    devices.transport.join("node-1", serve)
    policy = RoundPolicy(deadline=1000.0, minimum=0)
    history = served(devices, tmp_path, rounds=2, evaluate_every=1, policy=policy, leaves="sums")
    devices.close()
    assert all("a result of judging 'valid' that nobody" in text for text in events(tmp_path, "lost"))
    assert len(events(tmp_path, "lost")) == 2 * len(devices.nodes[1].clients)
    mine = [len(devices.data.rows(place, "test")) for place in range(0, len(devices.data), 2)]
    assert {r.n for r in history if (r.split, r.client) == ("test", None)} == {sum(mine)}


def test_a_nodes_key_is_renewed_by_moving_its_clients_to_the_new_one(tmp_path: Path) -> None:
    keys = {"node-0": "zero", "node-1": "one", "renewed": "two"}
    devices = Devices(CASE, tmp_path / "devices", 2, keys=keys)
    served(devices, tmp_path, rounds=2)
    devices.transport.leave("node-0")
    devices.transport.join("renewed", devices.nodes[0].serve)
    move(tmp_path / "run", [str(client) for client in devices.nodes[0].clients], "two")
    served(devices, tmp_path)
    assert set(attendance_of(tmp_path / "run").roster.owners.values()) == {"one", "two"}
    assert_undisturbed(devices, tmp_path)


def test_whom_nobody_knows_or_a_run_that_is_on_its_way_is_not_moved(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path / "devices", 2, keys={"node-0": "zero", "node-1": "one"})
    served(devices, tmp_path, rounds=1)
    devices.close()
    with pytest.raises(ConfigError, match="'user-00' is none of this run's"):
        move(tmp_path / "run", ["user-00"], "one")
    directory = RunDirectory(tmp_path / "run", read_info(tmp_path / "run"))
    with pytest.raises(RunError):
        move(tmp_path / "run", ["user-0"], "one")
    directory.close()
    assert attendance_of(tmp_path / "run").roster.owners["user-0"] == "zero"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_node_with_another_key_that_claims_a_site_changes_nothing(stopped: bool, tmp_path: Path) -> None:
    """It is refused by name, also by a server that starts again while the site is not there yet."""
    keys = {"node-0": "zero", "node-1": "one", "thief": "two"}
    devices = Devices(CASE, tmp_path / "devices", 2, keys=keys)
    thief = Devices(CASE, tmp_path / "thief", 2).nodes[0]
    transport = devices.transport
    if stopped:
        served(devices, tmp_path, rounds=2)
        transport.leave("node-0")
        transport.after(300.0, lambda: transport.join("node-0", devices.nodes[0].serve))
    transport.join("thief", thief.serve)
    served(devices, tmp_path)
    assert list(thief._runs) == [str(read_info(tmp_path / "run")["run"])], "it was told of the run alone"
    assert not {kind for kind, name, _ in transport.carried if name == "thief"} - {"hello", "encoding"}
    text = (tmp_path / "run" / "events.jsonl").read_text()
    assert text.count("Node 'thief' claims client 'user-0', which belongs to another key.") == 1
    thief.close()
    assert_undisturbed(devices, tmp_path)
