"""A party that the owner adds to a run on its way takes part from a round on; nothing is stopped, and a kill changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedkeep import methods
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.net import Net
from fedkeep.core.run_files import read_info
from fedkeep.engines import Job, LocalDevice, Sampler, Sequential, first_global, first_kept, run_round
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.remote.attendance import attendance_of
from fedkeep.remote.client_ledger import Listed
from fedkeep.remote.joining import ADDED, add
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.roll_back import roll_back
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died
from fedkeep.store import Default, MemoryStore
from tests.engines.test_conformance import CASES, SEED
from tests.remote import federations
from tests.remote.federations import Devices, experiment, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import same_bits

ROUNDS, COHORT, JOINS = 6, 4, 3
KIND = "float64"
LATE = "node-2"


class Late:
    """Three nodes, of which the third comes, and is added, in the round before the last without it."""

    def __init__(self, case: str, folder: Path, *, added: bool = True, clients: tuple[str, ...] = ()) -> None:
        keys = {f"node-{n}{life}": f"key-{n}" for n in range(3) for life in ("", ".1", ".2")}
        self.case, self.folder = case, folder
        self.devices = Devices(case, folder / "devices", 3, keys=keys)
        self.transport, self.added, self.clients = self.devices.transport, added, clients
        self.transport.leave(LATE)
        send = self.transport.send

        def sending(messages: Any) -> list[str]:
            given = list(messages)
            if any(packet.header.get("round") == JOINS - 2 for _, packet in given):
                self.come()
            return send(given)

        self.transport.send = sending  # type: ignore[method-assign]
        self.came = False

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def early(self) -> list[str]:
        return sorted(client for node in self.devices.nodes[:2] for client in node.clients)

    @property
    def late(self) -> list[str]:
        return sorted(self.devices.nodes[2].clients)

    def come(self) -> None:
        if not self.came:
            self.came = True
            if self.added:
                add(self.run, "key-2", self.clients)
            self.transport.join(LATE, self.devices.nodes[2].serve)

    def serve(self, **changes: Any) -> None:
        given = {"rounds": ROUNDS, "cohort": COHORT, "clients": len(self.early), **changes}
        what = replace(federation(self.case, KIND), **given)
        serve_run(what, self.transport, self.run, progress=False, patience=1000, keep_rounds=ROUNDS)

    def events(self, kind: str) -> list[str]:
        lines = map(json.loads, (self.run / "events.jsonl").read_text().splitlines())
        return [line["text"] for line in lines if line["kind"] == kind]


def by_hand(late: Late) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what the server has, and what clients keep, after rounds of these cohorts in this process."""
    what, data = CASES[late.case], CASES[late.case].data
    module, method = experiment(f"{late.case}, {KIND}", {})
    method = method.resolved(module)
    net = Net(method.made_for(module))
    ids = [str(client) for client in data.ids]
    store = MemoryStore(Default(first_kept(method, net), method.client.keep.value, SEED), ids)
    device = LocalDevice(Job(method, net, data, store, SEED), Sequential())
    server = first_global(method, net, data)
    everybody = [*late.early, *late.late]
    for number in range(ROUNDS):
        there = late.early if number < JOINS else everybody
        since = 0 if number < JOINS else JOINS
        draw = Sampler(len(there), COHORT, what.options.get("sampling", "shuffled"), SEED)
        epoch, group = divmod(number - since, draw.rounds_per_epoch)
        cohort = [there[place] for place in draw((since + epoch) * draw.rounds_per_epoch + group)]
        given = server.but(progress=number / ROUNDS, population=len(there))
        server, _ = run_round(
            method, device, given, cohort, declared(method, net), Faults(broken="skip", malformed="skip")
        )
    flat = {**server.params, **{f"server/{name}": value for name, value in server.state.items()}}
    return flat, store.read(range(len(ids)))


@pytest.mark.parametrize("case", ["furl", "scaffold", "the share of FedAvg"])
def test_who_is_added_takes_part_from_the_next_round_on_with_the_bits_of_one_process(
    case: str, tmp_path: Path
) -> None:
    late = Late(case, tmp_path)
    late.serve()
    server, kept = by_hand(late)
    assert same_bits(server_of(late.run), server)
    assert same_bits(late.devices.kept(ledger_of(late.run)), kept)
    found = attendance_of(late.run)
    assert list(map(str, found.roster.ids)) == [*late.early, *late.late]
    assert found.roster.joined == [(JOINS, len(late.early))]
    assert (found.lines(), found.asked) == ([], found.taken)
    assert all(found.taken[client] for client in late.late)
    assert found.roster.owners[late.late[0]] == "key-2"
    assert read_info(late.run)["data"]["clients"] == len(found.roster)
    (said,) = (text for text in late.events("joined") if "take part" in text)
    assert (repr(late.late[0]) in said, f"round {JOINS + 1} on" in said) == (True, True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Return what the server has after a run in which nobody dies."""
    late = Late("furl", tmp_path_factory.mktemp("undisturbed"))
    late.serve()
    late.devices.close()
    return server_of(late.run)


@pytest.mark.parametrize("at", range(1, 9))
def test_a_server_that_dies_around_the_joining_goes_on_with_the_same_bits(
    at: int, tmp_path: Path, undisturbed: Mapping[str, Any]
) -> None:
    """It dies at one of its messages of the rounds before and after: the file, or the roster, is there already."""
    late = Late("furl", tmp_path)
    send, left = late.transport.send, [at]

    def dying(messages: Any) -> list[str]:
        given = list(messages)
        if late.came or any(packet.header.get("round") == JOINS - 2 for _, packet in given):
            left[0] -= 1
            if left[0] == 0:
                late.transport.send = send  # type: ignore[method-assign]
                raise Died
        return send(given)

    late.transport.send = dying  # type: ignore[method-assign]
    with pytest.raises(Died):
        late.serve()
    late.come()
    late.serve()
    if attendance_of(late.run).roster.joined == [(JOINS, len(late.early))]:
        assert same_bits(server_of(late.run), undisturbed)
    else:  # it had died before the party came, and met it as it began anew
        assert attendance_of(late.run).roster.joined == [(JOINS - 1, len(late.early))]
    late.devices.close()


def test_a_run_that_is_rolled_back_before_the_joining_comes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federations, "OwnerTerms", partial(federations.OwnerTerms, history=ROUNDS))
    late = Late("scaffold", tmp_path)
    late.serve()
    before = server_of(late.run)
    roll_back(late.run, JOINS - 2)
    late.serve()
    assert same_bits(server_of(late.run), before)


def test_who_is_not_added_takes_no_part(tmp_path: Path) -> None:
    late = Late("furl", tmp_path, added=False)
    late.serve()
    assert list(map(str, attendance_of(late.run).roster.ids)) == late.early


def test_where_clients_are_listed_those_that_are_added_are_listed_with_them(tmp_path: Path) -> None:
    probe = Late("furl", tmp_path / "probe")
    early, late_ones = [list(node.clients) for node in probe.devices.nodes[:2]], probe.late
    probe.devices.close()
    late = Late("furl", tmp_path / "run", clients=(late_ones[0],))
    late.serve(listed=Listed({f"key-{n}": clients for n, clients in enumerate(early)}))
    assert list(map(str, attendance_of(late.run).roster.ids)) == [*late.early, late_ones[0]]
    assert all("'node-2'" in text and "no node" in text for text in late.events("refused"))
    assert len(late.events("refused")) == len(late_ones) - 1


def test_whom_the_method_cannot_take_in_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amp = replace(CASES["furl"], method=methods.fedamp(local=CASES["furl"].method.client.phases[0]))
    monkeypatch.setitem(CASES, "furl", amp)
    late = Late("furl", tmp_path)
    late.serve()
    assert list(map(str, attendance_of(late.run).roster.ids)) == late.early
    (told,) = late.events("refused")
    assert ("state for each client" in told, "continue-from" in told, repr(late.late[0]) in told) == (
        True,
        True,
        True,
    )


def test_nobody_is_added_where_no_round_could_ask_them(tmp_path: Path) -> None:
    late = Late("furl", tmp_path / "done")
    late.serve()
    with pytest.raises(ConfigError, match="has finished.*continue-from"):
        add(late.run, "key-3")
    late.devices.close()
    other = Late("furl", tmp_path / "more")
    with pytest.raises(ConfigError, match="asks more clients than it takes"):
        other.serve(policy=RoundPolicy(over_selection=1.5))
    other.devices.close()
    with pytest.raises(RunError):
        add(tmp_path, "key-3")


def test_a_damaged_file_of_those_that_were_added_is_named(tmp_path: Path) -> None:
    late = Late("furl", tmp_path)
    late.run.mkdir()
    (late.run / ADDED).write_text("{")
    with pytest.raises(RunError, match=ADDED):
        late.serve()
