"""The same experiment with another method: which settings go along, and what the method needs of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedkeep.core.arguments import accepted
from fedkeep.core.errors import ConfigError, FedkeepError, MethodError, NonFiniteError, raising
from fedkeep.core.net import tensors_of
from fedkeep.data import SPLITS, FederatedData
from fedkeep.data.federated import take
from fedkeep.engines.rehearsal import resolve, told_head
from fedkeep.experiments.build import (
    LOCAL,
    SERVER,
    build_method,
    build_model,
    method_maker,
    offered_methods,
    settled,
)
from fedkeep.experiments.config import Config, MethodConfig
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import Method

FEW, TRIED = 3, 4
"""Clients, and examples of each client and split, in the round that shows whether a method fits."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An experiment with one method.

    Attributes:
        config: with all that was filled in.
        note: what was filled in, for people; may be empty.
        private: what is private and how many numbers these are, for people.
    """

    config: Config
    note: str = ""
    private: str = ""


def with_method(config: Config, kind: str) -> Config:
    """Return an experiment with another method, and its own name for it.

    Loss, optimisers, passes, batches, clipping, weights of clients and protections go along as far as the method knows
    them. Options that are a method's own do not, nor how it adapts (``[method.adapt]``): there it has its defaults.

    Raises:
        ConfigError: there is no such method.
    """
    make = method_maker(kind, "--methods")
    old = config.method
    if kind == old.kind:
        return config.model_copy(update={"name": kind})
    has_server = "server" in accepted(make)
    also = LOCAL | (SERVER if has_server else {})
    of_server = set() if has_server else {"server_optimizer", "reduce", "secure"}
    left_out = set(old.options) | {"kind", "adapt"} | of_server
    table = {k: v for k, v in old.model_dump(exclude_unset=True).items() if k not in left_out}
    table |= {k: v for k, v in old.options.items() if k in also}
    return config.model_copy(
        update={"name": kind, "method": MethodConfig.model_validate({"kind": kind, **table})}
    )


def variant_of(config: Config, data: FederatedData, folder: Path | None = None) -> Variant:
    """Return an experiment as a comparison runs it: its method fits the model, and references are judged beside it.

    A method that speaks of parts that the model does not name has its head found. A round of a cohort with a few examples each is tried. Where the shared part
    alone can predict it is judged too; where clients have models of their own only after adapting, these are. A method
    that sends nothing, as local training, has no table ``privacy``.

    Args:
        config: the experiment.
        data: its data.
        folder: the folder of real data.

    Raises:
        ConfigError: method, model and data don't fit each other; the method is named.
    """
    name = config.name or config.method.kind
    # A method that wants another kind of model
    with (
        raising(
            ConfigError,
            "{name}: {why}. It does not fit the model {kind!r}.",
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            name=name,
            kind=config.model.kind,
        ),
        raising(ConfigError, "{name}: {why}", FedkeepError, name=name),
    ):
        config = settled(config, data)
        model = build_model(config, data, folder)
        method = resolve(build_method(config.method), model, data)
        if method.client.pools == "clients" and not config.run.centralised:
            raise MethodError(
                "It trains on all clients' examples in one place, each mini-batch one client's. Set run.centralised = "
                "true, and compare it with centralised runs."
            )
        module = method.made_for(model)
        found = told_head(method, model, data)
        note = f"{name}: {found}." if found else ""
        _try(config, model, method, data)
    federated = not config.run.centralised
    private = bool(method.split.personal(dict(module.state_dict())))
    later = federated and method.adapt.everyone
    own = private or method.predict is not method.predict_shared
    shared = federated and not later and own and method.predict_shared is not None
    changed: dict[str, Any] = {"run": replace(config.run, evaluate_shared=shared, evaluate_adapted=later)}
    if config.privacy is not None and not method.split.halves(module).federated(tensors_of(module)):
        changed["privacy"] = None
        note = f"{note} {name}: without [privacy], as nothing of it leaves a client.".strip()
    return Variant(config=config.model_copy(update=changed), note=note, private=_private(method, module))


def _private(method: Method, module: nn.Module) -> str:
    """Return what is private in rounds, or else once clients adapt: "head.* (15 of 1,203 numbers)"."""
    values = {n: p for n, p in module.named_parameters() if p.requires_grad}
    for split, when in ((method.split, ""), (method.adapt.split or method.split, ", after the rounds")):
        own = [v.numel() for n, v in values.items() if split.is_private(n)]
        if own:
            whose = "all" if len(own) == len(values) else ", ".join(split.private)
            return f"{whose} ({sum(own):,} of {sum(v.numel() for v in values.values()):,} numbers{when})"
    return "nothing"


def all_fitted(
    config: Config, data: FederatedData, folder: Path | None = None
) -> Iterator[tuple[str, Variant | ConfigError]]:
    """Yield every method's name with the experiment as it would have it, or why it does not fit.

    Args:
        config: the experiment; a method that it names by ``package.module:function`` is one of all.
        data: its data.
        folder: the folder of real data.

    Raises:
        ConfigError: the model cannot be made, whatever the method.
    """
    build_model(settled(config, data), data, folder)
    for kind in every_method(config):
        try:
            yield kind, variant_of(with_method(config, kind), data, folder)
        except ConfigError as error:
            yield kind, ConfigError(str(error).removeprefix(kind + ": "))


def every_method(*configs: Config) -> list[str]:
    """Return the names of all methods: those that are offered, and the configurations' own."""
    return list(dict.fromkeys([*offered_methods(), *(config.method.kind for config in configs)]))


def _try(config: Config, model: nn.Module, method: Method, data: FederatedData) -> None:
    """Run a round over a few clients with a few examples of each split, and judge it; a loss may become NaN.

    A reduction and secure sums say how many clients they need, so they are given a whole cohort.
    """
    many = config.method.reduce or config.method.secure
    trains = np.flatnonzero(data.counts("train"))[
        : config.run.cohort if many else min(config.run.cohort, FEW)
    ]
    parts = [(int(c), split, data.rows(int(c), split)[:TRIED]) for c in trains for split in SPLITS]
    few = FederatedData.from_columns(
        [data.ids[client] for client, _, rows in parts for _ in rows],
        take(data.columns, np.array([row for _, _, rows in parts for row in rows])),
        [split for _, split, rows in parts for _ in rows],
        {name: value for name, value in data.meta.items() if name not in ("traits", "best")},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fedkeep's own: the run itself says them again
        try:
            simulate(
                model,
                method,
                few,
                rounds=1,
                cohort=max(1, len(trains)),
                centralised=config.run.centralised,
                engine="sequential",
                progress=False,
                accelerate=False,
            )
        except NonFiniteError:
            return
