"""Claim: a round with a cohort of 10 costs the same time and memory (±10 %) with 1 000 and with 1 000 000 users.

    python -m benchmarks.users [--turns N]

Both federations keep private states on disk (SQLite) and hold the same number of examples a user;
a round samples, reads, trains, writes and commits.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import interleaved, ratio, write
from benchmarks.models import Document
from benchmarks.rounds import Rounds, default
from fedkeep import FederatedData, Phase, methods, sgd
from fedkeep.core.net import Net
from fedkeep.data import RangeIds
from fedkeep.engines import Sampler, Sequential
from fedkeep.store import SqliteStore

TEXTS, LENGTH = 32, 64


def federation(users: int, folder: Path) -> Callable[[], None]:
    """Return a function that runs and commits one round over ``users`` users."""
    rng = np.random.default_rng(0)
    text = np.broadcast_to(
        rng.integers(0, 100, LENGTH), (users * TEXTS, LENGTH)
    )  # one text: no gigabytes of texts
    label = np.broadcast_to(np.int64(3), users * TEXTS)
    offsets, bounds = mapped_index(folder, users)
    length = np.broadcast_to(np.int64(LENGTH), users * TEXTS)
    data = FederatedData(
        {"text": text, "text_length": length, "label": label}, offsets, RangeIds(users), bounds, check=False
    )
    method = methods.furl("user", local=Phase(optimizer=sgd(0.1), batch_size=16))
    torch.manual_seed(0)
    net = Net(Document())
    store = SqliteStore(folder / "private", default(method, net), RangeIds(users))
    rounds, sampler = Rounds(method, net, data, Sequential(), store), Sampler(users, 10, "shuffled", 0)

    def step() -> None:
        rounds(sampler(rounds.server.round))
        store.flush()
        rounds.device.committed()

    return step


def memory(users: int, rounds: int) -> float:
    """Return the memory of a process that runs rounds over ``users`` users alone, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        step = federation(users, Path(folder))
        for _ in range(rounds):
            step()
        return anonymous_mb()


def mapped_index(folder: Path, users: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients' offsets and bounds, mapped from files as those of a large data set are."""
    offsets = np.arange(users + 1, dtype=np.int64) * TEXTS
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "bounds.npy", np.stack([offsets[:-1], offsets[1:], offsets[1:], offsets[1:]], 1))
    del offsets
    return np.load(folder / "offsets.npy", mmap_mode="r"), np.load(folder / "bounds.npy", mmap_mode="r")


def anonymous_mb() -> float:
    """Return the process's memory that no file backs (Linux), in MB: what rounds allocate, not the system's cache."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def main() -> None:
    """Measure, write ``results/users.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(memory(options.memory, 20))
        return
    with tempfile.TemporaryDirectory() as few, tempfile.TemporaryDirectory() as many:
        steps = {"1 000": federation(1_000, Path(few)), "1 000 000": federation(1_000_000, Path(many))}
        seconds = interleaved(steps, options.turns, warm_up=5)
    command = [sys.executable, "-m", "benchmarks.users", "--memory"]
    used = {}
    for users in steps:
        done = subprocess.run([*command, users.replace(" ", "")], check=True, capture_output=True, text=True)
        used[users] = float(done.stdout)
    time_ratio = ratio(seconds, "1 000 000", "1 000")
    memory_ratio = used["1 000 000"] / used["1 000"]
    medians = {users: statistics.median(taken) for users, taken in seconds.items()}
    write(
        "users",
        {"time_ratio": time_ratio, "memory_ratio": memory_ratio, "seconds": medians, "memory_mb": used},
    )
    assert 0.9 <= time_ratio["median"] <= 1.1, f"time ratio {time_ratio['median']:.3f}; claimed 1 ± 0.1"
    assert 0.9 <= memory_ratio <= 1.1, f"memory ratio {memory_ratio:.3f}; claimed 1 ± 0.1"


if __name__ == "__main__":
    main()
