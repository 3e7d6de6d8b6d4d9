"""Claim: a round with a cohort of 10 costs the same time and memory (±10 %) with 1 000 and with 1 000 000 users.

    python -m benchmarks.users [--turns N]

Both federations keep private states on disk (a table with a journal) and hold the same number of examples a user;
a round samples, reads, trains, writes and commits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import write

TEXTS, LENGTH = 32, 64


def one(users: int, rounds: int) -> dict[str, float]:
    """Measure rounds over ``users`` users, in a process of its own."""
    import torch

    from benchmarks.workloads import PlainDocument
    from fedkeep import FederatedData, methods, sgd
    from fedkeep.core.net import Net
    from fedkeep.data import RangeIds
    from fedkeep.engines import Job, Sampler, Sequential, Server, run_round
    from fedkeep.store import Default, TableStore

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = np.broadcast_to(
        rng.integers(0, 100, LENGTH), (users * TEXTS, LENGTH)
    )  # one text: no gigabytes of texts
    label = np.broadcast_to(np.int64(3), users * TEXTS)
    method = methods.furl("user", optimizer=sgd(0.1), batch_size=16)
    torch.manual_seed(0)
    net = Net(PlainDocument())
    with tempfile.TemporaryDirectory() as folder:
        offsets, bounds = mapped_index(Path(folder), users)
        data = FederatedData({"x": x, "label": label}, offsets, RangeIds(users), bounds, check=False)
        store = TableStore(
            Path(folder) / "private", Default(method.split.personal(net.initial()), 0.0), users
        )
        server = Server(method.split.federated(net.initial()))
        job, sampler, engine = (
            Job(method, net, data, store, seed=0),
            Sampler(users, 10, "shuffled", 0),
            Sequential(),
        )

        def step() -> None:
            run_round(job, engine, server, sampler(server.round))
            store.prepare(server.round)
            store.apply()

        for _ in range(5):
            step()
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        return {"seconds": statistics.median(seconds), "memory_mb": anonymous_mb()}


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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--one", type=int)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.rounds)))
        return
    found: dict[int, list[dict[str, float]]] = {1_000: [], 1_000_000: []}
    for turn in range(options.turns):
        for users in sorted(found, reverse=bool(turn % 2)):
            command = [
                sys.executable,
                "-m",
                "benchmarks.users",
                "--one",
                str(users),
                "--rounds",
                str(options.rounds),
            ]
            found[users].append(
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
    pairs = list(zip(found[1_000], found[1_000_000], strict=True))
    times = [b["seconds"] / a["seconds"] for a, b in pairs]
    memory = [b["memory_mb"] / a["memory_mb"] for a, b in pairs]
    result = {
        "time_ratio": {"median": statistics.median(times), "low": min(times), "high": max(times)},
        "memory_ratio": {"median": statistics.median(memory), "low": min(memory), "high": max(memory)},
        "measured": {str(k): v for k, v in found.items()},
    }
    write("users", result)
    assert 0.9 <= result["time_ratio"]["median"] <= 1.1, f"time ratio {result['time_ratio']['median']:.3f}"
    assert 0.9 <= result["memory_ratio"]["median"] <= 1.1, (
        f"memory ratio {result['memory_ratio']['median']:.3f}"
    )


if __name__ == "__main__":
    main()
