"""A run across machines goes on where it was stopped, can be rolled back, judged, and read by reports."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import simulate
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.records import from_line, to_line
from fedkeep.core.run_files import read_info
from fedkeep.methods import aggregate
from fedkeep.remote import Packet, exchange
from fedkeep.remote.client_ledger import RunClients
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.node import Node
from fedkeep.remote.roll_back import kept_rounds, roll_back
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died
from fedkeep.report.page import write_report
from tests.engines.test_conformance import CASES, COHORT, SEED, reference, trained
from tests.experiments.test_trackers import Own, lines
from tests.remote.device_states import copied
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import assert_near, ledger_of, server_of
from tests.tiny import everyone, files, on_server, same_bits

CASE = "the share of FedAvg"


def served(devices: Devices, folder: Path, **changes: Any) -> list[Any]:
    options = {k: changes.pop(k) for k in ("keep_rounds", "only", "patience") if k in changes}
    return serve_run(
        federation(CASE, **changes), devices.transport, folder / "run", progress=False, **options
    )


def stops_after(devices: Devices, rounds: int) -> None:
    """Let the server die as it sends the messages of the round after so many."""
    send = devices.transport.send
    seen: set[int] = set()

    def stopping(messages: Any) -> list[str]:
        given = list(messages)
        seen.update(packet.header["round"] for _, packet in given if packet.header["kind"] == "work")
        if len(seen) > rounds:
            devices.transport.send = send  # type: ignore[method-assign]
            raise Died
        return send(given)

    devices.transport.send = stopping  # type: ignore[method-assign]


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_server_that_was_killed_goes_on_at_the_next_round_by_itself(rounds: int, tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    stops_after(devices, rounds)
    with pytest.raises(Died):
        served(devices, tmp_path)
    before = len(devices.transport.carried)
    history = served(devices, tmp_path)
    asked = [kind for kind, _, _ in devices.transport.carried[before:]]
    assert asked.count("hello") == 2  # nodes are met anew
    expected = reference(CASE, "float32")
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, 6))
    devices.close()
    assert_near(history, expected.history)  # the evaluation of round 2, made with round 3, is there once


def test_uploads_that_wait_in_a_file_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, asked, filed = tmp_path / "one", tmp_path / "other", list[int](), list[str]()
    served(Devices(CASE, one, 3), one)
    devices = Devices(CASE, other, 3)
    put, portions = exchange.Shelf.put, exchange.Exchange._portions

    def portioned(one: exchange.Exchange) -> list[list[str]]:
        found = portions(one)
        asked.extend(len(some) for some in found if len(found) > 1)
        return found

    def filing(shelf: exchange.Shelf, client: str, upload: Any) -> None:
        put(shelf, client, upload)
        filed.extend(shelf._there.keys() & {client})

    monkeypatch.setattr(exchange.Exchange, "_portions", portioned)
    monkeypatch.setattr(exchange.Shelf, "put", filing)
    monkeypatch.setattr(exchange, "HELD", 0)
    served(devices, other)
    assert same_bits(server_of(one / "run"), server_of(other / "run"))
    assert len(filed) >= COHORT
    assert set(asked) == {1}  # of several, each is heard by itself


def test_a_servers_sums_of_a_large_model_lie_in_files_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, made = tmp_path / "one", tmp_path / "other", list[int]()
    served(Devices(CASE, one, 3), one)
    room = aggregate.TensorFile
    monkeypatch.setattr(aggregate, "LARGE", 0)
    monkeypatch.setattr(aggregate, "TensorFile", lambda: made.append(1) or room())
    served(Devices(CASE, other, 3), other)
    assert made
    assert same_bits(server_of(one / "run"), server_of(other / "run"))


def test_two_runs_on_the_same_nodes_do_not_touch_each_other(tmp_path: Path) -> None:
    devices, one, two = Devices(CASE, tmp_path, 2), tmp_path / "one", tmp_path / "two"
    stops_after(devices, 1)
    with pytest.raises(Died):
        served(devices, one)
    served(devices, two)  # the other run, from its first round to its last, between two rounds of the first
    served(devices, one)
    expected = reference(CASE, "float32")
    for folder in (one, two):
        run = read_info(folder / "run")["run"]
        assert same_bits(server_of(folder / "run"), on_server(expected))
        assert same_bits(devices.kept(ledger_of(folder / "run"), run), everyone(expected.private, 6))


def test_a_tracker_is_told_every_record_of_a_server_that_was_killed_once(tmp_path: Path) -> None:
    own, devices = Own(), Devices(CASE, tmp_path, 2)
    stops_after(devices, 2)  # the evaluation of round 2 is still to be made
    with pytest.raises(Died):
        served(devices, tmp_path, trackers=[own])
    assert {r.round for r in own.records} == {1, 2}
    served(devices, tmp_path, trackers=[own])
    devices.close()
    assert own.ends_seen == ["failed", "finished"]
    assert sorted(map(to_line, own.records)) == sorted(map(to_line, lines(tmp_path / "run")))


def test_a_link_that_fails_after_the_last_round_is_noted_and_the_run_ends_when_it_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RunError("The link has answered nothing but faults.")

    devices = Devices(CASE, tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "settle", fails)
        with pytest.raises(RunError):
            served(devices, tmp_path)
    info = read_info(tmp_path / "run")
    assert (info["status"], info["error"]) == ("failed", "The link has answered nothing but faults.")
    served(devices, tmp_path)
    devices.close()
    info = read_info(tmp_path / "run")
    assert (info["status"], "error" in info) == ("finished", False)


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_server_that_dies_as_it_tells_of_the_last_round_tells_again_and_nothing_counts_twice(
    heard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(CASE, tmp_path, 2)
    send, settle = devices.transport.send, Fleet.settle

    def dying(fleet: Fleet, orders: Any) -> None:
        def few(messages: Any) -> list[str]:
            send(list(messages)[:heard])
            raise Died

        monkeypatch.setattr(devices.transport, "send", few)
        settle(fleet, orders)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "settle", dying)
        with pytest.raises(Died):
            served(devices, tmp_path, evaluate_every=0)
    monkeypatch.setattr(devices.transport, "send", send)
    before = files(tmp_path / "run", but=("run.json", "lock", "events.jsonl"))
    served(devices, tmp_path, evaluate_every=0)
    assert files(tmp_path / "run", but=("run.json", "lock", "events.jsonl")) == before
    lines = {(c, one.version, one.attempt) for c, one in ledger_of(tmp_path / "run").items()}
    expected = reference(CASE, "float32")
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, 6))
    devices.close()
    last = set()
    for path in tmp_path.glob("?/*.db"):
        with closing(DeviceFile(path, "ann")) as file:
            versions = {v.client: v for v in file.versions() if v.accepted}  # the last of each
            last |= {(v.client, v.version, v.attempt) for v in versions.values()}
    assert last == lines


def test_a_finished_run_that_is_served_again_changes_nothing(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    first = served(devices, tmp_path)
    before = files(tmp_path / "run", but=("run.json", "lock", "events.jsonl"))
    assert served(devices, tmp_path) == first
    devices.close()
    assert files(tmp_path / "run", but=("run.json", "lock", "events.jsonl")) == before


def test_a_run_that_is_made_longer_ends_like_one_that_was_that_long(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path, rounds=2)
    served(devices, tmp_path, rounds=5)
    torch.manual_seed(0)
    case = CASES[CASE]
    longer = simulate(
        case.model(), case.method, case.data, rounds=5, cohort=COHORT, seed=SEED, engine="sequential"
    ).last
    assert same_bits(server_of(tmp_path / "run"), on_server(longer))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(longer.private, 6))


def test_a_run_of_another_length_says_what_it_was_served_with(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    for rounds in (2, 4):
        served(devices, tmp_path, rounds=rounds, config={"run": {"rounds": rounds}})
    devices.close()
    assert read_info(tmp_path / "run")["config"] == {"run": {"rounds": 4}}


def test_it_cannot_end_with_a_round_that_is_judged_with_the_next(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    stops_after(devices, 2)
    with pytest.raises(Died):
        served(devices, tmp_path, evaluate_every=1)
    with pytest.raises(RunError, match=r"with evaluate_every = 1, a.*2.*2"):
        served(devices, tmp_path, evaluate_every=1, rounds=2)
    history = served(devices, tmp_path, evaluate_every=1)
    devices.close()
    assert {r.round for r in history if r.split == "test"} == {1, 2, 3}


@pytest.mark.parametrize("to", [1, 2])
def test_a_server_that_was_rolled_back_is_followed_by_its_devices(to: int, tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path, keep_rounds=3)
    assert kept_rounds(tmp_path / "run") == [1, 2, 3]
    roll_back(tmp_path / "run", to)
    assert kept_rounds(tmp_path / "run") == list(range(1, to + 1))
    history = served(devices, tmp_path, keep_rounds=3)
    expected = reference(CASE, "float32")
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, 6))
    devices.close()
    assert_near(history, expected.history)


def test_rounds_that_are_not_kept_are_named(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(ConfigError, match="keep_rounds must be"):
        served(devices, tmp_path, keep_rounds=-1)
    served(devices, tmp_path, keep_rounds=1)
    devices.close()
    with pytest.raises(RunError, match=r"does not keep round 1; it.*2.*3.*keep_rounds=N"):
        roll_back(tmp_path / "run", 1)


def test_a_federation_can_be_judged_without_training(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    history = served(devices, tmp_path)
    before = files(tmp_path / "run", but=("lock", "events.jsonl"))
    trains = len(devices.transport.carried)
    judged = served(devices, tmp_path, only="judge")
    devices.close()
    assert [kind for kind, _, _ in devices.transport.carried[trains:]].count("work") == 2
    best = [r for r in history if r.round == 2 and r.split in ("valid", "test") and r.client is None]
    assert [r for r in judged if r.client is None] == best
    after = files(tmp_path / "run", but=("lock", "events.jsonl"))
    lines = after.pop("judged.jsonl").decode().splitlines(keepends=True)
    was, info = (json.loads(each.pop("run.json")) for each in (before, after))
    assert after == before
    assert {key for key in info if info[key] != was[key]} == {"attempts", "seal"}  # its messages are numbered
    assert list(map(from_line, lines)) == judged


def test_judging_alone_wants_a_run(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(RunError, match="holds no run to judge"):
        served(devices, tmp_path, only="judge")


def test_who_came_before_the_first_round_is_in_the_runs_events(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path)
    devices.close()
    first = (tmp_path / "run" / "events.jsonl").read_text().splitlines()[:2]
    assert [json.loads(line)["text"] for line in first] == [
        "Node 'node-0' has 3 clients.",
        "Node 'node-1' has 3 clients.",
    ]


def test_a_report_is_made_of_the_runs_folder(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    served(devices, tmp_path)
    devices.close()
    write_report([tmp_path / "run"], tmp_path / "page")
    assert "accuracy" in (tmp_path / "page" / "report.md").read_text()


def test_a_run_waits_for_its_clients_and_says_how_many_are_there(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    late = devices.transport
    late.leave("node-1")
    late.after(500.0, lambda: late.join("node-1", devices.nodes[1].serve))
    with pytest.raises(ConfigError, match=r"^Wanted 6 clients that are there, got 3 in 100 s\."):
        served(devices, tmp_path, patience=100.0)
    assert not (tmp_path / "run").exists()
    history = served(devices, tmp_path, patience=1000.0)
    devices.close()
    assert_near(history, reference(CASE, "float32").history)


def test_a_folder_with_a_simulation_is_not_gone_on_with(tmp_path: Path) -> None:
    trained(CASE, "float32", out=tmp_path / "run")
    devices = Devices(CASE, tmp_path, 2)
    with pytest.raises(RunError, match="is a simulation, not a run across machines"):
        served(devices, tmp_path)


def test_a_state_that_is_gone_is_reported_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    devices = Devices(CASE, tmp_path, 2)
    stops_after(devices, 1)
    with pytest.raises(Died):
        served(devices, tmp_path)
    devices.transport.leave("node-1")
    devices.nodes[1].close()
    shutil.rmtree(tmp_path / "1")
    devices.restart("node-1")
    history = served(devices, tmp_path)
    entries = ledger_of(tmp_path / "run")
    devices.close()
    gone = {str(c) for c in devices.nodes[1].clients}
    assert any(
        entries[client].version == 1 for client in gone
    )  # as it was: nothing was reset, nothing counted anew
    lost = [r for r in history if r.metric == "lost_clients"]
    assert lost
    assert "this device has none" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("one", "Client {client!r} is declared on two nodes, 'node-1' and 'copy'."),
        ("another", "Node 'copy' claims client {client!r}, which belongs to another key."),
    ],
)
def test_a_copy_of_a_devices_folder_on_a_second_machine_is_named_and_changes_nothing(
    key: str, said: str, tmp_path: Path
) -> None:
    devices = Devices(CASE, tmp_path, 2, keys={"node-0": "zero", "node-1": "one", "copy": key})
    first, send, served_copy = devices.nodes[1], devices.transport.send, list[str]()

    def copying(messages: Any) -> list[str]:
        given = list(messages)
        if any(packet.header["kind"] == "work" and packet.header["round"] == 1 for _, packet in given):
            devices.transport.send = send  # type: ignore[method-assign]
            first.release()
            copy = Node(first.source, copied(tmp_path / "1", tmp_path / "2"), first.terms, devices.experiment)

            def serving(packet: Packet) -> Packet:
                served_copy.append(packet.header["kind"])
                return copy.serve(packet)

            devices.transport.join("copy", serving)
        return send(given)

    devices.transport.send = copying  # type: ignore[method-assign]
    served(devices, tmp_path, rounds=5)
    expected = trained(CASE, "float32", engine="sequential", rounds=5)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    assert same_bits(devices.kept(ledger_of(tmp_path / "run")), everyone(expected.private, 6))
    devices.close()
    told = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    told = "\n".join(json.loads(line)["text"] for line in told.splitlines())
    assert [told.count(said.format(client=client)) for client in first.clients] == [1, 1, 1]
    assert "hello" in served_copy
    assert "work" not in served_copy


def test_the_order_of_clients_is_that_of_their_ids_whatever_node_they_are_on() -> None:
    roster = RunClients.of({"b": {"train": 1}, "a": {"train": 0}, "c": {"train": 2}}, {})
    assert list(roster.ids) == ["a", "b", "c"]
    assert roster.trains.tolist() == [1, 2]
    assert roster.index("c") == 2
    with pytest.raises(ConfigError, match="^Client 'd' is none of this run's 3 clients"):
        roster.index("d")
    later = roster.grown({"e": {"train": 1}}, {}, 4)
    assert (list(later.ids), later.owners, later.joined) == (["a", "b", "c", "e"], {}, [(4, 3)])
