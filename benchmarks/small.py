"""Claim: small clients in large cohorts train faster with ``auto``, which makes one tensor program of a cohort, than
client by client with any engine or with a plain PyTorch loop: 1.3 × in cohorts of 40, 2 × in cohorts of 160.

    python -m benchmarks.small [--turns N]

300 users with some 40 examples of 32 features each; cohorts of 40 and 160, mini-batches of 8, 1 epoch, SGD 0.1. The
models are a linear layer, and one hidden layer of 64 or 256 units, all with private numbers that are added. A round of
each contender runs side by side with the others' in one process (``workers`` has its own), with one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import interleaved, ratio, write
from benchmarks.rounds import Rounds
from fedkeep import FederatedData, Phase, data, methods, sgd
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.net import Net
from fedkeep.engines import Engine, Sequential, Workers
from fedkeep.experiments.simulate import make_engine

USERS, EXAMPLES, FEATURES, CLASSES, BATCH, RATE = 300, 40, 32, 10, 8, 0.1
HIDDEN = (0, 64, 256)
WANTED = {40: 1.3, 160: 2.0}  # by cohort


class Model(nn.Module):
    """Linear, or with a hidden layer; private numbers are added to the first layer's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden or CLASSES)
        self.last = nn.Linear(hidden, CLASSES) if hidden else None
        self.user = nn.Parameter(torch.zeros(hidden or CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, CLASSES)."""
        values: Tensor = self.first(x) + self.user
        return values if self.last is None else self.last(F.relu(values))


class Plain:
    """A loop as one writes it: a copy of the model a client, torch's optimiser, the mean weighted by examples."""

    def __init__(self, module: nn.Module, federation: FederatedData) -> None:
        self.module = copy.deepcopy(module)
        self.local = copy.deepcopy(module)
        rows = [federation.rows(client, "train") for client in range(len(federation))]
        batches = [federation.batch(np.arange(r.start, r.stop)) for r in rows]
        self.data = [(b["x"], b["label"]) for b in batches]
        self.users = [module.user.detach().clone() for _ in rows]
        self.generator = torch.Generator().manual_seed(0)

    def round(self, clients: list[int]) -> None:
        """Train a cohort."""
        start = {n: v.detach().clone() for n, v in self.module.named_parameters()}
        total = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in start.items() if n != "user"}
        for client in clients:
            x, label = self.data[client]
            with torch.no_grad():
                for name, value in self.local.named_parameters():
                    value.copy_(self.users[client] if name == "user" else start[name])
            optimizer = torch.optim.SGD(self.local.parameters(), lr=RATE)
            for chosen in torch.randperm(len(x), generator=self.generator).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(self.local(x[chosen]), label[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                for name, value in self.local.named_parameters():
                    if name == "user":
                        self.users[client].copy_(value)
                    else:
                        total[name].add_(value, alpha=len(x))
        examples = sum(len(self.data[client][0]) for client in clients)
        with torch.no_grad():
            for name, value in self.module.named_parameters():
                if name != "user":
                    value.copy_(total[name] / examples)


def measured(hidden: int, cohort: int, turns: int) -> dict[str, Any]:
    """Return what a round of each contender takes, and how ``auto`` compares."""
    federation = data.toy(users=USERS, examples=EXAMPLES, features=FEATURES, classes=CLASSES)
    torch.manual_seed(0)
    module = Model(hidden)
    plain, auto = Plain(module, federation), make_engine("auto", None, "cpu", cohort, 1000)[0]
    engines: dict[str, Engine] = {"sequential": Sequential(), "workers": Workers(), "auto": auto}
    rng = np.random.default_rng(0)
    cohorts = [sorted(rng.choice(USERS, cohort, replace=False).tolist()) for _ in range(turns + 1)]

    def each_turn(run: Callable[[list[int]], object]) -> Callable[[], object]:
        left = iter(cohorts)
        return lambda: run(next(left))

    contenders = {name: each_turn(federated(module, federation, engine)) for name, engine in engines.items()}
    seconds = interleaved({**contenders, "plain": each_turn(plain.round)}, turns)
    for engine in engines.values():
        engine.close()
    return {
        "hidden": hidden,
        "cohort": cohort,
        "engine": auto.name,
        "turns": turns,
        "milliseconds_a_client": {n: 1000 * statistics.median(s) / cohort for n, s in seconds.items()},
        "auto_over": {n: ratio(seconds, n, "auto") for n in seconds if n != "auto"},
    }


def federated(module: nn.Module, federation: FederatedData, engine: Engine) -> Callable[[list[int]], object]:
    """Return what runs a round of some clients with an engine of fedkeep."""
    method = methods.furl("user", local=Phase(batch_size=BATCH, optimizer=sgd(RATE)))
    rounds = Rounds(method, Net(module), federation, engine)

    def step(clients: list[int]) -> None:
        rounds(clients)
        rounds.device.committed()

    return step


def main() -> None:
    """Measure, write ``results/small.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    found = [measured(hidden, cohort, options.turns) for hidden in HIDDEN for cohort in WANTED]
    write("small", {"cases": found})
    for case in found:
        what = f"hidden {case['hidden']}, cohort {case['cohort']}"
        assert case["engine"] == "vectorised", f"{what}: auto chose {case['engine']}"
        for other, times in case["auto_over"].items():
            wanted = WANTED[case["cohort"]]
            assert times["median"] >= wanted, (
                f"{what}: {times['median']:.2f} x as fast as {other}; claimed {wanted}"
            )


if __name__ == "__main__":
    main()
