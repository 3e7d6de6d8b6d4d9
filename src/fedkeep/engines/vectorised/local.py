"""The local runs of some clients as one tensor program.

What ``local_run`` does for one client, step for step and from the same random streams: the gradient of the phase's
loss, mapped over the clients by ``torch.func.vmap``, then clipping, optimiser and bounds on stacked tensors. A client
that has no mini-batch (left) for a step takes no part in it, so it is frozen exactly: momentum and Adam would move it
even at a gradient of zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params
from fedkeep.core.seeds import stream
from fedkeep.engines.batches import batches, float_type
from fedkeep.engines.local import MODEL_ERRORS, failed, gradients
from fedkeep.engines.opt_out import READS_HIDDEN, trains_federated, veiled
from fedkeep.engines.vectorised.batches import Step, lockstep
from fedkeep.engines.vectorised.clients import Pick, Stacked, flat, picked, put_back
from fedkeep.engines.vectorised.dropout import Noise


def run_together(clients: Stacked) -> None:
    """Train some clients, all phases; ``clients`` holds the outcome."""
    clients.job.net.train()
    everyone = range(len(clients.client.phases))
    for numbers in [everyone] if clients.client.take_turns else [range(n, n + 1) for n in everyone]:
        noise = noise_of(clients, numbers[0])
        passes = [Pass(clients, number, noise) for number in numbers]
        for step in passes[0].steps():
            batch = clients.examples.batch(step)
            for each in passes:
                each.take(step, batch)
        for each in passes:
            each.finish()


def noise_of(clients: Stacked, number: int) -> Noise:
    """Return the clients' streams of noise from a phase on."""
    seeds = [stream(d.seed, f"noise/{number}", d.client, d.round) for d in clients.draws]
    return Noise(seeds, clients.job.device)


class Pass:
    """One phase.

    Args:
        clients: who trains.
        number: the phase's number.
        noise: their streams of noise.
    """

    def __init__(self, clients: Stacked, number: int, noise: Noise) -> None:
        method, params = clients.method, clients.params
        phases = method.client.phases
        self.clients, self.number, self.noise, self.phase = clients, number, noise, phases[number]
        self.names = self.phase.trained_names(method.split, [n for n in params if n in clients.trainable])
        self.scale = self.phase.optimizer.scale(clients.progress)
        hidden = clients.tainted() if trains_federated(self.names, method.split) else set()
        self.hides = bool(hidden)
        self.seen = (
            veiled(params, hidden, clients.job.net.initial(), clients.trainable) if hidden else dict(params)
        )
        moved = [n for n in params if n in clients.changing and n not in clients.trainable]
        self.buffers = [n for n in moved if n not in hidden or self.seen[n] is params[n]]
        frozen = [n for n in self.buffers if n in clients.received] if self.phase.examples == "all" else []
        self.before = {n: params[n].clone() for n in frozen}
        self.state = OptimizerState()
        self.taken = {n: np.zeros(len(clients.clients), np.int64) for n in self.names}
        self.steps_taken = np.zeros(len(clients.clients), np.int64)
        self.total = torch.zeros(len(clients.clients), dtype=float_type(params), device=clients.job.device)

    def steps(self) -> Iterator[Step]:
        """Yield who steps when, and on what."""
        every = zip(self.clients.rows, self.clients.draws, strict=True)
        data = self.clients.job.data
        plans = [list(batches(data, rows, self.phase, draws, self.number)) for rows, draws in every]
        return lockstep(plans, self.phase.batch_size)

    def take(self, step: Step, batch: Batch) -> None:
        """Take the optimiser steps of some clients on a mini-batch of each."""
        for _ in range(self.clients.client.steps(self.number) if self.names else 0):
            pick = self.clients.pick(step.who)
            values, losses, grads = self.gradients(step, pick, batch)
            if self.phase.clip_norm is not None:
                grads = clipped(grads, self.phase.clip_norm)
            self._update(step.who, pick, values, grads)
            put_back(self.clients.params, pick, {n: values[n] for n in self.buffers})
            self.total[pick] += losses
            self.steps_taken[step.who] += 1

    def gradients(self, step: Step, pick: Pick, batch: Batch) -> tuple[Params, Tensor, Params]:
        """Return some clients' values (with buffers as the step left them), losses and gradients."""
        stacked = picked({n: v for n, v in self.seen.items() if n in self.clients.stacked}, pick)
        leaves = {n: stacked[n].detach().requires_grad_() for n in self.names}
        try:
            losses = self._losses(step, {**self.seen, **stacked, **leaves}, pick, batch)
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            raise self._failed(step, error) from error
        return stacked, losses.detach(), gradients(losses.sum(), leaves)

    def _losses(self, step: Step, params: Params, pick: Pick, batch: Batch) -> Tensor:
        clients = self.clients
        cut = picked({n: clients.received[n] for n in clients.cut}, pick)
        axes = (
            {n: 0 if n in clients.stacked else None for n in params},
            {n: 0 if n in cut else None for n in clients.received},
        )

        def loss(mine: Params, theirs: Params, examples: Batch, client: Tensor) -> Tensor:
            self.noise.client = client
            return self.phase.loss(clients.job.net, mine, examples, theirs)

        numbers = torch.arange(len(step.who), device=clients.job.device)
        with self.noise.of(step.who):
            return torch.func.vmap(loss, (*axes, 0, 0))(params, clients.received | cut, batch, numbers)

    def _failed(self, step: Step, error: Exception) -> MethodError:
        names = [self.clients.draws[k].client for k in step.who[:3]]
        more = f" and {len(step.who) - 3} more" if len(step.who) > 3 else ""
        who = f"Clients {', '.join(map(repr, names))}{more}, round {self.clients.round}"
        return failed(who, step.rows.shape[1], error, " engine='sequential' says which client it is.")

    def _update(self, who: np.ndarray, pick: Pick, values: Params, grads: Params) -> None:
        """Let the optimiser step on some clients; those who have taken equally many steps at once."""
        optimizer, whole = self.phase.optimizer, self.clients.params
        for kept in (self.state.first, self.state.second)[: optimizer.moments]:
            kept.update({n: torch.zeros_like(whole[n]) for n in grads if n not in kept})
        first, second = picked(self.state.first, pick), picked(self.state.second, pick)
        taken = {n: self.taken[n][who] for n in grads}
        for part in alike(taken, len(who)) if optimizer.moments == 2 else [slice(None)]:
            state = OptimizerState(
                0, picked(first, part), picked(second, part), {n: int(k[part][0]) for n, k in taken.items()}
            )
            optimizer.update(
                picked({n: values[n] for n in grads}, part), picked(grads, part), state, self.scale
            )
        for n in grads:
            self.taken[n][who] += 1
        put_back(whole, pick, {n: values[n] for n in grads})
        put_back(self.state.first, pick, first)
        put_back(self.state.second, pick, second)

    def finish(self) -> None:
        """Put frozen buffers back, and write the losses into ``clients``."""
        total = self.total.double().cpu().numpy()
        if self.hides and np.isnan(total).any():
            raise MethodError(READS_HIDDEN)
        self.clients.params.update(self.before)
        stepped = self.steps_taken > 0
        opted_out = self.phase.examples == "all" and "opted_in" in self.clients.job.data.columns
        if not (opted_out and any(p.examples != "all" for p in self.clients.client.phases)):
            self.clients.losses[stepped] = total[stepped] / self.steps_taken[stepped]
            self.clients.looked_at |= stepped
        self.clients.steps += self.steps_taken


def alike(taken: dict[str, np.ndarray], clients: int) -> list[slice]:
    """Return the runs of neighbours who have taken equally many steps: Adam corrects its moments by their number."""
    ends = {clients}
    for counts in taken.values():
        ends |= {int(k) + 1 for k in np.flatnonzero(np.diff(counts))}
    bounds = [0, *sorted(ends)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


@torch.no_grad()
def clipped(grads: Params, bound: float) -> Params:
    """Return each client's gradients scaled down to a joint L2 norm of at most ``bound``."""
    if not grads:
        return grads
    norms = torch.stack(
        [torch.linalg.vector_norm(flat(g), dim=1) for g in grads.values()]
    )  # (names, clients)
    scale = (bound / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    return {n: g * scale.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1)) for n, g in grads.items()}
