"""From a configuration to the things it names: data, model, method, simulation."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn

from fedkeep import data as data_room
from fedkeep import models
from fedkeep.core.errors import ConfigError, DataError, did_you_mean, first_line
from fedkeep.core.seeds import stream
from fedkeep.data import PARTITIONS, FederatedData, ImageSet, opt_out
from fedkeep.experiments.config import Config, DataConfig, LossConfig, MethodConfig
from fedkeep.experiments.options import accepted, check_options
from fedkeep.experiments.personalization import Protocol, add_curve, check_task
from fedkeep.experiments.plugins import Offered, papers_hint
from fedkeep.experiments.readers import offered_readers
from fedkeep.experiments.run import Run
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import METHODS, Method, Optimize, Phase, WeightedMean, terms
from fedkeep.methods.augment import Augmented
from fedkeep.privacy import GaussianNoise

T = TypeVar("T")

LOCAL: dict[str, Any] = {"epochs": int, "batch_size": int, "clip_norm": float | None}
"""Keys of a method's table that its local phase is made of, beside ``loss`` and ``optimizer``."""
SERVER: dict[str, Any] = {"weighting": Literal["examples", "uniform"]}
"""Likewise of its server, beside ``server_optimizer``."""

MODELS: dict[str, type[nn.Module]] = {
    "document": models.DocumentModel,
    "bag_of_words": models.BagOfWords,
    "text_classifier": models.TextClassifier,
    "matrix_factorization": models.MatrixFactorization,
    "linear": models.Linear,
    "cnn": models.CNN,
    "cifar_cnn": models.CifarCNN,
    "fashion_cnn": models.FashionCNN,
    "mixture_of_experts": models.MixtureOfExperts,
    "gate": models.Gate,
    "confidence_gate": models.ConfidenceGate,
}


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of real data: the one given, else ``FEDKEEP_DATA``, else None."""
    if given is not None:
        return given
    named = os.environ.get("FEDKEEP_DATA")
    return Path(named) if named else None


def build_data(config: Config, folder: Path | None = None) -> FederatedData:
    """Read or make the data that a configuration names.

    Sets of images are divided among clients by ``data.partition``; data that come without a split are split per user;
    ``data.opt_out`` says last which examples stay out.

    Args:
        config: the configuration.
        folder: the folder of real data (``--data`` or ``FEDKEEP_DATA``); relative paths in the configuration are
            looked up there.

    Raises:
        ConfigError, DataError: an unknown reader or option, or a fault in the data.
    """
    settings = config.data
    made = _partitioned(settings, config.seed, read_source(config, folder))
    splits = settings.split is not None or made.bounds is None
    if splits:
        split = {"seed": config.seed, **(settings.split or {})}
        made = made.split_per_user(**check_options("data.split", made.split_per_user, split))
    if settings.opt_out is not None:
        out = check_options(
            "data.opt_out", opt_out, {"seed": config.seed, **settings.opt_out}, ("data", "where")
        )
        made = opt_out(made, **out)
    made.meta["follows_seed"] = _follows_seed(settings, made, splits)
    return made


def _follows_seed(settings: DataConfig, made: FederatedData, splits: bool) -> bool:
    """Tell whether another seed of the configuration makes or divides the data in another way; reports ask for it."""
    drawn = [settings.options] if "seed" in (made.meta.get("source") or {}) else []
    drawn += [settings.partition.options] if settings.partition is not None else []
    drawn += [settings.split or {}] if splits else []
    drawn += [settings.opt_out] if settings.opt_out is not None else []
    return any("seed" not in options for options in drawn)


def read_source(config: Config, folder: Path | None = None) -> FederatedData | ImageSet:
    """Read or make what a configuration's reader gives: data of clients, or images that belong to nobody yet.

    Raises:
        ConfigError, DataError: as for ``build_data``.
    """
    settings = config.data
    reader = _named("data.reader", "reader", settings.reader, offered_readers(), papers_hint)
    options = settings.options
    if reader.argument is not None:
        place = options.get(reader.argument, reader.place)
        if not isinstance(place, str):
            wanted = "missing" if place is None else f"wanted a path as text; got {place!r}"
            raise ConfigError(
                f"data.{reader.argument}: {wanted}. It says where in the folder of data to read."
            )
        options[reader.argument] = _located(f"The reader {settings.reader!r}", place, folder)
    if "seed" in inspect.signature(reader.read).parameters:
        options.setdefault("seed", config.seed)
    return reader.read(**check_options("data", reader.read, options))


def _partitioned(settings: DataConfig, seed: int, made: FederatedData | ImageSet) -> FederatedData:
    given = settings.partition
    if isinstance(made, FederatedData):
        if given is None:
            return made
        raise ConfigError(
            f"data.partition: the reader {settings.reader!r} gives examples that belong to clients already. Leave "
            f"the table out."
        )
    if given is None:
        raise ConfigError(
            f"data.partition: missing. The reader {settings.reader!r} gives images that belong to no client; divide "
            f"them by one of the kinds {', '.join(PARTITIONS)}."
        )
    divide = _named("data.partition.kind", "partition", given.kind, PARTITIONS)
    return divide(
        made, **check_options("data.partition", divide, {"seed": seed, **given.options}, ("images",))
    )


def _named(place: str, what: str, name: str, table: Mapping[str, T], hint: Callable[[], str] = str) -> T:
    if name not in table:
        known = f"{', '.join(table)}.{did_you_mean(name, table)}"
        raise ConfigError(f"{place}: there is no {what} {name!r}; there are {known}{hint()}")
    return table[name]


def _located(what: str, named: str, folder: Path | None) -> Path:
    path = Path(named)
    try:
        if path.is_absolute():
            return path
        if folder is None:
            raise DataError(
                f"{what} wants a folder of data. Name it with --data DIR or the variable FEDKEEP_DATA; "
                f"{str(path)!r} is looked up in it."
            )
        if not folder.is_dir():
            fault = "is no folder" if folder.exists() else "does not exist"
            raise DataError(
                f"The folder of data {folder} {fault}. Name another with --data DIR or FEDKEEP_DATA."
            )
        # --data may name the data set's own folder
        return folder if not (folder / path).exists() and folder.name == path.name else folder / path
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise DataError(f"{what}: cannot look up {named[:80]!r}: {error.strerror}.") from error


def build_model(config: Config, data: FederatedData, folder: Path | None = None) -> nn.Module:
    """Make the model that a configuration names, its initial values drawn from the configuration's seed.

    Args:
        config: the configuration.
        data: tell the model's sizes, and the vocabulary of word vectors.
        folder: the folder of real data, where ``model.word_vectors`` is looked up.

    Raises:
        ConfigError: an unknown kind or option, a size that the data don't tell, or word vectors that don't fit.
        DataError: a fault in the file of word vectors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "model"))
        sizes = sizes_of(data)
        _check_loss(config.method.loss, data)
        _check_sizes(config.model.options, sizes)
        made = _model("model", config.model.kind, config.model.options, sizes)
    if config.model.word_vectors is not None:
        path = _located("model.word_vectors", config.model.word_vectors, folder)
        start_from_vectors(made, path, data, config.seed)
    return made


def _check_loss(config: LossConfig, data: FederatedData) -> None:
    """Raise ConfigError where the loss wants classes and the data hold numbers, before a run's folder is made."""
    label = data.columns.get(config.label)
    if config.kind == "cross_entropy" and isinstance(label, np.ndarray) and label.dtype.kind == "f":
        raise ConfigError(
            f"method.loss: 'cross_entropy' wants classes, but the column {config.label!r} holds {label.dtype}. For "
            f"numbers as labels say method.loss.kind = 'squared_error'."
        )


def _check_sizes(options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a size is given that the data do not fit."""
    for name, wanted in sizes.items():
        got, exact = options.get(name), name in ("features", "channels", "side")
        if isinstance(got, int) and (got < wanted or (exact and got != wanted)):
            raise ConfigError(
                f"model.{name}: wanted {'' if exact else 'at least '}{wanted}, as the data have; got {got}. Leave it "
                f"out to take the data's."
            )


def start_from_vectors(model: nn.Module, path: Path, data: FederatedData, seed: int) -> None:
    """Fill the table that a model looks the column ``text`` up in with word vectors from a file.

    Raises:
        ConfigError: the model has no such table, the data no vocabulary of words, or the widths differ.
        DataError: a fault in the file.
    """
    tables = [name for name, column in getattr(model, "lookup", {}).items() if column == "text"]
    if len(tables) != 1:
        raise ConfigError(
            f"model.word_vectors: {type(model).__name__} names no table, or several, for the column 'text' in "
            f"`lookup`, so it is not known which to fill."
        )
    entry = data.meta.get("vocabulary")
    vocabulary = data_room.vocabulary_from(entry) if isinstance(entry, Mapping) else None
    if not isinstance(vocabulary, data_room.WordVocabulary):
        kind = entry.get("kind") if isinstance(entry, Mapping) else entry
        raise ConfigError(f"model.word_vectors: the data's vocabulary must be one of words; it is {kind!r}.")
    table = model.get_parameter(tables[0])
    vectors = data_room.read_word_vectors(path, vocabulary.symbols)
    if vectors.width != table.shape[1]:
        raise ConfigError(
            f"model.word_vectors: the vectors of {path.name} have {vectors.width} numbers each, but {tables[0]!r} is "
            f"{table.shape[1]} wide. Set model.embedding_dim = {vectors.width}."
        )
    with torch.no_grad():
        table.copy_(torch.from_numpy(vectors.table(vocabulary, seed)))


def _model(place: str, kind: Any, options: Mapping[str, Any], sizes: Mapping[str, int]) -> nn.Module:
    """Make a model; options that are tables with a ``kind`` are models themselves, e.g. a mixture's experts."""
    if not isinstance(kind, str):
        raise ConfigError(f"{place}.kind: wanted a name; got {kind!r}.")
    make = _model_class(kind, place)
    wanted = inspect.signature(make).parameters
    given: dict[str, Any] = {name: value for name, value in sizes.items() if name in wanted}
    for name, value in options.items():
        inner = isinstance(value, Mapping) and "kind" in value and name in wanted
        parts = {n: v for n, v in value.items() if n != "kind"} if inner else {}
        given[name] = _model(f"{place}.{name}", value["kind"], parts, sizes) if inner else value
    checked = check_options(place, make, given)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error", "Initializing zero-element tensors"
            )  # a size of 0: nothing could learn
            return make(**checked)
    except (TypeError, ValueError, RuntimeError, MemoryError, ArithmeticError, UserWarning) as error:
        why = first_line(error, 1000).rstrip(".")
        shown = str({n: options.get(n, v) for n, v in checked.items()})[:400]
        raise ConfigError(f"{place}: {kind!r} cannot be made of {shown}: {why}.") from error


def _model_class(kind: str, place: str) -> type[nn.Module]:
    if ":" not in kind:
        return _named(f"{place}.kind", "model", kind, MODELS)
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(f"{place}.kind: {kind!r} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{place}.kind: {kind!r} is no class of torch.nn.Module.")
    return found


def sizes_of(data: FederatedData) -> dict[str, int]:
    """Return the sizes that the data fix: vocabulary, classes, items, features, channels and side (of images)."""
    sizes = {}
    vocabulary = data.meta.get("vocabulary")
    if vocabulary is not None:
        sizes["vocabulary"] = int(vocabulary["size"] if isinstance(vocabulary, Mapping) else vocabulary)
    for name in ("classes", "items"):
        if data.meta.get(name) is not None:
            sizes[name] = int(data.meta[name])
    x = data.columns.get("x")
    if x is not None and not isinstance(x, data_room.Ragged) and x.ndim == 2:
        sizes["features"] = int(x.shape[1])
    image = data.columns.get("image")
    if image is not None and not isinstance(image, data_room.Ragged) and image.ndim == 4:
        sizes |= {"channels": int(image.shape[1]), "side": int(image.shape[2])}
    return sizes


def offered_methods() -> Offered[Callable[..., Method]]:
    """Return fedkeep's methods and those of installed packages (entry points ``fedkeep.methods``), by name.

    Raises:
        ConfigError: two have the same name.
    """
    return Offered("fedkeep.methods", Callable, METHODS)  # type: ignore[arg-type]


def build_method(config: MethodConfig) -> Method:
    """Make the method that a configuration names.

    Raises:
        ConfigError: an unknown kind or option.
    """
    make = _named("method.kind", "method", config.kind, offered_methods())
    has_server = "server" in accepted(make)
    if config.server_optimizer is not None and not has_server:
        raise ConfigError(f"method.server_optimizer: {config.kind!r} has no server optimiser.")
    also = LOCAL | (SERVER if has_server else {})
    given = {"local", "server", "loss", "optimizer", "server_optimizer", "adapt"}
    options = check_options("method", make, config.options, given, also)
    usual = inspect.signature(make).parameters.get("local")
    local = usual.default if usual is not None else Phase()
    loss = build_loss(config.loss)
    settings = {name: options.pop(name) for name in LOCAL if name in options}
    options["local"] = local.but(loss=loss, optimizer=config.optimizer.build(), **settings)
    said: dict[str, Any] = {}
    if (weighting := options.pop("weighting", None)) is not None:
        said["reduce"] = WeightedMean(by=weighting)
    if config.server_optimizer is not None:
        said["update"] = Optimize(optimizer=config.server_optimizer.build())
    if said:  # the rest is as the method has it where nothing is said
        server = inspect.signature(make).parameters.get("server")
        known = None if server is None else server.default
        options["server"] = (known or make(**options).server).but(**said)
    method = make(**options)
    if config.upload_noise:
        method = method.but(upload=(*method.upload, GaussianNoise(config.upload_noise)))
    if config.adapt is None:
        return method
    adapting = method.adapt.phases or (Phase(loss=loss, trains="private", examples="all"),)
    return method.adapting(phases=tuple(config.adapt.applied(phase) for phase in adapting))


def build_loss(config: LossConfig) -> terms.Term:
    """Make the loss that a configuration names."""
    loss = (
        terms.cross_entropy(config.label, smoothing=config.smoothing)
        if config.kind == "cross_entropy"
        else terms.squared_error(config.label)
    )
    for pattern, factor in config.l2.items():
        loss = loss + factor * terms.l2_penalty(pattern)
    return loss if config.augment is None else Augmented(loss, **config.augment.model_dump())


def run_config(
    config: Config,
    *,
    data: FederatedData | None = None,
    folder: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    text: str | None = None,
    progress: bool | None = None,
    workers: int | None = None,
) -> Run:
    """Run a whole configuration.

    Args:
        config: the configuration.
        data: the data, where they are read already.
        folder: the folder of real data.
        text: the text of a file that gives this configuration, kept in the run's folder; made where None.
        out, resume, progress, workers: as for ``simulate``, whatever the configuration says.
    """
    data = data if data is not None else build_data(config, folder)
    protocol = None if config.personalization is None else Protocol(**config.personalization.model_dump())
    if protocol is not None:  # said now, not after hours of training
        check_task(data)
    settings = config.run.model_dump() | ({} if workers is None else {"workers": workers})
    run = simulate(
        build_model(config, data, folder), build_method(config.method), data, **settings, seed=config.seed, out=out,
        resume=resume, name=config.name, config=config.model_dump(), config_text=text or config.to_toml(),
        progress=progress,
    )  # fmt: skip
    if protocol is not None:
        add_curve(run, protocol, progress)
    return run
