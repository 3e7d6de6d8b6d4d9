"""pFedHN: an independent loop with modules and autograd, its pull-back, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedkeep import Method, Phase, averaging, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params
from fedkeep.methods.pfedhn import EMBEDDING, PullBack
from fedkeep.split import Split
from tests.engines.reference import rows_of
from tests.fitting import fit_private
from tests.methods.parts import Deep
from tests.methods.plain import DATA, State, apart, examples_of, initial, loss_of, plan, run_of, slopes_of
from tests.tiny import Rounds, classes, job, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))


class Hyper(nn.Module):
    """The hypernetwork as a module: layers, a linear output for each parameter, and an embedding of each client."""

    def __init__(self, state: Params, layers: int) -> None:
        super().__init__()
        self.shapes = {n: v.shape for n, v in initial().items()}
        self.v = nn.ParameterList(nn.Parameter(v.clone()) for v in state[EMBEDDING])
        self.layers = nn.ModuleList(self.linear(state, f"hyper/layer.{k}") for k in range(layers))
        self.outs = nn.ModuleDict(
            {n.replace(".", "_"): self.linear(state, f"hyper/out.{n}") for n in self.shapes}
        )

    @staticmethod
    def linear(state: Params, name: str) -> nn.Linear:
        bias = state[f"{name}.bias"].flatten()
        layer = nn.Linear(state[f"{name}.weight"].shape[-1], len(bias)).double()
        layer.load_state_dict({"weight": state[f"{name}.weight"].reshape(len(bias), -1), "bias": bias})
        return layer

    def forward(self, client: int) -> dict[str, Tensor]:
        z = self.v[client]
        for layer in self.layers:
            z = torch.relu(layer(z))
        return {n: self.outs[n.replace(".", "_")](z).reshape(shape) for n, shape in self.shapes.items()}

    def state(self) -> State:
        """Return the values by the names of the server's state."""
        found = {EMBEDDING: torch.stack([v.detach() for v in self.v])}
        named = {f"hyper/layer.{k}": layer for k, layer in enumerate(self.layers)}
        for name, layer in named.items():
            found |= {f"{name}.weight": layer.weight.detach(), f"{name}.bias": layer.bias.detach()}
        for n, shape in self.shapes.items():
            layer = self.outs[n.replace(".", "_")]
            found |= {f"hyper/out.{n}.weight": layer.weight.detach().reshape(*shape, -1)}
            found |= {f"hyper/out.{n}.bias": layer.bias.detach().reshape(shape)}
        return found


def plain(hyper: Hyper, momentum: float) -> None:
    """Run some rounds; the mean of all pulled back for φ, each client's own for its embedding."""
    shared = [p for n, p in hyper.named_parameters() if not n.startswith("v.")]
    stepper = torch.optim.SGD(hyper.parameters(), 0.5, momentum=momentum)
    for cohort in plan(LOCAL):
        slopes = [torch.zeros_like(p) for p in shared]
        for v in hyper.v:
            v.grad = torch.zeros_like(v)
        for k, batches in cohort.items():
            theta = hyper(k)
            y = {n: v.detach() for n, v in theta.items()}
            for batch in batches:
                g = slopes_of(y, batch)
                y = {n: v - 0.3 * g[n] for n, v in y.items()}
            less = [theta[n].detach() - y[n] for n in theta]  # −Δ, as a gradient
            *found, own = torch.autograd.grad(list(theta.values()), [*shared, hyper.v[k]], grad_outputs=less)
            slopes = [a + b / len(cohort) for a, b in zip(slopes, found, strict=True)]
            hyper.v[k].grad = own
        for p, g in zip(shared, slopes, strict=True):
            p.grad = g
        stepper.step()


@pytest.mark.parametrize(("hidden", "momentum"), [((5, 4), 0.0), ((5,), 0.9), ((), 0.0)])
def test_pfedhn_equals_a_plain_loop(hidden: tuple[int, ...], momentum: float) -> None:
    server = averaging(sgd(0.5, momentum=momentum), by="uniform")
    method = methods.pfedhn(hidden, embedding=3, local=LOCAL, server=server)
    run, start = run_of(method), run_of(method, rounds=0).state
    hyper = Hyper(start, len(hidden))
    assert apart(start, hyper.state()) == 0
    plain(hyper, momentum)
    assert apart(run.state, hyper.state()) < 1e-12
    assert min(float((run.state[n] - v).abs().max()) for n, v in start.items()) > 1e-3
    assert same_bits(run.server, initial())
    losses = [loss_of(hyper(k), examples_of(k, "test")) for k in range(len(DATA))]  # 3 test examples each
    assert run.evaluate()["loss"] == pytest.approx(float(torch.stack(losses).detach().mean()), abs=1e-12)
    for k in range(len(DATA)):
        theta = {n: v.detach() for n, v in hyper(k).items()}
        assert apart(run.parameters(DATA.ids[k]), theta) < 1e-12
        expected = float(loss_of(theta, examples_of(k, "test")))
        assert run.evaluate(clients=[f"user-{k}"])["loss"] == pytest.approx(expected, abs=1e-12)


def test_weights_start_as_those_of_a_linear_layer() -> None:
    """Uniform within 1 / √inputs of 0."""
    start = run_of(methods.pfedhn((50,), embedding=4), rounds=0).state
    for name, inputs in (("hyper/layer.0.weight", 4), ("hyper/out.body.weight.weight", 50)):
        assert 0.95 < float(start[name].abs().max()) * inputs**0.5 <= 1


def test_who_is_not_drawn_keeps_its_embedding() -> None:
    method = methods.pfedhn((5,), embedding=3, local=LOCAL)
    run, start = run_of(method, rounds=1), run_of(method, rounds=0)
    (cohort,) = plan(LOCAL, 1)
    moved = [
        k for k in range(len(DATA)) if not torch.equal(run.state[EMBEDDING][k], start.state[EMBEDDING][k])
    ]
    assert moved == sorted(cohort)


def test_a_hypernetwork_of_biases_alone_is_fedavg() -> None:
    """Outputs that see no embedding, a step of 1 for their biases: θ ← θ + mean Δ."""
    server = averaging(sgd(0.0, rates={"hyper/out.*.bias": 1.0}), by="uniform")
    ours = Rounds(job(Deep().double(), methods.pfedhn((), local=LOCAL, server=server), DATA))
    blind = {n: torch.zeros_like(v) if n.endswith(".weight") else v for n, v in ours.server.state.items()}
    ours.server = ours.server.but(state=blind)
    theirs = Rounds(job(Deep().double(), methods.fedavg(local=LOCAL, server=averaging(by="uniform")), DATA))
    for cohort in ([0, 2, 3, 5], [1, 4], [2, 3]):
        ours(cohort)
        theirs(cohort)
    found = {n: ours.server.state[f"hyper/out.{n}.bias"] for n in initial()}
    assert apart(found, theirs.server.params) < 1e-14
    assert apart(found, initial()) > 0.1


def pulled(order: list[int], parts: int) -> Params:
    """Return what the reduction makes of uploads that are made up, added in an order and in parts by blocks of 16."""
    data = classes(counts=[2] * 40)
    rounds = Rounds(job(Deep().double(), methods.pfedhn((5,), embedding=3), data))
    ids = sorted(data.ids)
    held = [PullBack().begin(rounds.server, rounds.server.params, ids) for _ in range(parts)]
    for k in order:
        draw = torch.Generator().manual_seed(k)
        trained = {n: v + torch.randn(v.shape, generator=draw, dtype=v.dtype) for n, v in initial().items()}
        held[k // 16 % parts].add(ids[k], Split().upload(rounds.server.params, trained, 1.0))
    for other in held[1:]:
        held[0].merge(other)
    found = held[0].value()
    assert found.rows[EMBEDDING].tolist() == list(range(40))
    return found.params


def test_the_order_and_the_place_of_pulling_back_change_no_bit() -> None:
    first = pulled(list(range(40)), 1)
    for order, parts in ((list(range(39, -1, -1)), 1), (list(range(40)), 3), (list(range(39, -1, -1)), 3)):
        assert same_bits(pulled(order, parts), first)


def test_a_client_gets_its_model_and_no_other_state() -> None:
    run = run_of(methods.pfedhn((5,), embedding=3, local=LOCAL))
    one, two = run.sent("user-0"), run.sent("user-1")
    assert one.state == {}
    assert one.params.keys() == initial().keys()
    assert all(not torch.equal(v, two.params[n]) for n, v in one.params.items())
    size = 8.0 * sum(v.numel() for v in initial().values())
    assert {r.value for r in run.history if r.split == "traffic"} == {size}
    with pytest.raises(MethodError, match=r"^The shared part of 'pfedhn' cannot predict alone"):
        run.evaluate(stage="shared")


def test_a_client_adapts_the_model_that_it_is_sent() -> None:
    method = methods.pfedhn((5,), embedding=3, local=LOCAL)
    tune = Phase(optimizer=sgd(0.2), epochs=1, batch_size=100)
    run = run_of(method.adapting(phases=(tune,), split=Split("*")))
    theta, own = run.sent("user-1").params, fit_private(run, "user-1", rows_of(DATA, 1))
    slopes = slopes_of(theta, examples_of(1))
    assert apart(own, {n: v - 0.2 * slopes[n] for n, v in theta.items()}) < 1e-12


def test_a_hypernetwork_that_is_too_large_is_refused_before_memory_is_taken() -> None:
    numbers = sum(p.numel() for p in Deep().parameters())
    fits = 17 * 100 + 101 * 100 + 101 * 2 + 3 * numbers  # (100, 100, 2) from an embedding of 16
    with pytest.raises(MethodError, match=r"hidden=\[100, 100, 2\].*raise limit") as error:
        run_of(methods.pfedhn(limit=fits), rounds=1)
    assert f"{17 * 100 + 2 * 101 * 100 + 101 * numbers:,}" in str(error.value)
    run_of(methods.pfedhn((100, 100, 2), limit=fits, local=LOCAL), rounds=1)
    with pytest.raises(MethodError, match=r"hidden=\[100, 100, 1\]"):
        run_of(methods.pfedhn((100, 100, 2), limit=fits - 1), rounds=1)
    with pytest.raises(MethodError, match="smaller one"):
        run_of(methods.pfedhn(limit=numbers - 1), rounds=1)


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            self.bytes = max(self.bytes, value.nbytes if isinstance(value, Tensor) else 0)
        return made


@pytest.mark.parametrize(
    ("method", "width"),
    [(methods.pfedhn(), 1_000), (methods.pfedhn((10_100, 10_100, 2)), 30)],
    ids=["outputs of a model of a million numbers", "layers before the outputs"],
)
def test_refusing_makes_nothing_larger_than_the_model(method: Method, width: int) -> None:
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 3))
    largest = max(p.nbytes for p in model.parameters())
    with Largest() as made, pytest.raises(MethodError, match="hypernetwork has"):
        simulate(model, method, classes(kind="f4"), rounds=1, engine="sequential")
    assert 0 < made.bytes <= largest
