"""A run that goes on with private values of an earlier one, which opted-out examples have trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep import FederatedData, Method, Phase, methods, sgd, simulate
from fedkeep.core.errors import FedkeepError, MethodError
from fedkeep.engines import Adaptation
from fedkeep.experiments.build import run_config
from fedkeep.experiments.load import load_run
from fedkeep.methods import Finish, Finished
from fedkeep.store import Line, MemoryStore
from fedkeep.store.sqlite import SqliteStore
from tests.experiments.configs import config
from tests.remote.hand import Hand
from tests.tiny import Logits, classes, run_by

ON_ALL = methods.furl("user").on_client(phases=(Phase(trains="private", examples="all", optimizer=sgd(0.5)),))
READS = methods.furl("user", local=Phase(batch_size=4))
REFUSED = "an earlier run that this one goes on with"


def consent(out: bool = True) -> FederatedData:
    """Return data of which half has opted out, or nothing."""
    data = classes(counts=(12, 14, 13, 15), opted_in=True, kind="f4")
    inside = np.asarray(data.columns["opted_in"]) | (not out)
    return FederatedData({**data.columns, "opted_in": inside}, data.offsets, data.ids, data.bounds, data.meta)


def store(method: Method = ON_ALL, data: FederatedData | None = None, **changes: Any) -> MemoryStore:
    settings: dict[str, Any] = {"rounds": 2, "cohort": 4, "evaluate_every": 0, "engine": "sequential"}
    run = simulate(Logits(), method, data or consent(), **{**settings, **changes})
    assert isinstance(run.private, MemoryStore)
    return run.private


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers", "centralised"])
@pytest.mark.parametrize("known", [True, False])
def test_a_federated_phase_may_not_read_them(engine: str, known: bool) -> None:
    """Whether or not the later run's data still say who opted out."""
    data = consent()
    columns = {n: c for n, c in data.columns.items() if known or n != "opted_in"}
    later = FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)
    with pytest.raises(MethodError, match=REFUSED):
        store(READS, later, **run_by(engine), private=store())


def test_nor_after_a_run_between_and_for_clients_in_another_order() -> None:
    data = consent()
    first = store()
    store(ON_ALL, consent(out=False), private=first)
    with pytest.raises(MethodError, match=REFUSED):
        store(READS, data.select([3, 0, 2, 1]), private=first)


def test_nor_what_clients_adapted_on_all_their_examples() -> None:
    run = simulate(Logits(), READS, consent(), rounds=1, cohort=4, evaluate_every=0)
    device = run.local_device()
    device.adapt(run.orders(run.clients), Adaptation(split=""))
    with pytest.raises(MethodError, match=REFUSED):
        store(READS, private=device.held("adapted"))


def look(finish: Finish) -> Finished:
    return Finished()


def test_nor_may_hooks_see_them() -> None:
    shared = READS.on_client(phases=(Phase(trains=("linear.*",), batch_size=4),), finish=look)
    with pytest.raises(MethodError, match="Hooks"):
        store(shared, private=store())


def test_a_folder_that_is_read_knows_them(tmp_path: Path) -> None:
    data = {"reader": "toy", "opt_out": {"fraction": 0.5, "by": "example"}}
    for kind, names in (("ditto", {"own.user", "own.linear.weight", "own.linear.bias"}), ("furl", set())):
        run_config(config(data=data, method={"kind": kind}), out=tmp_path / kind)
        before = load_run(tmp_path / kind).private
        assert isinstance(before, SqliteStore)
        assert before.default.opted_out == names


def test_what_nobody_opted_out_of_may_be_read() -> None:
    store(READS, private=store(data=consent(out=False)))
    store(READS, private=store(READS))


def test_the_same_method_goes_on() -> None:
    """Its own phases keep apart what must be."""
    once = store(rounds=1)
    store(rounds=1, private=once)
    assert once.default.opted_out == {"user"}


def versions(old: Hand) -> dict[str, Line]:
    return dict(old.ledger)


@pytest.mark.parametrize("out", [True, False])
def test_a_device_keeps_them_from_a_run_that_continues(tmp_path: Path, out: bool) -> None:
    data = consent(out)
    old = Hand(Logits, ON_ALL, data, run="old")
    old.meet(old.node(tmp_path, range(4)))
    old.go(2, 4)
    old.close()
    new = Hand(Logits, READS, data, run="new", changes={"continue_from": "old"})
    node = new.node(tmp_path, range(4))
    packet = new.say(node, new.encode(versions=versions(old)))
    assert packet.header["kind"] == "fits"
    new.nodes.append(node)
    new.place |= dict.fromkeys(map(str, data.ids), node)
    if out:
        with pytest.raises(FedkeepError, match="MethodError. Its own log says more"):
            new.go(1, 4)
    else:
        new.go(1, 4)
    new.close()
