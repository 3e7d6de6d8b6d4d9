"""Where a model ends: found by watching it, or refused in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from fedkeep.core.errors import MethodError
from fedkeep.core.heads import Head, caught, put_in
from fedkeep.split.find_head import beside_head, find_head

BATCH = {"x": torch.linspace(-1, 1, 20).reshape(5, 4), "label": torch.tensor([0, 1, 2, 0, 1])}


class Model(nn.Module):
    """A body, a head, and what a function makes of them."""

    def __init__(self, run: Callable[[Any, Tensor], Any] | None = None, **more: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        self.run = run
        for name, layer in more.items():
            setattr(self, name, layer)

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.fc1(x))

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.body(x)) if self.run is None else self.run(self, x)


class Scaled(Model):
    """A number that scales all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        return self.scale * super().forward(x)


class Prototypes(Model):
    """Its last matrix is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Any:
        return self.body(x) @ self.prototypes.T


def tied() -> nn.Module:
    model = Model(
        lambda m, x: m.decoder(m.words(x[:, 0].long().clamp_min(0))),
        words=nn.Embedding(4, 3),
        decoder=nn.Linear(3, 4),
    )
    model.decoder.weight = model.words.weight  # type: ignore[union-attr, assignment]
    return model


def frozen() -> nn.Module:
    model = Model()
    model.fc2.requires_grad_(False)
    return model


def normalised() -> nn.Module:
    model = Model()
    model.fc2 = weight_norm(model.fc2)
    return model


FOUND: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "plain": (Model, "fc2", True),
    "a sequence": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Softmax(1)),
        "2",
        False,
    ),
    "log-softmax": (lambda: Model(lambda m, x: m.fc2(m.body(x)).log_softmax(1)), "fc2", False),
    "each position": (lambda: Model(lambda m, x: m.fc2(m.body(x.unsqueeze(1)))[:, -1]), "fc2", False),
    "squeezed": (lambda: Model(lambda m, x: m.fc2(m.body(x))[:, 0]), "fc2", False),
    "a head with keywords": (lambda: Model(lambda m, x: m.fc2(input=m.body(x))), "fc2", True),
    "a skip around it": (lambda: Model(lambda m, x: m.fc2(m.body(x)) + x[:, :3]), "fc2", False),
    "a part called head": (
        lambda: Model(
            lambda m, x: m.head(m.body(x)), head=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        ),
        "head",
        True,
    ),
    "a part called head that does not end it": (
        lambda: Model(lambda m, x: m.fc2(m.head(x)), head=nn.Sequential(nn.Linear(4, 6), nn.Tanh())),
        "fc2",
        True,
    ),
    "a parametrised weight": (normalised, "fc2", True),
    "a convolution of points": (
        lambda: Model(lambda m, x: m.score(m.body(x)[:, :, None])[:, :, 0], score=nn.Conv1d(6, 3, 1)),
        "score",
        False,
    ),
    "a scale behind it": (lambda: Scaled(), "fc2", False),
    "a tuple": (lambda: Model(lambda m, x: (m.fc2(m.body(x)), None)), "fc2", True),
    "a checkpoint": (
        lambda: Model(lambda m, x: m.fc2(checkpoint(m.body, x, use_reentrant=False))),
        "fc2",
        True,
    ),
}


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.parametrize("name", FOUND)
def test_the_last_layer_with_parameters_is_found(name: str) -> None:
    make, layer, last = FOUND[name]
    model = make()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    assert find_head(model, BATCH) == Head(layer=layer, last=last)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no layer at the end": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), "linear layer"),
    "a matrix of no layer": (Prototypes, "'prototypes'"),
    "no parameters": (lambda: Model(lambda m, x: x * 2), "No parameter"),
    "one layer": (lambda: nn.Linear(4, 3), "Sequential"),
    "two heads": (
        lambda: Model(lambda m, x: torch.cat([m.fc3(m.body(x)), m.fc2(m.body(x))], 1), fc3=nn.Linear(6, 2)),
        "several heads",
    ),
    "a dict": (lambda: Model(lambda m, x: {"a": m.fc2(m.body(x)), "b": x}), "several heads"),
    "tied": (tied, "tied weights"),
    "the weight used beside": (
        lambda: Model(lambda m, x: nn.functional.linear(m.body(x), m.fc2.weight)),
        "call 'fc2'",
    ),
    "called twice": (lambda: Model(lambda m, x: m.fc2(m.body(x)) + m.fc2(m.body(2 * x))), "2 times"),
    "detached": (lambda: Model(lambda m, x: m.fc2(m.body(x).detach())), "no gradient"),
    "re-entrant checkpoint": (
        lambda: Model(lambda m, x: m.fc2(checkpoint(m.body, x, use_reentrant=True))),
        "checkpoint",
    ),
    "frozen": (frozen, "frozen"),
    "re-entrant checkpoint of all": (
        lambda: Model(
            lambda m, x: checkpoint(lambda t: m.fc2(m.body(t)), x.requires_grad_(), use_reentrant=True)
        ),
        "use_reentrant=False",
    ),
    "by chance of the position": (lambda: Model(lambda m, x: m.fc2(m.body(x).mean(0))), "first axis"),
}


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_apart_is_refused(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(MethodError, match=said) as caught_error:
        find_head(make(), BATCH)
    assert len(str(caught_error.value)) < 420


BESIDE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "two heads that are summed": (
        lambda: Model(lambda m, x: m.wide(m.body(x)) + m.fc2(m.body(x)), wide=nn.Linear(6, 3)),
        {"wide.weight", "wide.bias"},
    ),
    "a wide part": (
        lambda: Model(lambda m, x: (m.wide(x) + m.fc2(m.body(x))).log_softmax(1), wide=nn.Linear(4, 3)),
        {"wide.weight", "wide.bias"},
    ),
    "the weight used beside is frozen": (
        lambda: Model(lambda m, x: m.wide(x) + m.fc2(m.body(x)), wide=nn.Linear(4, 3).requires_grad_(False)),
        set(),
    ),
    "a skip around it": (lambda: Model(lambda m, x: (lambda h: m.fc2(h) + h[:, :3])(m.body(x))), set()),
    "a residual connection before it": (
        lambda: Model(lambda m, x: m.fc2(m.body(x) + m.short(x)), short=nn.Linear(4, 6)),
        set(),
    ),
    "a scale behind it": (Scaled, set()),
    "plain": (Model, set()),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_joins_the_output_beside_the_head_is_told(name: str) -> None:
    make, beside = BESIDE[name]
    model = make()
    head = find_head(model, BATCH)
    assert head.layer == "fc2"
    assert set(beside_head(model, BATCH, head)) == beside


def test_what_is_added_to_the_heads_output_in_place_joins_it() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        wide = model.wide(x)
        out: Tensor = model.fc2(model.body(x))
        return out.add_(wide)

    model = Model(run, wide=nn.Linear(4, 3))
    assert set(beside_head(model, BATCH, Head(layer="fc2"))) == {"wide.weight", "wide.bias"}


def test_a_named_head_is_checked() -> None:
    model = Model()
    for wanted in ("fc2", "*2"):
        assert find_head(model, BATCH, Head(layer=wanted)).layer == "fc2"
    with pytest.raises(MethodError, match="after its head"):
        find_head(model, BATCH, Head(layer="fc1"))
    with pytest.raises(MethodError, match="names no layer"):
        find_head(model, BATCH, Head(layer="decoder"))
    with pytest.raises(MethodError, match="matches"):
        find_head(model, BATCH, Head(layer="fc?"))


def test_features_are_put_in_under_transforms() -> None:
    model = Model(lambda m, x: m.fc2(m.body(x)).log_softmax(1))
    layer = model.fc2
    values = {n: torch.stack([v.detach(), 2 * v.detach()]) for n, v in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        class Call(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Tensor:
                found = caught(layer, lambda: model(x), "fc2")
                return put_in(layer, 3 * found, lambda: model(x), "fc2")

        named = {f"model.{n}": v for n, v in params.items()}
        out: Tensor = torch.func.functional_call(Call(), named, (x,))
        return out.square().sum()

    both = torch.func.vmap(torch.func.grad(loss), (0, None))(values, BATCH["x"])
    for lane in range(2):
        own = {n: v[lane].clone().requires_grad_() for n, v in values.items()}
        hidden = 3 * torch.tanh(BATCH["x"] @ own["fc1.weight"].T + own["fc1.bias"])
        wanted = (hidden @ own["fc2.weight"].T + own["fc2.bias"]).log_softmax(1).square().sum()
        for name, slope in zip(own, torch.autograd.grad(wanted, list(own.values())), strict=True):
            torch.testing.assert_close(both[name][lane], slope)


def test_features_are_caught_while_torch_exports() -> None:
    """An exception that leaves a module would confuse the exporter; the model's rest is computed in vain."""

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
            self.score = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(caught(self.body[2], partial(self.body, x), "body.2"))

    model, x = Score().eval(), torch.randn(4, 3)
    exported = torch.export.export(model, (x,), strict=False).module()
    assert torch.equal(exported(x), model(x))
    assert torch.equal(model(x), model.score(model.body[:2](x)))
