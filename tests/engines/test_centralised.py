"""Centralised training equals plain PyTorch with a table of user vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, adam, methods, sgd, simulate
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.methods.terms import squared_error
from fedkeep.models import MatrixFactorization
from tests.engines.reference import close, rows_of, step, trained
from tests.methods.parts import Parts
from tests.refusals import raises
from tests.tiny import Logits, Scalar, Unsaid, classes, pairs, parts

DATA = classes(counts=(5, 9, 3, 7, 4, 6))


class Central(nn.Module):
    """The linear model with an embedding of all users."""

    def __init__(self, model: nn.Module, users: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.load_state_dict(model.linear.state_dict())  # type: ignore[union-attr]
        self.user = nn.Embedding(users, 3)
        nn.init.zeros_(self.user.weight)

    def forward(self, x: Tensor, client: Tensor) -> Tensor:
        return self.linear(x) + self.user(client)


def centralised(
    model: nn.Module,
    data: FederatedData,
    phase: Any,
    optimizer: torch.optim.Optimizer,
    rounds: int,
    seed: int,
) -> None:
    rows = np.concatenate([rows_of(data, c) for c in range(len(data))])
    for number in range(rounds):
        for chosen in batches(data, rows, phase, Stream(seed, "pooled", number), 0):
            batch = data.batch(chosen)
            client = torch.from_numpy(np.searchsorted(data.offsets, chosen, side="right") - 1)
            step(optimizer, nn.functional.cross_entropy(model(batch["x"], client), batch["label"]))


OPTIMIZERS = {
    "sgd": (sgd(0.3), lambda m: torch.optim.SGD(m.parameters(), 0.3)),
    "momentum": (sgd(0.3, momentum=0.9), lambda m: torch.optim.SGD(m.parameters(), 0.3, 0.9)),
    "adam": (adam(0.05), lambda m: torch.optim.Adam(m.parameters(), 0.05)),
    "rates": (
        sgd(0.1, momentum=0.9, rates={"user": 0.5}),
        lambda m: torch.optim.SGD(
            [{"params": m.linear.parameters()}, {"params": m.user.parameters(), "lr": 0.5}], 0.1, 0.9
        ),
    ),
}


@pytest.mark.parametrize("kind", [Logits, Unsaid])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pooled_training_is_central_training_with_a_user_table(name: str, kind: type[Logits]) -> None:
    ours, theirs = OPTIMIZERS[name]
    model = kind().double()
    method = methods.furl("user", private_init=0.0, local=Phase(optimizer=ours, batch_size=4))
    run = simulate(model, method, DATA, rounds=4, seed=9, centralised=True).last
    central = Central(model, len(DATA)).double()
    centralised(central, DATA, method.client.phases[0], theirs(central), 4, 9)
    close(run.server, {n: v.detach() for n, v in central.state_dict().items()})
    users = run.private.read(range(len(DATA)))["user"]
    torch.testing.assert_close(users, central.user.weight.detach(), rtol=0, atol=1e-10)
    assert run.rounds_per_epoch == 1
    assert run.epoch == 4


def test_without_private_parameters_it_is_plain_central_training() -> None:
    model = Logits().double()
    method = methods.fedavg(local=Phase(optimizer=adam(0.05), batch_size=8))
    run = simulate(model, method, DATA, rounds=3, seed=2, centralised=True).last
    central = Logits().double()
    stepper = torch.optim.Adam(central.parameters(), 0.05)
    rows = np.concatenate([rows_of(DATA, c) for c in range(len(DATA))])
    for number in range(3):
        for chosen in batches(DATA, rows, method.client.phases[0], Stream(2, "pooled", number), 0):
            batch = DATA.batch(chosen)
            step(stepper, nn.functional.cross_entropy(central(batch["x"]), batch["label"]))
    close(run.server, {n: v.detach() for n, v in central.state_dict().items()})


def test_one_client_pooled_is_that_client_trained_alone() -> None:
    data = DATA.select([1])
    model = Logits().double()
    method = methods.furl("user", private_init="model", local=Phase(optimizer=sgd(0.3), batch_size=4))
    run = simulate(model, method, data, rounds=1, seed=3, centralised=True)
    phase = method.client.phases[0]
    order = list(batches(data, rows_of(data, 0), phase, Stream(3, "pooled", 0), 0))
    alone = Logits().double()
    stepper = torch.optim.SGD(alone.parameters(), 0.3)
    for chosen in order:
        batch = data.batch(chosen)
        step(stepper, nn.functional.cross_entropy(alone(batch["x"]), batch["label"]))
    close(run.parameters("user-1"), {n: v.detach() for n, v in alone.state_dict().items()})
    assert trained is not None


def test_matrix_factorisation_pooled_equals_plain_pytorch() -> None:
    rng = np.random.default_rng(0)
    owner = np.repeat([f"u{k}" for k in range(4)], 6)
    data = FederatedData.from_columns(
        owner,
        {"item": rng.integers(0, 5, 24), "label": rng.integers(1, 6, 24).astype("f8")},
        parts(4, 1, 1) * 4,
        meta={"task": "regression"},
    )
    torch.manual_seed(0)
    model = MatrixFactorization(5, 2).double()
    method = methods.furl(
        ["user", "user_bias"],
        private_init="model",
        local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.05, momentum=0.5), batch_size=5),
    )
    nn.init.normal_(model.user)
    run = simulate(model, method, data, rounds=3, seed=1, centralised=True).last

    users = nn.Parameter(model.user.detach().repeat(4, 1))
    biases = nn.Parameter(model.user_bias.detach().repeat(4, 1))
    item, item_bias, mean = (
        nn.Parameter(p.detach().clone()) for p in (model.item.weight, model.item_bias.weight, model.mean)
    )
    stepper = torch.optim.SGD([users, biases, item, item_bias, mean], 0.05, 0.5)
    rows = np.concatenate([rows_of(data, c) for c in range(4)])
    for number in range(3):
        for chosen in batches(data, rows, method.client.phases[0], Stream(1, "pooled", number), 0):
            batch = data.batch(chosen)
            client = torch.from_numpy(np.searchsorted(data.offsets, chosen, side="right") - 1)
            i = batch["item"]
            predicted = mean + biases[client, 0] + item_bias[i, 0] + (users[client] * item[i]).sum(1)
            step(stepper, ((predicted - batch["label"]) ** 2).mean())
    close(
        run.server,
        {"item.weight": item.detach(), "item_bias.weight": item_bias.detach(), "mean": mean.detach()},
    )
    kept = run.private.read(range(4))
    torch.testing.assert_close(kept["user"], users.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(kept["user_bias"], biases.detach(), rtol=0, atol=1e-10)


def test_pooled_refuses_the_share_rule() -> None:
    with raises(MethodError, said="Centralised training has no aggregation, so"):
        simulate(Logits(), methods.furl("user", private_scale="fedavg"), DATA, rounds=1, centralised=True)


def half(before: methods.Kept, after: methods.Kept, share: float) -> methods.Kept:
    """Keep half of what was trained."""
    return methods.Kept(
        params={n: 0.5 * (before.params[n] + v) for n, v in after.params.items()}, state=after.state
    )


def test_pooled_refuses_an_accept_of_ones_own() -> None:
    method = methods.furl("user").on_client(accept=half)
    with pytest.raises(MethodError, match=r"^'furl' has an accept of its own, .* engine='sequential'\.$"):
        simulate(Logits(), method, DATA, rounds=1, centralised=True)


def test_pooled_refuses_phases_that_stop_early() -> None:
    """It said that no example is in the split ``valid``, where there are some."""
    own = Phase(trains="private", early_stopping=methods.EarlyStopping())
    method = methods.furl("user").on_client(phases=(own, Phase(trains="federated")))
    with pytest.raises(MethodError, match=r"^'furl' .* Set early_stopping=None"):
        simulate(Logits(), method, DATA, rounds=1, centralised=True)


@pytest.mark.parametrize("method", [methods.kteps(), methods.pfl_da()])
def test_pooled_refuses_methods_that_compute_on_features_alone(method: methods.Method) -> None:
    with raises(MethodError, said="Examples of many clients together need to"):
        simulate(Parts().double(), method, DATA, rounds=1, centralised=True)


def test_pooled_runs_are_marked_and_count_no_traffic() -> None:
    run = simulate(Logits(), methods.furl("user"), DATA, rounds=2, centralised=True)
    assert run.engine == "centralised"
    assert not any(r.split == "traffic" for r in run.history)


def test_opted_out_examples_do_not_train_a_pooled_model() -> None:
    data = classes(opted_in=True)
    other = classes(opted_in=True)
    out = ~np.asarray(other.columns["opted_in"])
    other.columns["x"][out] += 3.0
    runs = [
        simulate(
            Logits(),
            methods.furl("user", local=Phase(batch_size=4)),
            d,
            rounds=2,
            centralised=True,
            evaluate_every=0,
        )
        for d in (data, other)
    ]
    assert all(torch.equal(runs[0].server[n], runs[1].server[n]) for n in runs[0].server)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_training_that_breaks_down_is_named(on_nonfinite: Any) -> None:
    data, method = (
        pairs({"a": [(1, 1), (2, 3)]}),
        methods.fedavg(local=Phase(loss=squared_error(), optimizer=sgd(1e200))),
    )
    with raises(NonFiniteError, who="Centralised training, round 0", what="the training loss", steps=4):
        simulate(
            Scalar(),
            method.on_client(phases=(replace(method.client.phases[0], epochs=4),)),
            data,
            rounds=1,
            centralised=True,
            on_nonfinite=on_nonfinite,
        )
