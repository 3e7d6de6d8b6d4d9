"""Federated and centralised training once more, in plain PyTorch: what the engines are compared with.

Written apart from fedkeep's own loop: modules, autograd and torch.optim. Only the order of the mini-batches and of the
clients is taken from fedkeep, because it is random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import FederatedData
from fedkeep.engines import Sampler, Stream
from fedkeep.engines.batches import batches
from fedkeep.methods import Phase

State = dict[str, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, dict[str, Tensor], int], Tensor]


def rows_of(data: FederatedData, client: int) -> np.ndarray:
    return np.arange(data.bounds[client, 0], data.bounds[client, 1])


def mini_batches(
    data: FederatedData, client: int, phase: Phase, seed: int, round: int
) -> Iterator[dict[str, Tensor]]:
    """Yield a client's mini-batches of a round, as the engines draw them."""
    for chosen in batches(data, rows_of(data, client), phase, Stream(seed, data.ids[client], round), 0):
        yield data.batch(chosen)


def cohorts(
    data: FederatedData, cohort: int, rounds: int, seed: int, mode: Any = "shuffled"
) -> list[list[int]]:
    sampler = Sampler(np.arange(len(data)), cohort, mode, seed)
    return [sampler(r) for r in range(rounds)]


def averaged(states: Sequence[State], weights: Sequence[float]) -> State:
    total = sum(weights)
    return {
        n: sum(s[n] * (w / total) for s, w in zip(states, weights, strict=True))
        if states[0][n].is_floating_point()
        else states[0][n]
        for n in states[0]
    }  # type: ignore[misc]


def plain_loss(model: nn.Module, batch: dict[str, Tensor], client: int) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"])


def trained(
    model: nn.Module,
    state: State,
    data: FederatedData,
    client: int,
    phase: Phase,
    optimizer: Optimizer,
    seed: int,
    round: int,
    loss: Loss = plain_loss,
    clip: float | None = None,
) -> State:
    """Return a copy of the model's state after local training from ``state``."""
    local = copy.deepcopy(model).train()
    local.load_state_dict(state)
    stepper = optimizer(local)
    for batch in mini_batches(data, client, phase, seed, round):
        stepper.zero_grad()
        loss(local, batch, client).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(local.parameters(), clip)
        stepper.step()
    return {n: v.detach().clone() for n, v in local.state_dict().items()}


def federated(
    model: nn.Module,
    data: FederatedData,
    plan: Sequence[Sequence[int]],
    phase: Phase,
    optimizer: Optimizer,
    *,
    seed: int = 0,
    uniform: bool = False,
    server: Optimizer | None = None,
    loss: Loss = plain_loss,
    keep_rows: Sequence[str] = (),
    clip: float | None = None,
) -> State:
    """Return the server's state after federated averaging of all parameters of ``model``.

    Args:
        server: an optimiser on the pseudo-gradient; None: plain averaging.
        keep_rows: tables of which each participant's own row is kept as trained (FURL eq. 7), not averaged (eq. 6).
    """
    state = {n: v.detach().clone() for n, v in model.state_dict().items()}
    holder = copy.deepcopy(model)
    stepper = server(holder) if server else None
    for number, clients in enumerate(plan):
        results = [
            trained(model, state, data, c, phase, optimizer, seed, number, loss, clip) for c in clients
        ]
        weights = [1.0 if uniform else float(len(rows_of(data, c))) for c in clients]
        mean = averaged(results, weights)
        if stepper is not None:
            for name, value in holder.named_parameters():
                value.grad = state[name] - mean[name]
            stepper.step()
            mean = {**mean, **{n: v.detach().clone() for n, v in holder.named_parameters()}}
        for name in keep_rows:
            for client, result in zip(clients, results, strict=True):
                mean[name][client] = result[name][client]
        state = mean
    return state


def step(stepper: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take an optimiser's step down a loss."""
    stepper.zero_grad()
    loss.backward()
    stepper.step()


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 1e-10) -> None:
    theirs = {name: theirs[name] for name in ours}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, check_device=False)
