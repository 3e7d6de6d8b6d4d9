"""The space of a sweep: which settings it chooses, and from what, for every method.

A file of TOML has the tables of a configuration; where a configuration has a value, it has a range::

    [method.optimizer]
    learning_rate = { low = 0.01, high = 1.0, log = true }

    [method]
    batch_size = { choices = [8, 16, 32] }

    [for.fedprox.method]        # for one method alone; other values here are fixed settings of it
    mu = { low = 0.001, high = 1.0, log = true }
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError, did_you_mean, raising, warn
from fedkeep.experiments.build import offered_methods
from fedkeep.experiments.config import parse_toml, read_text
from fedkeep.experiments.plugins import is_own
from fedkeep.experiments.toml import key_text, value_text

if TYPE_CHECKING:
    import optuna

OWN = "for"
TABLES = ("method", "model", "privacy")
SINGLE = ("run.cohort", "run.sampling")
KINDS = ("method.kind", "model.kind")


@dataclass(frozen=True, kw_only=True)
class Range:
    """What one setting is chosen from: numbers between bounds, which belong to it, or choices.

    Attributes:
        low, high: the bounds; two whole numbers: whole numbers alone.
        log: even over the logarithm.
        step: between neighbours, counted from ``low``; None: any number, or whole number.
        choices: values of any kind, in place of bounds.
    """

    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    step: float | int | None = None
    choices: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it holds whole numbers alone."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> list[Any]:
        """Its bounds, or all its choices."""
        return list(self.choices) or [self.low, self.high]

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """Return the value that a trial has for the setting of this name."""
        if self.choices:
            return json.loads(trial.suggest_categorical(name, [json.dumps(c) for c in self.choices]))
        assert self.low is not None
        assert self.high is not None
        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(name, float(self.low), float(self.high), step=self.step, log=self.log)

    def plain(self) -> dict[str, Any]:
        """Return it as in a file."""
        found = {
            "choices": list(self.choices) or None,
            "low": self.low,
            "high": self.high,
            "log": self.log or None,
            "step": self.step,
        }
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        """Return it for people."""
        if self.choices:
            return f"one of {', '.join(map(value_text, self.choices))}"
        kind = "whole numbers from " if self.whole else ""
        steps = "" if self.step is None else f" in steps of {self.step}"
        return f"{kind}{self.low} to {self.high}{steps}{', by the logarithm' if self.log else ''}"


@dataclass(frozen=True, kw_only=True)
class Space:
    """What one method's trials choose, and what is fixed for them.

    Attributes:
        ranges: by dotted key.
        fixed: values as TOML, by dotted key.
    """

    ranges: Mapping[str, Range]
    fixed: Mapping[str, str]

    def plain(self) -> dict[str, Any]:
        """Return its ranges as in a file, by dotted key."""
        return {key: one.plain() for key, one in self.ranges.items()}


def read_space(path: Path | None, given: Mapping[str, str], methods: Sequence[str]) -> dict[str, Space]:
    """Return the space of each method.

    Args:
        path: a file of TOML; None: there is none. What it says of other methods is not used.
        given: further ranges for all methods, as TOML by dotted key; they replace those of the file.
        methods: the methods' names.

    Raises:
        ConfigError: a table, key or bound is wrong, or a method has nothing to choose.
    """
    content = {} if path is None else parse_toml(read_text(path), str(path))
    where = "--range" if path is None else str(path)
    own = content.pop(OWN, {})
    if not isinstance(own, Mapping) or not all(isinstance(one, Mapping) for one in own.values()):
        raise ConfigError(
            "{where}: {own}: wanted tables of methods, e.g. [{own}.fedprox.method]; got {got!r}.",
            where=where,
            own=OWN,
            got=own,
        )
    known = offered_methods()
    for name in own:
        if not is_own(name) and name not in known:
            raise ConfigError(
                "{where}: {own}.{name}: there is no such method.{near}",
                where=where,
                own=OWN,
                name=name,
                near=did_you_mean(name, known),
            )
    shared = dict(_leaves(content))
    for key, text in given.items():
        with raising(
            ConfigError,
            "--range {key} wants a range: '{key}={{low=0.01,high=1.0,log=true}}' or "
            "'{key}={{choices=[1,2]}}', in quotation marks; got {got!r}.",
            ConfigError,
            key=key,
            got=text,
        ):
            value = parse_toml(f"value = {text}", f"--range {key}")["value"]
        shared |= dict(_leaves(_nested(key, value)))
    found = {}
    for method in methods:
        ranges, fixed = {}, {}
        alone = dict(_leaves(own.get(method, {})))
        for key, value in {**shared, **alone}.items():
            _check_key(where, key)
            if isinstance(value, Mapping):
                ranges[key] = _range(f"{where}: {key}", value)
            elif key not in alone:
                raise ConfigError(
                    "{where}: {key}: wanted a range, e.g. {{ low = 0.01, high = 1.0, log = true }} or {{ choices = "
                    "[1, 2] }}; got {value!r}. What does not vary stands in the configuration.",
                    where=where,
                    key=key,
                    value=value,
                )
            else:
                fixed[key] = value_text(value)
        for key in (*ranges, *fixed):
            if inner := next((other for other in (*ranges, *fixed) if other.startswith(f"{key}.")), None):
                raise ConfigError(
                    "{where}: {key} is chosen whole, and {inner} in it apart: one would undo the other. Give "
                    "ranges of keys, or choices of tables that hold all.",
                    where=where,
                    key=key,
                    inner=inner,
                )
        if not ranges:
            raise ConfigError(
                "{where}: the space of {method} is empty: nothing is to be chosen. Give a range, e.g. "
                "method.optimizer.learning_rate = {{ low = 0.01, high = 1.0, log = true }}.",
                where=where,
                method=method,
            )
        found[method] = Space(ranges=ranges, fixed=fixed)
    return found


def _is_range(value: Any) -> bool:
    return isinstance(value, Mapping) and (not value or not {"low", "high", "choices"}.isdisjoint(value))


def _leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ranges and other values with their dotted keys."""
    for name, value in content.items():
        key = f"{above}.{key_text(name)}" if above else key_text(name)
        if isinstance(value, Mapping) and not _is_range(value):
            yield from _leaves(value, key)
        else:
            yield key, value


def _nested(key: str, value: Any) -> dict[str, Any]:
    tables: Any = parse_toml(f"{key} = 0", f"--range {key}")
    at = tables
    while True:
        ((name, inner),) = at.items()
        if not isinstance(inner, dict):
            at[name] = value
            found: dict[str, Any] = tables
            return found
        at = inner


def _check_key(where: str, key: str) -> None:
    table = key.partition(".")[0]
    if key in KINDS:
        raise ConfigError(
            "{where}: {key}: a sweep keeps to its kinds. Name methods with --methods; sweep models apart.",
            where=where,
            key=key,
        )
    if key.startswith("method.adapt."):
        raise ConfigError(
            "{where}: {key}: a sweep chooses by valid during training, and adapting afterwards is not seen there.",
            where=where,
            key=key,
        )
    if (table in TABLES and key != table) or key in SINGLE:
        return
    raise ConfigError(
        "{where}: {key}: a sweep chooses settings of the tables {tables}, and {files}: what "
        "is judged, and how long, is the same for all trials.{near}",
        where=where,
        key=key,
        tables=", ".join(TABLES),
        files=" and ".join(SINGLE),
        near=did_you_mean(table, TABLES),
    )


def _range(place: str, given: Mapping[str, Any]) -> Range:
    known = list(Range.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(
                "{place}: unknown key {name!r} of a range.{near} Known here: {known}.",
                place=place,
                name=name,
                near=near,
                known=", ".join(known),
            )
    if "choices" in given:
        choices = given["choices"]
        if len(given) > 1:
            raise ConfigError(
                "{place}: wanted either choices or low and high; got {given!r}.",
                place=place,
                given=dict(given),
            )
        if not isinstance(choices, list) or not choices:
            raise ConfigError(
                "{place}: the range is empty: choices wants a list of values; got {choices!r}.",
                place=place,
                choices=choices,
            )
        # A date
        with raising(
            ConfigError,
            "{place}: choices: wanted numbers, texts, truth values, lists or tables; got {choices!r}.",
            TypeError,
            place=place,
            choices=choices,
        ):
            texts = {json.dumps(c) for c in choices}
        if len(texts) < len(choices):
            raise ConfigError(
                "{place}: choices names a value twice: {choices!r}.", place=place, choices=choices
            )
        found = Range(choices=tuple(choices))
    else:
        found = _between(place, given)
    if len(found.ends) == 1 or (not found.choices and found.low == found.high):
        warn(f"{place}: there is one value only, {found.ends[0]!r}, so nothing is chosen.")
    return found


def _between(place: str, given: Mapping[str, Any]) -> Range:
    low, high, step, log = (given.get(name) for name in ("low", "high", "step", "log"))
    for name, value in (("low", low), ("high", high), ("step", 1 if step is None else step)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                "{place}: {name}: wanted a number; got {value!r}.", place=place, name=name, value=value
            )
    if log is not None and not isinstance(log, bool):
        raise ConfigError("{place}: log: wanted true or false; got {log!r}.", place=place, log=log)
    assert low is not None
    assert high is not None
    if low > high:
        raise ConfigError(
            "{place}: the range is empty: low is {low}, high is {high}.", place=place, low=low, high=high
        )
    if log and low <= 0:
        raise ConfigError("{place}: by the logarithm, low must be above 0; got {low}.", place=place, low=low)
    if step is not None and (log or step <= 0):
        raise ConfigError(
            "{place}: step: wanted a number above 0, and none with log; got {step}.", place=place, step=step
        )
    found = Range(low=low, high=high, log=bool(log), step=step)
    if found.whole and isinstance(step, float):
        raise ConfigError(
            "{place}: step: wanted a whole number between whole numbers; got {step}.", place=place, step=step
        )
    return found
