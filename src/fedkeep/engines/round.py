"""THE round: sample, send, train, upload, combine, apply. It knows nothing of files, engines' insides or reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, check_finite, nbytes, subtract
from fedkeep.core.seeds import numpy_generator, stream
from fedkeep.engines.aggregate import spread
from fedkeep.engines.base import CohortResult, Engine, Job
from fedkeep.methods import Method


@dataclass
class Server:
    """The server's state: federated parameters, the server optimiser's state, and finished rounds."""

    params: Params
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    round: int = 0


@dataclass(frozen=True)
class RoundReport:
    """Measurements of one round.

    Attributes:
        clients: how many took part.
        examples: their training examples, weights' sum.
        loss: mean training loss, weighted as the uploads.
        download_bytes, upload_bytes: per client, the mean over the cohort.
        private_upload_bytes: bytes of private parameters that left a client: 0 for every federated engine.
        aggregate_seconds, seconds: time of combining and of the whole round.
        refused: messages about clients that sat out.
    """

    clients: int
    examples: float
    loss: float
    download_bytes: int
    upload_bytes: int
    aggregate_seconds: float
    seconds: float
    refused: tuple[str, ...] = ()


class Sampler:
    """Draws the cohort of a round from (seed, round) alone, at a cost that does not grow with the clients.

    Args:
        clients: the indices that may be drawn, in order; an int n means 0 .. n − 1.
        cohort: how many a round.
        mode: ``"shuffled"``: all clients in a new order each epoch, consecutive groups of ``cohort``, so that an
            epoch uses every example once (FURL §4, read so); ``"independent"``: each round draws anew.
        seed: the run's seed.
    """

    def __init__(
        self, clients: np.ndarray | int, cohort: int, mode: Literal["shuffled", "independent"], seed: int
    ) -> None:
        self.clients = clients
        self.count = clients if isinstance(clients, int) else len(clients)
        if not cohort >= 1:
            raise ConfigError(f"cohort must be at least 1; got {cohort}.")
        if self.count < 1:
            raise ConfigError("There is no client with training examples to draw a cohort from.")
        if mode not in ("shuffled", "independent"):
            raise ConfigError(f"sampling must be 'shuffled' or 'independent'; got {mode!r}.")
        self.cohort, self.mode, self.seed = min(cohort, self.count), mode, seed
        self.rounds_per_epoch = -(-self.count // self.cohort)

    def __call__(self, round: int) -> list[int]:
        """Return the clients of a round, ascending order of the draw."""
        if self.mode == "independent":
            rng = numpy_generator(self.seed, "cohort", round=round)
            drawn = rng.choice(self.count, self.cohort, replace=False, shuffle=False)
        else:
            epoch, group = divmod(round, self.rounds_per_epoch)
            places = range(group * self.cohort, min((group + 1) * self.cohort, self.count))
            key = stream(self.seed, "cohort", round=epoch)
            drawn = np.array([permuted(place, self.count, key) for place in places])
        return [int(c) for c in (drawn if isinstance(self.clients, int) else self.clients[drawn])]


def permuted(place: int, count: int, key: int) -> int:
    """Return where a pseudo-random permutation of 0 .. count − 1 sends ``place``, in constant time and memory.

    A four-round Feistel network on the next even power of two, walked until it lands inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for step in range(4):
            left, right = right, left ^ (stream(key, "feistel", str(step), right) & mask)
        place = (left << half) | right
        if place < count:
            return place


def run_round(
    job: Job, engine: Engine, server: Server, clients: list[int], progress: float = 0.0
) -> RoundReport:
    """Run one round: ``server`` is brought to the next round and the store gets the cohort's private values (staged).

    Raises:
        NonFiniteError, UploadError: a client's training broke down and ``on_nonfinite`` is ``"stop"``.
    """
    began = time.perf_counter()
    received = server.params
    result = engine.run_cohort(job, received, clients, server.round, progress)
    trained = time.perf_counter()
    if result.clients and result.mean.weight > 0:
        combined, rows = result.mean.compact()
        server.params = apply(
            job.method, job.net.trainable(), received, combined, server.optimizer, progress, rows
        )
        check_finite(server.params, f"The server's parameters after round {server.round}")
    combined_at = time.perf_counter()
    if result.clients:
        job.store.write(result.clients, keep(job, result))
    weights = [u.weight for u in result.uploads]
    losses = [
        (loss, w) for loss, w in zip(result.losses, weights, strict=True) if np.isfinite(loss) and w > 0
    ]
    total = sum(w for _, w in losses)
    server.round += 1
    return RoundReport(
        clients=len(result.clients),
        examples=float(sum(weights)),
        loss=sum(loss * w for loss, w in losses) / total if total else float("nan"),
        download_bytes=round_mean([u.cut_bytes(received) for u in result.uploads], nbytes(received)),
        upload_bytes=round_mean(result.upload_bytes, 0),
        aggregate_seconds=result.mean.seconds + combined_at - trained,
        seconds=time.perf_counter() - began,
        refused=tuple(result.refused),
    )


def round_mean(values: list[int], default: int) -> int:
    """Return the mean to the nearest integer."""
    return round(sum(values) / len(values)) if values else default


def apply(
    method: Method,
    trainable: frozenset[str],
    received: Mapping[str, Tensor],
    combined: Mapping[str, Tensor],
    state: OptimizerState,
    progress: float = 0.0,
    rows: Mapping[str, Tensor] | None = None,
) -> Params:
    """Return the server's next parameters: the server optimiser on the pseudo-gradient −combined (FedOpt).

    Buffers are moved by plain averaging; integer counters take the uploaded value.

    Args:
        method: its server optimiser counts.
        trainable: names of parameters; the other names are buffers.
        received: the parameters before; they are not changed.
        combined: the mean change.
        state: the server optimiser's; it is changed.
        progress: the finished part of the run in [0, 1), for schedules.
        rows: by name, the numbers of the rows that ``combined`` holds of a table; the others have not changed.
    """
    params = {name: value.clone() for name, value in received.items()}
    optimizer, slopes, few = method.server_optimizer, Params(), Params()
    for name, change in combined.items():
        start = params[name]
        change = change.to(start.device)
        if rows and name in rows:
            if name in trainable and optimizer.rests:
                few[name] = change
                continue
            change = spread(change, rows[name].to(start.device), start)
        if not change.is_floating_point():
            params[name] = change
        elif name in trainable:
            slopes[name] = -change
        else:
            params[name] = start + change
    if slopes or few:
        optimizer.update(params, slopes, state, optimizer.scale(progress))
    for name, change in few.items():
        assert rows is not None
        rate = optimizer.rate(name) * optimizer.scale(progress)
        params[name].index_add_(0, rows[name].to(change.device), change, alpha=rate)
    return params


def keep(job: Job, result: CohortResult) -> Params:
    """Return the cohort's new private values: u_p (z = 1, FURL eq. 7), or w_p + z (u_p − w_p) (eq. 6)."""
    if job.method.private_scale == 1:
        return result.private
    before = job.store.read(result.clients)
    weights = torch.tensor([u.weight for u in result.uploads], dtype=torch.float64)
    if not float(weights.sum()) > 0:
        return before
    z = weights / weights.sum()
    out: Params = {}
    for name, change in subtract(result.private, before).items():
        if change.is_floating_point():
            scale = z.to(change.dtype).reshape(-1, *[1] * (change.dim() - 1))
            out[name] = before[name] + scale * change
        else:
            out[name] = result.private[name]
    return out
