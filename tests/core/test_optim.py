"""The optimisers equal torch.optim step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import Optimizer, OptimizerState, adagrad, adam, sgd
from tests.refusals import raises

SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "user": (), "b": (2, 2, 2)}
STEPS = 20


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}


def slopes() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}
        for _ in range(STEPS)
    ]


def follow(
    ours: Optimizer,
    theirs: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    laid: Callable[[Tensor, int], Tensor] = lambda g, step: g.clone(),
    kind: torch.dtype = torch.float64,
    bound: float = 1e-12,
    held: Callable[[Tensor, int], Tensor] = lambda value, _: value,
) -> None:
    """Both take the same steps; ``laid`` lays out our gradients in memory, ``held`` our parameters."""
    mine, state = {n: held(v.to(kind), 0) for n, v in start().items()}, ours.init()
    leaves = {n: v.clone().requires_grad_() for n, v in start().items()}
    reference = theirs([{"params": [v], "lr": ours.rate(n)} for n, v in leaves.items()])
    for step, grads in enumerate(slopes()):
        ours.update(mine, {n: laid(g.to(kind), step) for n, g in grads.items()}, state)
        for name, value in leaves.items():
            value.grad = grads[name].clone()
        reference.step()
        for name, value in leaves.items():
            torch.testing.assert_close(mine[name].double(), value.detach(), rtol=0, atol=bound)


RATES = {"a.*": 0.03, "user": 0.5, "a.bias": 9.0}


@pytest.mark.parametrize("rates", [None, RATES], ids=["one rate", "rates"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_is_torch_sgd(momentum: float, decay: float, rates: dict[str, float] | None) -> None:
    ours = sgd(0.1, momentum=momentum, weight_decay=decay, rates=rates)
    follow(ours, lambda groups: torch.optim.SGD(groups, momentum=momentum, weight_decay=decay))


DECAYS = {"a.bias": 0.0, "a.*": 0.3, "user": 0.01}


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (partial(sgd, momentum=0.9), partial(torch.optim.SGD, momentum=0.9)),
        (adam, torch.optim.Adam),
        (partial(adam, decoupled=True), torch.optim.AdamW),
        (adagrad, torch.optim.Adagrad),
    ],
)
def test_decays_by_pattern_are_those_of_torchs_groups(make: Any, reference: Any) -> None:
    ours = make(0.1, rates=RATES, weight_decay=DECAYS)
    decays = dict(zip(SHAPES, (0.3, 0.0, 0.01, 0.0), strict=True))

    def theirs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return reference([{**g, "weight_decay": d} for g, d in zip(groups, decays.values(), strict=True)])

    follow(ours, theirs)
    with pytest.raises(ConfigError, match="weight decay pattern 'c'"):
        sgd(weight_decay={"c": 0.1}).check_patterns(list(SHAPES))
    with pytest.raises(ConfigError, match="weight_decay of 'a'"):
        sgd(weight_decay={"a": -0.1})


@pytest.mark.parametrize("rates", [None, RATES], ids=["one rate", "rates"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("decoupled", "reference"), [(False, torch.optim.Adam), (True, torch.optim.AdamW)])
def test_adam_is_torch_adam(
    decoupled: bool, reference: type[torch.optim.Optimizer], decay: float, rates: dict[str, float] | None
) -> None:
    constants: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": decay}
    ours = adam(0.01, decoupled=decoupled, rates=rates, **constants)
    assert ours.kind == ("adamw" if decoupled else "adam")
    follow(ours, lambda groups: reference(groups, **constants))


@pytest.mark.parametrize("rates", [None, RATES], ids=["one rate", "rates"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad_is_torch_adagrad(decay: float, rates: dict[str, float] | None) -> None:
    constants: dict[str, Any] = {"eps": 1e-3, "weight_decay": decay}
    make = partial(torch.optim.Adagrad, **constants)
    follow(adagrad(0.05, rates=rates, **constants), make)
    follow(adagrad(0.05, rates=rates, **constants), make, held=backwards)


def backwards(grad: Tensor, step: int) -> Tensor:
    """The same gradient, its last axis slowest in memory (at even steps)."""
    axes = list(range(grad.dim()))[::-1]
    return grad.permute(axes).contiguous().permute(axes) if step % 2 == 0 else grad.clone()


@pytest.mark.parametrize("laid", [lambda g, _: g.clone(), backwards], ids=["contiguous", "other strides"])
@pytest.mark.parametrize(("kind", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_strides_and_types_make_no_difference(
    laid: Callable[[Tensor, int], Tensor], kind: torch.dtype, bound: float
) -> None:
    """Torch's fused steps would silently take the values of other strides in a wrong order."""
    decay: dict[str, Any] = {"weight_decay": 0.01}
    follow(sgd(0.1, **decay), lambda groups: torch.optim.SGD(groups, **decay), laid, kind, bound)
    moving = {**decay, "momentum": 0.5}
    follow(sgd(0.1, **moving), lambda groups: torch.optim.SGD(groups, **moving), laid, kind, 4 * bound)
    follow(adam(0.01, **decay), lambda groups: torch.optim.Adam(groups, **decay), laid, kind, bound)
    decoupled = adam(0.01, decoupled=True, **decay)
    follow(decoupled, lambda groups: torch.optim.AdamW(groups, **decay), laid, kind, bound)


def test_parameters_of_other_strides_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go the general way, without the fused steps, each of which would take them in a wrong order."""
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, None)
    for constants in ({}, {"weight_decay": 0.01}, {"momentum": 0.5}, {"weight_decay": 0.01, "momentum": 0.5}):
        follow(sgd(0.1, **constants), partial(torch.optim.SGD, **constants), held=backwards)
    for decay in (0.0, 0.1):
        moments: dict[str, Any] = {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": decay}
        follow(adam(0.01, **moments), partial(torch.optim.Adam, **moments), held=backwards)
        follow(adam(0.01, decoupled=True, **moments), partial(torch.optim.AdamW, **moments), held=backwards)


def test_values_of_mixed_types_and_strides() -> None:
    """What the fused step does not take all of goes the general way."""
    params = {"a": torch.ones(3, 2).t(), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(2)}
    grads = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones(2)}
    ours = sgd(0.5, momentum=0.5)
    state = ours.init()
    for _ in range(2):  # 1 − 0.5 g − 0.5 (0.5 g + g)
        ours.update(params, grads, state)
    assert params["a"].tolist() == [[1.0, -0.25, -1.5], [-2.75, -4.0, -5.25]]
    assert params["b"].tolist() == params["c"].tolist() == [-0.25, -0.25]


def test_a_zero_rate_and_no_gradients_move_nothing() -> None:
    for ours in (sgd(0.0, momentum=0.9), adam(0.0)):
        params, state = start(), ours.init()
        ours.update(params, slopes()[0], state)
        ours.update(params, {}, state)
        assert all(torch.equal(params[n], v) for n, v in start().items())
        assert state.step == 2


def test_the_first_pattern_that_matches_gives_the_rate() -> None:
    ours = sgd(0.1, rates=RATES)
    assert [ours.rate(n) for n in SHAPES] == [0.03, 0.03, 0.5, 0.1]


@pytest.mark.parametrize("ours", [sgd(0.1, momentum=0.9), adam(0.01)], ids=["sgd", "adam"])
def test_a_parameter_without_a_gradient_stays_and_starts_fresh_later(ours: Optimizer) -> None:
    params, state = start(), ours.init()
    all_slopes = slopes()
    kept = params["b"].clone()
    for grads in all_slopes[:3]:
        ours.update(params, {n: g for n, g in grads.items() if n != "b"}, state)
    assert torch.equal(params["b"], kept)
    ours.update(params, all_slopes[3], state)
    alone, other = {"b": kept.clone()}, ours.init()
    ours.update(alone, {"b": all_slopes[3]["b"]}, other)
    assert torch.equal(params["b"], alone["b"])


@pytest.mark.parametrize(
    "ours", [sgd(0.1, momentum=0.9), adam(0.01), adam(0.01, decoupled=True, weight_decay=0.1)]
)
def test_a_state_saved_and_restored_goes_on_as_if_never_stopped(ours: Optimizer) -> None:
    whole, state = start(), ours.init()
    for grads in slopes():
        ours.update(whole, grads, state)
    halved, first = start(), ours.init()
    for grads in slopes()[:7]:
        ours.update(halved, grads, first)
    second = OptimizerState.from_tensors(first.tensors())
    ours.update({n: v.clone() for n, v in halved.items()}, slopes()[0], first)  # the copy owns its tensors
    for grads in slopes()[7:]:
        ours.update(halved, grads, second)
    assert second.step == STEPS
    assert all(torch.equal(halved[n], whole[n]) for n in SHAPES)


def test_the_gradients_given_are_not_changed() -> None:
    grads = slopes()[0]
    before = {n: g.clone() for n, g in grads.items()}
    ours, state, params = sgd(0.1, momentum=0.9, weight_decay=0.1), OptimizerState(), start()
    for _ in range(3):
        ours.update(params, grads, state)
    assert all(torch.equal(grads[n], before[n]) for n in SHAPES)


def test_how_many_numbers_are_kept_for_each_parameter() -> None:
    kept = [ours.moments for ours in (sgd(0.1), sgd(0.1, momentum=0.9), adagrad(0.1), adam(0.1))]
    assert kept == [0, 1, 1, 2]


def test_schedules() -> None:
    assert [sgd(schedule="constant").scale(p) for p in (0.0, 0.5, 0.9)] == [1.0, 1.0, 1.0]
    assert [sgd(schedule="linear").scale(p) for p in (0.0, 0.25, 0.75)] == [1.0, 0.75, 0.25]
    cosine = [adam(schedule="cosine").scale(p) for p in (0.0, 1 / 3, 0.5, 1.0)]
    assert cosine == pytest.approx([1.0, 0.75, 0.5, 0.0], abs=1e-15)


def test_the_schedule_scales_every_rate() -> None:
    params = {"a": torch.ones((), dtype=torch.float64), "b": torch.ones((), dtype=torch.float64)}
    ours = sgd(0.1, rates={"b": 0.4})
    ours.update(params, {n: torch.ones((), dtype=torch.float64) for n in params}, ours.init(), 0.5)
    assert (float(params["a"]), float(params["b"])) == (pytest.approx(0.95), pytest.approx(0.8))


def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion() -> None:
    with raises(ConfigError, kind="learning rate", pattern="usr", names=["linear.weight", "user"]):
        sgd(rates={"usr": 0.5}).check_patterns(["linear.weight", "user"])

    sgd(rates={"linear.*": 0.5, "user": 1.0}).check_patterns(["linear.weight", "user"])


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_numbers_out_of_range_are_refused(bad: float) -> None:
    for name in ("learning_rate", "momentum", "weight_decay"):
        with pytest.raises(ConfigError, match=f"^{name} must be (at least 0|finite); got {bad}"):
            Optimizer(**{name: bad})
    with raises(ConfigError, name="The learning rate of 'user'", got=bad):
        sgd(rates={"user": bad})


def test_unknown_words_are_refused() -> None:
    with raises(ConfigError, got="step"):
        sgd(schedule="step")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rmsprop"):
        Optimizer("rmsprop")  # type: ignore[arg-type]


def test_a_rate_that_is_a_text_is_refused() -> None:
    with raises(ConfigError, name="learning_rate", got="0.1"):
        sgd("0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize("ours", [sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.1), adagrad(0.1)])
def test_a_step_on_what_autograd_gave_is_the_same_and_leaves_autograd_on(ours: Optimizer) -> None:
    held = {"a": torch.randn(4, 3, requires_grad=True), "b": torch.randn(3, requires_grad=True)}
    other, states = {n: v.detach().clone() for n, v in held.items()}, (ours.init(), ours.init())
    for step in range(3):
        (held["a"] @ held["b"] * step).tanh().sum().backward()  # type: ignore[no-untyped-call]
        slopes = {n: v.grad for n, v in held.items() if v.grad is not None}
        ours.update(held, slopes, states[0], autograds=True)
        ours.update(other, slopes, states[1])
        assert all(torch.equal(held[n], other[n]) for n in held)
    with pytest.raises(KeyError):
        ours.update(held, {"c": torch.ones(3)}, states[0], autograds=True)
    assert torch.is_grad_enabled()
