"""Stores of rows that take two pages each, and what a commit of theirs that was torn must give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedkeep.store import Default, Lines, SqliteStore, database
from tests.store.build import CLIENTS, IDS, RUN, count, lines
from tests.tiny import files

PAGE = database.PAGES[0]
LARGE = {"user": torch.zeros(1500)}  # 6,000 bytes: a row takes two pages


def large(folder: Path, **options: Any) -> SqliteStore:
    return SqliteStore(folder, Default(LARGE), IDS, **{"run": RUN, **options})


def large_round(store: SqliteStore, round: int) -> None:
    clients = [c for c in range(CLIENTS) if (c + round) % 2]
    count(store, clients, {"user": torch.full((len(clients), 1500), float(round))}, round)


def large_lines(round: int) -> Lines:
    """Return the ledger after a round of ``large_round``."""
    return lines({c: int(value) for c, value in enumerate(after(round)) if value})


def large_state(folder: Path, round: int, **options: Any) -> list[float]:
    store = large(folder, **options)
    store.begin(large_lines(round))
    found = store.read(range(CLIENTS))["user"]
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


def after(round: int) -> list[float]:
    """What every value of each client is after a round of ``large_round``."""
    return [float(max((r for r in range(1, round + 1) if (c + r) % 2), default=0)) for c in range(CLIENTS)]


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    before = files(folder)
    yield
    assert files(folder) == before


def goes_on(folder: Path) -> None:
    """Read the state of round 3 without a touch; resume, and repeat round 4."""
    with untouched(folder):
        assert large_state(folder, 3, write=False, create=False) == after(3)
    assert large_state(folder, 3) == after(3)
    store = large(folder)
    store.begin(large_lines(3))
    large_round(store, 4)
    store.flush()
    store.rest()
    assert large_state(folder, 4) == after(4)
    assert [p.name for p in folder.iterdir()] == ["store.db"]
