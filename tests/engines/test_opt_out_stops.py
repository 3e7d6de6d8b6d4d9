"""Early stopping: by which validation examples, and where a client has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedkeep import FederatedData, Method, Phase, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.experiments.learned import remarks
from fedkeep.methods import EarlyStopping
from tests.fitting import fit_private
from tests.methods.parts import Deep
from tests.refusals import raises
from tests.tiny import classes, same_bits

RULE = EarlyStopping(every=1, patience=2)


def stopping(**changes: Any) -> Method:
    """Return FedRep whose head stops early, before the body is trained through it."""
    local = Phase(batch_size=3, optimizer=sgd(0.3))
    method = methods.fedrep("head.*", head_epochs=30, head_optimizer=sgd(0.8), local=local)
    head, body = method.client.phases
    return method.on_client(phases=(head.but(early_stopping=RULE, **changes), body))


def opted(inside: int, seed: int | None = None) -> FederatedData:
    """Return clients of whom the first ``inside`` of six validation examples are opted in; others by the seed."""
    data = classes((6, 6, 6, 6), valid=6)
    columns: dict[str, Any] = {name: np.array(column) for name, column in data.columns.items()}
    columns["opted_in"] = np.ones(len(columns["label"]), bool)
    for client in range(len(data)):
        valid = data.rows(client, "valid")
        columns["opted_in"][valid.start + inside : valid.stop] = False
    out = ~columns["opted_in"]
    if seed is not None:
        rng = np.random.default_rng(seed)
        columns["x"][out] = 5 * rng.standard_normal(columns["x"][out].shape)
        columns["label"][out] = rng.integers(0, 3, out.sum())
    return FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_opted_out_examples_stop_no_phase_whose_values_a_federated_one_reads(engine: Any) -> None:
    runs = [
        simulate(Deep(), stopping(), data, rounds=2, cohort=4, seed=1, evaluate_every=0, engine=engine)
        for data in (opted(3), opted(3, 5), opted(3, 6))
    ]
    assert same_bits(runs[0].server, runs[1].server)
    assert same_bits(runs[0].server, runs[2].server)


def test_who_has_no_validation_example_opted_in_cannot_stop_early() -> None:
    with raises(MethodError, examples="opted_in"):
        simulate(Deep(), stopping(), opted(0), rounds=1, cohort=4, evaluate_every=0, engine="sequential")


def test_who_has_opted_everything_out_trains_and_stops_nothing() -> None:
    data = opted(3)
    columns = {name: np.array(column) for name, column in data.columns.items()}  # type: ignore[arg-type]
    columns["opted_in"][data.offsets[1] : data.offsets[2]] = False
    data = FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)
    run = simulate(Deep(), stopping(), data, rounds=1, cohort=4, evaluate_every=0, engine="sequential")
    assert run.round == 1


def test_a_phase_on_all_examples_stops_by_all() -> None:
    """Nothing federated may read what it trains, so opted-out examples may say when it has had enough."""
    method = methods.fine_tuned(
        local=Phase(batch_size=3, optimizer=sgd(0.8)), tune_epochs=30, early_stopping=RULE
    )
    found = []
    for data in (opted(0), opted(0, 5)):
        run = simulate(Deep(), method, data, rounds=1, cohort=4, seed=1, evaluate_every=0)
        rows = [data.rows(client, "train") for client in range(len(data))]
        found.append([fit_private(run, f"user-{c}", np.arange(r.start, r.stop)) for c, r in enumerate(rows)])
    assert not all(same_bits(one, other) for one, other in zip(*found, strict=True))


def adapting(rule: EarlyStopping | None) -> Method:
    local = Phase(batch_size=3, optimizer=sgd(0.3), epochs=1)
    method = methods.fine_tuned(local=local, early_stopping=rule)
    return method.adapting(phases=tuple(p.but(epochs=6) for p in method.adapt.phases))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_without_validation_examples_takes_all_passes_where_none_are_required(engine: Any) -> None:
    data = classes((6, 6, 6), valid=6)
    data.bounds[1, 1:3] = data.bounds[1, 3]  # the second client's are trained on, but for none
    runs = {
        key: simulate(Deep(), adapting(rule), data, rounds=1, seed=1, evaluate_every=0, engine=engine)
        for key, rule in (
            ("stops", EarlyStopping(every=1, patience=1, required=False)),
            ("all", None),
            ("required", EarlyStopping(every=1, patience=1)),
        )
    }
    for client, same in (("user-0", False), ("user-1", True), ("user-2", False)):
        assert same_bits(runs["stops"].own(client), runs["all"].own(client)) == same
    with pytest.raises(MethodError, match="no example in the split 'valid'"):
        runs["required"].own("user-1")


def test_a_run_says_who_took_all_passes() -> None:
    data = classes((6, 6, 6), valid=6, test=3)
    data.bounds[1, 1:3] = data.bounds[1, 2]
    run = simulate(Deep(), methods.mixture(), data, rounds=3, seed=1)
    assert any("1 client without a validation example" in said for said in remarks(run))
