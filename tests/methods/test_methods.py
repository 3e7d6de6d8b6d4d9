"""Methods are values: their defaults, their reductions, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedkeep import (
    Adapt,
    Client,
    Init,
    Method,
    Optimize,
    Phase,
    Server,
    Split,
    WeightedMean,
    adam,
    averaging,
    methods,
    sgd,
)
from fedkeep.core.errors import ConfigError, MethodError, SplitError
from fedkeep.methods import METHODS, by_share, fedavg, furl, local, newest, terms
from fedkeep.methods.added_parts import PulledCopy
from fedkeep.methods.apfl import OnMixedModel
from fedkeep.methods.asp_mtl import AdversarialLoss
from fedkeep.methods.base import forward
from fedkeep.methods.fedcp import SeparatedLoss
from fedkeep.methods.feddbe import NearMean
from fedkeep.methods.feddyn import LinearTerm
from fedkeep.methods.fedfusion import FusionLoss
from fedkeep.methods.fedmmd import TwoStreams
from fedkeep.methods.fedpac import WithHeadStill
from fedkeep.methods.fedproto import NearPrototypes
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.fedrod import TwoHeads
from fedkeep.methods.gpfl import GenericAndPersonal
from fedkeep.methods.kteps import BranchLoss
from fedkeep.methods.mixture import OnOutput
from fedkeep.methods.moon import Contrast
from fedkeep.methods.per_fedavg import AfterOneStep
from fedkeep.methods.pfedme import Pulled
from fedkeep.methods.pfl_da import MixtureLoss
from fedkeep.methods.scaffold import Correction
from tests.refusals import raises
from tests.tiny import Logits

NAMES = ["user", "linear.weight", "linear.bias"]


def test_fedavg_is_the_default_of_every_field() -> None:
    assert fedavg() == Method()
    assert Method() == Method(
        name="fedavg",
        split=Split(),
        predict=forward,
        predict_shared=forward,
        extend=None,
        client=Client(
            phases=(
                Phase(
                    loss=terms.cross_entropy(),
                    trains="all",
                    optimizer=sgd(0.1),
                    epochs=1,
                    steps=None,
                    batch_size=32,
                    clip_norm=None,
                    examples="opted_in",
                ),
            ),
            turns="phases",
            accept=newest,
            keep=Init(value="model", every_round=False),
            start=None,
            finish=None,
            tables="exact",
            pools="examples",
        ),
        server=Server(
            update=Optimize(optimizer=sgd(1.0)), reduce=WeightedMean(by="examples", missing_rows="unchanged")
        ),
        adapt=Adapt(phases=(), split=None, start=None),
        upload=(),
    )


DEFAULTS: dict[str, dict[str, Any]] = {
    "asp_mtl": {"tasks": 16, "adversarial": 0.05, "difference": 0.01},
    "fedamp": {"alpha": 1.0, "sigma": 1.0, "lam": 1.0},
    "feddyn": {"alpha": 0.1},
    "fedmmd": {"lam": 0.01},
    "fedprox": {"mu": 0.01},
    "knn_per": {"neighbours": 10},
    "kteps": {"diversity": 0.01, "transfer": 0.01, "temperature": 4.0, "noise": 1e-3},
    "kteps_star": {"start": 2, "end": 150, "noise": 1e-3},
    "mixture": {"local_epochs": 200, "mixture_epochs": 200},
    "moon": {"mu": 1.0, "temperature": 0.5},
}
"""What papers and their authors' code give, or, where these leave it open, what fedkeep has settled on."""


def test_the_numbers_that_methods_begin_with() -> None:
    for name, wanted in DEFAULTS.items():
        said = inspect.signature(getattr(methods, name)).parameters
        assert {option: said[option].default for option in wanted} == wanted, name


def test_furl_is_fedavg_but_for_the_split() -> None:
    given = furl("user")
    assert given == Method(
        name="furl",
        split=Split("user"),
        client=Client(keep=Init(value="model")),
        adapt=Adapt(phases=(Phase(trains="private", epochs=10, examples="all"),), rate_decay="linear"),
    )
    assert given.client.accept is newest
    assert given.but(name="fedavg", split=Split(), client=Client(), adapt=Adapt()) == fedavg()


def test_local_keeps_everything() -> None:
    phase = Phase(examples="all")
    assert local() == Method(
        name="local",
        split=Split("*"),
        predict_shared=None,
        client=Client(phases=(phase,)),
        adapt=Adapt(phases=(phase,)),
    )


TRAINED = {
    "ditto": ("federated", 0),
    "fedrep": ("federated", 1),
    "fedrecon": ("federated", 1),
    "mixture": ("federated", 0),
    "pfedme": ("federated", 1),
    "fedpac": ("all", 1),
    "fedala": ("federated", 0),
    "mr_mtl": ("private", 0),
    "fedamp": ("private", 0),
}
LOSSES = {
    "fedprox": terms.squared_error() + Proximal(0.01),
    "apfl": terms.squared_error() + OnMixedModel(None, terms.squared_error()),
    "pfedme": Pulled(15.0),
    "per_fedavg": AfterOneStep(0.01, terms.squared_error()),
    "fedmmd": TwoStreams(loss=terms.squared_error()),
    "fedfusion": FusionLoss(terms.squared_error()),
    "fedproto": NearPrototypes(loss=terms.squared_error()),
    "fedrod": TwoHeads(loss=terms.squared_error()),
    "moon": Contrast(loss=terms.squared_error()),
    "asp_mtl": AdversarialLoss(terms.squared_error()),
    "pfl_da": MixtureLoss(terms.squared_error()),
    "kteps": BranchLoss(loss=terms.squared_error()),
    "kteps_star": BranchLoss(loss=terms.squared_error()),
    "mixture": OnOutput("global_logits", terms.squared_error()),
    "scaffold": terms.squared_error() + Correction(),
    "feddyn": terms.squared_error() + Proximal(0.1) + LinearTerm(),
    "mr_mtl": PulledCopy(terms.squared_error() + Proximal(0.1)),
    "fedamp": PulledCopy(terms.squared_error() + Proximal(1.0)),
    "gpfl": GenericAndPersonal(loss=terms.squared_error()),
    "fedcp": SeparatedLoss(loss=terms.squared_error()),
    "fedpac": WithHeadStill(loss=NearPrototypes(loss=terms.squared_error())),
    "feddbe": NearMean(loss=terms.squared_error()),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_option_reaches_the_phase_that_trains_what_leaves(name: str) -> None:
    plain = (
        name == "scaffold"
    )  # it reads the gradient from the change, so the optimiser has to be SGD, unclipped
    optimizer, clip_norm = (sgd(0.5), None) if plain else (adam(0.5), 2.0)
    method = METHODS[name](
        local=Phase(
            loss=terms.squared_error(), optimizer=optimizer, epochs=3, batch_size=7, clip_norm=clip_norm
        )
    )
    trains, number = TRAINED.get(name, ("all", 0))
    phase = method.client.phases[number]
    loss = LOSSES.get(name, terms.squared_error())
    bounds = (("alpha", (0.0, 1.0)),) if name == "apfl" else ()
    assert (phase.loss, phase.trains, phase.optimizer) == (
        loss,
        trains,
        dataclasses.replace(optimizer, bounds=bounds),
    )
    assert (phase.epochs, phase.steps, phase.batch_size, phase.clip_norm) == (3, None, 7, clip_norm)


PLAIN_MEANS = ("apfl", "fedbn", "fedrep", "mr_mtl", "per_fedavg", "pfedme")  # of their papers, as IFCA's
# These have no server of the usual kind, or wrap what they are given in records of their own: shown in their own files.
OWN_SERVERS = ("local", "fedproto", "scaffold", "feddyn", "ifca", "pfedhn", "fedamp", "feddbe", "fedpac")


@pytest.mark.parametrize("name", [n for n in METHODS if n not in OWN_SERVERS])
def test_every_method_weights_and_applies_as_told(name: str) -> None:
    server = averaging(sgd(1.0, momentum=0.9), by="uniform")
    assert server == Server(
        reduce=WeightedMean(by="uniform"), update=Optimize(optimizer=sgd(1.0, momentum=0.9))
    )
    assert METHODS[name](server=server).server == server
    assert METHODS[name]().server.reduce == WeightedMean(by="uniform" if name in PLAIN_MEANS else "examples")


def test_furl_options() -> None:
    adapt = Phase(trains="private", steps=4)
    given = furl(
        ["user", "linear.bias"],
        private_scale="fedavg",
        private_init=("normal", 0.1),
        adapt=adapt,
        server=averaging(sgd(1.0, momentum=0.9), by="uniform"),
    )
    assert given == Method(
        name="furl",
        split=Split(["user", "linear.bias"]),
        client=Client(keep=Init(value=("normal", 0.1)), accept=by_share),
        server=Server(reduce=WeightedMean(by="uniform"), update=Optimize(optimizer=sgd(1.0, momentum=0.9))),
        adapt=Adapt(phases=(adapt,), rate_decay="linear"),
    )
    with raises(MethodError, text="private_scale must be 1 or 'fedavg'; got 2."):
        furl(private_scale=2)  # type: ignore[arg-type]
    with raises(MethodError, said="FURL needs at least one private pattern;"):
        furl([])


def test_the_table_names_every_method() -> None:
    assert set(METHODS) == {
        "fedavg",
        "furl",
        "local",
        "apfl",
        "asp_mtl",
        "ditto",
        "fedbn",
        "fedfusion",
        "fedmmd",
        "fedper",
        "fedprox",
        "fedrecon",
        "fedrep",
        "fine_tuned",
        "kteps",
        "kteps_star",
        "lg_fedavg",
        "mixture",
        "per_fedavg",
        "pfedme",
        "pfl_da",
        "scaffold",
        "feddyn",
        "ifca",
        "fedbabu",
        "pfedhn",
        "fedala",
        "fedproto",
        "fedrod",
        "moon",
        "mr_mtl",
        "feddbe",
        "fedamp",
        "knn_per",
        "gpfl",
        "fedcp",
        "fedpac",
    }
    for name, build in METHODS.items():
        assert build().name == name
        assert getattr(methods, name) is build


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Phase(optimizer="sgd"),  # type: ignore[arg-type]
            "optimizer must be one of fedkeep's optimisers, e.g. fedkeep.sgd(0.1); got 'sgd'.",
        ),
        (
            lambda: Phase(loss=len),  # type: ignore[arg-type]
            "loss must be a term, e.g. fedkeep.methods.terms.cross_entropy(); got <built-in function len>.",
        ),
        (
            lambda: averaging(torch.optim.SGD),  # type: ignore[arg-type]
            (
                "optimizer must be one of fedkeep's optimisers, e.g. fedkeep.sgd(0.1); got <class "
                "'torch.optim.sgd.SGD'>."
            ),
        ),
        (
            lambda: Server(reduce="mean"),  # type: ignore[arg-type]
            "reduce must be a reduction, e.g. fedkeep.WeightedMean(); got 'mean'.",
        ),
        (lambda: Method(split="user"), "split must be a fedkeep.Split; got 'user'."),  # type: ignore[arg-type]
        (
            lambda: fedavg(server=Phase),
            "server must be a fedkeep.Server; got <class 'fedkeep.methods.phase.Phase'>.",
        ),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_another_kind(build: Callable[[], object], message: str) -> None:
    with raises(ConfigError, text=message):
        build()


def test_what_a_phase_trains() -> None:
    split = Split("user")
    assert Phase().trained_names(split, NAMES) == NAMES
    assert Phase(trains="private").trained_names(split, NAMES) == ["user"]
    assert Phase(trains="federated").trained_names(split, NAMES) == ["linear.weight", "linear.bias"]
    assert Phase(trains="linear.*").trained_names(split, NAMES) == ["linear.weight", "linear.bias"]
    assert Phase(trains=("*.bias", "user")).trained_names(split, NAMES) == ["user", "linear.bias"]
    with raises(MethodError, what="trains", pattern="haed.*"):
        Phase(trains=("user", "haed.*")).trained_names(split, NAMES)


def test_opted_out_examples_may_not_train_what_leaves() -> None:
    with raises(MethodError, method="furl", federated="linear.weight"):
        furl().on_client(phases=(Phase(examples="all"),)).check(Logits())
    with pytest.raises(MethodError, match="trains the federated 'linear.bias' on all examples"):
        furl().on_client(phases=(Phase(trains=("linear.bias",), examples="all"),)).check(Logits())
    with raises(MethodError, name="user", method="furl", federated="linear.weight"):
        furl().on_client(phases=(Phase(), Phase(trains="private", examples="all"))).check(Logits())
    furl().on_client(phases=(Phase(trains="federated"),)).check(Logits())
    local().check(Logits())


def test_check_refuses_patterns_that_match_nothing() -> None:
    with pytest.raises(SplitError, match="^The private pattern 'usr' matches no parameter of Logits"):
        furl("usr").check(Logits())
    with pytest.raises(ConfigError, match="^The learning rate pattern 'usr' matches no parameter"):
        furl(local=Phase(optimizer=sgd(0.1, rates={"usr": 1.0}))).check(Logits())
    with pytest.raises(ConfigError, match="^The learning rate pattern 'usr' matches no parameter"):
        furl(server=averaging(sgd(1.0, rates={"usr": 1.0}))).check(Logits())
    with pytest.raises(ConfigError, match="^The learning rate pattern 'usr' matches no parameter"):
        furl(adapt=Phase(trains="private", optimizer=sgd(0.1, rates={"usr": 1.0}))).check(Logits())
    with pytest.raises(SplitError, match="^The private pattern 'usr' matches no parameter of Logits"):
        fedavg().adapting(split=Split("usr")).check(Logits())
    with pytest.raises(MethodError, match="^trains='usr' matches no trainable parameter"):
        furl(adapt=Phase(trains="usr")).check(Logits())
    furl(local=Phase(optimizer=sgd(0.1, rates={"user": 1.0}))).check(Logits())


def test_a_frozen_parameter_is_not_trained() -> None:
    model = Logits()
    model.linear.requires_grad_(False)
    assert Phase().trained_names(
        Split("user"), [n for n, p in model.named_parameters() if p.requires_grad]
    ) == ["user"]
    with pytest.raises(MethodError, match="matches no trainable parameter"):
        furl().on_client(phases=(Phase(trains="linear.*"),)).check(model)
