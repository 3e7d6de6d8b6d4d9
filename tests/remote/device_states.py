"""Small private states of a device, for the tests of this folder."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fedkeep.core.params import Params
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import FileHeader, create, file_of
from fedkeep.remote.device_store import DeviceStore
from fedkeep.store import Default, LedgerLines, Line
from fedkeep.store.rows import RowFormat

INITIAL = {"user": torch.tensor([0.5, -1.5]), "client/count": torch.tensor(4)}
DEFAULT = Default(INITIAL)
OWNER, RUN = "ann", "abc123"
CLIENTS = ("a", "b", "c")
IDS = (*CLIENTS, "bo", "\u00e9", "anna with a long id")
NEW = Line()


def made(
    folder: Path, *, owner: str = OWNER, run: str = RUN, initial: Params = INITIAL, **about: Any
) -> Path:
    path = file_of(folder, run)
    create(path, FileHeader(owner=owner, run=run, columns=RowFormat(initial).columns(), **about))
    return path


def opened(folder: Path, *, ids: Sequence[str] = IDS, **options: Any) -> DeviceStore:
    given = {"owner": OWNER, "run": RUN, "default": DEFAULT, "patience": 0.1, **options}
    names = ("owner", "run", "default")
    store = DeviceStore(folder, *(given.pop(name) for name in names), ids, **given)
    store.open()
    return store


def fresh(folder: Path, **options: Any) -> DeviceStore:
    """Return the states of a run that has just begun, in a file."""
    made(folder)
    return opened(folder, **options)


def begun(store: DeviceStore, client: str, line: Line = NEW) -> Params:
    """Let a client begin at the version that its line names; return what it begins with."""
    store.begin(LedgerLines.of({store.ids.index(client): line}))
    return one(store, client)


def one(store: DeviceStore, client: str) -> Params:
    """Return what a client keeps of the version that counts."""
    return {name: value[0] for name, value in store.read([store.ids.index(client)]).items()}


def stage(store: DeviceStore, client: str, values: Params, *, round: int, attempt: int) -> None:
    store.stage(store.ids.index(client), values, attempt, round)


def values(number: float) -> Params:
    return {"user": torch.tensor([float(number), -float(number)]), "client/count": torch.tensor(int(number))}


def plain(kept: Params) -> tuple[list[float], int]:
    return kept["user"].tolist(), int(kept["client/count"])


def trained(store: DeviceStore, round: int, line: Line, number: float, client: str = "a") -> Params:
    """Begin, stage and flush a client's round, its message's attempt being ten times the round; return the beginning."""
    kept = begun(store, client, line)
    stage(store, client, values(number), round=round, attempt=10 * round)
    store.flush()
    return kept


def rows(store: DeviceStore, client: str = "a") -> list[tuple[int, int, bool]]:
    """Return version, attempt, and whether it is accepted."""
    return [(v.version, v.attempt, v.accepted) for v in store.file.versions(client)]


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a folder: what a kill at this instant leaves."""
    return shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.lock"))


def run_sql(folder: Path, *statements: str) -> list[Any]:
    with closing(sqlite3.connect(file_of(folder, RUN), isolation_level=None)) as sql:
        return [sql.execute(text).fetchall() for text in statements][-1]


def after(version: int) -> tuple[list[float], int]:
    """Return what ``train_rounds`` gives: each round adds 8 to [0.5, -1.5], and half of it is kept (z = 0.5)."""
    return ([0.5 + 4 * version, -1.5 + 4 * version], version or 4)


def line_in(round: int) -> Line:
    return Line(round, 10 * round, 0.5) if round else NEW


def train_rounds(folder: Path, rounds: int, begin: int = 0) -> None:
    """Train all clients in rounds ``begin`` .. ``rounds`` − 1 of a server that takes every upload."""
    store = opened(folder, accept=by_share)
    for round in range(begin, rounds):
        for client in CLIENTS:
            kept = begun(store, client, line_in(round))
            assert plain(kept) == after(round)
            new = {"user": kept["user"] + 8, "client/count": torch.tensor(round + 1)}
            stage(store, client, new, round=round, attempt=10 * (round + 1))
        store.flush()
    store.close()
