"""Claim: judging 100,000 users takes at most 1.2 s of processor time, whatever is private.

    python -m benchmarks.judging [--users N] [--turns N]

Every user has a model of their own and 1 to 3 examples, in the last case 1 to 20; an example has 32 features.
``Run.evaluate`` takes turns with itself judging one client after the other (fewer users); one thread, processor time.
In double precision every example's loss is compared with that of the module itself, called for one client at a time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import write
from fedkeep import FederatedData, Method, Phase, Run, declare, methods, sgd, simulate
from fedkeep.engines import judge

FEATURES, HIDDEN, CLASSES, ITEMS = 32, 64, 10, 20
WANTED, USERS = 1.2, 100_000  # seconds
EXACT = 1e-12
ONE_BY_ONE, COMPARED = 20, 50  # times fewer users


class Model(nn.Module):
    """One hidden layer, with numbers of each item and of the user added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.items = nn.Embedding(ITEMS, HIDDEN)
        self.user = nn.Parameter(torch.zeros(HIDDEN))
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, item: Tensor) -> Tensor:
        """Return logits (B, CLASSES)."""
        out: Tensor = self.last(F.relu(self.first(x) + self.items(item) + self.user))
        return out


class Rows(Model):
    """The same, which takes a row of ``user`` for each example."""

    def __init__(self) -> None:
        super().__init__()
        declare(self, per_example=("user",))


LOCAL = Phase(optimizer=sgd(0.1), batch_size=32)
CASES: dict[str, tuple[type[Model], Method, int]] = {
    "nothing private": (Model, methods.fedavg(local=LOCAL), 3),
    "a vector, a row for each example": (Rows, methods.furl("user", local=LOCAL), 3),
    "a vector": (Model, methods.furl("user", local=LOCAL), 3),
    "the head": (Model, methods.fedper("last.*", local=LOCAL), 3),
    "rows of an embedding": (Model, methods.furl("items.weight", local=LOCAL), 3),
    "the head, 1 to 20 examples": (Model, methods.fedper("last.*", local=LOCAL), 20),
}


def judged(case: str, users: int, kind: type) -> Run:
    """Return a run whose users all keep values of their own."""
    model, method, most = CASES[case]
    rng = np.random.default_rng(0)
    tests = rng.integers(1, most + 1, users)
    owner = np.repeat(np.arange(users), tests + 1)
    split = np.full(len(owner), "test", "<U5")
    split[np.cumsum(tests + 1) - 1] = "train"
    columns = {
        "x": rng.standard_normal((len(owner), FEATURES)).astype(kind),
        "item": rng.integers(0, ITEMS, len(owner)),
        "label": rng.integers(0, CLASSES, len(owner)),
    }
    meta = {"task": "multiclass", "classes": CLASSES}
    data = FederatedData.from_columns(owner, columns, split.tolist(), meta)
    torch.manual_seed(0)
    module = model().to(torch.from_numpy(columns["x"][:1]).dtype)
    run = simulate(module, method, data, rounds=0)
    values = {
        n: 0.1 * torch.randn(users, *v.shape, dtype=v.dtype) for n, v in run.private.default.initial.items()
    }
    run.private.write(range(users), values)
    return run


def largest_difference(case: str, users: int) -> float:
    """Return by how much any example's loss differs from that of the module called for one client."""
    run = judged(case, users, np.float64)
    found, module = run.judge(("own",))[0].of("own"), copy.deepcopy(run.net.module)
    wanted = np.zeros(len(found.loss))
    for client in range(users):
        module.load_state_dict(run.parameters(client))
        mine = found.client == client
        batch = run.data.batch(found.row[mine])
        with torch.no_grad():
            loss = F.cross_entropy(module(batch["x"], batch["item"]), batch["label"], reduction="none")
        wanted[mine] = loss.numpy()
    return float(np.abs(found.loss - wanted).max())


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def most_memory(work: Callable[[], object]) -> float:
    """Return the most memory that some work takes beside what is there before it, in MB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # what was most so far counts no more
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    """Return a number of this process's status (Linux), in KB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(case: str, users: int, turns: int) -> dict[str, Any]:
    """Return what judging takes, many users at a time and one by one."""
    run = judged(case, users, np.float32)
    few = run.clients[: users // ONE_BY_ONE]
    run.evaluate(clients=few)
    memory = most_memory(run.evaluate)
    many, alone, several = [], [], judge.SEVERAL
    for _ in range(turns):
        many.append(seconds(run.evaluate))
        judge.SEVERAL = users + 1
        alone.append(seconds(lambda: run.evaluate(clients=few)))
        judge.SEVERAL = several
    ratios = [ONE_BY_ONE * b / a for a, b in zip(many, alone, strict=True)]
    return {
        "private": case,
        "users": users,
        "most_examples": CASES[case][2],
        "examples": int(run.data.counts("test").sum()),
        "seconds": statistics.median(many),
        "slowest": max(many),
        "times_faster_than_one_by_one": statistics.median(ratios),
        "memory_mb": memory,
        "largest_difference_of_a_loss": largest_difference(case, users // COMPARED),
    }


def main() -> None:
    """Measure, write ``results/judging.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measured(case, options.users, options.turns) for case in CASES]
    write(
        "judging" if options.users == USERS else f"judging-{options.users}",
        {"seed": 0, "turns": options.turns, "cases": found},
    )
    for case in found:
        limit = WANTED * options.users / USERS
        assert case["seconds"] <= limit, (
            f"{case['private']}: {case['seconds']:.2f} s; claimed at most {limit:.2f}"
        )
        off = case["largest_difference_of_a_loss"]
        assert off <= EXACT, f"{case['private']}: a loss differs by {off:.1e}; claimed at most {EXACT}"


if __name__ == "__main__":
    main()
