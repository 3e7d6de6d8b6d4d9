"""Options of methods, phases, terms and reductions: what is refused, and what a table of a configuration makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from fedkeep import Method, averaging, methods, sgd
from fedkeep.core.errors import ConfigError, FedkeepError, MethodError
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.methods import ClippedMean, Krum, Phase, SecureSums, TrimmedMean, WeightedMean
from fedkeep.methods.terms import cross_entropy

# What is made, an option that it refuses, and what the error says of it.
REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (Phase, {"epochs": -1}, "epochs must be at least 0; got -1"),
    (Phase, {"steps": -2}, "steps must be at least 0; got -2"),
    (Phase, {"batch_size": 0}, "batch_size must be at least 1; got 0"),
    (Phase, {"batch_size": 8.0}, "batch_size must be a whole number; got 8.0"),
    (Phase, {"epochs": "2"}, "epochs must be a whole number; got '2'"),
    (Phase, {"steps": 1.5}, "steps must be a whole number; got 1.5"),
    (Phase, {"clip_norm": 0.0}, "clip_norm must be positive; got 0.0"),
    (Phase, {"clip_norm": math.nan}, "clip_norm must be positive; got nan"),
    (Phase, {"examples": "opted"}, "examples must be 'opted_in', 'support', 'query' or 'all'; got 'opted'"),
    (cross_entropy, {"class_weights": "balanced"}, "class_weights must be numbers"),
    (cross_entropy, {"class_weights": 2.0}, "class_weights must be numbers"),
    (cross_entropy, {"class_weights": [1, -1]}, "finite and at least 0; got [1.0, -1.0]"),
    (cross_entropy, {"class_weights": [1, math.nan]}, "finite and at least 0; got [1.0, nan]"),
    (cross_entropy, {"class_weights": [1, math.inf]}, "finite and at least 0; got [1.0, inf]"),
    (cross_entropy, {"class_weights": [0, 0]}, "above 0 for one class at least; got [0.0, 0.0]"),
    (TrimmedMean, {"share": 0.5}, "share must be in [0, 0.5); got 0.5"),
    (TrimmedMean, {"share": -0.1}, "share must be in [0, 0.5); got -0.1"),
    (Krum, {"faulty": -1}, "faulty must be at least 0; got -1"),
    (Krum, {"taken": 0}, "taken must be at least 1; got 0"),
    (ClippedMean, {"bound": 0.0}, "bound must be positive; got 0.0"),
    (SecureSums, {"clip": 0.0}, "clip must be positive; got 0.0"),
    (SecureSums, {"clip": 1.0, "threshold": 0.5}, "threshold must be a share above ½ and at most 1"),
    (SecureSums, {"clip": 1.0, "bits": 16}, "bits must be 32 or 64; got 16"),
    (methods.apfl, {"alpha": 1.5}, "alpha must be in [0, 1]; got 1.5"),
    (methods.asp_mtl, {"tasks": 0}, "tasks must be at least 1; got 0"),
    (
        methods.asp_mtl,
        {"adversarial": -1},
        "adversarial must be at least 0; got -1.0",
    ),
    (methods.asp_mtl, {"difference": math.nan}, "difference must be at least 0; got nan"),
    (methods.fedala, {"most_passes": 0}, "most_passes must be at least 1; got 0"),
    (methods.fedamp, {"alpha": 0.0}, "alpha must be positive; got 0.0"),
    (methods.fedamp, {"sigma": -1.0}, "sigma must be positive; got -1.0"),
    (methods.fedamp, {"lam": -1.0}, "lam must be at least 0; got -1.0"),
    (methods.fedbabu, {"tunes": "body"}, "tunes must be 'all' or 'head'; got 'body'"),
    (methods.fedcp, {"lam": -1.0}, "lam must be at least 0; got -1.0"),
    (methods.feddbe, {"kappa": -1.0}, "kappa must be at least 0; got -1.0"),
    (methods.feddbe, {"momentum": 0.0}, "momentum must be in (0, 1]; got 0.0"),
    (methods.feddyn, {"alpha": 0}, "alpha must be positive; got 0"),
    (methods.feddyn, {"server": averaging()}, "'feddyn' counts every client alike"),
    (methods.fedpac, {"lam": -1.0}, "lam must be at least 0; got -1.0"),
    (methods.fedproto, {"lam": -1}, "lam must be at least 0; got -1.0"),
    (methods.fedproto, {"predict": "heads"}, "predict must be 'prototype' or 'head'; got 'heads'"),
    (methods.gpfl, {"lam": -1.0}, "lam must be at least 0; got -1.0"),
    (methods.ifca, {"clusters": 0}, "clusters must be at least 1; got 0"),
    (methods.ifca, {"clusters": 2.5}, "clusters must be a whole number; got 2.5"),
    (methods.ifca, {"spread": 0.0}, "spread must be positive; got 0.0"),
    (methods.ifca, {"server": averaging(sgd(1.0, momentum=0.9))}, "momentum=0.9"),
    (methods.knn_per, {"neighbours": 0}, "neighbours must be at least 1; got 0"),
    (
        methods.knn_per,
        {"weight": 1.5},
        "weight must be in [0, 1]; got 1.5",
    ),
    (methods.kteps, {"kernel": "single"}, "'mixture' or 'median'; got 'single'"),
    (methods.kteps, {"diversity": -1}, "diversity must be at least 0"),
    (methods.kteps, {"transfer": math.nan}, "transfer must be at least 0"),
    (methods.kteps, {"temperature": 0}, "temperature"),
    (methods.mixture, {"tune_global": "copy"}, "'local_copy', 'frozen' or 'gate_only'; got 'copy'"),
    (methods.mixture, {"local_init": "tuned"}, "local_init must be 'scratch' or 'finetuned'; got 'tuned'"),
    (methods.mixture, {"mix": "logits"}, "mix must be 'probability' or 'logprob'; got 'logits'"),
    (methods.moon, {"mu": -1.0}, "mu must be at least 0; got -1.0"),
    (methods.moon, {"temperature": 0.0}, "temperature must be positive; got 0.0"),
    (methods.mr_mtl, {"lam": -1.0}, "mu must be at least 0; got -1.0"),
    (methods.per_fedavg, {"order": "second"}, "order must be 'first', 'exact' or 'free'; got 'second'"),
    (methods.per_fedavg, {"rate": -1}, "rate must be at least 0; got -1.0"),
    (methods.per_fedavg, {"delta": 0}, "delta must be positive; got 0.0"),
    (methods.pfedhn, {"hidden": (3, 0)}, "hidden must be at least 1; got 0"),
    (methods.pfedhn, {"embedding": 0}, "embedding must be at least 1; got 0"),
    (methods.pfedhn, {"server": averaging()}, "'pfedhn' counts every client alike"),
    (methods.pfedme, {"lam": 0}, "lam must be positive; got 0.0"),
    (methods.pfedme, {"steps": 0}, "steps must be at least 1; got 0"),
    (methods.scaffold, {"local": Phase(optimizer=sgd(0.1, momentum=0.9))}, "momentum=0.9"),
    (methods.scaffold, {"local": Phase(optimizer=sgd(0.1, bounds={"head.*": (-1.0, 1.0)}))}, "'head.*'"),
    (methods.scaffold, {"local": Phase(clip_norm=1.0)}, "clip_norm=1.0"),
    (methods.scaffold, {"server": averaging()}, "'scaffold' counts every client alike"),
]


@pytest.mark.parametrize(("make", "options", "said"), REFUSED)
def test_options_that_make_no_sense_are_refused(
    make: Callable[..., object], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(FedkeepError) as error:
        make(**options)
    assert type(error.value) is (ConfigError if "bits" in options else MethodError)
    assert said in str(error.value)


ON_TOPIC = Phase(loss=cross_entropy("topic"))
# A configuration's table, and the method that it makes.
NAMED: list[tuple[dict[str, Any], Method]] = [
    ({"kind": "fedamp", "alpha": 0.1, "sigma": 5.0, "lam": 0.5}, methods.fedamp(0.1, 5.0, lam=0.5)),
    ({"kind": "fedbabu", "private": ["head.*"], "tunes": "head"}, methods.fedbabu(["head.*"], tunes="head")),
    (
        {"kind": "feddbe", "kappa": 50.0, "momentum": 0.1, "classifier": "out"},
        methods.feddbe(50.0, momentum=0.1, classifier="out"),
    ),
    ({"kind": "feddyn", "alpha": 0.3}, methods.feddyn(0.3)),
    (
        {"kind": "fedpac", "lam": 0.5, "head_epochs": 2, "classifier": "out", "weighting": "uniform"},
        methods.fedpac(0.5, head_epochs=2, classifier="out", server=averaging(by="uniform")),
    ),
    (
        {"kind": "ifca", "clusters": 4, "seed": 7, "weighting": "uniform"},
        methods.ifca(4, seed=7, server=averaging(by="uniform")),
    ),
    (
        {"kind": "fedcp", "lam": 1.0, "classifier": "out", "loss": {"label": "topic"}},
        methods.fedcp(1.0, classifier="out", local=ON_TOPIC),
    ),
    ({"kind": "fedproto", "lam": 0.5, "predict": "head"}, methods.fedproto(0.5, predict="head")),
    (
        {"kind": "fedrod", "classifier": "out", "label": "topic", "loss": {"label": "topic"}},
        methods.fedrod(classifier="out", label="topic", local=ON_TOPIC),
    ),
    (
        {"kind": "gpfl", "lam": 0.1, "classifier": "out", "label": "topic", "loss": {"label": "topic"}},
        methods.gpfl(0.1, classifier="out", label="topic", local=ON_TOPIC),
    ),
    ({"kind": "knn_per"}, methods.knn_per()),
    (
        {"kind": "knn_per", "neighbours": 5, "weight": 0.2, "label": "topic", "loss": {"label": "topic"}},
        methods.knn_per(5, weight=0.2, label="topic", local=ON_TOPIC),
    ),
    (
        {"kind": "moon", "mu": 5.0, "temperature": 0.2, "epochs": 3},
        methods.moon(5.0, temperature=0.2, local=Phase(epochs=3)),
    ),
    ({"kind": "mr_mtl", "lam": 0.5}, methods.mr_mtl(0.5)),
    (
        {"kind": "pfedhn", "hidden": [8, 4], "embedding": 3, "server_optimizer": {"learning_rate": 0.2}},
        methods.pfedhn((8, 4), embedding=3, server=averaging(sgd(0.2), by="uniform")),
    ),
    (
        {"kind": "scaffold", "epochs": 2, "server_optimizer": {"learning_rate": 0.5}},
        methods.scaffold(local=Phase(epochs=2), server=averaging(sgd(0.5), by="uniform")),
    ),
]


@pytest.mark.parametrize(("table", "method"), NAMED, ids=[table["kind"] for table, _ in NAMED])
def test_a_configuration_names_a_method(table: dict[str, Any], method: Method) -> None:
    assert build_method(MethodConfig.model_validate(table)) == method


@pytest.mark.parametrize("given", [{}, {"weighting": "uniform"}, {"weighting": "examples"}])
@pytest.mark.parametrize("name", ["ifca", "apfl"])
def test_a_configuration_weighs_as_the_paper_or_as_it_says(name: str, given: dict[str, Any]) -> None:
    reduce = build_method(MethodConfig(kind=name, server_optimizer=sgd(0.5), **given)).server.reduce
    mean = getattr(reduce, "mean", reduce)  # IFCA's, of each of its models
    assert mean == WeightedMean(by=given.get("weighting", "uniform"))
