"""From a configuration to a method and its loss."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest

from fedkeep import Phase, averaging, methods, models
from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import adam, sgd
from fedkeep.experiments.build import LossConfig, build_loss, build_method, build_model
from fedkeep.experiments.config import MethodConfig, builtin_config, parse_config
from fedkeep.methods import EarlyStopping, terms
from fedkeep.methods.augment import Augmented
from fedkeep.privacy import GaussianNoise
from tests.experiments.configs import PICTURES
from tests.refusals import raises


def method(**table: Any) -> methods.Method:
    return build_method(MethodConfig.model_validate({"kind": "furl"} | table))


def test_a_method_is_what_a_call_would_make() -> None:
    assert method() == methods.furl()
    assert method(kind="fedavg", batch_size=8) == methods.fedavg(local=Phase(batch_size=8))
    assert method(kind="local", optimizer={"learning_rate": 0.5}) == methods.local(
        local=Phase(optimizer=sgd(0.5))
    )
    built = method(
        private=["user", "head.*"],
        private_init=["normal", 0.1],
        weighting="uniform",
        clip_norm=2,
        optimizer={"learning_rate": 0.3, "rates": {"user": 1.0}},
        server_optimizer={"momentum": 0.9},
        loss={"kind": "squared_error", "label": "y", "l2": {"user": 0.5}},
    )
    loss = terms.squared_error("y") + 0.5 * terms.l2_penalty("user")
    assert built == methods.furl(
        ["user", "head.*"],
        private_init=("normal", 0.1),
        local=Phase(clip_norm=2, optimizer=sgd(0.3, rates={"user": 1.0}), loss=loss),
        server=averaging(sgd(1.0, momentum=0.9), by="uniform"),
    )


def test_what_is_not_said_of_the_server_stays_the_methods_own() -> None:
    assert method(kind="fedfusion", weighting="uniform") == methods.fedfusion(
        server=averaging(sgd(1.0, rates={"fusion.gamma": 0.1}), by="uniform")
    )
    assert method(kind="fedfusion", server_optimizer={"momentum": 0.9}) == methods.fedfusion(
        server=averaging(sgd(1.0, momentum=0.9))
    )


def test_every_method_can_have_noise_on_its_uploads() -> None:
    assert method(kind="fedavg", upload_noise=0.5) == methods.fedavg().but(upload=(GaussianNoise(0.5),))
    both = method(kind="kteps", noise=0.25, upload_noise=0.5)
    assert both.upload == (GaussianNoise(0.25), GaussianNoise(0.5))
    assert method(kind="fedavg", upload_noise=0) == methods.fedavg()


def test_adaptation() -> None:
    built = method(
        adapt={"optimizer": {"learning_rate": 2.0}, "epochs": 3, "batch_size": 4, "clip_norm": 1.0}
    )
    (phase,) = built.adapt.phases
    assert phase.optimizer == sgd(2.0)
    assert (phase.trains, phase.examples, phase.epochs, phase.batch_size, phase.clip_norm) == (
        "private",
        "all",
        3,
        4,
        1,
    )
    assert phase.loss == built.client.phases[0].loss


def test_loss() -> None:
    assert build_loss(LossConfig()) == terms.cross_entropy()
    assert build_loss(LossConfig(label="stars", smoothing=0.1)) == terms.cross_entropy("stars", smoothing=0.1)
    weighted = build_loss(LossConfig.model_validate({"class_weights": [1, 20.0]}))
    assert weighted == terms.cross_entropy(class_weights=(1.0, 20.0))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"kind": "fural"},
            "method.kind: there is no method 'fural'. Did you mean 'furl'?",
        ),
        ({"batch": 3}, "method.batch: unknown key. "),
        ({"batch_size": "3"}, "method.batch_size: wanted a whole number; got '3'."),
        ({"weighting": "none"}, "method.weighting: wanted 'examples' or 'uniform'; got 'none'."),
        (
            {"kind": "local", "server_optimizer": {}},
            "method.server_optimizer: 'local' has no server optimiser.",
        ),
    ],
)
def test_methods_that_cannot_be_made(table: dict[str, Any], message: str) -> None:
    with raises(ConfigError, said=message):
        method(**table)


def adapting(kind: str, table: dict[str, Any]) -> tuple[Phase, ...]:
    return build_method(MethodConfig.model_validate({"kind": kind, "adapt": table})).adapt.phases


def test_adaptation_of_several_phases() -> None:
    table = {"epochs": 7, "batch_size": 3, "clip_norm": 2.0, "optimizer": {"learning_rate": 0.5}}
    own, joint = adapting("mixture", table)
    usual = methods.mixture()
    for phase, before in zip((own, joint), usual.adapt.phases, strict=True):
        stop = EarlyStopping(required=False)
        assert (phase.trains, phase.examples, phase.early_stopping) == (before.trains, "all", stop)
        assert (phase.epochs, phase.batch_size, phase.clip_norm, phase.optimizer) == (7, 3, 2.0, sgd(0.5))
    stops = {**table, "early_stopping": {"every": 1, "patience": 3}}
    (tuned,) = adapting("fine_tuned", stops)
    assert tuned.early_stopping == EarlyStopping(every=1, patience=3)
    (fitted,) = adapting("fedprox", table)
    assert (fitted.trains, fitted.examples, fitted.early_stopping) == ("private", "all", None)


def test_augmented_images() -> None:
    table = {"augment": {"shift": 2, "mirror": False}, "smoothing": 0.1}
    loss = build_loss(LossConfig.model_validate(table))
    assert loss == Augmented(terms.cross_entropy(smoothing=0.1), 2, False)
    assert build_loss(LossConfig.model_validate({"augment": {}})) == Augmented(terms.cross_entropy())


@pytest.mark.parametrize("kind", ["squared_error", "a.b:c"])
def test_smoothing_is_of_classes(kind: str) -> None:
    with pytest.raises(ValueError, match="smoothing is for 'cross_entropy'"):
        LossConfig.model_validate({"kind": kind, "smoothing": 0.1})


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_smoothing_is_what_cross_entropy_takes(smoothing: float) -> None:
    with pytest.raises(ValueError, match="smoothing must be in"):
        LossConfig.model_validate({"smoothing": smoothing})


def test_the_built_in_mixture_is_the_papers() -> None:
    made = builtin_config("mixture")
    local = Phase(optimizer=adam(1e-4), epochs=3, batch_size=10)
    method = build_method(made.method)
    usual = methods.mixture(
        local=local, early_stopping=EarlyStopping()
    )  # which the paper's clients can all do
    assert (method.adapt, method.client) == (usual.adapt, usual.client)
    assert isinstance(build_model(made, PICTURES), models.MixtureOfExperts)
    assert (made.run.rounds, made.run.cohort) == (1500, 5)


LOCAL = Phase()


def plain(strength: float = 1.0, *, local: Phase = LOCAL) -> methods.Method:
    """A method of one's own; its parameter is a key of the table."""
    return methods.ditto(strength, local=local)


def silent(*, local: Phase = LOCAL):  # type: ignore[no-untyped-def]
    return methods.fedavg(local=local)


def without_phase() -> methods.Method:
    return methods.fedavg()


def wrong(*, local: Phase = LOCAL) -> methods.Method:
    raise ValueError("a rate of 3")


def nothing(*, local: Phase = LOCAL) -> methods.Method:
    return None  # type: ignore[return-value]


@pytest.fixture
def my_methods(monkeypatch: pytest.MonkeyPatch) -> str:
    here = types.ModuleType("my_methods")
    for function in (plain, silent, without_phase, wrong, nothing):
        setattr(here, function.__name__, function)
    monkeypatch.setitem(sys.modules, here.__name__, here)
    return here.__name__


def test_a_function_of_ones_own_makes_a_method(my_methods: str) -> None:
    made = method(kind=f"{my_methods}:plain", strength=0.4, batch_size=8, optimizer={"learning_rate": 0.3})
    assert made == methods.ditto(0.4, local=Phase(batch_size=8, optimizer=sgd(0.3)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"kind": "no_such_module:plain"},
            "method.kind: 'no_such_module:plain' cannot be imported: No module named ",
        ),
        (
            {"kind": "my_methods:plane"},
            "method.kind: 'my_methods:plane' cannot be imported: module 'my_methods' has no",
        ),
        (
            {"kind": "my_methods:silent"},
            "method.kind: 'my_methods:silent' is no function that says `-> fedkeep.Method`.",
        ),
        ({"kind": "os:system"}, "method.kind: 'os:system' is no function that says `-> fedkeep.Method`."),
        (
            {"kind": "my_methods:without_phase"},
            "method.kind: 'my_methods:without_phase' takes no argument `local`, ",
        ),
        (
            {"kind": "my_methods:wrong"},
            "method.kind: 'my_methods:wrong' makes no method of this table: ValueError: a rate of 3.",
        ),
        (
            {"kind": "my_methods:nothing"},
            "method.kind: 'my_methods:nothing' must return a fedkeep.Method; got a NoneType.",
        ),
        (
            {"kind": "my_methods:plain", "strenght": 1.0},
            "method.strenght: unknown key. Did you mean method.strength?",
        ),
    ],
)
def test_methods_of_ones_own_that_cannot_be_made(
    my_methods: str, table: dict[str, Any], message: str
) -> None:
    with raises(ConfigError, said=message):
        method(**table)


def test_a_term_of_ones_own_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("own_terms")
    own.ready = terms.squared_error("y")  # type: ignore[attr-defined]
    own.made = lambda label: terms.squared_error(label)  # type: ignore[attr-defined]
    own.plain = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_terms", own)

    def loss(kind: str) -> terms.Term:
        return build_loss(LossConfig.model_validate({"kind": kind, "label": "z"}))

    assert loss("own_terms:ready") == terms.squared_error("y")
    assert loss("own_terms:made") == terms.squared_error("z")
    for kind in ("own_terms:plain", "own_terms:missing", "nowhere:term"):
        with pytest.raises(ConfigError, match=r"method\.loss\.kind"):
            loss(kind)
    with pytest.raises(ConfigError, match="package.module:name"):
        parse_config('[data]\nreader = "toy"\n[method.loss]\nkind = "hinge"\n')
