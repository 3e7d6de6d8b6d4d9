"""The experiment as server and devices build it: from the part of a configuration that travels, and the encoding."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.data.preparation import Encoding
from fedkeep.experiments.build import build_method, build_model
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.toml import from_toml, to_toml
from fedkeep.methods import Method

ELSEWHERE = {"data": {"reader": "devices"}, "run": {"rounds": 0}}
"""What stands for the tables that one side does not have: the server has no data, a device does not run rounds."""
SENT = {"name", "seed", "model", "method", "preparation"}
"""What devices are told of a configuration."""


def read_experiment(text: str, where: str = "The experiment") -> Config:
    """Return the configuration of a text that may lack ``[data]`` or ``[run]``.

    Raises:
        ConfigError: it is wrong; every fault is named.
    """
    try:
        content = from_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no valid TOML: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{where} is no configuration: {error}.") from error
    return parse_config(to_toml({**ELSEWHERE, **content}), where)


def shared_text(config: Config) -> str:
    """Return what devices are told of a configuration, as TOML."""
    return to_toml(config.model_dump(exclude_unset=True, include=SENT))


def build_experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    """Return model and method; server and devices call this with the same text and encoding.

    Raises:
        ConfigError, MethodError, SplitError: they cannot be made here.
    """
    config = read_experiment(text)
    made = build_model(config, Encoding.from_json(json.dumps(encoding)))
    return made, build_method(config.method)
