"""Claim: 100,000 private adapters are read from the store and written at a third of a plain file's speed or faster.

    python -m benchmarks.many_adapters [--users N] [--rank R] [--rounds N]

A user's state is a low-rank adapter on the queries and values of a MiniLM (six layers of width 384): with rank 1 it is
36,864 bytes, of 24 tensors, 3.7 GB of all users. Rounds of 100 users write all of them once, and then read and write
rounds of users drawn at random, whose states lie anywhere. A plain file of the same bytes takes turns, round by round:
it is written and read at the same places in one go, without checksums, names, or a way back. Both flush to the disk
before a round ends, and reading comes from the same cache of the system, where it still holds them. Megabytes per
second of a round's median; ``ratio``: the store's speed over the file's. At last every state is read and compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import write
from benchmarks.processes import ROOT
from benchmarks.store_contenders import Fedkeep, Params
from fedkeep.data import RangeIds

LAYERS, WIDTH, COHORT = 6, 384, 100
WANTED = 1 / 3


def adapter(rank: int) -> Params:
    """Return the tensors of an adapter."""
    shapes = {"lora_A.default.weight": (rank, WIDTH), "lora_B.default.weight": (WIDTH, rank)}
    return {
        f"backbone.encoder.layer.{layer}.attention.self.{part}.{name}": torch.zeros(shape)
        for layer in range(LAYERS)
        for part in ("query", "value")
        for name, shape in shapes.items()
    }


def states(default: Params, clients: list[int], round: int) -> Params:
    """Return what users have after a round, stacked: the number of the user and of the round tell them apart."""
    own = torch.tensor(clients, dtype=torch.float32) + round / 1024
    return {n: own.view(-1, *[1] * v.dim()).expand(-1, *v.shape).contiguous() for n, v in default.items()}


class File:
    """A plain file with a place for each user."""

    def __init__(self, path: Path, default: Params) -> None:
        self.size = sum(v.nbytes for v in default.values())
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)

    def write(self, clients: list[int], params: Params) -> None:
        """Write states and flush."""
        parts = [v.flatten(1).numpy() for v in params.values()]
        for client, state in zip(clients, np.concatenate(parts, 1), strict=True):
            os.pwrite(self.file, state.tobytes(), client * self.size)
        os.fsync(self.file)

    def read(self, clients: list[int]) -> Tensor:
        """Return states, (clients, numbers)."""
        found = b"".join(os.pread(self.file, self.size, client * self.size) for client in clients)
        return torch.frombuffer(bytearray(found), dtype=torch.float32).view(len(clients), -1)


def measure(users: int, rank: int, rounds: int) -> dict[str, object]:
    """Return megabytes per second of both by kind of access, and their ratios."""
    default, rng = adapter(rank), np.random.default_rng(0)
    size = sum(v.nbytes for v in default.values())
    first = np.split(np.arange(users), range(COHORT, users, COHORT))
    plans = [("filled", c.tolist()) for c in first]
    plans += [("again", rng.choice(users, COHORT, replace=False).tolist()) for _ in range(rounds)]
    taken: dict[str, dict[str, list[float]]] = {
        name: {"filled": [], "read": [], "again": []} for name in ("store", "file")
    }
    latest = np.zeros(users, np.int64)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        store = Fedkeep(Path(folder), default, RangeIds(users), True)
        file = File(Path(folder) / "plain", default)
        for round, (kind, clients) in enumerate(plans, 1):
            values = states(default, clients, round)
            latest[clients] = round
            for name in ("store", "file") if round % 2 else ("file", "store"):
                began = time.perf_counter()
                if kind == "again":
                    (store if name == "store" else file).read(clients)
                read = time.perf_counter()
                if name == "store":
                    store.write(clients, values)
                    store.commit(round)
                else:
                    file.write(clients, values)
                taken[name][kind].append((time.perf_counter() - read) / len(clients))
                if kind == "again":
                    taken[name]["read"].append((read - began) / len(clients))
        for clients in (c.tolist() for c in first):
            mine, plain = store.read(clients), file.read(clients)
            wanted = torch.tensor(clients, dtype=torch.float32) + torch.from_numpy(latest[clients]) / 1024
            together = torch.cat([v.flatten(1) for v in mine.values()], 1)
            assert torch.equal(together, plain), "store and file differ"
            assert torch.equal(together, wanted.float()[:, None].expand_as(together)), (
                "states are not what was written"
            )
        disk = sum(f.stat().st_size for f in Path(folder).iterdir() if f.is_file() and f.name != "plain")
    speed = {
        name: {k: size / 1e6 / statistics.median(v) for k, v in kinds.items()}
        for name, kinds in taken.items()
    }
    ratio = {k: speed["store"][k] / speed["file"][k] for k in speed["store"]}
    return {
        "users": users,
        "bytes": size,
        "tensors": len(default),
        "cohort": COHORT,
        "rounds": rounds,
        "megabytes_per_second": speed,
        "ratio": ratio,
        "disk_over_states": disk / (users * size),
    }


def main() -> None:
    """Measure, write ``results/many-adapters.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200, help="after all states are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.users, options.rank, options.rounds)
    if options.users >= 100_000:
        write("many-adapters", found)
    else:
        print(found)
    ratio = found["ratio"]
    assert isinstance(ratio, dict)
    slow = {kind: round(value, 2) for kind, value in ratio.items() if not value >= WANTED}
    assert not slow, f"the store has less than {WANTED:.2f} of a plain file's speed: {slow}"


if __name__ == "__main__":
    main()
