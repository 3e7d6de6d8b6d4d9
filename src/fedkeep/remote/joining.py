"""Parties that the owner adds to a run on its way: a file beside the run names their keys, and the server takes them in.

Between two rounds the clients of such a key that fit join the roster, and cohorts are drawn from all from then on. That is
written before anybody asks them, so a run that is killed goes on with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import layout, write_whole
from fedkeep.core.net import Net
from fedkeep.core.run_files import read_info
from fedkeep.engines import Sampler, first_global
from fedkeep.experiments.conductor import check_cohorts
from fedkeep.methods import Method
from fedkeep.remote.attendance import noted
from fedkeep.remote.client_ledger import Listed, RunClients
from fedkeep.remote.policy import RoundPolicy

ADDED = "added.json"
"""Names, in a run's folder, the keys of parties that were added on its way, each with its clients where these are listed."""
INSTEAD = "Let the run end, and continue from it with all of them (continue-from)."


def add(folder: Path, key: str, clients: Sequence[str] = ()) -> None:
    """Let the clients of a key join a run, which may be on its way.

    Args:
        folder: the run's.
        key: what stands for it, as the link knows it (``Transport.key``).
        clients: their names and globs, where the project lists clients.

    Raises:
        ConfigError: the run's rounds are not such that somebody can join, or it has ended.
        RunError: there is no such run across machines, or it is damaged.
    """
    info = read_info(folder)
    if "roster" not in info:
        raise RunError("{folder} is a simulation: nobody joins it.", folder=folder)
    if info.get("status") == "finished":
        raise ConfigError("{folder} has finished. {instead}", folder=folder, instead=INSTEAD)
    if (info.get("config") or {}).get("privacy"):
        raise ConfigError(
            "ε of {folder} holds for the clients that it began with. {instead}",
            folder=folder,
            instead=INSTEAD,
        )
    check_rounds(info["identity"]["policy"]["mode"], info["identity"]["policy"]["over_selection"])
    write_whole(folder / ADDED, json.dumps({**added_to(folder), key: list(clients)}).encode())


def added_to(folder: Path) -> dict[str, list[str]]:
    """Return the keys of parties that were added to a run, each with names and globs of its clients.

    Raises:
        RunError: the file that names them is damaged.
    """
    return noted(folder / ADDED, dict[str, list[str]], "add")


def listed_with(listed: Listed | None, added: Mapping[str, Sequence[str]]) -> Listed | None:
    """Return which clients are whose, those of added parties among them."""
    if listed is None:
        return None
    return replace(listed, clients={**added, **listed.clients})


def check_rounds(mode: str, over_selection: float) -> None:
    """Raise ConfigError where rounds are such that nobody can join on the way."""
    if mode == "buffered" or over_selection > 1:
        raise ConfigError(
            "Nobody joins a run that is buffered or asks more clients than it takes. {instead}",
            instead=INSTEAD,
        )


def check_growth(
    method: Method, net: Net, before: RunClients, after: RunClients, sampler: Sampler, policy: RoundPolicy
) -> None:
    """Refuse clients whom a run cannot take in on its way.

    Args:
        method: the run's.
        net: its model.
        before, after: its clients without them and with them.
        sampler: draws its cohorts now.
        policy: of its rounds.

    Raises:
        ConfigError: the server's state is of each client, cohorts would be too small for secure sums, or rounds are none that
            somebody can join.
    """
    check_rounds(policy.mode, policy.over_selection)
    there, here = (layout(first_global(method, net, roster).state) for roster in (before, after))
    if there != here:
        raise ConfigError(
            "The server of {method!r} has a state for each client that the run began with. {instead}",
            method=method.name,
            instead=INSTEAD,
        )
    check_cohorts(method, Sampler(after.trains, sampler.asked, sampler.mode, sampler.seed))
