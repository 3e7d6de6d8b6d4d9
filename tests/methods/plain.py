"""What the plain loops of methods' tests share: a network in plain PyTorch, who trains when, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeep import Method, Phase, Run, simulate
from tests.engines.reference import cohorts, mini_batches, rows_of
from tests.methods import parts
from tests.methods.parts import Deep
from tests.tiny import classes

State = dict[str, Tensor]
DATA = classes()  # six clients with 5, 9, 3, 7, 4 and 6 examples
COHORT, ROUNDS, SEED = 4, 5, 3


def initial() -> State:
    """Return the network's first values: a body of 4 units, and a head."""
    return {n: v.detach().clone() for n, v in Deep().double().state_dict().items()}


def loss_of(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, written out."""
    hidden = torch.tanh(batch["x"] @ w["body.weight"].T + w["body.bias"])
    logits = hidden @ w["head.weight"].T + w["head.bias"]
    return (torch.logsumexp(logits, 1) - logits.gather(1, batch["label"][:, None])[:, 0]).mean()


def slopes_of(w: State, batch: State) -> State:
    """Return the loss's gradient by name."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in w.items()}
    found = torch.autograd.grad(loss_of(leaves, batch), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def examples_of(client: int, split: str = "train") -> State:
    """Return all of a client's examples."""
    rows = DATA.rows(client, split)
    return DATA.batch(torch.arange(rows.start, rows.stop).numpy())


def plan(phase: Phase, rounds: int = ROUNDS) -> list[dict[int, list[State]]]:
    """Return for each round its clients and their mini-batches."""
    return [
        {c: list(mini_batches(DATA, c, phase, SEED, number)) for c in cohort}
        for number, cohort in enumerate(cohorts(DATA, COHORT, rounds, SEED))
    ]


def count(client: int) -> int:
    """Return how many examples a client trains on."""
    return len(rows_of(DATA, client))


def run_of(method: Method, rounds: int = ROUNDS, **options: Any) -> Run:
    """Return a run of the same clients, cohorts and seeds."""
    settings: dict[str, Any] = {"cohort": COHORT, "seed": SEED, "engine": "sequential", **options}
    return simulate(Deep().double(), method, DATA, rounds=rounds, **settings).last


def kept(run: Run, client: int) -> State:
    """Return a client's state of the method's own, by name."""
    return run.kept(DATA.ids[client]).state


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the greatest difference in any value; the names are the same."""
    assert ours.keys() == theirs.keys()
    return max(float((v - theirs[n]).abs().max()) for n, v in ours.items())


def trained(method: Method, **options: Any) -> Run:
    """Return what the loops here are compared with: as many rounds, of the same clients."""
    return parts.trained(method, **{"rounds": ROUNDS, **options})
