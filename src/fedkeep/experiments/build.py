"""From a configuration to the things it names: data, model, loss, method, simulation."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from fedkeep import data as data_room
from fedkeep import models
from fedkeep.core.arguments import accepted
from fedkeep.core.declared import declared
from fedkeep.core.describe import differences
from fedkeep.core.errors import ConfigError, DataError, MethodError, check_choice, first_line, raising
from fedkeep.core.modes import Sized
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.core.seeds import stream
from fedkeep.data import FederatedData
from fedkeep.data.alike import oddities
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.data.seen import Seen
from fedkeep.engines import Engine
from fedkeep.engines.rehearsal import resolve
from fedkeep.experiments.ahead import Ahead, ahead
from fedkeep.experiments.analyses import add_ranking
from fedkeep.experiments.config import (
    ADAPTING,
    AUTO,
    Config,
    LossConfig,
    MethodConfig,
    ReduceConfig,
    parse_config,
)
from fedkeep.experiments.config_tables import check_options
from fedkeep.experiments.continuing import Before, Origin, encoding_in
from fedkeep.experiments.personalize.fine_tuning import add_curve, check_task
from fedkeep.experiments.plugins import Offered, imported, is_own, says_it_returns
from fedkeep.experiments.recommending import USUAL
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.simulate import Simulation, divided
from fedkeep.experiments.sources import (
    build_data,
    build_source,
    data_folder,
    located,
    named,
    read_source,
)
from fedkeep.experiments.trackers import Tracker
from fedkeep.methods import (
    METHODS,
    ClippedMean,
    Krum,
    Median,
    Method,
    Optimize,
    Phase,
    Reduction,
    TrimmedMean,
    WeightedMean,
    securely,
    terms,
)
from fedkeep.methods.augment import Augmented
from fedkeep.nn.accelerate import swap_, swaps_of
from fedkeep.privacy import GaussianNoise
from fedkeep.tasks import Kind, tasks_in, usual_kind

__all__ = [
    "MODELS",
    "build_data",
    "build_method",
    "build_model",
    "build_source",
    "data_folder",
    "data_of",
    "encoding_of",
    "method_maker",
    "offered_methods",
    "read_source",
    "run_config",
    "settled",
    "simulation_of",
    "sizes_of",
    "start_from_vectors",
    "with_head_named",
]

LOCAL = {
    name: kind
    for name, kind in get_type_hints(Phase).items()
    if name in ("epochs", "batch_size", "merge_single", "clip_norm", "clip_over")
}
"""Keys of a method's table that its local phase is made of, beside ``loss`` and ``optimizer``."""
SERVER: dict[str, Any] = {"weighting": get_type_hints(WeightedMean)["by"]}
"""Likewise of its server, beside ``server_optimizer``."""

MODELS: dict[str, type[nn.Module]] = {
    "document": models.DocumentModel,
    "bag_of_words": models.BagOfWords,
    "text_classifier": models.TextClassifier,
    "matrix_factorization": models.MatrixFactorization,
    "linear": models.Linear,
    "mlp": models.MLP,
    "gru": models.SequenceClassifier,
    "cnn": models.CNN,
    "resnet": models.ResNet,
    "cifar_cnn": models.CifarCNN,
    "fashion_cnn": models.FashionCNN,
    "mixture_of_experts": models.MixtureOfExperts,
    "gate": models.Gate,
    "confidence_gate": models.ConfidenceGate,
}
"""Networks by the name that ``model.kind`` has in a configuration."""

REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "clipped_mean": ClippedMean,
}
"""Reductions by the name that ``method.reduce.kind`` has."""


def build_model(config: Config, data: FederatedData | Encoding, folder: Path | None = None) -> nn.Module:
    """Make the model that a configuration names, its initial values drawn from the configuration's seed.

    Args:
        config: the configuration.
        data: tell the model's sizes, and the vocabulary of word vectors; a server has no data, and gives the encoding.
        folder: the folder of real data, where ``model.word_vectors`` is looked up.

    Raises:
        ConfigError: an unknown kind or option, a size that the data don't tell, or word vectors that don't fit.
        DataError: a fault in the file of word vectors.
    """
    encoding = encoding_of(data)
    config = settled(config, encoding)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(config.seed, "model"))
        sizes = encoding.sizes
        make = _maker(config.model.kind, "model")
        check_loss(config.method.loss, encoding, make, config.model.options)
        _check_sizes(config.model.options, sizes)
        made = _model("model", config.model.kind, config.model.options, sizes)
    if config.run.accelerate:
        swap_(made)
    if config.model.word_vectors:
        path = located("model.word_vectors", config.model.word_vectors, folder)
        start_from_vectors(made, path, encoding, config.seed, config.model.word_vectors_scale or 1.0)
    return made


def _check_sizes(options: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a size is given that the data do not fit."""
    for name, wanted in sizes.items():
        got, exact = options.get(name), name in ("features", "step_features", "channels", "side")
        if isinstance(got, int) and (got < wanted or (exact and got != wanted)):
            raise ConfigError(
                "model.{name}: wanted {at_least}{wanted}, as the data have; got {got}. Leave it "
                "out to take the data's.",
                name=name,
                at_least="" if exact else "at least ",
                wanted=wanted,
                got=got,
            )


def start_from_vectors(
    model: nn.Module, path: Path, encoding: Encoding, seed: int, scale: float = 1.0
) -> None:
    """Fill the table that a model looks the column ``text`` up in with word vectors from a file, times ``scale``.

    Raises:
        ConfigError: the model has no such table, the data no vocabulary of words, or the widths differ.
        DataError: a fault in the file.
    """
    tables = [name for name, column in declared(model).lookup.items() if column == "text"]
    if len(tables) != 1:
        raise ConfigError(
            "model.word_vectors: {model} declares no table, or several, for the column 'text' in "
            "`lookup`, so it is not known which to fill.",
            model=type(model).__name__,
        )
    entry = encoding.meta.get("vocabulary")
    vocabulary = data_room.vocabulary_from(entry) if isinstance(entry, Mapping) else None
    if not isinstance(vocabulary, data_room.WordVocabulary):
        kind = entry.get("kind") if isinstance(entry, Mapping) else entry
        raise ConfigError(
            "model.word_vectors: the data's vocabulary must be one of words; it is {kind!r}. Say "
            'tokens = "word" under [preparation]; words are then counted.',
            kind=kind,
        )
    table = model.get_parameter(tables[0])
    vectors = data_room.read_word_vectors(path, vocabulary.symbols)
    if vectors.width != table.shape[1]:
        raise ConfigError(
            "model.word_vectors: the vectors of {path} have {width} numbers each, but {name!r} is "
            "{wide} wide. Set model.embedding_dim = {width}.",
            path=path.name,
            width=vectors.width,
            name=tables[0],
            wide=table.shape[1],
        )
    with torch.no_grad():
        table.copy_(torch.from_numpy(vectors.table(vocabulary, seed, scale)))


def _model(place: str, kind: Any, options: Mapping[str, Any], sizes: Mapping[str, int]) -> nn.Module:
    """Make a model; options that are tables with a ``kind`` are models themselves, e.g. a mixture's experts."""
    if not isinstance(kind, str):
        raise ConfigError("{place}.kind: wanted a name; got {kind!r}.", place=place, kind=kind)
    make = _maker(kind, place)
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
            if not is_own(kind):  # of one's own it is not known whether it can be made without values
                with Sized(memory() // 2), torch.device("meta"):  # training wants a copy of it, at least
                    make(**checked)
            return make(**checked)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        MemoryError,
        ArithmeticError,
        AssertionError,
        UserWarning,
    ) as error:
        why = first_line(error, 1000).rstrip(".")
        shown = str({n: options.get(n, v) for n, v in checked.items()})[:400]
        raise ConfigError(
            "{place}: {kind!r} cannot be made of {value}: {why}.",
            place=place,
            kind=kind,
            value=shown,
            why=why,
        ) from error


def memory() -> int:
    """Return how many bytes of memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _maker(kind: str, place: str) -> Callable[..., nn.Module]:
    """Return what makes a model of a kind: a built-in or imported class, or a function that says it returns one."""
    if not is_own(kind):
        return named(f"{place}.kind", "model", kind, MODELS)
    found = imported(f"{place}.kind", kind)
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if not (is_class or says_it_returns(found, nn.Module)):
        raise ConfigError(
            "{place}.kind: {kind!r} is no class of torch.nn.Module, nor a function that says `-> torch.nn.Module`.",
            place=place,
            kind=kind,
        )
    return found  # type: ignore[no-any-return]


def sizes_of(data: FederatedData | Encoding) -> dict[str, int]:
    """Return the sizes that data or their encoding fix: vocabulary, classes, items, features, channels and side."""
    return encoding_of(data).sizes


def offered_methods() -> Offered[Callable[..., Method]]:
    """Return fedkeep's methods and those of installed packages (entry points ``fedkeep.methods``), by name.

    Raises:
        ConfigError: two have the same name.
    """
    return Offered("fedkeep.methods", Callable, METHODS)  # type: ignore[arg-type]


def method_maker(kind: str, place: str = "method.kind") -> Callable[..., Method]:
    """Return what makes a method of a kind: an offered function, or ``package.module:function`` of one's own.

    Raises:
        ConfigError: there is none, or it does not say that it returns a method; ``place`` is the key that names it.
    """
    if not is_own(kind):
        return named(
            place, "method", kind, offered_methods(), lambda: " One of your own is 'package.module:function'."
        )
    found = imported(place, kind)
    if not says_it_returns(found, Method):
        raise ConfigError(
            "{place}: {kind!r} is no function that says `-> fedkeep.Method`.", place=place, kind=kind
        )
    return found  # type: ignore[no-any-return]


def _made(kind: str, make: Callable[..., Method], options: Mapping[str, Any]) -> Method:
    """Return the method; what a function of one's own does wrong is said as a fault of the configuration."""
    try:
        made = make(**options)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        if not is_own(kind):
            raise
        why = f"{type(error).__name__}: {first_line(error, 1000).rstrip('.')}"
        raise ConfigError(
            "method.kind: {kind!r} makes no method of this table: {why}.", kind=kind, why=why
        ) from error
    if not isinstance(made, Method):
        raise ConfigError(
            "method.kind: {kind!r} must return a fedkeep.Method; got a {got}.",
            kind=kind,
            got=type(made).__name__,
        )
    return made


def build_method(config: MethodConfig) -> Method:
    """Make the method that a configuration names.

    Raises:
        ConfigError: an unknown kind or option.
    """
    make = method_maker(config.kind)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    if not takes_any and "local" not in accepted(make):
        raise ConfigError(
            "method.kind: {kind!r} takes no argument `local`, the phase that the loss and the optimiser of the "
            "configuration go into. Give it one: `local: Phase = Phase()`.",
            kind=config.kind,
        )
    has_server = "server" in accepted(make)
    if config.server_optimizer is not None and not has_server:
        raise ConfigError("method.server_optimizer: {kind!r} has no server optimiser.", kind=config.kind)
    also = LOCAL | (SERVER if has_server else {})
    given = {"local", "server", "loss", "optimizer", "server_optimizer", "adapt"}
    options = check_options("method", make, config.options, given, also, MethodConfig)
    usual = inspect.signature(make).parameters.get("local")
    local = usual.default if usual is not None else Phase()
    loss = build_loss(config.loss)
    settings = {name: options.pop(name) for name in LOCAL if name in options}
    if config.optimizer is not None:
        settings["optimizer"] = config.optimizer
    with raising(ConfigError, "method: {why}", MethodError):
        options["local"] = local.but(loss=loss, **settings)
    said: dict[str, Any] = {}
    if (weighting := options.pop("weighting", None)) is not None:
        said["reduce"] = WeightedMean(by=weighting)
    if config.server_optimizer is not None:
        said["update"] = Optimize(optimizer=config.server_optimizer)
    if said:  # the rest is as the method has it where nothing is said
        server = inspect.signature(make).parameters.get("server")
        known = None if server is None else server.default
        options["server"] = (known or _made(config.kind, make, options).server).but(**said)
    if config.reduce is not None and "reduce" in said:
        raise ConfigError("method.reduce: every client counts once, so leave method.weighting out.")
    method = _made(config.kind, make, options)
    if config.head is not None:
        method = method.but(head=config.head)
    if config.upload_noise:
        method = method.but(upload=(*method.upload, GaussianNoise(config.upload_noise)))
    if config.reduce is not None:
        method = _reducing(method, config.reduce)
    if config.secure is not None:
        method = securely(method, config.secure)
    if config.adapt is None:
        return method
    phases = method.adapt.phases or (Phase(loss=loss, trains="private", examples="all"),)
    said = {name: getattr(config.adapt, name) for name in ADAPTING}
    stops = config.adapt.early_stopping
    return method.adapting(
        phases=tuple(p.but(**said | {"early_stopping": stops or p.early_stopping}) for p in phases)
    )


def _reducing(method: Method, config: ReduceConfig) -> Method:
    """Return a method with another reduction.

    Raises:
        ConfigError: the method's own is no mean that another could take the place of, or an option makes no sense.
    """
    if type(method.server.reduce) is not WeightedMean:
        raise ConfigError(
            "method.reduce: {method!r} reduces uploads in a way of its own, by "
            "{reduce}. Leave the table out.",
            method=method.name,
            reduce=type(method.server.reduce).__name__,
        )
    check_choice("method.reduce.kind must be", config.kind, REDUCTIONS)
    make = REDUCTIONS[config.kind]
    options = check_options("method.reduce", make, config.options, ("by", "missing_rows"))
    return method.on_server(reduce=make(**options))


def run_config(
    config: Config,
    *,
    data: FederatedData | None = None,
    folder: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    continue_from: Path | None = None,
    text: str | None = None,
    progress: bool | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    trackers: Sequence[Tracker] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    agree: Callable[[Ahead], None] = lambda ahead: None,
) -> Run:
    """Run a whole configuration.

    Args:
        config: the configuration.
        data: the data, where they are read already.
        folder: the folder of real data.
        text: the text of a file that gives this configuration, kept in the run's folder; made where None.
        continue_from: the folder of a run whose rounds go on here, see ``experiments.continuing``; of a run that is
            resumed it is not looked at.
        out, resume, progress, workers, trackers: as for ``simulate``, whatever the configuration says.
        engine: trains clients, in place of the one that the configuration says.
        tell: called with texts that say what has changed since an older run, what is odd about the data, which of the
            model's layers run on fedkeep's kernels, if any, and what the head is.
        agree: called with what the run has before it; nothing is written before, or if it raises.
    """
    origin = before = None
    if resume and out is not None and (out / "run.json").exists():
        origin = Origin.of(read_info(out))
    elif continue_from is not None:
        before = Before.at(continue_from)
    if data is None:
        kept_in = out if origin is not None else continue_from if before is not None else None
        data = data_of(config, folder, kept_in)
    if resume and out is not None and config.personalization is not None:
        asked, made = (
            config.model_dump()["personalization"],
            (read_info(out).get("config") or {}).get("personalization"),
        )
        if made is not None and (lines := differences(asked, made, "personalization")):
            raise ConfigError(
                "{out} was made with another protocol of personalisation: {lines}. Leave it as it is, or take "
                "a new folder.",
                out=out,
                lines="; ".join(lines),
            )
    settings = config.run
    if workers is not None:
        settings = replace(settings, workers=workers)
    if trackers is not None:
        settings = replace(settings, trackers=trackers)
    made = simulation_of(config, data, folder, settings, text or config.to_toml(), before, origin)
    if engine is not None:
        if settings.centralised:
            raise ConfigError(
                "Centralised training is one loop over all data, which is not spread over machines."
            )
        made.engine, made.reason = engine, "clients train elsewhere"
    if before is not None and made.origin is not None:
        tell(f"Continues {continue_from} after round {before.round}: {made.origin.told}.")
    for line in oddities(data):
        tell(line)
    if line := str(swaps_of(made.net.module)):
        tell(f"Layers {line}.")
    if line := made.head:
        tell(f"{line[0].upper()}{line[1:]}.")
    agree(ahead_of(made, config, out if origin is not None else None))
    run = made.run(out, resume, progress)
    if config.personalization is not None:
        add_curve(run, config.personalization, progress)
    if config.ranking is not None and out is not None:
        add_ranking(run, config.ranking)
    return run


def ahead_of(made: Simulation, config: Config, going_on: Path | None = None) -> Ahead:
    """Return what a configuration's simulation has before it; ``going_on``: the folder of the rounds behind it."""
    done = 0 if going_on is None else read_commit(going_on, read_info(going_on)).round
    return ahead(made, done, 0 if config.personalization is None else config.personalization.steps)


def data_of(config: Config, folder: Path | None, run: Path | None) -> FederatedData:
    """Return the data of a configuration, in the encoding of a run, extended, and divided as there.

    Args:
        config: the configuration.
        folder: the folder of real data.
        run: the folder of a run whose examples stay in their parts; None: the data are as they are alone.

    Raises:
        FedkeepError: as for ``build_data``; or the folder of the run is damaged.
    """
    if run is None:
        return build_data(config, folder)
    data = divided(build_data(config, folder, encoding_in(run)))
    return Seen.read(run, read_info(run)["seen"]).kept_apart(data)


def simulation_of(
    config: Config,
    data: FederatedData,
    folder: Path | None = None,
    settings: RunSettings | None = None,
    text: str | None = None,
    before: Before | None = None,
    origin: Origin | None = None,
) -> Simulation:
    """Return the simulation that a configuration asks for, with all that ``run_config`` checks before it trains.

    Args:
        config: the configuration.
        data: its data.
        folder: the folder of real data.
        settings: in place of the configuration's.
        text: kept in the run's folder.
        before, origin: as for `Simulation`.

    Raises:
        FedkeepError: what a run would refuse.
    """
    asked, config = config, settled(config, data)
    if config.personalization is not None:
        check_task(data)  # what only comes after training is checked now, not after hours
    if config.ranking is not None:
        config.ranking.check(data)
    return Simulation(
        build_model(config, data, folder),
        build_method(config.method),
        data,
        settings or config.run,
        seed=config.seed,
        name=config.name,
        before=before,
        origin=origin,
        privacy=config.privacy,
        config=asked.model_dump(),
        config_text=text,
        data_folder=folder,
        ranking=config.ranking or USUAL,
    )


def with_head_named(text: str, folder: Path | None = None) -> str:
    """Return a configuration's text that names its method's head, where that is to be found: on its data.

    A server across machines has no examples to find it on. Where the data are not here the text is left as it is.

    Raises:
        FedkeepError: the configuration is wrong, or the head is not found.
    """
    config = parse_config(text)
    try:
        data = build_data(config, folder)
    except (ConfigError, DataError):
        return text
    asked = settled(config, data)
    method = resolve(build_method(asked.method), build_model(asked, data, folder), data)
    if method.head is None or config.method.head is not None:
        return text
    return parse_config(text, overrides={"method.head": method.head.layer}).to_toml()


USUAL_MODELS: Mapping[str, str] = {
    "text": "bag_of_words",
    "image": "resnet",
    "item": "matrix_factorization",
    "x": "mlp",
}
"""By the column that it reads, the first that there is."""


def usual_model(encoding: Encoding) -> str:
    """Return the kind of model that ``model.kind = "auto"`` is for data in an encoding.

    Raises:
        ConfigError: there is none for such columns.
    """
    tasks = tasks_in(encoding.meta)
    found = next((model for column, model in USUAL_MODELS.items() if column in encoding.columns), None)
    if found == "mlp" and "step_features" in encoding.sizes:
        found = "gru"
    deep = found == "mlp" and "features" not in encoding.sizes
    if found is None or deep or len(tasks) > 1 or not (tasks[0].kind.axes == 1 or tasks[0].kind.several):
        columns = ", ".join(n for n in encoding.columns if n != "label")
        raise ConfigError(
            "model.kind: there is no usual model for the columns {columns} and the task "
            "{tasks}. Name one: `fedkeep list` shows the built-in ones; your own is "
            "'package.module:Class'.",
            columns=columns,
            tasks=" and ".join(task.kind.name for task in tasks),
        )
    return found


def encoding_of(data: FederatedData | Encoding) -> Encoding:
    """Return the encoding that data are in, as far as a model and a loss depend on it."""
    return data if isinstance(data, Encoding) else Encoding.of(Ready(data=data).summary())


def settled(config: Config, data: FederatedData | Encoding) -> Config:
    """Return a configuration that names what it left open to the data: model and loss.

    Args:
        config: the configuration.
        data: its data, or the encoding that they are in.

    Raises:
        ConfigError: there is no usual model for such data.
    """
    encoding = encoding_of(data)
    model, method = config.model, config.method
    if model.kind == AUTO:
        model = model.model_copy(update={"kind": usual_model(encoding)})
    if method.loss.kind is None:
        task = _kind_of(encoding, method.loss.label)
        kind = "cross_entropy" if task is None else task.loss
        method = method.model_copy(update={"loss": method.loss.model_copy(update={"kind": kind})})
    return config.model_copy(update={"model": model, "method": method})


def _kind_of(encoding: Encoding, label: str) -> Kind | None:
    """Return the kind of the task whose labels are a column; None: there is none."""
    return next((task.kind for task in tasks_in(encoding.meta) if task.label == label), None)


def build_loss(config: LossConfig) -> terms.Term:
    """Make the loss that a configuration names."""
    loss: terms.Term
    if config.kind in (None, "cross_entropy"):
        loss = config.cross_entropy()
    elif is_own(config.kind):
        loss = _own_term(config.kind, config.label)
    else:
        loss = terms.named(config.kind, config.label)
    for pattern, factor in config.l2.items():
        loss = loss + factor * terms.l2_penalty(pattern)
    if config.augment is None:
        return loss
    return Augmented(
        loss, **check_options("method.loss.augment", Augmented, config.augment, ("term", "transform"))
    )


def _own_term(kind: str, label: str) -> terms.Term:
    found = imported("method.loss.kind", kind)
    if callable(found) and not isinstance(found, terms.Term):
        try:
            found = found(label) if "label" in inspect.signature(found).parameters else found()
        except (TypeError, ValueError) as error:
            why = first_line(error, 1000).rstrip(".")
            raise ConfigError(
                "method.loss.kind: {kind!r} makes no term: {why}.", kind=kind, why=why
            ) from error
    if not isinstance(found, terms.Term):
        raise ConfigError(
            "method.loss.kind: {kind!r} must be a fedkeep.methods.terms.Term, or make one; got a {got}.",
            kind=kind,
            got=type(found).__name__,
        )
    return found


def check_loss(
    config: LossConfig, encoding: Encoding, make: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Check that a loss fits the data and the model, before a run's folder is made.

    Args:
        config: the loss.
        encoding: of the data.
        make: makes the model.
        options: what it is given, beside sizes that the data fix.

    Raises:
        ConfigError: the loss wants classes and the data hold numbers or several labels an example, or there are not as
            many weights as classes.
    """
    label, task = encoding.columns.get(config.label), _kind_of(encoding, config.label)
    if config.kind == "cross_entropy" and label is not None and label.dtype.kind == "f":
        raise ConfigError(
            "method.loss: 'cross_entropy' wants classes, but the column {label!r} holds {dtype}. For "
            "numbers as labels say method.loss.kind = {loss!r}.",
            label=config.label,
            dtype=label.dtype,
            loss=usual_kind(whole=False).loss if task is None else task.loss,
        )
    if config.kind == "cross_entropy" and task is not None and task.loss != config.kind:
        raise ConfigError(
            "method.loss: 'cross_entropy' wants one class an example, and the task is {task!r}. Say method.loss.kind = "
            "{loss!r}.",
            task=task.name,
            loss=task.loss,
        )
    classes = options.get("classes", encoding.sizes.get("classes"))
    weights, known = config.class_weights, "classes" in inspect.signature(make).parameters
    if weights is not None and known and isinstance(classes, int) and len(weights) != classes:
        raise ConfigError(
            "method.loss.class_weights: wanted {classes} numbers, one for each class; got {count}.",
            classes=classes,
            count=len(weights),
        )
