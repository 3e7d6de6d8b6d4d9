"""ASP-MTL, and mini-batches of one client each: numbers by hand, and centralised training in plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, Phase, adam, declare, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.engines.centralised import WithClient
from fedkeep.methods.asp_mtl import (
    AddPrivateModel,
    AdversarialLoss,
    PrivateModel,
    orthogonality,
    predict_task,
    reversed_gradient,
)
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import cross_entropy, l2_penalty
from fedkeep.models import TextClassifier
from tests.engines.reference import close, rows_of
from tests.methods.parts import Parts, State, Words, linear
from tests.refusals import raises
from tests.tiny import Noisy, classes, everyone, same_bits, texts

DATA = classes(counts=(5, 9, 3, 1))
TEXTS = texts(counts=(9, 4, 12), vocabulary=300)
CLIENTS = list(range(len(DATA)))


# --- by hand


def test_the_reversed_gradient() -> None:
    x = torch.tensor([0.1, -3.0], requires_grad=True)
    out = reversed_gradient(x)
    assert torch.equal(out, x)
    (slope,) = torch.autograd.grad((out * torch.tensor([1.0, 5.0])).sum(), [x])
    assert slope.tolist() == [-1.0, -5.0]


def test_orthogonality_by_hand() -> None:
    """Rows of length 1: s = (1, 0), (0, 1); p = (0.6, 0.8), (1, 0): SᵀP = [[0.6, 0.8], [1, 0]], squares sum to 2."""
    s, p = torch.tensor([[2.0, 0.0], [0.0, 3.0]]).double(), torch.tensor([[3.0, 4.0], [0.5, 0.0]]).double()
    assert float(orthogonality(s, p)) == pytest.approx(2.0, abs=1e-14)
    assert float(orthogonality(s, p, torch.tensor([1.0, 0.0]))) == pytest.approx(1.0, abs=1e-14)
    assert float(orthogonality(s[:1], torch.tensor([[0.0, 7.0]]).double())) == pytest.approx(1.0, abs=1e-14)
    assert float(orthogonality(s, 0 * p)) == 0


def test_the_whole_loss_by_hand() -> None:
    """Zero weights: logits (ln 3, 0), told (0, ln 3) of client 0 and tanh(1) as both features, one each."""
    net = Net(AddPrivateModel(2)(Parts(1, 1, 2).double()))
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params["private.classifier.bias"] = torch.tensor([math.log(3), 0.0], dtype=torch.float64)
    params["discriminator.bias"] = torch.tensor([0.0, math.log(3)], dtype=torch.float64)
    params["encoder.bias"] = params["private.encoder.bias"] = torch.ones(1).double()
    batch = {"x": torch.ones(1, 1).double(), "label": torch.tensor([0]), "client": torch.tensor([0])}
    value = float(AdversarialLoss(adversarial=0.5, difference=0.25)(net, params, batch, {}))
    assert value == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4) + 0.25, abs=1e-14)
    del batch["client"]  # a client alone
    value = float(AdversarialLoss(adversarial=0.5, difference=0.0)(net, params, batch, {}))
    assert value == pytest.approx(math.log(4 / 3), abs=1e-14)


def test_encoder_and_discriminator_pull_against_each_other() -> None:
    net = Net(AddPrivateModel(4)(Parts().double()))
    batch = {
        "x": torch.randn(6, 3).double(),
        "label": torch.tensor([0, 1, 2] * 2),
        "client": torch.full((6,), 2),
    }
    params = {n: v.requires_grad_() for n, v in net.initial().items()}
    names = ["encoder.weight", "discriminator.weight"]
    slopes = [
        torch.autograd.grad(
            AdversarialLoss(adversarial=a, difference=0.0)(net, params, batch, {}),
            [params[n] for n in names],
            allow_unused=True,
        )
        for a in (0.5, 0.0)
    ]
    told = linear(params, "discriminator", torch.tanh(linear(params, "encoder", batch["x"])))
    plain = torch.autograd.grad(
        nn.functional.cross_entropy(told, batch["client"]), [params[n] for n in names]
    )
    torch.testing.assert_close(slopes[0][0] - slopes[1][0], -0.5 * plain[0])
    torch.testing.assert_close(slopes[0][1], 0.5 * plain[1])
    assert slopes[1][1] is None


# --- what is added


def test_what_is_added_is_new_and_depends_on_the_model_alone() -> None:
    torch.manual_seed(0)
    model = TextClassifier(300, 3, embedding_dim=6, hidden=4, mlp=5)
    build = AddPrivateModel(3)
    wide = build(model)
    shapes = {n: tuple(v.shape) for n, v in wide.state_dict().items() if n not in model.state_dict()}
    assert shapes["private.classifier.0.weight"] == (5, 16)
    assert shapes["private.classifier.2.weight"] == (3, 5)
    assert shapes["discriminator.weight"] == (3, 8)
    assert {n for n in shapes if n.startswith("private.encoder.")} == {
        f"private.{n}" for n in model.state_dict() if n.startswith("encoder.")
    }
    assert not torch.equal(wide.private.encoder.weight_ih_l0, model.encoder.weight_ih_l0)  # type: ignore[union-attr, arg-type]
    torch.rand(2)
    assert same_bits(wide.state_dict(), build(model).state_dict())
    assert isinstance(wide.private, PrivateModel)
    methods.asp_mtl(3).check(wide)


# --- mini-batches of one client each


def test_every_mini_batch_is_one_clients_and_a_pass_uses_every_example_once() -> None:
    data = WithClient(DATA, CLIENTS)
    rows = np.concatenate([rows_of(DATA, c) for c in CLIENTS])
    phase = Phase(batch_size=4, epochs=2)
    draws = Stream(0, "pooled")
    drawn = list(batches(data, rows, phase, draws, 0, data.owners))
    assert len(drawn) == 2 * (2 + 3 + 1 + 1)
    assert all(len(set(data.owners(chosen).tolist())) == 1 for chosen in drawn)
    owners = [int(data.owners(chosen)[0]) for chosen in drawn]
    for half in (drawn[:7], drawn[7:]):
        assert sorted(np.concatenate(half).tolist()) == rows.tolist()
    assert owners[:7] != sorted(owners[:7]) or owners[7:] != sorted(owners[7:])
    some = list(batches(data, rows, phase.but(steps=9), draws, 0, data.owners))
    assert [c.tolist() for c in some] == [c.tolist() for c in drawn[:9]]


def test_a_client_that_trains_alone_has_the_same_mini_batches() -> None:
    """In federated training every mini-batch is one client's anyhow."""
    method = methods.fedavg(local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2)))
    one, two = (
        simulate(Parts().double(), method.on_client(pools=pools), DATA, rounds=2, seed=3).server
        for pools in ("clients", "examples")
    )
    assert same_bits(one, two)


def central(
    method: Method, initial: State, loss: Any, rounds: int, seed: int, rate: float, momentum: float
) -> tuple[State, list[State]]:
    """Train one model that holds every client's private values, all parameters under one optimiser."""
    private = method.split.is_private
    shared = {n: v.clone().requires_grad_() for n, v in initial.items() if not private(n)}
    own = [{n: v.clone().requires_grad_() for n, v in initial.items() if private(n)} for _ in CLIENTS]
    everything = [*shared.values(), *(v for state in own for v in state.values())]
    stepper = torch.optim.SGD(everything, rate, momentum=momentum)
    data = WithClient(DATA, CLIENTS)
    rows = np.concatenate([rows_of(DATA, c) for c in CLIENTS])
    for number in range(rounds):
        draws = Stream(seed, "pooled", number)
        for chosen in batches(data, rows, method.client.phases[0], draws, 0, data.owners):
            batch = data.batch(chosen)
            for value in everything:  # zero, not none: other clients' values move on with their momentum
                value.grad = torch.zeros_like(value)
            loss({**shared, **own[int(batch["client"][0])]}, batch).backward()
            stepper.step()
    return {n: v.detach() for n, v in shared.items()}, [{n: v.detach() for n, v in s.items()} for s in own]


def compare(run: Any, server: State, own: list[State]) -> None:
    close(run.server, server)
    kept = everyone(run.private, len(own))
    for c, state in enumerate(own):
        assert kept.keys() == state.keys()
        close({n: v[c] for n, v in kept.items()}, state)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_asp_mtl_equals_plain_pytorch(momentum: float) -> None:
    method = methods.asp_mtl(
        4, 0.5, 0.3, local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=momentum))
    )
    initial = AddPrivateModel(4)(Parts().double()).state_dict()

    def loss(w: State, batch: State) -> Tensor:
        s = torch.tanh(linear(w, "encoder", batch["x"]))
        p = torch.tanh(linear(w, "private.encoder", batch["x"]))
        task = nn.functional.cross_entropy(
            linear(w, "private.classifier", torch.cat([s, p], 1)), batch["label"]
        )
        fooled = nn.functional.cross_entropy(
            linear({n: v.detach() for n, v in w.items()}, "discriminator", s), batch["client"]
        )
        told = nn.functional.cross_entropy(linear(w, "discriminator", s.detach()), batch["client"])
        product = (s / s.norm(dim=1, keepdim=True)).T @ (p / p.norm(dim=1, keepdim=True))
        return task + 0.5 * (told - fooled) + 0.3 * product.pow(2).sum()

    run = simulate(Parts().double(), method, DATA, rounds=3, seed=3, centralised=True).last
    server, own = central(method, initial, loss, 3, 3, 0.2, momentum)
    compare(run, server, own)
    assert torch.equal(
        run.server["classifier.weight"], initial["classifier.weight"]
    )  # the model's own is not used
    assert not torch.allclose(own[0]["private.encoder.weight"], own[1]["private.encoder.weight"])
    batch = DATA.batch(np.arange(DATA.rows(1, "test").start, DATA.rows(1, "test").stop))
    found = predict_task(run.net, {**server, **own[1]}, batch)
    expected = nn.functional.cross_entropy(found, batch["label"])
    assert run.evaluate(clients=["user-1"])["loss"] == pytest.approx(float(expected))


def test_any_method_can_be_trained_centrally_by_client() -> None:
    """FedPer: private heads, one client a mini-batch (the single branch of multi-task learning)."""
    method = methods.fedper(
        "classifier.*", local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
    )
    method = method.on_client(pools="clients")

    def loss(w: State, batch: State) -> Tensor:
        h = torch.tanh(linear(w, "encoder", batch["x"]))
        return nn.functional.cross_entropy(linear(w, "classifier", h), batch["label"])

    run = simulate(Parts().double(), method, DATA, rounds=3, seed=3, centralised=True).last
    compare(run, *central(method, Parts().double().state_dict(), loss, 3, 3, 0.2, 0.9))


def test_nothing_private_and_one_client_a_batch_is_plain_training() -> None:
    method = methods.fedavg(local=Phase(batch_size=4, optimizer=sgd(0.2)))
    method = method.on_client(pools="clients")

    def loss(w: State, batch: State) -> Tensor:
        h = torch.tanh(linear(w, "encoder", batch["x"]))
        return nn.functional.cross_entropy(linear(w, "classifier", h), batch["label"])

    run = simulate(Parts().double(), method, DATA, rounds=2, seed=3, centralised=True).last
    server, _ = central(method, Parts().double().state_dict(), loss, 2, 3, 0.2, 0.0)
    close(run.server, server)


def test_local_rows_and_clients_rows_together_equal_the_whole_table() -> None:
    method = methods.asp_mtl(3, local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9)))
    runs = []
    for lookup in ({"embedding.weight": "text"}, {}):
        model = Words().double()
        declare(model, lookup=lookup)
        runs.append(simulate(model, method, TEXTS, rounds=2, seed=3, centralised=True))
    close(runs[0].server, runs[1].server, atol=1e-13)
    close(everyone(runs[0].private, 3), everyone(runs[1].private, 3), atol=1e-13)


def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    method = methods.asp_mtl(4, local=Phase(batch_size=4, optimizer=sgd(0.2, momentum=0.9)))
    settings: dict[str, Any] = {"seed": 3, "centralised": True}
    whole = simulate(Parts().double(), method, DATA, rounds=3, **settings)
    kept = simulate(Parts().double(), method, DATA, rounds=3, out=tmp_path / "run", **settings)
    assert same_bits(whole.server, kept.server)
    again = simulate(Parts().double(), method, DATA, rounds=3, out=tmp_path / "run", resume=True, **settings)
    assert same_bits(dict(sorted(whole.server.items())), dict(sorted(again.server.items())))


WANTED = (
    "'asp_mtl' trains each client's private values in mini-batches of its own (pools='clients'): that wants SGD without "
    "weight decay and bounds, losses of the model's output alone, and no momentum where phases take turns."
)


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": adam(0.1)},
        {"optimizer": sgd(0.1, weight_decay=0.1)},
        {"loss": cross_entropy() + l2_penalty("*")},
        {"loss": cross_entropy() + Proximal(0.1)},
    ],
)
def test_what_cannot_be_trained_row_by_row_is_refused(changed: dict[str, Any]) -> None:
    with raises(MethodError, text=WANTED):
        simulate(
            Parts().double(),
            methods.asp_mtl(4, local=Phase(batch_size=16, **changed)),
            DATA,
            rounds=1,
            centralised=True,
        )


def test_further_refusals() -> None:
    base = methods.asp_mtl(4)
    (phase,) = base.client.phases
    turned = base.on_client(phases=(replace(phase, optimizer=sgd(0.1, momentum=0.9)), phase), turns="batches")
    with raises(MethodError, text=WANTED):
        simulate(Parts().double(), turned, DATA, rounds=1, centralised=True)
    method = methods.fedbn("norm.*", local=Phase(batch_size=4))
    method = method.on_client(pools="clients")
    with raises(MethodError, name="norm.num_batches_tracked", method="fedbn"):
        simulate(Noisy().double(), method, DATA, rounds=1, centralised=True)


def test_more_clients_than_tasks_are_refused_by_name() -> None:
    method = methods.asp_mtl(tasks=3, local=Phase(batch_size=4, optimizer=sgd(0.1)))
    with pytest.raises(MethodError, match=r"tells tasks=3 clients apart,"):
        simulate(Parts().double(), method, DATA, rounds=1, centralised=True)
