"""``clients.toml`` of a project: which clients live at which node. It is signed as all files of the project are.

    [clients]
    north = ["anna", "north-*"]

Names of nodes are those of their keys; clients are named, or met by globs. A client that is named somewhere is met by no glob.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.experiments.config import parse_toml, read_text
from fedkeep.remote.listed import Listed

CLIENTS = "clients.toml"


def clients_by_node(text: str, nodes: Collection[str], where: str = CLIENTS) -> dict[str, list[str]]:
    """Return names and globs of clients by the name of their node.

    Args:
        text: of the file.
        nodes: the names of those that have keys.
        where: the file's name, for messages.

    Raises:
        ConfigError: it is wrong, or names a node that has no key, or a client twice.
    """
    content = parse_toml(text, where)
    table = content.get("clients")
    if set(content) != {"clients"} or not isinstance(table, Mapping) or not table:
        raise ConfigError(
            f"{where}: wanted one table [clients], with a line for each node: north = ['anna', 'north-*']; got "
            f"{', '.join(content) or 'nothing'}."
        )
    found, taken = dict[str, list[str]](), dict[str, str]()
    for node, names in table.items():
        if node not in nodes:
            raise ConfigError(
                f"{where}: clients.{node}: no node of that name has a key; known are {', '.join(sorted(nodes)) or 'none'}."
                f"{did_you_mean(node, nodes)} Add it: fedkeep flower init DIR --node {node}."
            )
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"{where}: clients.{node}: wanted a list of names and globs of clients; got {names!r}."
            )
        for name in names:
            if taken.setdefault(name, node) != node:
                raise ConfigError(
                    f"{where}: {name!r} is listed for {taken[name]} and for {node}. Take it out of one."
                )
        found[node] = list(names)
    return found


def listed_in(project: Path, keys: Mapping[str, str]) -> Listed | None:
    """Return which clients a project lists for which node's key; None: it lists none.

    Args:
        project: its folder.
        keys: the names of nodes by what stands for their keys at the link.

    Raises:
        ConfigError: as for ``clients_by_node``.
    """
    path = project / CLIENTS
    if not path.exists():
        return None
    found = clients_by_node(read_text(path), keys.values(), str(path))
    return Listed({key: found[name] for key, name in keys.items() if name in found})
