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

from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, clone, nonfinite
from fedkeep.core.seeds import numpy_generator, stream
from fedkeep.engines.vocabulary import Examples, LocalTable, local_tables, narrow, widen
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
    data: Examples,
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
        MethodError: a phase that trains federated parameters reads private ones that were trained on opted-out
            examples.
    """
    tables = [] if states else local_tables(net.module, phases, params, data, rows)
    start = narrow(dict(params), tables)
    current = {name: value.detach().to(device, copy=True) for name, value in start.items()}
    run = _LocalRun(
        net, split, phases, current, received, data, rows, tables, draws, device, progress, after_step
    )
    net.train()
    result = LocalResult(current, float("nan"), 0)
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        for number, phase in enumerate(phases):
            torch.manual_seed(stream(draws.seed, f"noise/{number}", draws.client, draws.round))
            state = states[number] if states else phase.optimizer.init()
            loss, steps = run.phase(number, phase, state, result.steps)
            result.loss, result.steps = (loss if steps else result.loss), result.steps + steps
            result.states.append(state)
    fault = "the training loss" if result.steps and not np.isfinite(result.loss) else nonfinite(current)
    if fault is not None:
        raise NonFiniteError(
            f"Client {draws.client!r}, round {draws.round}: {fault} became NaN or infinite after {result.steps} steps. "
            f"Lower the learning rate, set clip_norm, or look for NaN in this client's data."
        )
    result.params = widen(current, params, tables)
    return result


@dataclass(frozen=True)
class _LocalRun:
    """What the phases of one local run share; ``params`` is changed in place."""

    net: Net
    split: Split
    phases: Sequence[Phase]
    params: Params
    received: Params
    data: Examples
    rows: np.ndarray
    tables: list[LocalTable]
    draws: Stream
    device: str
    progress: float
    after_step: Callable[[int], None] | None

    def phase(self, number: int, phase: Phase, state: OptimizerState, done: int) -> tuple[float, int]:
        """Run one phase; return the mean loss of its mini-batches, and how many there were."""
        trainable = self.net.trainable()
        names = phase.trained_names(self.split, [n for n in self.params if n in trainable])
        if not names:
            return float("nan"), 0
        kind = float_type(self.params)
        buffers = (
            {n: self.params[n] for n in self.received if n not in trainable and not self.split.is_private(n)}
            if phase.examples == "all"
            else {}
        )
        buffers = clone(buffers)
        seen = self._visible(names, trainable)
        leaves = [self.params[name].requires_grad_() for name in names]
        total, steps = torch.zeros((), dtype=kind, device=self.device), 0
        scale = phase.optimizer.scale(self.progress)
        with self.net.bound(seen):
            for chosen in batches(self.data, self.rows, phase, self.draws, number):
                batch = load_batch(self.data, chosen, self.device, kind, self.tables)
                loss = self._loss(phase, seen, batch)
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
                grads = {name: g for name, g in zip(names, found, strict=True) if g is not None}
                if phase.clip_norm is not None:
                    clip_(grads, phase.clip_norm)
                phase.optimizer.update(self.params, grads, state, scale)
                total += loss.detach()
                steps += 1
                if self.after_step is not None:
                    self.after_step(done + steps)
        for leaf in leaves:
            leaf.requires_grad_(False)
        if seen is not self.params and bool(torch.isnan(total)):
            raise MethodError(
                "A phase that trains federated parameters reads private ones that another phase trains on opted-out "
                "examples too, so these would influence what leaves the client. Train that phase with "
                "examples='opted_in', or leave those parameters out of the federated phase's loss."
            )
        self.params.update(buffers)
        return float(total) / max(steps, 1), steps

    def _loss(self, phase: Phase, params: Params, batch: Batch) -> Tensor:
        try:
            return phase.loss(self.net, params, batch, self.received)
        except (ValueError, RuntimeError) as error:
            raise MethodError(
                f"Client {self.draws.client!r}, round {self.draws.round}: the model failed on a batch of "
                f"{len(next(iter(batch.values())))} examples: {error} Check its forward and the data's columns; "
                f"batch normalisation needs batches of more than one example."
            ) from error

    def _visible(self, names: Sequence[str], trainable: frozenset[str]) -> Params:
        """Return the parameters that a phase may see.

        Where there are opted-out examples, a phase that trains federated parameters must not depend on private ones
        that were trained on them: these are shown as NaN, so that any use of them shows in the loss.
        """
        if "opted_in" not in self.data.columns or all(self.split.is_private(n) for n in names):
            return self.params
        hidden = tainted(self.phases, self.split, trainable)
        if not hidden:
            return self.params
        return {n: torch.full_like(v, torch.nan) if n in hidden else v for n, v in self.params.items()}


def tainted(phases: Sequence[Phase], split: Split, trainable: frozenset[str]) -> set[str]:
    """Return the private parameters that a phase trains on all examples, opted-out ones included."""
    names = sorted(trainable)
    return {
        n for p in phases if p.examples == "all" for n in p.trained_names(split, names) if split.is_private(n)
    }


def batches(
    data: Examples, rows: np.ndarray, phase: Phase, draws: Stream, number: int
) -> Iterator[np.ndarray]:
    """Yield the row numbers of each mini-batch: shuffled passes over the examples that the phase may use."""
    rows = usable(data, rows, phase, draws)
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


def usable(data: Examples, rows: np.ndarray, phase: Phase, draws: Stream) -> np.ndarray:
    """Return the rows that a phase may use and whose half it asks for."""
    rows = allowed(data, rows, phase.examples)
    if phase.part == "all":
        return rows
    order = numpy_generator(draws.seed, "halves", draws.client).permutation(rows)
    half = len(rows) // 2
    return order[:half] if phase.part == "support" else order[half:]


def allowed(data: Examples, rows: np.ndarray, examples: str) -> np.ndarray:
    """Return the rows that a phase may use: all, or those whose column ``opted_in`` is true."""
    if examples == "all" or "opted_in" not in data.columns:
        return rows
    return rows[np.asarray(data.columns["opted_in"][rows], bool)]  # type: ignore[index]


def load_batch(
    data: Examples, rows: np.ndarray, device: str, kind: torch.dtype, tables: Sequence[LocalTable] = ()
) -> Batch:
    """Return the examples' columns on the device; floats take the model's type, ids of local tables their positions."""
    batch = data.batch(rows)
    for table in tables:
        batch[table.column] = table.local(batch[table.column])
    if device != "cpu":
        batch = {name: value.to(device) for name, value in batch.items()}
    return {n: v.to(kind) if v.is_floating_point() and v.dtype != kind else v for n, v in batch.items()}


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
