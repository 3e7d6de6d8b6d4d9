"""Configuration files: TOML, checked field by field; an unknown key fails with a suggestion."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.core.optim import Optimizer

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Open(BaseModel):
    """A table whose further keys are the options of the thing that ``kind`` names; they are checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.__pydantic_extra__ or {})


class OptimizerConfig(_Strict):
    """An optimiser: ``kind``, ``learning_rate``, ``rates`` by name pattern, and its constants."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: Rate = 0.1
    rates: dict[str, Rate] = {}
    momentum: Rate = 0.0
    weight_decay: Rate = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"

    def build(self) -> Optimizer:
        """Return the optimiser."""
        fields = self.model_dump()
        return Optimizer(**{**fields, "rates": tuple(self.rates.items()), "betas": self.betas})


class DataConfig(_Open):
    """The data: ``reader`` names a reader or generator, further keys are its options."""

    reader: str
    split: dict[str, Any] | None = None


class ModelConfig(_Open):
    """The model: ``kind`` names it, further keys are its options; sizes that the data fix are filled in."""

    kind: str


class LossConfig(_Strict):
    """The loss: ``kind``, and penalties on the client's own parameters by name pattern."""

    kind: Literal["cross_entropy", "squared_error"] = "cross_entropy"
    label: str = "label"
    l2: dict[str, Rate] = {}


class AdaptConfig(_Strict):
    """How a new client's private part is fitted."""

    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: int = Field(10, ge=0)
    batch_size: int = Field(32, ge=1)
    clip_norm: float | None = Field(None, gt=0)


class MethodConfig(_Open):
    """The method: ``kind`` names it; ``loss``, ``optimizer``, ``server_optimizer`` and ``adapt`` are tables."""

    kind: str
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    server_optimizer: OptimizerConfig | None = None
    adapt: AdaptConfig | None = None


class RunConfig(_Strict):
    """How long and on what: ``rounds`` or ``epochs``, cohort, engine, device."""

    rounds: int | None = Field(None, ge=0)
    epochs: float | None = Field(None, ge=0)
    cohort: int = Field(10, ge=1)
    sampling: Literal["shuffled", "independent"] = "shuffled"
    engine: str = "auto"
    device: str = "cpu"
    evaluate_every: int | None = Field(None, ge=0)
    hold_out: float = Field(0.0, ge=0, lt=1)
    on_nonfinite: Literal["stop", "skip"] = "stop"


def _seed(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a seed is a whole number")
    return value


class Config(_Strict):
    """A whole experiment: ``name``, ``seed``, and the tables ``data``, ``model``, ``method`` and ``run``."""

    name: str = ""
    seed: Annotated[int, BeforeValidator(_seed)] = 0
    data: DataConfig
    model: ModelConfig
    method: MethodConfig
    run: RunConfig


def read_config(path: Path, overrides: Mapping[str, str] | None = None) -> tuple[Config, str]:
    """Read a configuration file.

    Args:
        path: a TOML file.
        overrides: dotted keys and TOML values that replace the file's, e.g. ``{"run.epochs": "2"}``.

    Returns:
        The checked configuration, and the file's text.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, or a value doesn't fit; all faults are named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"Cannot read the configuration {path}: {reason}. `fedkeep list` names the built-in ones.") from error
    return parse_config(text, str(path), overrides), text


def parse_config(text: str, where: str = "configuration", overrides: Mapping[str, str] | None = None) -> Config:
    """Check a configuration's text; see ``read_config``."""
    try:
        content = tomllib.loads(text)
        for key, value in (overrides or {}).items():
            _set(content, key, _toml_value(value))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no valid TOML: {error}.") from error
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{where}:\n" + "\n".join(_fault(e) for e in error.errors())) from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        inner = content.setdefault(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: {table!r} is a value, not a table.")
        content = inner
    content[last] = value


def _fault(error: Any) -> str:
    place = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        known = _known(error["loc"][:-1])
        return f"  {place}: unknown key.{did_you_mean(str(error['loc'][-1]), known)} Known here: {', '.join(known)}."
    if error["type"] == "missing":
        return f"  {place}: missing."
    return f"  {place}: {error['msg']}; got {error.get('input')!r}."


def _known(location: tuple[Any, ...]) -> list[str]:
    model: Any = Config
    for part in location:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(model.model_fields) if model else []


def check_options(what: str, function: Callable[..., Any], options: Mapping[str, Any], given: set[str]) -> None:
    """Raise ConfigError unless ``options`` are arguments of ``function`` that are not ``given`` elsewhere.

    Args:
        what: the table's name in messages, e.g. ``data``.
        function: a reader, a model class or a method's builder.
        options: the table's further keys.
        given: arguments that fedkeep fills in itself.
    """
    parameters = inspect.signature(function).parameters
    known = [n for n, p in parameters.items() if n not in given and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in options:
        if key not in known:
            raise ConfigError(f"{what}.{key}: unknown key.{did_you_mean(key, known)} Known here: {', '.join(known)}.")
    needed = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in options]
    if needed:
        raise ConfigError(f"{what}: missing {', '.join(needed)}.")
