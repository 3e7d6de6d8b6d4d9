"""THE local run: the only place where fedkeep takes gradients to train (the split checker's probes aside).

A client of a federation, a cohort's member in another process, a new user who personalises, and centralised training
over pooled examples all come through ``local_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, nonfinite
from fedkeep.core.seeds import numpy_generator, stream
from fedkeep.data import FederatedData
from fedkeep.methods import Phase
from fedkeep.split import Split


@dataclass(frozen=True)
class Stream:
    """Names the random streams of one local run; every draw depends on these alone."""

    seed: int
    client: str
    round: int = 0


@dataclass
class LocalResult:
    """What local training gives.

    Attributes:
        params: all parameters after training, federated and private.
        loss: the mean of the mini-batch losses of the last phase; NaN if no step was taken.
        steps: optimiser steps taken.
        states: the optimisers' states after each phase.
    """

    params: Params
    loss: float
    steps: int
    states: list[OptimizerState] = field(default_factory=list)


def local_run(
    net: Net,
    split: Split,
    phases: Sequence[Phase],
    params: Mapping[str, Tensor],
    received: Params,
    data: FederatedData,
    rows: np.ndarray,
    draws: Stream,
    *,
    device: str = "cpu",
    progress: float = 0.0,
    states: Sequence[OptimizerState] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> LocalResult:
    """Train on a client's own examples, phase after phase.

    Args:
        net: the model as a function.
        split: the method's split.
        phases: the passes, in order.
        params: all parameters at the start; they are not changed.
        received: the federated parameters as the server sent them, for the terms that compare with them.
        data: the data set; ``rows`` are the client's examples in it.
        draws: names the random streams of batches and of dropout.
        device: where to train.
        progress: the finished part of the run in [0, 1), for learning-rate schedules.
        states: optimiser states to go on from (centralised training); fresh ones by default.
        after_step: called with the number of steps taken, e.g. to show progress.

    Raises:
        NonFiniteError: the loss or a parameter became NaN or infinite; names the client.
    """
    current = {name: value.detach().to(device, copy=True) for name, value in params.items()}
    trainable = [n for n in current if n in net.trainable()]
    result = LocalResult(current, float("nan"), 0)
    net.train()
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        torch.manual_seed(stream(draws.seed, "noise", draws.client, draws.round))
        for number, phase in enumerate(phases):
            state = states[number] if states else phase.optimizer.init()
            names = phase.trained_names(split, trainable)
            _run_phase(net, phase, names, result, received, data, rows, draws, number, device, progress, state, after_step)
            result.states.append(state)
    fault = "the training loss" if result.steps and not np.isfinite(result.loss) else nonfinite(current)
    if fault is not None:
        raise NonFiniteError(
            f"Client {draws.client!r}, round {draws.round}: {fault} became NaN or infinite after {result.steps} steps. "
            f"Lower the learning rate, set clip_norm, or look for NaN in this client's data."
        )
    return result


def _run_phase(
    net: Net,
    phase: Phase,
    names: list[str],
    result: LocalResult,
    received: Params,
    data: FederatedData,
    rows: np.ndarray,
    draws: Stream,
    number: int,
    device: str,
    progress: float,
    state: OptimizerState,
    after_step: Callable[[int], None] | None,
) -> None:
    params = result.params
    kind = float_type(params)
    leaves = {name: params[name].requires_grad_() for name in names}
    total = torch.zeros((), device=device)
    steps = 0
    scale = phase.optimizer.scale(progress)
    if leaves:
        for chosen in batches(data, rows, phase, draws, number):
            batch = load_batch(data, chosen, device, kind)
            loss = phase.loss(net, params, batch, received)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            found = {name: g for name, g in zip(names, grads, strict=True) if g is not None}
            if phase.clip_norm is not None:
                clip_(found, phase.clip_norm)
            phase.optimizer.update(params, found, state, scale)
            total += loss.detach()
            steps += 1
            if after_step is not None:
                after_step(result.steps + steps)
    for value in leaves.values():
        value.requires_grad_(False)
    result.steps += steps
    result.loss = float(total) / steps if steps else result.loss


def batches(data: FederatedData, rows: np.ndarray, phase: Phase, draws: Stream, number: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each mini-batch: shuffled passes over the examples that the phase may use."""
    rows = allowed(data, rows, phase.examples)
    if not len(rows):
        return
    rng = numpy_generator(draws.seed, f"batches/{number}", draws.client, draws.round)
    per_pass = -(-len(rows) // phase.batch_size)
    steps = phase.steps if phase.steps is not None else phase.epochs * per_pass
    order = rows
    for step in range(steps):
        position = step % per_pass
        if position == 0:
            order = rng.permutation(rows)
        yield order[position * phase.batch_size : (position + 1) * phase.batch_size]


def allowed(data: FederatedData, rows: np.ndarray, examples: str) -> np.ndarray:
    """Return the rows that a phase may use: all, or those whose column ``opted_in`` is true."""
    if examples == "all" or "opted_in" not in data.columns:
        return rows
    return rows[np.asarray(data.columns["opted_in"][rows], bool)]  # type: ignore[index]


def load_batch(data: FederatedData, rows: np.ndarray, device: str, kind: torch.dtype) -> Batch:
    """Return the examples' columns on the device; floats take the model's type."""
    batch = data.batch(rows)
    return {n: v.to(device, kind) if v.is_floating_point() else v.to(device) for n, v in batch.items()}


def float_type(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the floating type of the first parameter that has one."""
    return next((v.dtype for v in params.values() if v.is_floating_point()), torch.float32)


@torch.no_grad()
def clip_(grads: Params, bound: float) -> None:
    """Scale gradients in place so that their joint L2 norm is at most ``bound``."""
    if grads:
        norms = torch._foreach_norm(list(grads.values()))
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        torch._foreach_mul_(list(grads.values()), (bound / (norm + 1e-6)).clamp(max=1.0))
