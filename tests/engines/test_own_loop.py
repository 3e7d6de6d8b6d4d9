"""A module trains as its author's own loop would: hooks, closures, modes, checkpoints and inputs as PyTorch has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fedkeep import FederatedData, Phase, Run, methods, sgd, simulate
from fedkeep.core.copying import copied
from fedkeep.core.errors import ConfigError, MethodError, SplitError
from fedkeep.core.net import float_type
from tests.tiny import same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop.*_weight_norm:UserWarning"),
]

RATE, EPOCHS, ROUNDS = 0.3, 2, 2
LOCAL = Phase(batch_size=16, epochs=EPOCHS, optimizer=sgd(RATE))


def data(clients: int = 1) -> FederatedData:
    rng, rows = np.random.default_rng(0), 16 * clients
    columns = {"x": rng.standard_normal((rows, 4)), "label": rng.integers(0, 3, rows)}
    splits = (["train"] * 12 + ["test"] * 4) * clients
    return FederatedData.from_columns(np.repeat(np.arange(clients), 16), columns, splits)


class Two(nn.Module):
    """Two layers, and whatever ``more`` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
        self.more()
        self.double()

    def more(self) -> None:
        pass

    def inner(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Closure(Two):
    def more(self) -> None:
        self.run = lambda x: self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Deep(Two):
    def more(self) -> None:
        def first(x: Tensor) -> Any:
            return self.a(x)

        def second(x: Tensor, before: Callable[[Tensor], Tensor] = first) -> Any:
            return self.b(torch.tanh(before(x)))

        self.steps = {"all": [second]}

    def forward(self, x: Tensor) -> Any:
        return self.steps["all"][0](x)


class Bound(Two):
    def more(self) -> None:
        self.run = self.inner

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Partial(Two):
    def more(self) -> None:
        self.run = functools.partial(Two.inner, self)

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Listed(Two):
    def more(self) -> None:
        self.double()
        self.again = [self.a.weight]

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(x @ self.again[0].T + self.a.bias))


class LayerHook(Two):
    def more(self) -> None:
        self.a.register_forward_hook(lambda _, __, output: output * self.b.bias.sum().exp())


class RootHooks(Two):
    def more(self) -> None:
        self.register_forward_pre_hook(lambda _, given: (given[0] * 2,) if given else None)
        self.register_forward_hook(lambda _, __, output: output * 0.5)


class OwnCall(Two):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 3)


class SlopeHook(Two):
    def more(self) -> None:
        self.a.weight.register_hook(lambda slope: slope * 0.1)
        self.b.weight.register_hook(lambda slope: slope + self.b.bias.detach().sum())


class InPlace(Two):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x.mul_(3))


class Recomputed(Two):
    reentrant = False

    def block(self, hidden: Tensor) -> Any:
        return self.b(torch.tanh(hidden))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, self.a(x), use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    reentrant = True


class Spectral(Two):
    def more(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.a)


class Pruned(Two):
    """A weight that a hook computes at each call, and a tensor made before."""

    def more(self) -> None:
        prune.l1_unstructured(self.a, "weight", amount=0.5)


class Normed(Two):
    def more(self) -> None:
        nn.utils.weight_norm(self.a)


class LossFirst(Two):
    """As transformers' models, which put a loss first where labels are given."""

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        output = self.inner(x)
        return output if label is None else (nn.functional.cross_entropy(output, label), output)


class Merging(Two):
    """Adapters that are merged into a frozen weight for evaluation, in place."""

    def more(self) -> None:
        self.a.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        if mode == self.merged:
            sign = -1 if mode else 1
            self.a.weight.data += sign * (self.up.weight @ self.down.weight).data
            self.merged = not mode
        return super().train(mode)

    def inner(self, x: Tensor) -> Tensor:
        hidden = self.a(x) if self.merged else self.a(x) + self.up(self.down(x))
        return self.b(torch.tanh(hidden))


MODULES = [
    Two,
    Closure,
    Deep,
    Bound,
    Partial,
    Listed,
    LayerHook,
    RootHooks,
    OwnCall,
    SlopeHook,
    InPlace,
    Recomputed,
]
MODULES += [Reentrant, Merging, Pruned, Normed, LossFirst]


def made(kind: type[Two]) -> Two:
    torch.manual_seed(0)
    return kind()


def plainly(module: Two, given: FederatedData) -> tuple[dict[str, Tensor], float]:
    """Train a module in a loop as its author would, and return its values and its test loss."""
    train, test = (given.batch(given.split_rows(split)) for split in ("train", "test"))
    stepper = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], RATE)
    module.train()
    for _ in range(ROUNDS * EPOCHS):
        stepper.zero_grad()
        nn.functional.cross_entropy(module(train["x"].double().clone()), train["label"]).backward()
        stepper.step()
    values = {n: v.clone() for n, v in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module(test["x"].double()), test["label"])
    return values, float(loss)


def trained(module: nn.Module, engine: Any = "sequential", clients: int = 1, **settings: Any) -> Run:
    method = settings.pop("method", methods.fedavg(local=LOCAL))
    return simulate(module, method, data(clients), rounds=ROUNDS, engine=engine, seed=1, **settings)


@pytest.mark.parametrize("kind", MODULES)
def test_one_client_trains_as_the_authors_own_loop(kind: type[Two]) -> None:
    values, loss = plainly(made(kind), data())
    run = trained(made(kind))
    for name, value in run.parameters("0").items():
        torch.testing.assert_close(
            value, values[name], rtol=1e-10, atol=1e-12, msg=f"{kind.__name__}: {name}"
        )
    assert run.evaluate("test")["loss"] == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("engine", ["workers", "vectorised"])
def test_engines_agree_or_refuse_by_name(kind: type[Two], engine: str) -> None:
    if engine == "vectorised" and kind in (SlopeHook, Merging, Listed):
        with pytest.raises(ConfigError, match="vectorised"):
            trained(made(kind), engine, clients=3)
        return
    alone, other = (trained(made(kind), each, clients=3) for each in ("sequential", engine))
    for name, value in other.server.items():
        torch.testing.assert_close(value, alone.server[name], rtol=1e-9, atol=1e-11)
    assert other.evaluate("test")["loss"] == pytest.approx(alone.evaluate("test")["loss"], rel=1e-9)


@pytest.mark.parametrize("kind", [Recomputed, Reentrant, InPlace])
@pytest.mark.parametrize("method", [methods.pfedme, methods.per_fedavg, methods.apfl, methods.ditto])
def test_where_a_loss_runs_the_model_twice_too(kind: type[Two], method: Any) -> None:
    class Plain(Two):
        features, head = (lambda self, x: torch.tanh(self.a(x))), (lambda self, features: self.b(features))

    class Odd(kind, Plain):  # type: ignore[misc, valid-type]
        pass

    class Thrice(Plain):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x * 3)

    even = Thrice if kind is InPlace else Plain
    runs = [trained(made(one), clients=3, method=method(local=LOCAL)) for one in (even, Odd)]
    assert same_bits(runs[0].server, runs[1].server)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_trains_the_same(off: Any) -> None:
    with off():
        module = made(Two)
        run = trained(module)
    assert same_bits(run.server, trained(made(Two)).server)


class Cached(Two):
    """Keeps what it computed last."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(x)
        return self.last


def test_a_model_that_keeps_what_it_computed_is_copied_as_the_error_says() -> None:
    module = made(Cached)
    module(torch.ones(1, 4).double())
    with pytest.raises(MethodError, match="'last'.*None"):
        trained(module)
    module.last = None
    assert same_bits(trained(module).server, trained(made(Two)).server)


def test_the_users_own_module_stays_as_it_was() -> None:
    module = made(SlopeHook)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    trained(module)
    assert same_bits(before, module.state_dict())
    assert len(module.a.weight._backward_hooks) == 1


def test_a_copy_shares_nothing_with_its_original() -> None:
    module = made(Deep)
    copy = copied(module)
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    assert copy(torch.ones(1, 4).double()).abs().sum() > 0


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    module = made(Two)
    module.a.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(MethodError) as error:
        trained(module)
    assert error.value.facts["name"] == "a.weight"


class Teacher(Two):
    """A slow copy that follows by ``.data``, as MoCo's and BYOL's do."""

    def more(self) -> None:
        self.k = nn.Linear(4, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.k.weight.data.mul_(0.5).add_(self.a.weight.data, alpha=0.5)
        return self.b(torch.tanh(self.a(x)) + torch.tanh(self.k(x)))


class Viewed(Two):
    """Counts in a buffer through numpy."""

    def more(self) -> None:
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.count.numpy()[:] += 1
        return self.inner(x)


@pytest.mark.parametrize(("kind", "name"), [(Teacher, "k.weight"), (Viewed, "count")])
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_what_is_written_unseen_is_refused_by_name(kind: type[Two], name: str, engine: str) -> None:
    with pytest.raises(SplitError, match=name):
        trained(made(kind), engine)


class Halves(Two):
    """A frozen 16-bit factor before layers of 32 bits."""

    def more(self) -> None:
        self.factor = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)

    def double(self) -> Any:
        return self

    def forward(self, x: Tensor) -> Any:
        return self.inner((x - 1000) * self.factor.float())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inputs_are_rounded_to_few_bits_only_where_all_parameters_are() -> None:
    module = made(Halves)
    assert [float_type(m) for m in (module, made(Two), Two().bfloat16())] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]
    far = data()
    far.columns["x"] = np.asarray(far.columns["x"]) + 1000
    run = simulate(module, methods.fedavg(local=LOCAL), far, rounds=1, engine="sequential")
    test = far.batch(far.split_rows("test"))
    module.load_state_dict(run.parameters("0"))
    loss = nn.functional.cross_entropy(module(test["x"].float()), test["label"])
    assert run.evaluate("test")["loss"] == pytest.approx(float(loss), rel=1e-5)
