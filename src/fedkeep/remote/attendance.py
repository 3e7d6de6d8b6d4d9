"""Who took part in how many of the rounds that asked for it, and whether judging has lost examples on the way."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from fedkeep.core.errors import ConfigError, RunError, did_you_mean, raising
from fedkeep.core.files import write_whole
from fedkeep.core.records import read_records
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.engines.round import Sampler
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.remote.client_ledger import RunClients
from fedkeep.store import VersionLedger

T = TypeVar("T")
SOME = 5
"""Clients that a line names."""
DROPPED = "dropped.json"
"""Names, in a run's folder, the clients that its owner has dropped."""


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """Who took part in a run.

    Attributes:
        rounds: finished ones.
        roster: the clients.
        taken: by client, how many rounds took its upload.
        asked: by client, how many asked for it; empty where that is not known: cohorts are secret, or more are asked
            than are taken.
        judged: by split, on how many examples models were judged at most, and at last.
        dropped: clients that the owner has dropped.
        listed: whether the signed project says which clients are whose.
    """

    rounds: int
    roster: RunClients
    taken: Mapping[str, int]
    asked: Mapping[str, int]
    judged: Mapping[str, tuple[int, int]]
    dropped: Collection[str]
    listed: bool

    @property
    def rule(self) -> str:
        """How it is known whose a client is, for people."""
        if self.listed:
            return "Clients belong to the nodes for which the signed project lists them (clients.toml)."
        if self.roster.keys:
            return "A client belongs to the key that first brought it."
        return "The link of this run knows no keys: any node may bring any client."

    @property
    def missed(self) -> dict[str, tuple[int, int]]:
        """By client that was missing in rounds that asked for it: in how many it took part, and of how many."""
        return {c: (self.taken[c], asked) for c, asked in self.asked.items() if self.taken[c] < asked}

    def lines(self) -> list[str]:
        """Return what is to be known beside any result of the run, for people; nothing if all took part."""
        missed = self.missed
        named = [
            f"{client} took part in {taken} of {asked} rounds{' and was dropped' * (client in self.dropped)}"
            for client, (taken, asked) in sorted(missed.items(), key=lambda one: one[1][0] - one[1][1])
        ]
        more = [f"{len(named) - SOME} more clients missed rounds"] if len(named) > SOME else []
        lines = [f"{'; '.join([*named[:SOME], *more])}."] if named else []
        return lines + [
            f"The last models were judged on {last} examples of {split}, and earlier ones on up to {most}: their results are "
            f"of other clients, and do not compare."
            for split, (most, last) in self.judged.items()
            if last < most
        ]


def attendance_of(folder: Path) -> Attendance:
    """Return who took part in a run across machines, from its folder, which is only read.

    Raises:
        RunError: there is no such run, or it is damaged.
    """
    info = read_info(folder)
    roster, commit = _roster(info, folder), read_commit(folder, info)
    versions = VersionLedger(len(roster))
    versions.read(commit.ledger.read(folder / "ledger.jsonl"))
    ids = list(map(str, roster.ids))
    taken = dict(zip(ids, versions.of(range(len(ids))).version.tolist(), strict=True))
    judged = dict[str, tuple[int, int]]()
    for record in read_records(folder / "records.jsonl", commit.records):
        if record.client is None and record.metric == info["metric"] and record.split in ("valid", "test"):
            most = max(record.n, judged.get(record.split, (0, 0))[0])
            judged[record.split] = most, record.n
    return Attendance(
        rounds=commit.round,
        roster=roster,
        taken=taken,
        asked=_asked(info, roster, ids, commit.round),
        judged=judged,
        dropped=dropped_from(folder),
        listed=bool(info.get("listed")),
    )


def dropped_from(folder: Path) -> frozenset[str]:
    """Return the clients that a run's owner has dropped.

    Raises:
        RunError: the file that names them is damaged.
    """
    return frozenset(noted(folder / DROPPED, list[str], "drop"))


def noted(path: Path, kind: type[T], verb: str) -> T:
    """Return what a run's owner has noted in a file, checked; nothing, where there is none.

    Raises:
        RunError: it is damaged; ``verb`` is what the owner does to have it again.
    """
    if not path.exists():
        return kind()
    with raising(
        RunError,
        "{path} cannot be read: {why}. Mend it, or remove it and {verb} them again.",
        OSError,
        ValueError,
        path=path,
        verb=verb,
    ):
        return TypeAdapter(kind).validate_python(json.loads(path.read_bytes()))


def move(folder: Path, clients: Collection[str], key: str) -> None:
    """Let clients belong to another key from now on; no server may be at the run. What they keep stays where it is.

    Args:
        folder: the run's.
        clients: their ids.
        key: what stands for the key, as the link knows it (``Transport.key``).

    Raises:
        ConfigError: one is none of the run's, the link of this run knows no keys, or the project lists clients by node.
        RunError: there is no such run across machines, it is damaged, or a server is at it.
    """
    info = read_info(folder)
    roster = _roster(info, folder)
    _check_known(roster, clients)
    if info.get("listed"):
        raise ConfigError(
            "The signed project lists clients by node, and nothing else counts: change the list, and sign it by fedkeep "
            "flower init DIR --clients FILE."
        )
    if not roster.keys:
        raise ConfigError("Nodes of this run have no keys, so that any may bring any client.")
    with closing(RunDirectory(folder, info)) as directory:  # locked
        owners = {**roster.owners, **dict.fromkeys(clients, key)}
        moved = replace(roster, keys=[owners[client] for client in roster.ids])
        directory.write_info({**info, "roster": moved.plain()})


def _check_known(roster: RunClients, clients: Collection[str]) -> None:
    ids = list(map(str, roster.ids))
    for client in clients:
        if client not in ids:
            raise ConfigError(
                "{client!r} is none of this run's {count} clients.{near}",
                client=client,
                count=len(ids),
                near=did_you_mean(client, ids),
            )


def drop(folder: Path, clients: Collection[str], *, back: bool = False) -> frozenset[str]:
    """Drop clients from a run, which may be on its way: nobody asks them, or waits for them; or take them back.

    Returns:
        All that are dropped now.

    Raises:
        ConfigError: one is none of the run's, or none would be left.
        RunError: there is no such run across machines, or it is damaged.
    """
    roster = _roster(read_info(folder), folder)
    _check_known(roster, clients)
    known = dropped_from(folder)
    now = known.difference(clients) if back else known.union(clients)
    if len(now) == len(roster):
        raise ConfigError("No client would be left. Stop the run instead.")
    write_whole(folder / DROPPED, json.dumps(sorted(now)).encode())
    return now


def _roster(info: Mapping[str, Any], folder: Path) -> RunClients:
    if "roster" not in info:
        raise RunError(
            "{folder} is a simulation: all of its clients took part in all rounds that drew them.",
            folder=folder,
        )
    return RunClients.from_plain(info["roster"])


def _asked(info: Mapping[str, Any], roster: RunClients, ids: list[str], rounds: int) -> dict[str, int]:
    policy = info["identity"]["policy"]
    config = info.get("config") or {}
    if policy["over_selection"] > 1 or policy["mode"] == "buffered" or config.get("privacy"):
        return {}
    sampling, seed = info["identity"]["sampling"], int(info["cohort_seed"])
    first, later = roster.drawn
    sampler = Sampler(first, int(info["identity"]["cohort"]), sampling, seed, later)
    asked = dict.fromkeys(ids, 0)
    for number in range(rounds):
        for place in sampler(number):
            asked[ids[place]] += 1
    return asked
