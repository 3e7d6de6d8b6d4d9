"""Claims: a private state of 10 KB is read, and written, in at most 20 µs a client inside a round of 100; all reads
take at most 1 % of a round of W1; its checksum costs at most 5 % of a flushed commit; and a table of our own is not
twice as fast.

    python -m benchmarks.stores [--rounds N] [--quick]

A round reads the states of a cohort, writes all of them, and commits. Measured for states of 256 B, 10 KB and 100 KB,
among 1 000 and 1 000 000 users, in fedkeep's store (SQLite with a write-ahead log), the same with a rollback journal
(*journal*), a table of our own (*table*), and LMDB where it is installed: see ``store_contenders.py``. A cohort is
drawn from 300 users spread over all ids, so that most have a state. Stores take turns, round by round. Microseconds a
client, medians over rounds:

- ``read`` and ``write``: ``write`` is all that a round writes, the commit included, without waiting for the disk. That
  is what survives ``kill -9``.
- ``flushed``: ``write`` with every file flushed to the disk before the round ends, which survives a loss of power too.
- ``times``: how many times as long as in fedkeep's store a round's ``read`` and ``flushed`` take together, the median
  of ratios within a round. Claimed of the table is the geometric mean over all states, users and cohorts: a well-kept
  library wins unless ours would take at most half of its time.

Then the store's file is damaged (a bit flipped, a page zeroed, the end cut off) and all of it read in a process of its
own, as LMDB's is: how often the process died, for then nothing can be said to whoever uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.measure import write
from benchmarks.processes import ROOT
from benchmarks.store_contenders import STORES, Fedkeep, Params, lmdb
from fedkeep.data import RangeIds
from fedkeep.store import Default, SqliteStore, VersionLedger

SIZES = {"256 B": 256, "10 KB": 10_000, "100 KB": 100_000}
USERS = (1_000, 1_000_000)
COHORTS = (10, 100)
VISITED = 300
CLAIMED = 20.0
CHECKSUM_CLAIMED = 0.05
TABLE_CLAIMED = 0.5
W1_ROUND = 0.2  # seconds, with ten clients
READS_CLAIMED = 0.01


def default_of(size: int) -> Params:
    """Return a state of so many bytes."""
    return {"a": torch.zeros(size // 8), "b": torch.zeros(size // 8)}


def measure(
    size: int, users: int, cohort: int, rounds: int, flush: bool, visited_users: int = VISITED
) -> dict[str, dict[str, float]]:
    """Return microseconds a client by store: ``read`` and ``write``, and ``times`` of a round to fedkeep's."""
    default, ids = default_of(size), RangeIds(users)
    rng = np.random.default_rng(0)
    visited = rng.choice(users, visited_users, replace=False).tolist()
    cohorts = [rng.choice(visited, cohort, replace=False).tolist() for _ in range(rounds)]
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STORES}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        stores = {}
        for name, make in STORES.items():
            (Path(folder) / name).mkdir()
            store = stores[name] = make(Path(folder) / name, default, ids, flush)
            store.write(visited, {n: torch.ones(len(visited), size // 8) for n in default})
            store.commit(1)
        for round, clients in enumerate(cohorts, 2):
            for name in list(stores) if round % 2 else reversed(stores):
                began = time.perf_counter()
                values = stores[name].read(clients)
                read = time.perf_counter()
                values = {n: v + 1 for n, v in values.items()}  # the round's training
                trained = time.perf_counter()
                stores[name].write(clients, values)
                stores[name].commit(round)
                taken[name].append((read - began, time.perf_counter() - trained))
        last = [store.read(visited) for store in stores.values()]
    assert all(torch.equal(last[0][n], other[n]) for other in last for n in default), "stores differ"
    return {name: _summary(pairs, taken["fedkeep"], cohort) for name, pairs in taken.items()}


def _summary(
    pairs: list[tuple[float, float]], ours: list[tuple[float, float]], cohort: int
) -> dict[str, float]:
    read, write = (statistics.median(p[k] for p in pairs) / cohort * 1e6 for k in (0, 1))
    times = statistics.median(sum(a) / sum(b) for a, b in zip(pairs, ours, strict=True))
    return {"read": read, "write": write, "times": times}


def checksums(size: int, cohort: int, rounds: int) -> dict[str, float]:
    """Return what checksums cost: microseconds a client, and a fraction of a flushed commit; turns with and without.

    Without, crc32 is a function that returns 0 at once.
    """
    default = default_of(size)
    rng = np.random.default_rng(0)
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        stores = {}
        for checked in taken:
            (Path(folder) / str(checked)).mkdir()
            stores[checked] = Fedkeep(Path(folder) / str(checked), default, RangeIds(1000), True)
        for round in range(1, rounds + 1):
            clients = rng.choice(VISITED, cohort, replace=False).tolist()
            for checked in (True, False) if round % 2 else (False, True):
                with _unchecked(not checked):
                    began = time.perf_counter()
                    values = stores[checked].read(clients)
                    read = time.perf_counter()
                    stores[checked].write(clients, values)
                    stores[checked].commit(round)
                    taken[checked].append((read - began, time.perf_counter() - read))
    whole = statistics.median(w for _, w in taken[True])
    more = [
        statistics.median(a[k] - b[k] for a, b in zip(taken[True], taken[False], strict=True)) for k in (0, 1)
    ]
    return {"read": more[0] / cohort * 1e6, "write": more[1] / cohort * 1e6, "of_commit": more[1] / whole}


class _Nothing:
    @staticmethod
    def crc32(*_: Any) -> int:
        return 0


def _unchecked(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    found = contextlib.ExitStack()
    if wanted:
        found.enter_context(patch("fedkeep.store.version_file.zlib", _Nothing))
    return found


def damaged(name: str, tried: int) -> Counter[str]:
    """Return how often a store was read right after damage, the damage was noticed, and the process died."""
    draw = random.Random(0)  # noqa: S311
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        whole, work = Path(folder) / "whole", Path(folder) / "work"
        whole.mkdir()
        subprocess.run(_child(name, whole, "write"), check=True, cwd=ROOT)
        file = max((p for p in whole.iterdir() if p.is_file()), key=lambda p: p.stat().st_blocks)
        size = file.stat().st_size
        for number in range(tried):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(whole, work)
            at = draw.randrange(size if draw.random() < 0.5 else 40_960)
            _harm(work / file.name, ("flip", "zero", "cut")[number % 3], at)
            code = subprocess.run(_child(name, work, "read"), cwd=ROOT, capture_output=True).returncode
            ends["died" if code < 0 else "right" if code == 0 else "noticed"] += 1
    return ends


def _child(name: str, folder: Path, what: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.stores", "--child", name, str(folder), what]


def _harm(path: Path, how: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1) or b"\0"
        file.seek(at)
        if how == "cut":
            file.truncate(at)
        else:
            file.write(bytes(4096) if how == "zero" else bytes([old[0] ^ 1]))


def _in_child(name: str, folder: Path, what: str) -> int:
    """Write a store of 100 states, or read all of them and return 0 where they are right."""
    default, clients = default_of(10_000), list(range(100))
    wanted = {
        n: torch.arange(100.0).repeat_interleave(v.numel()).reshape(100, -1) for n, v in default.items()
    }
    if name == "fedkeep" and what == "read":
        store = SqliteStore(folder, Default(default), RangeIds(100), write=False)
        store.begin(VersionLedger(100).accept(clients, [3] * 100))
        found = store.read(clients)
    else:
        other = STORES[name](folder, default, RangeIds(100), True)
        for round in (1, 2, 3) if what == "write" else ():
            other.write(clients, {n: v + 3 - round for n, v in wanted.items()})
            other.commit(round)
        found = other.read(clients)
    return int(not all(torch.equal(found[n], wanted[n]) for n in wanted))


def measured(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each state, number of users and cohort."""
    for users in USERS[:1] if options.quick else USERS:
        for label, size in SIZES.items():
            for cohort in COHORTS[:1] if options.quick else COHORTS:
                rounds, visited = (2, 20) if options.quick else (options.rounds, VISITED)
                plain = measure(size, users, cohort, rounds, False, visited)
                flushed = measure(size, users, cohort, max(2, rounds // 2), True, visited)
                yield [
                    {
                        "state": label,
                        "users": users,
                        "cohort": cohort,
                        "store": name,
                        **plain[name],
                        "flushed": flushed[name]["write"],
                        "times": flushed[name]["times"],
                    }
                    for name in STORES
                ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, write ``stores.json`` and ``stores.md``, and return 1 if a claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few rounds, 1 000 users, nothing claimed")
    parser.add_argument("--out", type=Path, help="where to write")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.child:
        return _in_child(options.child[0], Path(options.child[1]), options.child[2])
    rows = []
    for some in measured(options):
        rows += some
        print(*map(line, some), sep="\n", flush=True)
    cost = {str(cohort): checksums(10_000, cohort, 4 if options.quick else 200) for cohort in COHORTS}
    harmed = {n: dict(damaged(n, 3 if options.quick else 60)) for n in STORES if n in ("fedkeep", "lmdb")}
    over = {
        name: math.exp(statistics.fmean(math.log(r["times"]) for r in rows if r["store"] == name))
        for name in STORES
    }
    content = {
        "rounds": options.rounds,
        "lmdb": lmdb.version() if lmdb else None,
        "microseconds_a_client": rows,
        "times_over_fedkeep": over,
        "checksum_of_10_kb": cost,
        "damaged": harmed,
    }
    folder = options.out or (ROOT / "runs" / "benchmarks" if options.quick else None)
    write("stores", content, page(rows, over, cost, harmed), folder)
    failed = [] if options.quick else missed(rows, over, cost, harmed)
    print("\n".join(f"claim failed: {text}" for text in failed) or "every claim holds")
    return bool(failed)


def missed(
    rows: list[dict[str, Any]], over: dict[str, float], cost: dict[str, dict[str, float]], harmed: Any
) -> list[str]:
    """Return what was claimed and not reached."""
    failed = []
    own = [r for r in rows if (r["store"], r["state"]) == ("fedkeep", "10 KB")]
    for kind in ("read", "write"):
        worst = max(r[kind] for r in own if r["cohort"] == 100)
        if worst > CLAIMED:
            failed.append(f"{kind}: {worst:.1f} µs a client; claimed {CLAIMED:g}")
    for cohort, each in cost.items():
        if each["of_commit"] > CHECKSUM_CLAIMED:
            failed.append(f"checksums: {each['of_commit']:.1%} of a flushed commit of {cohort}; claimed 5 %")
    reads = max(r["read"] for r in own if r["cohort"] == 10) * 10 / 1e6 / W1_ROUND
    if reads > READS_CLAIMED:
        failed.append(f"all reads: {reads:.2%} of a round of W1; claimed 1 %")
    if over["table"] <= TABLE_CLAIMED:
        failed.append(
            f"a table of our own takes {over['table']:.2f} of the time; claimed more than {TABLE_CLAIMED:g}"
        )
    if harmed["fedkeep"].get("died"):
        failed.append(f"{harmed['fedkeep']['died']} damaged stores ended the process; claimed none")
    return failed


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    return (
        f"| {row['state']} | {row['users']:,} | {row['cohort']} | {row['store']} | {row['read']:.1f} | "
        f"{row['write']:.1f} | {row['flushed']:.0f} | {row['times']:.2f} |"
    )


def page(
    rows: list[dict[str, Any]],
    over: dict[str, float],
    cost: dict[str, dict[str, float]],
    harmed: dict[str, dict[str, int]],
) -> str:
    """Return the page of results."""
    head = (
        "# Private states: SQLite, a table of our own, LMDB\n\n"
        "Made by `python -m benchmarks.stores`; microseconds a client, medians. *write*: all that a round writes, the\n"
        "commit included, without waiting for the disk (it survives `kill -9`). *flushed*: the same, with every file\n"
        "flushed to the disk before the round ends (it survives a loss of power). *times*: how many times as long\n"
        "as in fedkeep's store (SQLite with a write-ahead log) a round's read and flushed write take together.\n"
        "*journal*: the same with a rollback journal; *table*: the least that a table of our own would do. All look\n"
        "at a checksum of each row that they read, can take the last round back, and keep a digest of all rows.\n\n"
        "| state | users | cohort | store | read | write | flushed | times |\n|---|---|---|---|---|---|---|---|\n"
    )
    means = ", ".join(f"{name} {times:.2f}" for name, times in over.items())
    costs = "; ".join(
        f"with a cohort of {cohort} {c['read']:.1f} µs a read and {c['write']:.1f} µs a write, "
        f"{100 * c['of_commit']:.1f} % of a flushed commit"
        for cohort, c in cost.items()
    )
    ends = "\n".join(
        f"| {name} | {sum(e.values())} | {e.get('right', 0)} | {e.get('noticed', 0)} | {e.get('died', 0)} |"
        for name, e in harmed.items()
    )
    return (
        f"{head}{chr(10).join(map(line, rows))}\n\n"
        f"Geometric means of *times*: {means}.\n\nA checksum of 10 KB costs {costs}.\n\n"
        "The largest file of a store of 100 states damaged (a bit flipped, a page zeroed, the end cut off), then all\n"
        "states read in a process of its own: how often they were right, the damage was noticed, or the process\n"
        "died.\n\n"
        f"| store | damaged | right | noticed | process died |\n|---|---|---|---|---|\n{ends}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
