"""Which node a ClientApp speaks for: the one that the device's configuration describes, or one of a simulation.

A device's configuration has the tables ``[device]``, ``[data]`` as in an experiment, and ``[link]`` (``supernode``)::

    seed = 0                          # of divisions that [data] leaves to a seed

    [device]
    folder = "state"                  # private states
    owner = "clinic-a"
    clients = ["ward-1", "ward-2"]    # of the data; all, if it is left out
    data = "exports"                  # the folder of data, as --data of fedkeep run

    [data]
    reader = "csv"
    path = "visits.csv"

Further keys of ``[device]`` are the fields of ``remote.node.Terms``. Paths are looked up beside the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from pydantic import ValidationError

from fedkeep.core.errors import ConfigError, did_you_mean, first_line
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Encoding, Raw, Ready, Rules, Source, Summary
from fedkeep.data.preparation.columns import Counted
from fedkeep.experiments.config import DataConfig, parse_config
from fedkeep.experiments.sources import ConfiguredSource, build_source
from fedkeep.experiments.toml import from_toml
from fedkeep.flower.experiment import build_experiment
from fedkeep.flower.project import bundled
from fedkeep.flower.supernode import NODE_CONFIG
from fedkeep.remote.node import Node, Terms

TERMS = {f.name for f in fields(Terms)}
DEVICE = TERMS | {"folder", "clients", "data"}
SIMULATED = 64  # nodes that one process of a simulation keeps at hand


def node_of(context: Context) -> Node:
    """Return the node of a context; a process that serves several messages keeps it.

    Raises:
        ConfigError, DataError: the configuration is missing or wrong, or there is a fault in the data.
    """
    place = context.node_config.get(NODE_CONFIG)
    if place is not None:
        return read_node(Path(str(place)))
    if "partition-id" not in context.node_config:
        raise ConfigError(
            f"This node has no configuration. Start it with --node-config '{NODE_CONFIG}=\"node.toml\"'."
        )
    settings = context.run_config
    number, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return _simulated(str(bundled(str(settings["config"]))), str(settings["devices"]), number, count)


@lru_cache(maxsize=1)
def read_node(path: Path) -> Node:
    """Return the node that a configuration describes.

    Raises:
        ConfigError, DataError: it is missing or wrong, or there is a fault in the data; says what and where.
    """
    content = _read(path)
    device, data = _table(path, content, "device"), _table(path, content, "data")
    for key in device:
        if key not in DEVICE:
            known = f"{', '.join(sorted(DEVICE))}.{did_you_mean(key, DEVICE)}"
            raise ConfigError(f"{path}: device.{key}: unknown key. Known here: {known}")
    try:
        settings = DataConfig.model_validate(data)
        terms = Terms(**{"owner": "owner", **{key: device[key] for key in device if key in TERMS}})
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{path}: {first_line(error)}.") from error
    source = build_source(settings, int(content.get("seed", 0)), path.parent / str(device.get("data", "")))
    chosen = of_clients(source, device["clients"]) if "clients" in device else source
    folder = path.parent / str(device.get("folder", "state"))
    return Node(chosen, folder, terms, build_experiment, tell=lambda text: print(text, flush=True))  # noqa: T201


@lru_cache(maxsize=SIMULATED)
def _simulated(config: str, folder: str, number: int, count: int) -> Node:
    """Return a node of a simulation: its clients are every ``count``-th of the experiment's own data."""
    settings = parse_config(Path(config).read_text(encoding="utf-8"), config)
    source = build_source(settings.data, settings.seed)
    chosen = of_clients(source, list(map(str, source.ids))[number::count])
    return Node(chosen, Path(folder) / str(number), Terms(owner=f"node-{number}"), build_experiment)


@dataclass(frozen=True)
class ChosenSource:
    """Some clients of a source: nothing of the others is told or given.

    Attributes:
        all: the source.
        ids: the clients, in the order of the source.
    """

    all: ConfiguredSource
    ids: Sequence[str]

    @cached_property
    def _places(self) -> list[int]:
        position = {str(client): place for place, client in enumerate(self.all.ids)}
        return [position[client] for client in self.ids]

    def summary(self, rules: Rules = Rules()) -> Summary:
        """Return what may leave the device of these clients."""
        read = self.all.read
        if isinstance(read, Ready):
            return Ready(data=read.data.select(self._places)).summary(rules)
        if not isinstance(read, Raw):
            raise ConfigError("device.clients: this reader's data cannot be divided by client. Leave it out.")
        _, client = read._grouped
        wanted = np.isin(client, self._places)
        if read.split is not None:
            wanted &= np.asarray(read.split) == "train"
        rows = np.flatnonzero(wanted)
        counted = Counted(rows=rows, client=client[rows])
        columns = {name: column.summary(rules, counted) for name, column in read.columns.items()}
        return Summary(
            clients=len(self.ids), clients_a_word=rules.clients_a_word, columns=columns, about=read.about
        )

    def encoded(self, encoding: Encoding) -> FederatedData:
        """Return their data in numbers."""
        return self.all.encoded(encoding).select(self._places)


def of_clients(source: ConfiguredSource, clients: Sequence[Any]) -> Source:
    """Return some clients of a source, in its order.

    Raises:
        ConfigError: one is not there, or is named twice; none is named.
    """
    named = [str(client) for client in clients]
    there = [str(client) for client in source.ids]
    if missing := sorted(set(named) - set(there)):
        raise ConfigError(
            f"device.clients: the data have no client {missing[0]!r}.{did_you_mean(missing[0], there)} They have "
            f"{len(there)} clients."
        )
    if len(set(named)) < len(named) or not named:
        raise ConfigError("device.clients: wanted at least one client, each once.")
    wanted = set(named)
    return ChosenSource(source, [client for client in there if client in wanted])


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return from_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"There is no node configuration {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {first_line(error)}.") from error


def _table(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: the table [{name}] is missing.")
    return table
