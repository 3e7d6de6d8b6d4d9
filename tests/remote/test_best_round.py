"""A run across machines is of its best round on ``valid``, as a simulation is: on the server, and on every device."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import Run, simulate
from fedkeep.core.params import Params
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.device_store import STAGED, DeviceStore, counted
from fedkeep.remote.roll_back import roll_back
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.transport import Died, Weather
from tests.engines.test_conformance import CASES
from tests.methods.table import ROWS
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.remote.test_server import stops_after
from tests.tiny import at_best, on_server, same_bits

ROUNDS = 8
OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "evaluate_every": 1, "cohort": 3, "seed": 4}
FEW = ("furl", "mixture", "fine_tuned", "apfl")
EARLY = (*FEW, "fedrep", "fedper", "fedbabu", "ditto")
"""Whose best round is not the last."""


@functools.cache
def simulated(case: str) -> Run:
    torch.manual_seed(0)
    what = CASES[case]
    return simulate(
        what.model().double(), what.method, what.data, engine="sequential", progress=False, **OPTIONS
    )


def made(case: str, **changes: Any) -> Federation:
    return federation(case, "float64", **{**OPTIONS, **changes})


def served(case: str, devices: Devices, folder: Path, *, only: Any = "", **changes: Any) -> None:
    serve_run(made(case, **changes), devices.transport, folder / "run", progress=False, again=50.0, only=only)


@contextmanager
def files(devices: Devices) -> Iterator[list[DeviceFile]]:
    devices.close()
    found = [DeviceFile(path, "ann") for path in sorted(devices.folder.glob("*/*.db"))]
    yield found
    for file in found:
        file.close()


def on_devices(devices: Devices, run: Run, round: int) -> tuple[dict[str, Params], list[str]]:
    """Return by client what its device keeps of a round, and what the devices say of what they lack."""
    values, notes = {}, []
    with files(devices) as found:
        for file in found:
            for client in file.clients():
                version, note = counted(file, client, round)
                notes += [note] * bool(note)
                if version is not None:
                    values[client] = file.values(version)
    return values, notes


def in_the_simulation(run: Run) -> dict[str, Params]:
    clients = [k for k, seen in enumerate(run.private.seen(range(len(run.data)))) if seen]
    return {str(run.data.ids[k]): {n: v[0] for n, v in run.private.read([k]).items()} for k in clients}


def assert_equal(devices: Devices, folder: Path, run: Run) -> None:
    """Assert that the server's best and last rounds, and what every client kept after either, are the simulation's."""
    commit = read_commit(folder / "run", read_info(folder / "run"))
    assert (commit.chosen, commit.round) == (run.round, run.last.round)
    assert same_bits(server_of(folder / "run", best=True), at_best(run))
    assert same_bits(server_of(folder / "run"), on_server(run.last))
    for one in (run, run.last):
        found, notes = on_devices(devices, one, one.round)
        assert notes == []
        wanted = in_the_simulation(one)
        assert found.keys() == wanted.keys()
        assert [client for client in wanted if not same_bits(found[client], wanted[client])] == []


@pytest.mark.parametrize("case", [c if c in FEW else pytest.param(c, marks=pytest.mark.slow) for c in ROWS])
def test_every_clients_values_are_those_of_the_simulations_best_round(case: str, tmp_path: Path) -> None:
    run, devices = simulated(case), Devices(case, tmp_path / "devices", nodes=3)
    if case in EARLY:
        assert 0 < run.round < run.last.round == ROUNDS
    served(case, devices, tmp_path)
    assert_equal(devices, tmp_path, run)
    assert_few_versions(devices)


@pytest.mark.parametrize("case", ["apfl", "furl"])
def test_so_they_are_where_server_and_devices_die_and_messages_do_not_come(case: str, tmp_path: Path) -> None:
    """The server dies twice, a device is killed at a flush, another comes back from a copy of its disk."""
    run = simulated(case)
    weather = Weather(lose=0.1, corrupt=0.1, duplicate=0.3, delay=0.3)
    devices = Devices(case, tmp_path / "devices", nodes=3, seed=7, weather=weather)
    for rounds in (2, 5):
        stops_after(devices, rounds)
        with pytest.raises(Died):
            served(case, devices, tmp_path)
        name = next(
            name
            for name, number in devices.names.items()
            if number == rounds % 3 and name in devices.transport.nodes()
        )
        devices.nodes[rounds % 3].close()
        place = tmp_path / "devices" / str(rounds % 3)
        shutil.move(
            shutil.copytree(place, tmp_path / "copy", ignore=shutil.ignore_patterns("*.lock")),
            tmp_path / f"{rounds}",
        )
        shutil.rmtree(place)
        shutil.move(tmp_path / f"{rounds}", place)
        devices.restart(name)
    flush, calls = DeviceStore.flush, iter(range(10**6))

    def dies(store: DeviceStore) -> None:
        flush(store)
        if next(calls) == 4:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceStore, "flush", dies)
        served(case, devices, tmp_path)
    assert len(devices.transport.deaths) == 1
    assert_equal(devices, tmp_path, run)
    assert_few_versions(devices)


@pytest.mark.parametrize(
    "case",
    ["mixture", "furl", *(pytest.param(case, marks=pytest.mark.slow) for case in ("fine_tuned", "fedbabu"))],
)
def test_clients_adapt_from_the_best_round_as_in_a_simulation(case: str, tmp_path: Path) -> None:
    run, devices = simulated(case), Devices(case, tmp_path / "devices", nodes=2)
    served(case, devices, tmp_path)
    served(case, devices, tmp_path, only="adapt")
    expected = adapt_clients(run, progress=False)
    with files(devices) as found:
        own = {c: file.adapted_values(row) for file in found for c, row in file.adapted().items()}
        assert {row.round for file in found for row in file.adapted().values()} == {run.round}
    assert [str(c) for c in run.data.ids if not same_bits(own[str(c)], expected.own(c))] == []
    served(case, devices, tmp_path, rounds=ROUNDS)
    assert_equal(devices, tmp_path, run)  # what the last round left is there still


def test_a_run_that_goes_on_finds_a_better_round_or_keeps_the_best(tmp_path: Path) -> None:
    """Devices that were told of one best round hear of the next, also by a server that was started again."""
    devices = Devices("apfl", tmp_path / "devices", nodes=2)
    for rounds in (1, 2, 3, ROUNDS):
        served("apfl", devices, tmp_path, rounds=rounds)
    assert_equal(devices, tmp_path, simulated("apfl"))
    assert_few_versions(devices)


def test_what_a_device_lacks_is_said_and_its_last_values_are_used(tmp_path: Path) -> None:
    """A device from a copy of before, one that never heard of the round, and one whose kept version is gone."""
    case = "apfl"
    run, devices = simulated(case), Devices(case, tmp_path / "devices", nodes=2)
    served(case, devices, tmp_path)
    with files(devices) as found:
        file, client = found[0], str(devices.data.ids[0])
        word = file.named(client)["best"].named
        assert counted(file, client, run.round)[1] == ""
        kept = next(v for v in file.versions(client) if v.attempt == word.attempt)
        with file.writing():
            file.drop([kept.number])
        version, note = counted(file, client, run.round)
        last = max((v for v in file.versions(client) if v.accepted), key=lambda v: v.number)
        assert version == last
        assert (client in note, f"version {word.version}" in note, f"round {last.round + 1}" in note) == (
            True,
        ) * 3
        assert counted(file, client, run.last.round) == (last, "")
        version, note = counted(file, client, run.last.round - 1)
        assert (version, f"round {run.last.round - 1}" in note) == (last, True)


def test_of_rounds_that_were_taken_back_no_version_counts_on_a_device(tmp_path: Path) -> None:
    """It may have been told of a round of the same number, and have missed that the server went back."""
    devices, run = Devices("furl", tmp_path / "devices", nodes=2), tmp_path / "run"
    serve_run(made("furl", rounds=3), devices.transport, run, progress=False, again=50.0, keep_rounds=3)
    for _ in range(2):  # stopped on the way it is called again
        roll_back(run, 2)
    (taken,) = read_info(run)["rolled_back"]
    clients = [str(name) for name in devices.data.ids[::2]]
    with files(devices) as (file, _):
        taken_back = [c for c in clients if file.versions(c)[-1].round == 2]
        for client in taken_back:
            assert counted(file, client, 3) == (file.versions(client)[-1], "")
            version, _ = counted(file, client, 3, [taken])
            assert version is not None
            assert version.attempt == ledger_of(run)[client].attempt
        assert taken_back
    devices = Devices("furl", tmp_path / "devices", nodes=2)
    serve_run(made("furl", rounds=3), devices.transport, run, progress=False, again=50.0)
    with files(devices) as (file, _):
        for client in clients:
            assert counted(file, client, 3, [taken]) == counted(file, client, 3)
            assert counted(file, client, 3)[1] == ""


def assert_few_versions(devices: Devices, history: int = 1) -> None:
    """Assert that a device keeps of a client at most one version more than the last accepted ones and those staged."""
    with files(devices) as found:
        for file in found:
            for client in file.clients():
                versions = file.versions(client)
                assert sum(version.accepted for version in versions) <= 2 + history
                assert len(versions) <= 2 + history + STAGED
