"""SCAFFOLD: an independent loop, what its controls are, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import FederatedData, Phase, averaging, methods, sgd, simulate
from fedkeep.core.net import Net
from fedkeep.methods.scaffold import Correction
from tests.methods.plain import DATA, State, apart, initial, kept, plan, run_of, slopes_of
from tests.tiny import Rounds, Scalar, job, pairs, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3, rates={"head.*": 0.1}))
RATES = {"body.weight": 0.3, "body.bias": 0.3, "head.weight": 0.1, "head.bias": 0.1}


def plain(server_rate: float) -> tuple[State, State, list[State]]:
    """Return w, c and every c_k after some rounds."""
    w = initial()
    c = {n: torch.zeros_like(v) for n, v in w.items()}
    own = [dict(c) for _ in range(len(DATA))]
    for cohort in plan(LOCAL):
        moved, turned = [], []
        for k, batches in cohort.items():
            y = dict(w)
            for batch in batches:
                g = slopes_of(y, batch)
                y = {n: y[n] - RATES[n] * (g[n] - own[k][n] + c[n]) for n in y}
            new = {n: own[k][n] - c[n] + (w[n] - y[n]) / (len(batches) * RATES[n]) for n in w}
            moved.append({n: y[n] - w[n] for n in w})
            turned.append({n: new[n] - own[k][n] for n in w})
            own[k] = new
        w = {n: v + server_rate * sum(d[n] for d in moved) / len(cohort) for n, v in w.items()}
        c = {n: v + sum(d[n] for d in turned) / len(DATA) for n, v in c.items()}
    return w, c, own


@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_scaffold_equals_a_plain_loop(server_rate: float) -> None:
    run = run_of(methods.scaffold(local=LOCAL, server=averaging(sgd(server_rate), by="uniform")))
    w, c, own = plain(server_rate)
    assert apart(run.server, w) < 1e-12
    assert apart(run.state, c) < 1e-12
    assert max(apart(kept(run, k), own[k]) for k in range(len(DATA))) < 1e-12
    assert min(float(v.abs().max()) for v in c.values()) > 1e-3


def test_the_first_round_is_fedavgs() -> None:
    """All controls are zero then."""
    ours, theirs = methods.scaffold(local=LOCAL), methods.fedavg(local=LOCAL, server=averaging(by="uniform"))
    first, other = run_of(ours, rounds=1), run_of(theirs, rounds=1)
    assert same_bits(first.server, other.server)
    assert [r for r in first.history if r.split == "train"] == [
        r for r in other.history if r.split == "train"
    ]
    assert not same_bits(run_of(ours, rounds=3).server, run_of(theirs, rounds=3).server)


def test_a_client_alone_is_fedavg() -> None:
    """Its control is everybody's."""
    data = pairs({"a": [(1, 3), (2, 1), (-1, 0.5)]})
    local = Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.05), epochs=4, batch_size=2)
    runs = [
        simulate(Scalar(), build(local=local), data, rounds=6) for build in (methods.scaffold, methods.fedavg)
    ]
    assert apart(runs[0].server, runs[1].server) < 1e-14
    assert apart(runs[0].state, runs[0].kept("a").state) < 1e-14


@pytest.mark.parametrize("hold_out", [0.0, 0.34])
def test_the_servers_control_is_the_mean_of_all_clients(hold_out: float) -> None:
    """Of those in federation; clients that are held out of it count nowhere."""
    run = run_of(methods.scaffold(local=LOCAL), hold_out=hold_out, cohort=2)
    assert len(run.held_out) == (2 if hold_out else 0)
    every = [kept(run, int(k)) for k in run.clients.positions]
    assert apart(run.state, {n: sum(c[n] for c in every) / len(every) for n in run.state}) < 1e-14


def test_a_client_that_takes_no_step_keeps_its_control() -> None:
    owner = ["a"] * 3 + ["b"] * 2
    columns: dict[str, Any] = {
        "x": np.ones((5, 1)),
        "label": np.arange(5.0),
        "opted_in": np.array([True] * 3 + [False] * 2),
    }
    data = FederatedData.from_columns(owner, columns, ["train"] * 5, meta={"task": "regression"})
    local = Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.05))
    rounds = Rounds(job(Scalar(), methods.scaffold(local=local), data))
    for _ in range(2):
        rounds([0, 1])
    store = rounds.work.store.read([0, 1])["client/w"]
    assert store[1] == 0 != store[0]
    assert float(rounds.server.state["w"]) == pytest.approx(float(store[0]) / 2, abs=1e-15)


def test_a_control_counts_with_the_rate_of_its_round() -> None:
    """ŷ = w·x, (1, 3), from w = 1: the slope is −4 whatever the rate, and so is the new control."""
    falling = Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.1, schedule="linear"))
    rounds = Rounds(job(Scalar(1.0), methods.scaffold(local=falling), pairs({"a": [(1, 3)]})))
    rounds([0], progress=0.5)
    assert float(rounds.server.params["w"]) == pytest.approx(1.2, abs=1e-14)
    assert float(rounds.server.state["w"]) == pytest.approx(-4.0, abs=1e-13)


def test_what_is_not_trained_has_no_control() -> None:
    run = run_of(methods.scaffold(local=LOCAL.but(optimizer=sgd(0.3, rates={"head.*": 0.0}))))
    assert not any(v.any() for n, v in run.state.items() if n.startswith("head."))
    assert same_bits(
        {n: v for n, v in run.server.items() if n.startswith("head.")},
        {n: v for n, v in initial().items() if n.startswith("head.")},
    )
    assert all(v.any() for n, v in run.state.items() if n.startswith("body."))


def test_the_correction_by_hand() -> None:
    """c = 3, c_k = 1: it adds 2 to the slope, and nothing to the loss."""
    net = Net(Scalar(5.0))
    w = torch.tensor(5.0, requires_grad=True)
    value = Correction()(net, {"w": w, "client/w": torch.tensor(1.0)}, {}, {"server/w": torch.tensor(3.0)})
    value.backward()
    assert (float(value.detach()), float(w.grad)) == (0.0, 2.0)  # type: ignore[arg-type]
