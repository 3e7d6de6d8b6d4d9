"""Nodes on the disk, a server and its run's folder train every method of the conformance table as ``sequential`` does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedkeep.core.files import read_tensors
from fedkeep.core.params import Params
from fedkeep.core.records import Record
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.remote.client_ledger import Ledger, RunClients
from fedkeep.remote.served_run import serve_run
from fedkeep.store import Line, VersionLedger
from tests.engines.test_conformance import CASES
from tests.engines.test_conformance import best as best_of
from tests.remote.federations import Devices, federation
from tests.tiny import at_best, everyone, on_server, same_bits

FEW = ["furl", "the share of FedAvg", "scaffold", "feddyn", "a client sits out", "top-k with error feedback"]
TABLE = [
    pytest.param(case, kind, marks=() if case in FEW and kind == "float64" else pytest.mark.slow)
    for case in CASES
    for kind in ("float32", "float64")
]


@pytest.mark.parametrize(("case", "kind"), TABLE)
def test_a_run_across_machines_equals_sequential_to_the_bit(case: str, kind: str, tmp_path: Path) -> None:
    chosen = best_of(case, kind)
    expected = chosen.last
    devices = Devices(case, tmp_path / "devices")
    history = serve_run(federation(case, kind), devices.transport, tmp_path / "run", progress=False)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    kept = devices.kept(ledger_of(tmp_path / "run"))
    assert same_bits(kept, everyone(expected.private, len(expected.data)))
    if chosen.round < expected.round:
        assert same_bits(server_of(tmp_path / "run", best=True), at_best(chosen))
        kept = devices.kept(ledger_of(tmp_path / "run", best=True))
        assert same_bits(kept, everyone(chosen.private, len(chosen.data)))
    devices.close()
    assert_near(history, expected.history, kind)


def server_of(folder: Path, *, best: bool = False) -> Params:
    """Return what a run's folder has of the server: parameters, and the method's state under ``server/NAME``."""
    commit = read_commit(folder, read_info(folder))
    found = read_tensors(folder / (commit.best if best else commit.moment).server)
    kinds = {"params/": "", "state/": "server/"}
    return {
        new + n.removeprefix(old): v
        for old, new in kinds.items()
        for n, v in found.items()
        if n.startswith(old)
    }


def ledger_of(folder: Path, *, best: bool = False) -> dict[str, Line]:
    """Return the lines of all clients in a run's folder."""
    directory = RunDirectory.open(folder, write=False)
    info = directory.read_info()
    roster = RunClients.from_plain(info["roster"])
    versions = VersionLedger(len(roster.ids))
    directory.recover(versions)
    directory.close()
    if best:
        assert directory.marked is not None
        versions = directory.marked
    return Ledger(versions, roster).entries(list(roster.ids))


NEAR = {"float32": 1e-7, "float64": 1e-9}


def assert_near(found: list[Record], expected: list[Record], kind: str = "float32") -> None:
    """Assert that records are the same, and numbers near: a node judges its own clients' examples together.

    A matrix product rounds its rows otherwise when there are others beside them, on some processors: in the model's
    type. What was trained is equal to the bit, which is asserted apart.
    """
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.round, one.epoch, one.split, one.client, one.metric, one.n) == (
            other.round,
            other.epoch,
            other.split,
            other.client,
            other.metric,
            other.n,
        )
        assert math.isclose(one.value, other.value, rel_tol=0, abs_tol=NEAR[kind]) or math.isnan(
            one.value * other.value
        )
