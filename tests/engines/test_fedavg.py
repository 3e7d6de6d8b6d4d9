"""Federated averaging against numbers worked out by hand and against plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Phase, Server, adam, averaging, methods, sgd, simulate
from fedkeep.core.net import Net
from tests.engines.reference import close, cohorts, federated, rows_of, trained
from tests.tiny import Logits, Noisy, Rounds, Scalar, classes, job, pairs

# ŷ = w·x from w = 1. Loss (w·x − y)², gradient 2x(w·x − y), one step of rate 0.1.
# a: (1, 3) → gradient −4, w = 1.4, change 0.4, one example.
# b: (2, 0), (2, 2), (2, 4) in one batch: mean of 4·(2), 4·(0), 4·(−2) = 0; with (1, 0) instead of the last:
#    mean of 8, 0, 2 = 10/3, w = 1 − 1/3, change −1/3, three examples.
HAND = pairs({"a": [(1, 3)], "b": [(2, 0), (2, 2), (1, 0)]})
SQUARED = methods.terms.squared_error()


def one_round(server: Server) -> float:
    method = methods.fedavg(local=Phase(loss=SQUARED, optimizer=sgd(0.1)), server=server)
    rounds = Rounds(job(Scalar(1.0), method, HAND))
    report = rounds([0, 1])
    assert (rounds.server.round, report.clients) == (1, 2)
    assert report.upload_bytes == report.download_bytes == 8
    return float(rounds.server.params["w"])


def test_a_round_by_hand() -> None:
    assert one_round(Server()) == pytest.approx(1 + (1 * 0.4 + 3 * (-1 / 3)) / 4, abs=1e-15)
    assert one_round(averaging(by="uniform")) == pytest.approx(1 + (0.4 - 1 / 3) / 2, abs=1e-15)


def test_server_optimisers_by_hand() -> None:
    change = (1 * 0.4 + 3 * (-1 / 3)) / 4  # −0.15
    assert one_round(averaging(sgd(0.5))) == pytest.approx(1 + 0.5 * change, abs=1e-15)
    # Adam's first step is rate · g / (|g| + eps), whatever the size of g.
    assert one_round(averaging(adam(0.01, eps=1e-3))) == pytest.approx(1 - 0.01 * 0.15 / 0.151, abs=1e-12)


def test_the_report_by_hand() -> None:
    work = job(Scalar(1.0), methods.fedavg(local=Phase(loss=SQUARED)), HAND)
    report = Rounds(work)([0, 1])
    assert report.examples == 4
    assert report.loss == pytest.approx((1 * 4 + 3 * (4 + 0 + 1) / 3) / 4, abs=1e-15)
    assert report.refused == ()


DATA = classes()
PHASES: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 4},
    "epochs": {"batch_size": 3, "epochs": 2},
    "one batch": {"batch_size": 100},
}


@pytest.mark.parametrize("options", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_rounds_equal_plain_pytorch(options: dict[str, Any], weighting: Any) -> None:
    model = Logits().double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.3), **options), server=averaging(by=weighting))
    run = simulate(model, method, DATA, rounds=3, cohort=4, seed=5).last
    plan = cohorts(DATA, 4, 3, 5)
    assert [len(c) for c in plan] == [4, 2, 4]
    expected = federated(
        model,
        DATA,
        plan,
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.3),
        seed=5,
        uniform=weighting == "uniform",
    )
    close(run.server, expected)
    assert not torch.allclose(run.server["linear.weight"], model.linear.weight)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            sgd(0.2, momentum=0.9, weight_decay=0.1),
            lambda m: torch.optim.SGD(m.parameters(), 0.2, 0.9, weight_decay=0.1),
        ),
        (adam(0.05), lambda m: torch.optim.Adam(m.parameters(), 0.05)),
        (
            sgd(0.1, rates={"linear.*": 0.4}),
            lambda m: torch.optim.SGD(
                [{"params": m.linear.parameters(), "lr": 0.4}, {"params": [m.user], "lr": 0.1}]
            ),
        ),
    ],
    ids=["momentum", "adam", "rates"],
)
def test_local_optimisers_are_fresh_at_every_round(ours: Any, theirs: Any) -> None:
    model = Logits().double()
    method = methods.fedavg(local=Phase(optimizer=ours, batch_size=2))
    run = simulate(model, method, DATA, rounds=3, cohort=6, seed=1).last
    close(run.server, federated(model, DATA, cohorts(DATA, 6, 3, 1), method.client.phases[0], theirs, seed=1))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sgd(0.7, momentum=0.9), lambda m: torch.optim.SGD(m.parameters(), 0.7, 0.9)),
        (
            adam(0.05, eps=1e-3, betas=(0.9, 0.99)),
            lambda m: torch.optim.Adam(m.parameters(), 0.05, (0.9, 0.99), 1e-3),
        ),
    ],
    ids=["momentum", "adam"],
)
def test_server_optimisers_live_on_over_rounds(ours: Any, theirs: Any) -> None:
    model = Logits().double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4), server=averaging(ours))
    run = simulate(model, method, DATA, rounds=5, cohort=4, seed=2).last
    expected = federated(
        model,
        DATA,
        cohorts(DATA, 4, 5, 2),
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.3),
        seed=2,
        server=theirs,
    )
    close(run.server, expected)


def test_batch_statistics_are_averaged_and_counters_are_not() -> None:
    model = Noisy().double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.1), batch_size=50), server=averaging(adam(0.01)))
    work = job(model, method, DATA, seed=3)
    rounds = Rounds(work)
    rounds([1, 3])
    results = [
        trained(
            model,
            model.state_dict(),
            DATA,
            c,
            method.client.phases[0],
            lambda m: torch.optim.SGD(m.parameters(), 0.1),
            3,
            0,
        )
        for c in (1, 3)
    ]
    for name in ("norm.running_mean", "norm.running_var"):
        expected = (9 * results[0][name] + 7 * results[1][name]) / 16
        torch.testing.assert_close(rounds.server.params[name], expected, rtol=0, atol=1e-12)
    assert int(rounds.server.params["norm.num_batches_tracked"]) == 1


@pytest.mark.parametrize("bound", [0.05, 0.5, 100.0])
def test_clipping_equals_torch(bound: float) -> None:
    model = Logits().double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4, clip_norm=bound))
    run = simulate(model, method, DATA, rounds=2, cohort=6, seed=1).last
    expected = federated(
        model,
        DATA,
        cohorts(DATA, 6, 2, 1),
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.3),
        seed=1,
        clip=bound,
    )
    close(run.server, expected)


def test_schedules_scale_local_and_server_rates() -> None:
    """Round r of R runs at progress r / R: linear gives 1 and 1/2 over two rounds."""
    data = pairs({"a": [(1, 3)]})
    method = methods.fedavg(
        local=Phase(loss=SQUARED, optimizer=sgd(0.1, schedule="linear")), server=averaging(sgd(1.0))
    )
    w = 1.0 - 0.1 * 2 * (1.0 - 3)
    w = w - 0.05 * 2 * (w - 3)
    assert float(simulate(Scalar(1.0), method, data, rounds=2).server["w"]) == pytest.approx(w, abs=1e-15)
    method = methods.fedavg(
        local=Phase(loss=SQUARED, optimizer=sgd(0.1)), server=averaging(sgd(1.0, schedule="linear"))
    )
    w = 1.0 - 0.1 * 2 * (1.0 - 3)
    w = w - 0.5 * 0.1 * 2 * (w - 3)
    assert float(simulate(Scalar(1.0), method, data, rounds=2).server["w"]) == pytest.approx(w, abs=1e-15)


def test_tied_weights_within_a_half_train_as_in_pytorch() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = Tied().double()
    method = methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4))
    run = simulate(model, method, DATA, rounds=2, cohort=4, seed=1)
    expected = federated(
        model,
        DATA,
        cohorts(DATA, 4, 2, 1),
        method.client.phases[0],
        lambda m: torch.optim.SGD(m.parameters(), 0.3),
        seed=1,
    )
    close(run.server, expected)


def test_local_is_each_client_alone() -> None:
    model = Logits().double()
    method = methods.local(local=Phase(optimizer=sgd(0.3), batch_size=4))
    run = simulate(model, method, DATA, rounds=4, cohort=3, seed=6).last
    assert run.server == {}
    states = [model.state_dict() for _ in range(len(DATA))]
    for number, clients in enumerate(cohorts(DATA, 3, 4, 6)):
        for c in clients:
            states[c] = trained(
                model,
                states[c],
                DATA,
                c,
                method.client.phases[0],
                lambda m: torch.optim.SGD(m.parameters(), 0.3),
                6,
                number,
            )
    kept = run.private.read(range(len(DATA)))
    for c, state in enumerate(states):
        close({n: v[c] for n, v in kept.items()}, state)
    assert len(rows_of(DATA, 0)) == 5


def test_furl_that_cannot_move_its_vectors_is_fedavg() -> None:
    """A rate of 0 for the user vector, at zeros: FedAvg on the model without it."""

    class Without(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.linear.load_state_dict(Logits().linear.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    frozen = methods.furl(
        "user", private_init=0.0, local=Phase(optimizer=sgd(0.3, rates={"user": 0.0}), batch_size=4)
    )
    one = simulate(Logits().double(), frozen, DATA, rounds=4, cohort=4, seed=7)
    two = simulate(
        Without().double(),
        methods.fedavg(local=Phase(optimizer=sgd(0.3), batch_size=4)),
        DATA,
        rounds=4,
        cohort=4,
        seed=7,
    )
    close(one.server, two.server, atol=1e-14)
    assert float(one.private.read(range(6))["user"].abs().max()) == 0
    assert one.evaluate() == pytest.approx(two.evaluate())


@pytest.mark.parametrize("training", [True, False])
def test_the_model_itself_is_not_changed(training: bool) -> None:
    model = Noisy(dropout=0.3).train(training)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    simulate(model, methods.furl("user"), classes(kind="f4"), rounds=2, cohort=3)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert model.training == model.norm.training == training
    assert all(p.grad is None for p in model.parameters())


def test_numpy_numbers_are_as_good_as_pythons() -> None:
    one = simulate(Logits(), methods.fedavg(), DATA, rounds=2, cohort=3, seed=4)
    two = simulate(
        Logits(),
        methods.fedavg(),
        DATA,
        rounds=np.int64(2),
        cohort=np.int32(3),
        seed=np.int64(4),  # type: ignore[arg-type]
    )
    assert all(torch.equal(one.server[n], two.server[n]) for n in one.server)
    assert Net(Logits()).initial().keys() == one.server.keys()
