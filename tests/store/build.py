"""Small stores for the tests of this folder, and what stands in their file."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fedkeep.core.params import Params
from fedkeep.store import Default, Lines, PrivateStore, SqliteStore, VersionLedger

CLIENTS = 7
INITIAL = {
    "user": torch.tensor([0.5, -1.5, 2.5]),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "flag": torch.tensor([[True, False]]),
    "count": torch.tensor(4),
    "half": torch.ones(2, 2, dtype=torch.bfloat16),
}


IDS = [f"user-{k}" for k in range(CLIENTS)]
RUN = "a run"


def sqlite(
    folder: Path, rule: Any = "model", ids: list[str] = IDS, initial: Params = INITIAL, **options: Any
) -> SqliteStore:
    return SqliteStore(folder, Default(initial, rule, seed=3), ids, **{"run": RUN, **options})


def values(number: int, clients: int) -> Params:
    draw = torch.Generator().manual_seed(number)
    return {
        "user": torch.randn(clients, 3, generator=draw),
        "scalar": torch.randn(clients, generator=draw, dtype=torch.float64),
        "flag": torch.randint(0, 2, (clients, 1, 2), generator=draw).bool(),
        "count": torch.randint(-(2**62), 2**62, (clients,), generator=draw),
        "half": torch.randn(clients, 2, 2, generator=draw).bfloat16(),
    }


def numbers(store: PrivateStore, clients: int = CLIENTS) -> dict[str, Any]:
    read = store.read(range(clients))
    assert {n: (v.dtype, tuple(v.shape[1:])) for n, v in read.items()} == {
        n: (v.dtype, tuple(v.shape)) for n, v in INITIAL.items()
    }
    return {n: v.tolist() for n, v in read.items()} | {"seen": store.seen(range(clients))}


def of_round(round: int) -> tuple[list[int], Params]:
    """Return who takes part in a round, and what these write."""
    return [round % CLIENTS, (round + 3) % CLIENTS], values(round, 2)


def count(store: PrivateStore, clients: Sequence[int], params: Params, attempt: int) -> None:
    """Let values count that clients have staged in an attempt."""
    for k, client in enumerate(clients):
        store.stage(client, {n: v[k] for n, v in params.items()}, attempt)
    store.begin(lines(dict.fromkeys(clients, attempt)))


def lines(attempts: Mapping[int, int]) -> Lines:
    """Return lines of a ledger, given clients' attempts."""
    ledger = VersionLedger(max(attempts, default=0) + 1)
    return ledger.accept(list(attempts), list(attempts.values()))


def lines_after(round: int) -> Lines:
    """Return the ledger after a round of ``of_round``."""
    return lines({client: r for r in range(1, round + 1) for client in of_round(r)[0]})


def committed(folder: Path, rounds: int) -> SqliteStore:
    store = sqlite(folder)
    for round in range(1, rounds + 1):
        count(store, *of_round(round), round)
        store.flush()
    return store


def killed(folder: Path) -> Path:
    """Return a copy of a store's folder: what a kill at this instant leaves."""
    copy = folder.with_name(f"{folder.name}-killed-{len(list(folder.parent.iterdir()))}")
    return shutil.copytree(folder, copy)


def state(folder: Path, round: int, **options: Any) -> dict[str, Any]:
    store = sqlite(folder, **options)
    store.begin(lines_after(round))
    return numbers(store)


def expected(tmp_path: Path, rounds: int) -> dict[str, Any]:
    return numbers(committed(tmp_path / f"reference-{rounds}", rounds))


def run_sql(folder: Path, *statements: str) -> list[Any]:
    """Run statements on a store's file; return what the last one gives."""
    with closing(sqlite3.connect(folder / "store.db", isolation_level=None)) as sql:
        return [sql.execute(text).fetchall() for text in statements][-1]


def versions(folder: Path) -> list[tuple[int, int]]:
    """Return client and attempt of all versions."""
    return [(c, a) for c, a in run_sql(folder, "SELECT client, attempt FROM kept ORDER BY client, attempt")]
