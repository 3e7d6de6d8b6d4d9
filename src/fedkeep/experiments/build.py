"""From a configuration to the things it names: data, model, method, simulation."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedkeep import data as data_room
from fedkeep import methods, models
from fedkeep.core.errors import ConfigError, DataError, did_you_mean
from fedkeep.core.seeds import stream
from fedkeep.data import FederatedData, readers
from fedkeep.experiments.config import Config, LossConfig, MethodConfig, check_options
from fedkeep.experiments.simulate import Run, simulate
from fedkeep.methods import METHODS, Method, Phase, terms

READERS: dict[str, Callable[..., FederatedData]] = {
    "zulip_channels": readers.zulip_channels,
    "table": readers.read_table,
    "movielens": readers.movielens,
    "huggingface": readers.huggingface,
    "saved": FederatedData.load,
    "many_user_text": data_room.many_user_text,
    "toy": data_room.toy,
}
IN_FOLDER = {"zulip_channels": "folder", "table": "path", "movielens": "path", "saved": "folder"}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "document": models.DocumentModel,
    "matrix_factorization": models.MatrixFactorization,
    "linear": models.Linear,
}


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of real data: the one given, else ``FEDKEEP_DATA``, else None."""
    if given is not None:
        return given
    named = os.environ.get("FEDKEEP_DATA")
    return Path(named) if named else None


def build_data(config: Config, folder: Path | None = None) -> FederatedData:
    """Read or make the data that a configuration names.

    Args:
        config: the configuration.
        folder: the folder of real data (``--data`` or ``FEDKEEP_DATA``); relative paths in the configuration are
            looked up there.

    Raises:
        ConfigError, DataError: an unknown reader or option, or a fault in the data.
    """
    settings = config.data
    reader = READERS.get(settings.reader)
    if reader is None:
        hint = did_you_mean(settings.reader, READERS)
        raise ConfigError(f"data.reader: there is no reader {settings.reader!r}; the readers are {sorted(READERS)}.{hint}")
    options = settings.options
    argument = IN_FOLDER.get(settings.reader)
    if argument is not None:
        options[argument] = _locate(settings.reader, options.get(argument, settings.reader), folder)
    if "seed" in inspect.signature(reader).parameters:
        options.setdefault("seed", config.seed)
    check_options("data", reader, options, set())
    made = reader(**options)
    if settings.split is not None:
        check_options("data.split", FederatedData.split_per_user, settings.split, {"self"})
        made = made.split_per_user(**{"seed": config.seed, **settings.split})
    return made


def _locate(reader: str, named: str, folder: Path | None) -> Path:
    path = Path(named)
    if path.is_absolute():
        return path
    if folder is None:
        raise DataError(
            f"The reader {reader!r} wants a folder of data. Name it with --data DIR or the variable FEDKEEP_DATA; "
            f"{named!r} is looked up in it."
        )
    return folder / path


def build_model(config: Config, data: FederatedData) -> nn.Module:
    """Make the model that a configuration names, its initial values drawn from the configuration's seed.

    Raises:
        ConfigError: an unknown kind or option, or a size that the data don't tell.
    """
    kind = config.model.kind
    make = MODELS.get(kind)
    if make is None:
        raise ConfigError(f"model.kind: there is no model {kind!r}; the models are {sorted(MODELS)}.{did_you_mean(kind, MODELS)}")
    sizes = sizes_of(data)
    wanted = inspect.signature(make).parameters
    given = {name: value for name, value in sizes.items() if name in wanted}
    check_options("model", make, {**given, **config.model.options}, set())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "model"))
        return make(**{**given, **config.model.options})


def sizes_of(data: FederatedData) -> dict[str, int]:
    """Return the sizes that the data fix: ``vocabulary``, ``classes``, ``items``, ``features``."""
    sizes = {}
    vocabulary = data.meta.get("vocabulary")
    if vocabulary is not None:
        sizes["vocabulary"] = int(vocabulary["size"] if isinstance(vocabulary, Mapping) else vocabulary)
    for name in ("classes", "items"):
        if data.meta.get(name) is not None:
            sizes[name] = int(data.meta[name])
    x = data.columns.get("x")
    if x is not None and not isinstance(x, data_room.Ragged):
        sizes["features"] = int(x.shape[1])
    return sizes


def build_method(config: MethodConfig) -> Method:
    """Make the method that a configuration names.

    Raises:
        ConfigError: an unknown kind or option.
    """
    make = METHODS.get(config.kind)
    if make is None:
        hint = did_you_mean(config.kind, METHODS)
        raise ConfigError(f"method.kind: there is no method {config.kind!r}; the methods are {sorted(METHODS)}.{hint}")
    options = config.options
    check_options("method", make, options, {"loss", "optimizer", "server_optimizer", "adapt"})
    loss = build_loss(config.loss)
    options |= {"loss": loss, "optimizer": config.optimizer.build()}
    if config.server_optimizer is not None:
        if "server_optimizer" not in inspect.signature(make).parameters:
            raise ConfigError(f"method.server_optimizer: {config.kind!r} has no server optimiser.")
        options["server_optimizer"] = config.server_optimizer.build()
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(value)
    method = make(**options)
    if config.adapt is not None:
        a = config.adapt
        phase = Phase(
            loss, "private", a.optimizer.build(), a.epochs, batch_size=a.batch_size, clip_norm=a.clip_norm, examples="all"
        )
        method = replace(method, adapt=(phase,))
    return method


def build_loss(config: LossConfig) -> methods.terms.Term:
    """Make the loss that a configuration names."""
    loss = terms.cross_entropy(config.label) if config.kind == "cross_entropy" else terms.squared_error(config.label)
    for pattern, factor in config.l2.items():
        loss = loss + factor * terms.l2_penalty(pattern)
    return loss


def run_config(
    config: Config,
    *,
    data: FederatedData | None = None,
    folder: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    text: str | None = None,
    progress: bool | None = None,
) -> Run:
    """Run a whole configuration.

    Args:
        config: the configuration.
        data: the data, where they are read already.
        folder: the folder of real data.
        out: the run's folder.
        resume: go on with the run in ``out``.
        text: the configuration's text, kept in the run's folder.
        progress: as for ``simulate``.
    """
    data = data if data is not None else build_data(config, folder)
    settings = config.run.model_dump()
    return simulate(
        build_model(config, data), build_method(config.method), data, **settings, seed=config.seed, out=out,
        resume=resume, name=config.name, config=config.model_dump(), config_text=text, progress=progress,
    )  # fmt: skip
