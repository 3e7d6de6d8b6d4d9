"""Claim: a private state of 10 KB is read in at most 20 µs a client inside a round, and written in at most 20 µs.

    python -m benchmarks.stores [--rounds N] [--quick]

A round reads the states of a cohort, writes all of them, and commits. Measured for states of 256 B, 10 KB and 100 KB,
among 1 000 and 1 000 000 users, in fedkeep's table with a journal, in one safetensors file per user (written beside its
place and renamed), and in SQLite with a write-ahead log and one transaction a round. A cohort is drawn from 300 users
spread over all ids, so that most have a state. Microseconds a client, medians over rounds:

- ``read`` and ``write``: ``write`` is all that a round writes, the commit included, without waiting for the disk. That
  is what survives ``kill -9``. The claim is about these, with a cohort of 100.
- ``flushed``: ``write`` with every file flushed to the disk before the round ends, which survives a loss of power too.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from benchmarks.measure import write
from benchmarks.processes import ROOT
from fedkeep.store import Default, TableStore

SIZES = {"256 B": 256, "10 KB": 10_000, "100 KB": 100_000}
USERS = (1_000, 1_000_000)
COHORTS = (10, 100)
VISITED = 300
CLAIMED = 20.0
Params = dict[str, Tensor]


class Store(Protocol):
    """What is compared: values stacked as in fedkeep's stores, and a commit after a round."""

    def read(self, clients: list[int]) -> Params: ...

    def write(self, clients: list[int], params: Params) -> None: ...

    def commit(self, round: int) -> None: ...


class Table:
    """fedkeep's table."""

    def __init__(self, folder: Path, default: Params, users: int, flush: bool) -> None:
        self.store, self.flush = TableStore(folder, Default(default), users), flush

    def read(self, clients: list[int]) -> Params:
        return self.store.read(clients)

    def write(self, clients: list[int], params: Params) -> None:
        self.store.write(clients, params)

    def commit(self, round: int) -> None:
        with flushing(self.flush):
            self.store.prepare(round)
            self.store.apply()


@contextmanager
def flushing(wanted: bool) -> Iterator[None]:
    """Leave flushes out, unless they are wanted."""
    sync = os.fsync
    if not wanted:
        os.fsync = lambda handle: None
    try:
        yield
    finally:
        os.fsync = sync


class Files:
    """One safetensors file per user."""

    def __init__(self, folder: Path, default: Params, users: int, flush: bool) -> None:
        self.folder, self.default, self.flush = folder, default, flush

    def path(self, client: int) -> Path:
        """Return a user's file; no folder gets more than a thousand."""
        return self.folder / str(client // 1000) / f"{client}.safetensors"

    def read(self, clients: list[int]) -> Params:
        rows = []
        for client in clients:
            try:
                rows.append(load(self.path(client).read_bytes()))
            except FileNotFoundError:
                rows.append(self.default)
        return {n: torch.stack([row[n] for row in rows]) for n in self.default}

    def write(self, clients: list[int], params: Params) -> None:
        for position, client in enumerate(clients):
            path = self.path(client)
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(".part")
            with open(part, "wb") as file:
                file.write(save({n: v[position].clone() for n, v in params.items()}))
                if self.flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(part, path)

    def commit(self, round: int) -> None:
        """Do nothing: each file is there already."""


class Sqlite:
    """A table of SQLite with a write-ahead log, one transaction a round."""

    def __init__(self, folder: Path, default: Params, users: int, flush: bool) -> None:
        self.default = default
        self.connection = sqlite3.connect(folder / "states.sqlite", isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute(f"PRAGMA synchronous = {'FULL' if flush else 'OFF'}")
        self.connection.execute("CREATE TABLE states (client INTEGER PRIMARY KEY, value BLOB)")
        self.connection.execute("BEGIN")

    def read(self, clients: list[int]) -> Params:
        rows = []
        for client in clients:
            found = self.connection.execute("SELECT value FROM states WHERE client = ?", (client,)).fetchone()
            rows.append(self.default if found is None else self.parse(found[0]))
        return {n: torch.stack([row[n] for row in rows]) for n in self.default}

    def parse(self, value: bytes) -> Params:
        """Return the tensors that lie one after the other in a value."""
        out, start = {}, 0
        for name, default in self.default.items():
            part = np.frombuffer(value, np.float32, default.numel(), start)
            out[name], start = torch.from_numpy(part.copy()).reshape(default.shape), start + part.nbytes
        return out

    def write(self, clients: list[int], params: Params) -> None:
        rows = (
            (client, b"".join(v[position].numpy().tobytes() for v in params.values()))
            for position, client in enumerate(clients)
        )
        self.connection.executemany("INSERT OR REPLACE INTO states VALUES (?, ?)", rows)

    def commit(self, round: int) -> None:
        self.connection.execute("COMMIT")
        self.connection.execute("BEGIN")


STORES: dict[str, Callable[[Path, Params, int, bool], Store]] = {
    "fedkeep": Table, "files": Files, "sqlite": Sqlite,
}  # fmt: skip


def measure(
    size: int, users: int, cohort: int, rounds: int, flush: bool, visited_users: int = VISITED
) -> dict[str, dict[str, float]]:
    """Return microseconds a client by store: ``read`` and ``write``."""
    default = {"a": torch.zeros(size // 8), "b": torch.zeros(size // 8)}
    rng = np.random.default_rng(0)
    visited = rng.choice(users, visited_users, replace=False).tolist()
    cohorts = [rng.choice(visited, cohort, replace=False).tolist() for _ in range(rounds)]
    found: dict[str, dict[str, float]] = {}
    last: list[Params] = []
    for name, make in STORES.items():  # not in turns: one's writing back to the disk would slow the next
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            store = make(Path(folder), default, users, flush)
            store.write(visited, {n: torch.ones(len(visited), size // 8) for n in default})
            store.commit(1)
            os.sync()
            reads, writes = [], []
            for round, clients in enumerate(cohorts, 2):
                began = time.perf_counter()
                values = store.read(clients)
                reads.append(time.perf_counter() - began)
                values = {n: v + 1 for n, v in values.items()}  # the round's training
                began = time.perf_counter()
                store.write(clients, values)
                store.commit(round)
                writes.append(time.perf_counter() - began)
            last.append(store.read(visited))
        found[name] = {
            k: statistics.median(v) / cohort * 1e6 for k, v in (("read", reads), ("write", writes))
        }
    assert all(torch.equal(last[0][n], other[n]) for other in last for n in default), "stores differ"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, write ``stores.json`` and ``stores.md``, and return 1 if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few rounds, 1 000 users, nothing claimed")
    parser.add_argument("--out", type=Path, help="where to write")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for users in USERS[:1] if options.quick else USERS:
        for label, size in SIZES.items():
            for cohort in COHORTS[:1] if options.quick else COHORTS:
                rounds, visited = (2, 20) if options.quick else (options.rounds, VISITED)
                plain = measure(size, users, cohort, rounds, False, visited)
                flushed = measure(size, users, cohort, max(2, rounds // 4), True, visited)
                rows += [
                    {"state": label, "users": users, "cohort": cohort, "store": name, **plain[name],
                     "flushed": flushed[name]["write"]}
                    for name in STORES
                ]  # fmt: skip
                print(line(rows[-3]), line(rows[-2]), line(rows[-1]), sep="\n", flush=True)
    folder = options.out or (ROOT / "runs" / "benchmarks" if options.quick else None)
    write("stores", {"rounds": options.rounds, "microseconds_a_client": rows}, page(rows), folder)
    worst = {
        kind: max(r[kind] for r in rows if (r["store"], r["state"], r["cohort"]) == ("fedkeep", "10 KB", 100))
        for kind in ("read", "write")
    } if not options.quick else {}  # fmt: skip
    failed = [
        f"{kind}: {value:.1f} µs a client; claimed {CLAIMED:g}"
        for kind, value in worst.items()
        if value > CLAIMED
    ]
    print("\n".join(f"claim failed: {text}" for text in failed) or "every claim holds")
    return bool(failed)


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    return (
        f"| {row['state']} | {row['users']:,} | {row['cohort']} | {row['store']} | {row['read']:.1f} | "
        f"{row['write']:.1f} | {row['flushed']:.0f} |"
    )


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of results."""
    head = (
        "# Private states: a table with a journal, one file per user, SQLite\n\n"
        "Made by `python -m benchmarks.stores`; microseconds a client, medians. *write*: all that a round writes, the\n"
        "commit included, without waiting for the disk (it survives `kill -9`). *flushed*: the same, with every file\n"
        "flushed to the disk before the round ends (it survives a loss of power).\n\n"
        "| state | users | cohort | store | read | write | flushed |\n|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(map(line, rows)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
