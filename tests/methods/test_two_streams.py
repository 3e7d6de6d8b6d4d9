"""FedMMD and PFL-DA: numbers by hand, reductions as equalities, and each once more in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.declared import declared
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods.fedfusion import FusionLoss
from fedkeep.methods.fedmmd import TwoStreams
from fedkeep.methods.pfl_da import AddGate, MixtureLoss, mixed_log_probabilities
from fedkeep.methods.terms import l2_penalty
from tests.engines.reference import close
from tests.methods.parts import Normal, Parts, State, Words, compare, descend, linear, plain_rounds, trained
from tests.methods.test_dependence import kernel
from tests.tiny import bits, classes, same_bits

DATA = classes()
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
WHOLE = Phase(batch_size=50, optimizer=sgd(0.3))


def h(w: State, batch: State, prefix: str = "") -> Tensor:
    return torch.tanh(linear(w, f"{prefix}encoder", batch["x"]))


# --- FedMMD


def test_fedmmd_without_its_term_is_fedavg() -> None:
    fedavg = trained(methods.fedavg(local=LOCAL)).server
    assert same_bits(trained(methods.fedmmd(0, local=LOCAL)).server, fedavg)
    assert not same_bits(trained(methods.fedmmd(5.0, local=LOCAL)).server, fedavg)
    # At the first mini-batch of a round both streams are one, where MMD² has its minimum.
    close(
        trained(methods.fedmmd(5.0, local=WHOLE)).server,
        trained(methods.fedavg(local=WHOLE)).server,
        atol=1e-8,
    )


def test_fedmmd_equals_plain_pytorch() -> None:
    method = methods.fedmmd(0.7, local=LOCAL)

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            x, y = h(w, batch), h(received, batch)
            ce = nn.functional.cross_entropy(linear(w, "classifier", x), batch["label"])
            n, both = len(x), torch.cat([x, y])
            distance = (both[:, None] - both[None]).pow(2).sum(-1)
            scale = float(distance.detach().sum()) / (2 * n * (2 * n - 1)) + 1e-8
            k = sum(
                (torch.exp(-distance / (m * scale)) for m in (0.25, 0.5, 1, 2, 4)), torch.zeros(()).double()
            )
            return ce + 0.7 * (k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()) * (n > 1)

        return descend(state, [""], batches, loss, 0.2, 0.9)

    compare(trained(method), *plain_rounds(DATA, method, Parts().double().state_dict(), train))


def test_the_kernel_of_the_reference() -> None:
    x = torch.tensor([[0.0], [1.0]]).double()
    assert float(kernel(x, (1.0,))[0, 1]) == pytest.approx(math.exp(-1))


def test_fedmmd_leaves_received_statistics_alone() -> None:
    plain, pulled = (
        trained(m, Normal(), rounds=1).server
        for m in (methods.fedavg(local=WHOLE), methods.fedmmd(3.0, local=WHOLE))
    )
    close({n: plain[n] for n in plain if "running" in n}, pulled, atol=1e-15)


# --- PFL-DA


def test_the_mixture_by_hand() -> None:
    """p_G = (3/4, 1/4), p_k = (1/2, 1/2), α = 3/4: 0.75 · 0.75 + 0.25 · 0.5 = 0.6875."""
    net = Net(AddGate()(Parts(1, 1, 2).double()))
    zero = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params = {
        **zero,
        "classifier.bias": torch.tensor([math.log(3), 0.0]).double(),
        "gate.bias": torch.tensor([math.log(3)]).double(),
    }
    batch = {"x": torch.ones(1, 1).double(), "label": torch.tensor([0])}
    assert mixed_log_probabilities(net, params, batch).exp()[0].tolist() == pytest.approx([0.6875, 0.3125])
    assert float(MixtureLoss()(net, params, batch, {})) == pytest.approx(-math.log(0.6875), abs=1e-7)
    assert float(
        mixed_log_probabilities(net, {**params, "gate.bias": zero["gate.bias"]}, batch)[0, 0].exp()
    ) == pytest.approx(0.625)


def test_a_closed_gate_trains_one_model_alone() -> None:
    net = Net(AddGate()(Parts().double()))
    batch = {"x": torch.randn(5, 3, dtype=torch.float64), "label": torch.tensor([0, 1, 2, 0, 1])}
    for bias, live, still in ((60.0, "", "own."), (-60.0, "own.", "")):
        params = {n: v.requires_grad_() for n, v in net.initial().items()}
        params["gate.bias"] = torch.tensor([bias], dtype=torch.float64)
        value = MixtureLoss()(net, params, batch, {})
        names = [f"{p}{n}" for p in (live, still) for n in Parts().state_dict()]
        slopes = dict(zip(names, torch.autograd.grad(value, [params[n] for n in names]), strict=True))
        plain = torch.autograd.grad(
            nn.functional.cross_entropy(
                net({n: params[f"{live}{n}"] for n in Parts().state_dict()}, batch), batch["label"]
            ),
            [params[f"{live}{n}"] for n in Parts().state_dict()],
        )
        for n, expected in zip(Parts().state_dict(), plain, strict=True):
            torch.testing.assert_close(slopes[f"{live}{n}"], expected, rtol=0, atol=1e-12)
            assert float(slopes[f"{still}{n}"].abs().max()) < 1e-12


def test_pfl_da_equals_plain_pytorch() -> None:
    method = methods.pfl_da(local=LOCAL)
    initial = AddGate()(Parts().double()).state_dict()

    def probabilities(w: State, batch: State) -> Tensor:
        found = h(w, batch)
        general = linear(w, "classifier", found).softmax(1)
        own = linear(w, "own.classifier", h(w, batch, "own.")).softmax(1)
        alpha = torch.sigmoid(linear(w, "gate", found))
        return alpha * general + (1 - alpha) * own

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            return -probabilities(w, batch).gather(1, batch["label"][:, None]).log().mean()

        return descend(state, [""], batches, loss, 0.2, 0.9)

    run = trained(method)
    server, own = plain_rounds(DATA, method, initial, train)
    compare(run, server, own)
    assert set(own[0]) == {n for n in initial if n.startswith(("own.", "gate."))}
    batch = DATA.batch(np.arange(DATA.rows(1, "test").start, DATA.rows(1, "test").stop))
    expected = -probabilities({**server, **own[1]}, batch).gather(1, batch["label"][:, None]).log().mean()
    assert run.evaluate(clients=["user-1"])["loss"] == pytest.approx(float(expected), abs=1e-9)
    general = nn.functional.cross_entropy(linear(server, "classifier", h(server, batch)), batch["label"])
    assert run.evaluate(clients=["user-1"], stage="shared")["loss"] == pytest.approx(float(general), abs=1e-9)


def test_the_gate_starts_even_and_nothing_of_the_private_model_leaves() -> None:
    module = AddGate()(Parts())
    assert all(bits(v) == bits(torch.zeros_like(v)) for n, v in module.state_dict().items() if "gate" in n)
    names = module.state_dict()
    split = methods.pfl_da().split
    assert set(split.federated(names)) == set(Parts().state_dict())
    assert declared(AddGate()(Words())).lookup == {"embedding.weight": "text", "own.embedding.weight": "text"}


# --- what every one of these terms says of itself


@pytest.mark.parametrize("build", [TwoStreams, FusionLoss, MixtureLoss])
def test_tables_stay_local_unless_the_loss_reads_parameters(build: Any) -> None:
    assert not build().reads_parameters
    assert not build().reads_received
    assert build(loss=l2_penalty("*")).reads_parameters
    assert build(loss=methods.fedprox().client.phases[0].loss).reads_received


@pytest.mark.parametrize("name", ["fedmmd", "fedfusion", "pfl_da"])
def test_a_model_whose_steps_fail_is_refused(name: str) -> None:
    class Beheaded(Parts):
        head = None  # type: ignore[assignment]

    with pytest.raises(MethodError, match="^The model's forward cannot be computed"):
        simulate(Beheaded().double(), methods.METHODS[name](), DATA, rounds=1)
    with pytest.raises(MethodError, match="^lam must be at least 0; got -1.0"):
        methods.fedmmd(-1)
