"""Configuration files: TOML, checked field by field; an unknown key fails with a suggestion."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from fedkeep.core.errors import ConfigError, did_you_mean, shown
from fedkeep.core.optim import Kind, Optimizer
from fedkeep.experiments.losses import LossConfig
from fedkeep.experiments.protections import AuditConfig, PrivacyConfig, ReduceConfig, SecureConfig
from fedkeep.experiments.strict import Open, Rate, Strict
from fedkeep.experiments.toml import check_bounds, from_toml, to_toml
from fedkeep.methods import EarlyStopping, Phase

LONGEST_FILE = 1 << 20  # bytes
M = TypeVar("M", bound=BaseModel)


class OptimizerConfig(Strict):
    """An optimiser: ``kind``, ``learning_rate``, ``rates`` by name pattern, and its constants."""

    kind: Kind = "sgd"
    learning_rate: Rate = 0.1
    rates: dict[str, Rate] = {}  # noqa: RUF012 (pydantic copies it)
    momentum: Rate = 0.0
    weight_decay: Rate = 0.0
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"

    def build(self) -> Optimizer:
        """Return the optimiser."""
        fields = self.model_dump()
        return Optimizer(**{**fields, "rates": tuple(self.rates.items()), "betas": self.betas})


class ServerOptimizerConfig(OptimizerConfig):
    """The server's optimiser: applied to the mean change as a pseudo-gradient; rate 1 is plain averaging."""

    learning_rate: Rate = 1.0


class PartitionConfig(Open):
    """A partition of images: ``kind`` is majority, dirichlet, shards or by_size, further keys are its options."""

    kind: str


class DataConfig(Open):
    """The data: ``reader`` names a reader or generator, further keys are its options.

    ``split`` divides each user's examples again: ``{fractions = [0.8, 0.1, 0.1], order = "random", seed = 0}``. A text
    names the reader's column of splits instead.
    ``partition`` divides a set of images among clients: ``{kind = "majority", clients = 5, p = 0.8, train = 500,
    valid = 400}``. ``opt_out`` keeps examples out of whatever leaves a client: ``{fraction = 0.5, by = "client"}``.
    """

    reader: str
    split: dict[str, Any] | str | None = None
    partition: PartitionConfig | None = None
    opt_out: dict[str, Any] | None = None


class PreparationConfig(Strict):
    """How data are summed up and numbered before the first round; ``fedkeep.data.preparation.Rules``."""

    clients_a_word: int = Field(1, ge=1)
    clients_a_word_here: int = Field(1, ge=1)
    standardise: bool = False
    tokens: Literal["char", "word", "token", "hashed_words"] | None = None
    vocabulary: int | None = Field(None, ge=2)
    max_length: int | None = Field(None, ge=1)
    label_names: Annotated[tuple[str, ...] | None, Field(strict=False)] = None


class ModelConfig(Open):
    """The model: ``kind`` names it, further keys are its options; sizes that the data fix are filled in.

    ``kind`` is a name that ``fedkeep list`` shows, or ``package.module:Class`` for a module of your own.
    ``word_vectors`` names a file of word vectors that the embedding of ``text`` starts from, ``word_vectors_scale``
    times as long as there; empty: none.
    """

    kind: str
    word_vectors: str | None = None
    word_vectors_scale: float | None = Field(None, gt=0, allow_inf_nan=False)


class EarlyStoppingConfig(Strict):
    """When adaptation stops by the client's own validation loss; ``fedkeep.methods.EarlyStopping``."""

    every: int = Field(5, ge=1)
    patience: int = Field(10, ge=1)
    min_improvement: Rate = 0.0


class AdaptConfig(Strict):
    """How a client adapts: each phase of it (a new client's private part; the steps of a mixture of experts)."""

    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: int = Field(10, ge=0)
    batch_size: int = Field(32, ge=1)
    clip_norm: float | None = Field(None, gt=0)
    early_stopping: EarlyStoppingConfig | None = None

    def applied(self, phase: Phase) -> Phase:
        """Return a phase with these settings; early stopping stays as the method says where none is given."""
        stop = (
            phase.early_stopping
            if self.early_stopping is None
            else EarlyStopping(**self.early_stopping.model_dump())
        )
        return replace(
            phase,
            optimizer=self.optimizer.build(),
            epochs=self.epochs,
            steps=None,
            batch_size=self.batch_size,
            clip_norm=self.clip_norm,
            early_stopping=stop,
        )


class MethodConfig(Open):
    """The method: ``kind`` names it; ``loss``, ``optimizer``, ``server_optimizer`` and ``adapt`` are tables.

    So are ``reduce``, for uploads that can't be trusted, and ``secure``, for secure sums. ``upload_noise`` is the
    deviation of Gaussian noise that is added to every upload. ``package.module:function`` is a method of your own.
    """

    kind: str
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    server_optimizer: ServerOptimizerConfig | None = None
    adapt: AdaptConfig | None = None
    reduce: ReduceConfig | None = None
    secure: SecureConfig | None = None
    upload_noise: Rate = 0.0


class RunConfig(Strict):
    """How long and on what: ``rounds`` or ``epochs``, cohort, engine, workers, device, who is told (``trackers``).

    ``metrics`` names what is measured beside the usual: ``balanced_accuracy``, ``macro_f1``.
    """

    rounds: int | None = Field(None, ge=0)
    epochs: float | None = Field(None, ge=0, allow_inf_nan=False)
    cohort: int = Field(10, ge=1)
    sampling: Literal["shuffled", "independent", "poisson"] = "shuffled"
    engine: str = "auto"
    workers: int | None = Field(None, ge=1)
    device: str = "cpu"
    accelerate: bool = True
    evaluate_every: int | None = Field(None, ge=0)
    evaluate_shared: bool = False
    evaluate_adapted: bool = False
    hold_out: float = Field(0.0, ge=0, lt=1)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    min_clients: int = Field(1, ge=0)
    trackers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    metrics: Annotated[tuple[str, ...] | None, Field(strict=False)] = None

    @model_validator(mode="after")
    def _one_length(self) -> RunConfig:
        if (self.rounds is None) == (self.epochs is None):
            raise ValueError("give either rounds or epochs")
        return self


class PersonalizationConfig(Strict):
    """Fine-tuning on each client after the last round: ``ratio`` of the rates, ``steps``, tested ``every`` so many.

    ``optimizer`` is another kind than the method's.
    """

    ratio: Rate = 0.01
    steps: int = Field(200, ge=1)
    every: int = Field(20, ge=1)
    optimizer: Kind | None = None


class Config(Strict):
    """A whole experiment: ``name``, ``seed``, and the tables ``data``, ``model``, ``method`` and ``run``.

    The table ``personalization`` may ask for the curve of fine-tuning on each client after the last round; the table
    ``preparation`` says how texts, labels and features become numbers, where the reader is not to decide; the table
    ``privacy`` asks for differential privacy; the table ``rounds`` is for runs across machines (the fields of
    ``remote.RoundPolicy``), and simulations do without it. The table ``audit`` names what ``fedkeep audit`` allows.
    """

    name: str = ""
    seed: int = 0
    data: DataConfig
    model: ModelConfig
    method: MethodConfig
    run: RunConfig
    personalization: PersonalizationConfig | None = None
    preparation: PreparationConfig | None = None
    privacy: PrivacyConfig | None = None
    rounds: dict[str, Any] | None = None
    audit: AuditConfig | None = None

    @model_validator(mode="after")
    def _cohort_of_a_budget(self) -> Config:
        if self.privacy is not None and "cohort" not in self.run.model_fields_set:
            raise ValueError(
                "privacy wants run.cohort, the expected number of clients in a round, which ε goes by"
            )
        return self

    def to_toml(self) -> str:
        """Return a file that gives this configuration again: what was set, overrides included."""
        return to_toml(self.model_dump(exclude_unset=True))


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


def read_text(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: it is missing, no text, or too long to be one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
        if len(content) > LONGEST_FILE:
            raise ConfigError(
                f"The configuration {path} is longer than {LONGEST_FILE >> 20} MiB. Is it the right file?"
            )
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"Cannot read the configuration {path}: {reason}. `fedkeep list` names the built-in ones."
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
        _set(content, key, _toml_value(key, value))
    try:
        check_bounds(content)
    except ValueError as error:  # a key of many parts, or a text that is no TOML
        raise ConfigError(f"{where} with --set is no configuration: {error}.") from error
    return checked(Config, content, where)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a configuration's text.

    Raises:
        ConfigError: it is no TOML, or too deep or long to be a configuration.
    """
    try:
        return from_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no valid TOML: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{where} is no configuration: {error}.") from error


def checked(kind: type[M], content: Mapping[str, Any], where: str) -> M:
    """Return a configuration of a kind.

    Raises:
        ConfigError: a key is unknown, or a value doesn't fit; all faults are named.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        lines = [_fault(e, kind) for e in error.errors()]
        raise ConfigError(f"{where}:\n" + "\n".join(lines)) from None


def parse_overrides(given: list[str]) -> dict[str, str]:
    """Return ``["run.epochs=2"]`` as ``{"run.epochs": "2"}``.

    Raises:
        ConfigError: one of them is not of the form key=value.
    """
    overrides = {}
    for one in given:
        key, sign, value = one.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set wants key=value, e.g. --set run.epochs=2; got {_short(one)!r}.")
        overrides[key.strip()] = value.strip()
    return overrides


def _toml_value(key: str, text: str) -> Any:
    try:
        found = from_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise ConfigError(f"--set {_short(key)}: {error}.") from error
    return found["value"] if list(found) == ["value"] else text


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = _parts(key)
    for table in tables:
        inner = content.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {_short(key)}: {_short(table)!r} is a value, not a table.")
        content = inner
    content[last] = value


def _parts(key: str) -> list[str]:
    """Return a TOML key's parts: ``method.optimizer.rates."head.*"`` has four."""
    try:
        found: Any = from_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f'--set {_short(key)}: not a key of TOML; quote a pattern, as in rates."head.*"=0.1.'
        ) from error
    except ValueError as error:
        raise ConfigError(f"--set {_short(key)}: {error}.") from error
    parts: list[str] = []
    while isinstance(found, dict):
        if len(found) != 1:
            raise ConfigError(f"--set {_short(key)}: wanted one key.")
        ((part, found),) = found.items()
        parts.append(part)
    return parts


def _fault(error: Any, kind: type[BaseModel]) -> str:
    place = _short(".".join(str(p) for p in error["loc"])) or "configuration"
    if error["type"] == "extra_forbidden":
        known = _known(error["loc"][:-1], kind)
        near = did_you_mean(str(error["loc"][-1])[:40], known)
        return f"  {place}: unknown key.{near} Known here: {', '.join(known)}."
    if error["type"] == "missing":
        return f"  {place}: missing."
    if error["type"] == "value_error":
        return f"  {place}: {error['msg'].removeprefix('Value error, ')}."
    if error["type"] == "model_type":
        return f"  {place}: wanted a table; got {shown(error.get('input'))}."
    wanted = error["msg"].replace("Input should be", "wanted")
    return f"  {place}: {wanted}; got {shown(error.get('input'))}."


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]} …"


def _known(location: tuple[Any, ...], kind: type[BaseModel]) -> list[str]:
    model: Any = kind
    for part in location:
        field = model.model_fields.get(str(part))
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if model is None:
            return []
    return list(model.model_fields)
