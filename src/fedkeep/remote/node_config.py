"""A device's own configuration: where its data and its private states are, and what its owner lays down.

    [data]
    reader = "table"
    path = "notes.csv"

    [device]
    owner = "ann"
    folder = "states"
    clients = ["ann"]

Relative paths are looked up beside the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.data.preparation import Encoding, Source
from fedkeep.data.preparation.texts import HASHED, TextCode
from fedkeep.experiments.build import build_method, build_model, build_source, settled
from fedkeep.experiments.config import OF_CHARACTERS, DataConfig, parse_config, parse_toml, read_text
from fedkeep.experiments.config_tables import Strict, Table, made_of
from fedkeep.experiments.environment import check_device
from fedkeep.methods import Method
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.own_data import of_clients


@dataclass(frozen=True, kw_only=True)
class OwnDevice(OwnerTerms):
    """The table ``[device]``: the owner's terms, and what is the device's own.

    Attributes:
        folder: where private states are kept; only its owner may enter it.
        clients: the clients that take part, of those in the data; empty: all.
    """

    folder: Annotated[str, Field(min_length=1)]
    clients: tuple[str, ...] = ()


class NodeConfig(Strict):
    """A device's configuration.

    Attributes:
        seed: of what ``data`` draws where that names none.
        data: its reader, as in an experiment.
        device: what its owner lays down.
        link: how it reaches the server; the transport's own matter, and checked there.
    """

    seed: int = 0
    data: DataConfig
    device: Annotated[OwnDevice, Table()]
    link: dict[str, Any] | None = None


TO_HAVE_ONE = (
    " It is a device's own file: the federation's owner makes one for each node by fedkeep flower init. Ask the owner for "
    "this device's."
)


def read_node_config(path: Path) -> NodeConfig:
    """Read a device's configuration.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, or a value doesn't fit; all faults are named.
    """
    content = parse_toml(read_text(path, TO_HAVE_ONE), str(path))
    if "device" not in content and "model" in content:
        raise ConfigError(
            "{file} is a configuration; wanted a device's own file, node.toml. To train on this machine: fedkeep run {file}. "
            "To train on several: fedkeep flower init DIR --config {file} --node NAME writes DIR/NAME/node.toml, then "
            "fedkeep device run node.toml there.",
            file=path,
        )
    found: NodeConfig = made_of(NodeConfig, content, str(path))
    return found


def states_folder(path: Path) -> Path:
    """Return the folder of private states that a device's configuration names."""
    return path.parent / read_node_config(path).device.folder


def build_node(path: Path, tell: Callable[[str], None] = lambda text: None) -> Node:
    """Return the node of a configuration file.

    Raises:
        ConfigError: as for ``read_node_config``; or a client is named of whom there are no data.
        DataError: a fault in the data.
    """
    config = read_node_config(path)
    check_device(config.device.compute)
    source: Source = build_source(config.data, config.seed, path.parent)
    if config.device.clients:
        source = of_clients(source, config.device.clients, f"{path}: device.clients")
    if not len(source.ids):
        raise ConfigError(
            "{path}: the data hold no client. Name another file or reader in [data].", path=path
        )
    folder = path.parent / config.device.folder
    return Node(source, folder, config.device, experiment, tell=tell)


def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    """Make model and method of a configuration's text and an encoding as JSON; server and device do the same.

    Raises:
        ConfigError, DataError: they don't fit; or nothing says what texts are cut into, and a simulation of the
            configuration would count characters.
    """
    shared = Encoding.from_json(json.dumps(encoding))
    config = settled(parse_config(text, "The server's configuration"), shared)
    cut = {code.tokens for code in shared.columns.values() if isinstance(code, TextCode)}
    if config.model.kind in OF_CHARACTERS and config.preparation.tokens is None and cut & {*HASHED}:
        raise ConfigError(
            "The model {model!r} reads characters, and devices hash words of their texts, as [preparation] "
            "names no tokens; a simulation counts characters. Say tokens = 'char' there, and devices tell how often "
            "each occurs, or tokens = 'unicode_words'.",
            model=config.model.kind,
        )
    return build_model(config, shared), build_method(config.method)
