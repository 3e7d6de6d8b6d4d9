"""Configuration files: TOML, checked field by field; an unknown key fails with a suggestion."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    model_validator,
)

from fedkeep.core.errors import ConfigError, MethodError, near_path, raising
from fedkeep.core.optim import Optimizer
from fedkeep.data.preparation import Rules
from fedkeep.engines.adapt import FineTuning
from fedkeep.experiments.config_tables import Names, Open, Rate, Strict, Table, made_of
from fedkeep.experiments.plugins import builtin_text
from fedkeep.experiments.recommending import Ranking
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.toml import check_bounds, from_toml, to_toml
from fedkeep.methods import Phase, SecureSums
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.tasks import KINDS

LONGEST_FILE = 1 << 20  # bytes
AUTO = "auto"
OF_CHARACTERS = ("document",)
"""Models that read characters; the others read words."""
ANY_TOKENS = ("table", "huggingface")
"""Readers that cut texts into whatever tokens they are told."""


def _loss(name: str) -> str:
    known = sorted(kind.loss for kind in KINDS.values())
    if name not in known and re.fullmatch(r"[\w.]+:\w+", name) is None:
        losses = " or ".join(map(repr, dict.fromkeys(known)))
        raise ValueError(f"wanted {losses}, or your own 'package.module:name'; got {name[:80]!r}")
    return name


Loss = Annotated[str, AfterValidator(_loss)]
"""A loss of a kind of task (``Kind.loss``), or the name of something of one's own."""


class PartitionConfig(Open):
    """A partition of examples; further keys are its options.

    Attributes:
        kind: how examples are dealt, e.g. "dirichlet" (``fedkeep.data.PARTITIONS``).
    """

    kind: str


class DataConfig(Open):
    """The data; further keys are the reader's options.

    ``partition`` divides examples of classes among clients: ``{kind = "majority", clients = 5, p = 0.8, train = 500,
    valid = 400}``. ``clients`` and ``examples`` keep so many clients, and at most so many examples of each.

    Attributes:
        reader: a reader or generator that ``fedkeep list`` shows, or ``package.module:function``.
        split: divides each user's examples again: ``{fractions = [0.8, 0.1, 0.1], order = "random", seed = 0}``; a text
            names the reader's column of splits instead.
        opt_out: keeps examples out of whatever leaves a client: ``{fraction = 0.5, by = "client"}``.
    """

    reader: str
    split: dict[str, Any] | str | None = None
    partition: PartitionConfig | None = None
    opt_out: dict[str, Any] | None = None

    @property
    def leaves_tokens(self) -> bool:
        """Whether texts are cut as the model wants them: the table does not say how, and the reader could be told."""
        return self.reader in ANY_TOKENS and not {"tokens", "vocabulary", "features"} & self.options.keys()


class ModelConfig(Open):
    """The model; further keys are its options, and sizes that the data fix are filled in.

    Attributes:
        kind: "auto", the usual model for such data (``usual.MODELS``), a name that ``fedkeep list`` shows, or
            ``package.module:Class`` for a module of your own.
        word_vectors: a file of word vectors that the embedding of ``text`` starts from; empty: none.
        word_vectors_scale: how many times as long as there they are.
    """

    kind: str = AUTO
    word_vectors: str | None = None
    word_vectors_scale: float | None = Field(None, gt=0, allow_inf_nan=False)


ADAPTING = ("optimizer", "epochs", "batch_size", "clip_norm", "early_stopping")
"""What the table ``method.adapt`` says of a phase of adaptation; the rest is the method's."""


class ReduceConfig(Open):
    """A reduction for uploads that can't be trusted; further keys are its options.

    Attributes:
        kind: median, trimmed_mean (``share``), krum (``faulty``, ``taken``) or clipped_mean (``bound``).
    """

    kind: str


class LossConfig(Strict):
    """The loss, and penalties on the client's own parameters.

    Attributes:
        kind: a task's, e.g. ``"squared_error"``; by default the one that fits the task. ``package.module:name`` is a term of your own, or a class or function
            that makes one, of ``label`` where it takes that.
        label: the column of labels.
        smoothing: of ``cross_entropy``: the share of each label that is spread over all classes, in [0, 1).
        class_weights: of ``cross_entropy``: a number for each class, how much its examples count.
        l2: penalties by name pattern: ``{user = 0.001}`` adds 0.001 times the squares' sum.
        augment: moves training images at random; its keys are those of ``fedkeep.methods.augment.Augmented``.
    """

    kind: Loss | None = None
    label: str = "label"
    smoothing: float = 0.0
    class_weights: Annotated[tuple[Rate, ...] | None, Field(strict=False)] = None
    l2: dict[str, Rate] = {}  # noqa: RUF012 (pydantic copies it)
    augment: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _of_classes(self) -> LossConfig:
        given = {"smoothing": self.smoothing, "class_weights": self.class_weights}
        named = [name for name, value in given.items() if value]
        if named and self.kind not in (None, "cross_entropy"):
            are = f"{' and '.join(named)} {'is' if named == ['smoothing'] else 'are'}"
            raise ValueError(f"{are} for 'cross_entropy'; {self.kind!r} knows no classes")
        try:
            self.cross_entropy()
        except MethodError as error:
            raise ValueError(str(error).removesuffix(".")) from error
        return self

    def cross_entropy(self) -> Term:
        """Return the loss, where it is that of classes."""
        return cross_entropy(self.label, smoothing=self.smoothing, class_weights=self.class_weights)


class MethodConfig(Open):
    """The method; further keys are its options.

    ``loss``, ``optimizer``, ``server_optimizer``, ``adapt``, ``reduce`` and ``secure`` are tables; ``adapt`` says how a
    client adapts, in each phase of it (a new client's private part; the steps of a mixture of experts), 10 epochs long. Without ``optimizer``
    and ``batch_size`` those are taken that are usual for the model (``methods.usual.USUAL``), unless the method has its own.

    Attributes:
        kind: a name that ``fedkeep list`` shows, or ``package.module:function`` for a method of your own.
        upload_noise: the standard deviation of Gaussian noise that is added to every upload.
        head: the layer that the model ends with, where a method speaks of one and it is not to be found; runs across
            machines want it named.
    """

    kind: str = "fedavg"
    loss: LossConfig = LossConfig()
    optimizer: Annotated[Optimizer, Table()] | None = None
    server_optimizer: Annotated[Optimizer, Table({"learning_rate": 1.0})] | None = None
    adapt: Annotated[Phase, Table({"epochs": 10}, ADAPTING)] | None = None
    reduce: ReduceConfig | None = None
    secure: Annotated[SecureSums, Table()] | None = None
    upload_noise: Rate = 0.0
    head: str | None = None


class AuditConfig(Strict):
    """What may tell of what stays on a device.

    Attributes:
        allow: names of findings that are no leak here; ``fedkeep.audit`` says what each means.
    """

    allow: Names


class Config(Strict):
    """A whole experiment. The table ``data`` alone is enough: FedAvg then trains the usual model for such data.

    The table ``personalization`` asks for the curve of fine-tuning on each client after the last round, and ``ranking`` for a ranking of all items; ``preparation``
    says how texts, labels and features become numbers, where the reader is not to decide; ``privacy`` asks for
    differential privacy; ``rounds`` is for runs across machines; ``audit`` names what ``fedkeep audit`` allows.

    Attributes:
        name: of the experiment, for titles.
        seed: of every draw that names none of its own.
    """

    name: str = ""
    seed: int = 0
    data: DataConfig
    model: ModelConfig = ModelConfig.model_validate({})
    method: MethodConfig = MethodConfig()
    run: Annotated[RunSettings, Table()] = RunSettings()
    personalization: Annotated[FineTuning, Table()] | None = None
    ranking: Annotated[Ranking, Table()] | None = None
    preparation: Annotated[Rules, Table()] = Rules()
    privacy: Annotated[DifferentialPrivacy, Table()] | None = None
    rounds: dict[str, Any] | None = None
    audit: AuditConfig | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _privacy_needs_cohort(cls, content: Any, handler: ModelWrapValidatorHandler[Config]) -> Config:
        made, run = handler(content), content.get("run") if isinstance(content, Mapping) else None
        if made.privacy is not None and isinstance(run, Mapping) and "cohort" not in run:
            raise ValueError(
                "privacy wants run.cohort, the expected number of clients in a round, which ε goes by"
            )
        if made.privacy is not None and made.preparation.standardise is None:
            rules = replace(made.preparation, standardise=False)  # sums of features would leave without noise
            made = made.model_copy(update={"preparation": rules})
        if made.model.kind in OF_CHARACTERS and made.data.leaves_tokens and made.preparation.tokens is None:
            made = made.model_copy(update={"preparation": replace(made.preparation, tokens="char")})
        return made

    def to_toml(self) -> str:
        """Return a file that gives this configuration again: what was set, overrides included."""
        return to_toml(self.model_dump(exclude_unset=True))


WrittenConfig = Annotated[
    Config,
    PlainSerializer(Config.to_toml),
    BeforeValidator(lambda given: parse_config(given) if isinstance(given, str) else given),
]
"""A configuration in a job that is written down: as its file."""


def read_config(path: Path, overrides: Mapping[str, str] | None = None) -> tuple[Config, str]:
    """Read a configuration file.

    Args:
        path: a TOML file.
        overrides: as for ``parse_config``.

    Returns:
        The checked configuration, and the text of a file that gives it: the file's own, or with overrides a new one.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, or a value doesn't fit; all faults are named.
    """
    text = read_text(path)
    config = parse_config(text, str(path), overrides)
    return config, config.to_toml() if overrides else text


def read_text(path: Path, advice: str = "") -> str:
    """Return the text of a configuration file; ``advice`` is what to do where it is missing.

    Raises:
        ConfigError: it is missing, no text, or too long to be one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
        if len(content) > LONGEST_FILE:
            raise ConfigError(
                "The configuration {path} is longer than {most} MiB. Is it the right file?",
                path=path,
                most=LONGEST_FILE >> 20,
            )
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "Cannot read the configuration {path}: {reason}.{advice}",
            path=path,
            reason=reason,
            advice=f"{advice}{near_path(path)}" if isinstance(error, FileNotFoundError) else "",
        ) from error
    return text


def parse_config(
    text: str, where: str = "configuration", overrides: Mapping[str, str] | None = None
) -> Config:
    """Check a configuration's text.

    Args:
        text: TOML.
        where: its name in messages.
        overrides: dotted keys and values, e.g. ``{"run.epochs": "2"}``; a value that is no TOML is taken as text.

    Raises:
        ConfigError: as for ``read_config``.
    """
    content = parse_toml(text, where)
    for key, value in (overrides or {}).items():
        _set(content, key, toml_value(key, value))
    # A key of many parts, or a text that is no TOML
    with raising(ConfigError, "{where} with --set is no configuration: {why}.", ValueError, where=where):
        check_bounds(content)
    given = ", ".join(_short(f"{key} = {value}") for key, value in (overrides or {}).items())
    found: Config = made_of(Config, content, f"{where} with {given}" if given else where)
    return found


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a configuration's text.

    Raises:
        ConfigError: it is no TOML, or too deep or long to be a configuration.
    """
    try:
        return from_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "{where} is no valid TOML: {why}.{line}", where=where, why=error, line=_line_of(text, str(error))
        ) from error
    except ValueError as error:
        raise ConfigError("{where} is no configuration: {why}.", where=where, why=error) from error


def _line_of(text: str, why: str) -> str:
    """Return the line that is no TOML, and what mostly mends it."""
    found = re.search(r"at line (\d+)", why)
    if found is None:
        return ""
    line = _short(text.split("\n")[int(found[1]) - 1].strip())
    quoting = re.match(r"Illegal character '\\n'|Invalid value", why)
    return f" The line is `{line}`.{' A text stands between two quotation marks.' if quoting else ''}"


def parse_overrides(given: list[str]) -> dict[str, str]:
    """Return ``["run.epochs=2"]`` as ``{"run.epochs": "2"}``.

    Raises:
        ConfigError: one of them is not of the form key=value.
    """
    overrides = {}
    for one in given:
        key, sign, value = one.partition("=")
        if not sign or not key.strip():
            raise ConfigError(
                "--set wants key=value, e.g. --set run.epochs=2; got {name!r}.", name=_short(one)
            )
        overrides[key.strip()] = value.strip()
    return overrides


def toml_value(key: str, text: str) -> Any:
    """Return what an override's text is in TOML; a text that is no TOML is itself."""
    try:
        found = from_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise _not_set(key, error) from error
    return found["value"] if list(found) == ["value"] else text


def _not_set(key: str, why: Exception) -> ConfigError:
    return ConfigError("--set {key}: {why}.", key=_short(key), why=why)


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = _parts(key)
    for table in tables:
        inner = content.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                "--set {key}: {table!r} is a value, not a table.", key=_short(key), table=_short(table)
            )
        content = inner
    content[last] = value


def _parts(key: str) -> list[str]:
    """Return a TOML key's parts: ``method.optimizer.rates."head.*"`` has four."""
    try:
        found: Any = from_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            '--set {key}: not a key of TOML; quote a pattern, as in rates."head.*"=0.1.',
            key=_short(key),
        ) from error
    except ValueError as error:
        raise _not_set(key, error) from error
    parts: list[str] = []
    while isinstance(found, dict):
        if len(found) != 1:
            raise ConfigError("--set {key}: wanted one key.", key=_short(key))
        ((part, found),) = found.items()
        parts.append(part)
    return parts


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]} …"


def builtin_config(name: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Return a built-in configuration, checked; ``overrides`` as for ``parse_config``."""
    return parse_config(builtin_text(name), name, overrides)
