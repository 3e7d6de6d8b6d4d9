"""APFL's share, pFedMe and Per-FedAvg: numbers by hand, reductions as equalities, and each in plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, Optimize, Phase, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods.apfl import AddShare
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.per_fedavg import AfterOneStep, halves
from fedkeep.methods.pfedme import Apart
from fedkeep.methods.terms import l2_penalty, squared_error
from fedkeep.nn import LSTM
from tests.engines.reference import close, rows_of, step
from tests.fitting import fit_private
from tests.methods.parts import Parts, State, compare, descend, linear, plain_rounds, trained
from tests.refusals import raises
from tests.tiny import Scalar, classes, everyone, pairs, same_bits, texts

DATA = classes()
TEXTS = texts(counts=(9, 4, 12), vocabulary=300)
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
BY_HAND = Phase(loss=squared_error(), optimizer=sgd(0.1))
ORDERS = ("first", "exact", "free")


def one_client(method: Method, rounds: int = 1, examples: int = 1) -> tuple[float, State]:
    run = simulate(Scalar(1.0), method, pairs({"a": [(1, 3)] * examples}), rounds=rounds).last
    return float(run.server["w"]), {n: v[0] for n, v in run.private.read([0]).items()}


def plain_loss(w: State, batch: State, prefix: str = "") -> Tensor:
    h = torch.tanh(linear(w, f"{prefix}encoder", batch["x"]))
    return nn.functional.cross_entropy(linear(w, f"{prefix}classifier", h), batch["label"])


# --- APFL


def test_the_share_by_hand() -> None:
    """(1, 3), loss (ŷ − 3)². First v = w, so α stays; then w = 1.4, v = 1.2, v̄ = 1.3: slope −3.4 · (1.2 − 1.4) = 0.68."""
    w, own = one_client(methods.apfl(0.5, local=BY_HAND))
    assert (w, float(own["own.w"]), float(own["alpha"])) == pytest.approx((1.4, 1.2, 0.5), abs=1e-14)
    w, own = one_client(methods.apfl(0.5, local=BY_HAND), rounds=2)
    assert (w, float(own["own.w"]), float(own["alpha"])) == pytest.approx((1.72, 1.37, 0.432), abs=1e-14)
    _, own = one_client(
        methods.apfl(0.5, local=BY_HAND.but(optimizer=sgd(0.1, rates={"alpha": 1.0}))), rounds=2
    )
    assert float(own["alpha"]) == 0.0  # 0.5 − 0.68 is brought back
    _, own = one_client(methods.apfl(0.5, adaptive=False, local=BY_HAND), rounds=2)
    assert set(own) == {"own.w"}


def test_the_share_is_private_and_predicts() -> None:
    run = trained(methods.apfl(0.3, local=LOCAL))
    shares = everyone(run.private, 6)["alpha"]
    assert shares.shape == (6,)
    assert shares.dtype == torch.float64
    assert not torch.equal(shares, torch.full((6,), 0.3).double())
    assert "alpha" not in run.server
    fixed = trained(methods.apfl(0.3, adaptive=False, local=LOCAL))
    still = trained(methods.apfl(0.3, local=LOCAL.but(optimizer=sgd(0.2, rates={"alpha": 0.0}))))
    assert same_bits(fixed.server, still.server)
    kept, expected = everyone(still.private, 6), everyone(fixed.private, 6)
    close({n: kept[n] for n in expected}, expected, atol=1e-15)
    with raises(MethodError, name="alpha", module="Parts"):
        AddShare(0.5)(AddShare(0.5)(Parts()))


# --- pFedMe


def test_pfedme_by_hand() -> None:
    """λ = 2, two steps of 0.1: θ 1 → 1.4 (slope −4) → 1.64 (2 (1.4 − 3) + 2 (1.4 − 1) = −2.4); w − 0.25 · 2 (1 − 1.64)."""
    method = methods.pfedme(
        2.0, steps=2, own_optimizer=sgd(0.1), local=Phase(loss=squared_error(), optimizer=sgd(0.25))
    )
    w, own = one_client(method)
    assert (w, float(own["own.w"])) == pytest.approx((1.32, 1.64), abs=1e-14)
    w, _ = one_client(method.on_server(update=Optimize(optimizer=sgd(0.5))))
    assert w == pytest.approx(1.16, abs=1e-14)
    net = Net(Scalar())
    value = Apart(2.0)(net, {"w": torch.tensor(1.0), "own.w": torch.tensor(4.0)}, {}, {})
    assert float(value) == 9.0  # ½ · 2 · 3²
    assert Apart().reads_parameters


def test_pfedme_equals_plain_pytorch() -> None:
    method = methods.pfedme(
        2.0,
        steps=3,
        own_optimizer=sgd(0.1, momentum=0.5),
        local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2)),
    )

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        w = {n: v.clone() for n, v in state.items() if not n.startswith("own.")}
        theta = {n: v.clone().requires_grad_() for n, v in state.items() if n.startswith("own.")}
        stepper = torch.optim.SGD(theta.values(), 0.1, momentum=0.5)
        for batch in batches:
            for _ in range(3):
                near = sum(((theta[f"own.{n}"] - w[n]) ** 2).sum() for n in w)
                step(stepper, (plain_loss(theta, batch, "own.") + near))
            w = {n: v - 0.2 * 2.0 * (v - theta[f"own.{n}"].detach()) for n, v in w.items()}
        return {**w, **{n: v.detach() for n, v in theta.items()}}

    initial = methods.pfedme().extend(Parts().double()).state_dict()  # type: ignore[misc]
    run = trained(method)
    server, own = plain_rounds(DATA, method, initial, train, uniform=True)
    compare(run, server, own)
    batch = DATA.batch(rows_of(DATA, 1))
    expected = float(plain_loss(own[1], batch, "own."))
    assert run.evaluate("train", clients=["user-1"])["loss"] == pytest.approx(expected, abs=1e-10)


def test_pfedme_with_one_free_step_is_local_training() -> None:
    """λ → 0: θ sees its own loss alone, and w stays."""
    run = trained(
        methods.pfedme(
            1e-12, steps=1, own_optimizer=sgd(0.2), local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))
        )
    )
    alone = trained(methods.local(local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.2))))
    mine = {n.removeprefix("own."): v for n, v in everyone(run.private, 6).items()}
    close(mine, everyone(alone.private, 6), atol=1e-9)
    close(run.server, Parts().double().state_dict(), atol=1e-9)


# --- Per-FedAvg


@pytest.mark.parametrize(("order", "expected"), [("first", 1.32), ("exact", 1.256), ("free", 1.256)])
def test_per_fedavg_by_hand(order: Any, expected: float) -> None:
    """w̃ = 1 + 0.1 · 4 = 1.4, slope there −3.2; exactly, times 1 − 0.1 · 2; β = 0.1, one example is both halves."""
    w, _ = one_client(methods.per_fedavg(0.1, order=order, local=BY_HAND))
    assert w == pytest.approx(expected, abs=1e-9)
    w, _ = one_client(methods.per_fedavg(0.1, order=order, local=BY_HAND), examples=2)
    assert w == pytest.approx(expected, abs=1e-9)


def test_halves_of_a_batch() -> None:
    batch = {"x": torch.arange(5.0), "label": torch.arange(5)}
    first, second = halves(batch)
    assert (first["x"].tolist(), second["label"].tolist()) == ([0, 2, 4], [1, 3])
    weighted = {**batch, "weight": torch.tensor([1.0, 2.0, 0.5, 0.0, 0.0])}
    first, second = halves(weighted)
    assert first["weight"].tolist() == [1.0, 0.0, 0.5, 0.0, 0.0]
    assert second["weight"].tolist() == [0.0, 2.0, 0.0, 0.0, 0.0]
    assert first["x"] is batch["x"]
    one = {"x": torch.arange(3.0), "weight": torch.tensor([1.0, 0.0, 0.0])}
    assert all(half["weight"].tolist() == [1.0, 0.0, 0.0] for half in halves(one))
    alone = {"x": torch.arange(1.0)}
    assert halves(alone) == (alone, alone)


def plain_step(order: str, w: State, batch: State, rate: float) -> State:
    """Return the meta-gradient; Hessians by differentiating twice."""
    first, second = ({n: v[k::2] for n, v in batch.items()} for k in (0, 1))
    if len(batch["label"]) == 1:
        first = second = batch
    names = list(w)
    inner = torch.autograd.grad(plain_loss(w, first), list(w.values()), create_graph=order != "first")
    moved = {
        n: (v - rate * g) if order != "first" else v - rate * g.detach()
        for (n, v), g in zip(w.items(), inner, strict=True)
    }
    return dict(zip(names, torch.autograd.grad(plain_loss(moved, second), list(w.values())), strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_per_fedavg_equals_plain_pytorch(order: Any) -> None:
    method = methods.per_fedavg(0.3, order=order, delta=1e-4, local=LOCAL)

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        for batch in batches:
            w = {n: v.clone().requires_grad_() for n, v in state.items()}
            slopes = plain_step(order, w, batch, 0.3)
            state = {n: (v - 0.2 * slopes[n]).detach() for n, v in w.items()}
        return state

    run = trained(method)
    server, _ = plain_rounds(DATA, method, Parts().double().state_dict(), train, uniform=True)
    close(run.server, server, atol=1e-6 if order == "free" else 1e-12)
    other = trained(method.on_client(phases=(replace(method.client.phases[0], loss=AfterOneStep(0.0)),)))
    assert not torch.allclose(run.server["encoder.weight"], other.server["encoder.weight"], atol=1e-4)


def test_orders_differ_as_they_should() -> None:
    first, exact, free = (trained(methods.per_fedavg(0.5, order=o, local=LOCAL)).server for o in ORDERS)  # type: ignore[arg-type]
    assert not torch.allclose(first["encoder.weight"], exact["encoder.weight"], atol=1e-3)
    torch.testing.assert_close(free["encoder.weight"], exact["encoder.weight"], rtol=0, atol=1e-3)


class Recurrent(nn.Module):
    """An LSTM over the features one after the other, on the native kernel where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = LSTM(1, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body.pooled(x.unsqueeze(-1)))


def test_exact_is_exact_through_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose gradient had no derivative of its own would give the first-order method, without an error."""
    torch.manual_seed(0)
    model = Recurrent()

    def server(order: Any) -> dict[str, Tensor]:
        return dict(trained(methods.per_fedavg(0.5, order=order, local=LOCAL), copy.deepcopy(model)).server)

    first, exact = server("first"), server("exact")
    monkeypatch.setattr("fedkeep.kernels.native.available", lambda: False)
    close(exact, server("exact"), atol=1e-12)
    assert not torch.allclose(first["body.weight_ih_l0"], exact["body.weight_ih_l0"], atol=1e-4)


def test_per_fedavg_without_its_step_is_training_on_the_second_half() -> None:
    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        second = [{n: v[1::2] if len(v) > 1 else v for n, v in batch.items()} for batch in batches]
        return descend(state, [""], second, plain_loss, 0.2)

    for order in ORDERS:
        method = methods.per_fedavg(0.0, order=order, local=LOCAL)  # type: ignore[arg-type]
        server, _ = plain_rounds(DATA, method, Parts().double().state_dict(), train, uniform=True)
        close(trained(method).server, server, atol=1e-13)


def test_whoever_predicts_takes_a_step() -> None:
    method = methods.per_fedavg(0.3, local=Phase(batch_size=50, optimizer=sgd(0.2)))
    run = trained(method)
    rows = rows_of(DATA, 1)
    expected = descend(run.server, [""], [DATA.batch(rows)], plain_loss, 0.3)
    close(fit_private(run, "user-1", rows), expected, atol=1e-13)


def test_values_without_gradients_are_the_same() -> None:
    net = Net(Parts().double())
    batch = {"x": torch.randn(6, 3).double(), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    params = {n: v.requires_grad_() for n, v in net.initial().items()}
    found = set()
    for order in ORDERS:
        term = AfterOneStep(0.3, order=order)  # type: ignore[arg-type]
        value = float(term(net, params, batch, {}).detach())
        found.add(round(value, 12))
        with torch.no_grad():
            assert float(term(net, params, batch, {})) == pytest.approx(value, abs=1e-14)
    assert len(found) == 1


def test_what_the_terms_say_of_themselves() -> None:
    assert not AfterOneStep().reads_parameters
    assert not AfterOneStep().reads_received
    assert AfterOneStep(loss=l2_penalty("*")).reads_parameters
    assert AfterOneStep(loss=Proximal(0.1)).reads_received
