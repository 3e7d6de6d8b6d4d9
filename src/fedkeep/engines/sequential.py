"""The reference engine: one client after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedkeep.core.errors import NonFiniteError, UploadError
from fedkeep.core.params import Params
from fedkeep.engines.base import CohortResult, Job, train_rows
from fedkeep.engines.local import Stream, allowed, local_run, usable
from fedkeep.methods import Phase
from fedkeep.split import check_upload


class Sequential:
    """Runs the clients of a cohort one by one in this process."""

    name = "sequential"

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        split, method = job.method.split, job.method
        result = CohortResult([], [], {}, [])
        stored = job.private(clients)
        names = sorted(job.net.trainable())
        leaving = [p for p in method.phases if not all(map(split.is_private, p.trained_names(split, names)))]
        kept: list[Params] = []
        for position, client in enumerate(clients):
            name = job.data.ids[client]
            own = {n: v[position] for n, v in stored.items()}
            rows, draws = train_rows(job.data, client), Stream(job.seed, name, round)
            try:
                local = local_run(
                    job.net, split, method.phases, split.merge(received, own), received, job.data, rows,
                    draws, device=job.device, progress=progress,
                )  # fmt: skip
                weight = 1.0 if method.weighting == "uniform" else examples_of(job, leaving, rows, draws)
                upload = split.upload(received, local.params, weight)
                check_upload(upload, received, name)
            except (NonFiniteError, UploadError) as error:
                if job.on_nonfinite == "stop":
                    raise
                result.refused.append(str(error))
                continue
            result.clients.append(client)
            result.uploads.append(upload)
            result.losses.append(local.loss)
            kept.append(split.personal(local.params))
            if job.after_step is not None:
                job.after_step((position + 1) / len(clients))
        result.private = {n: torch.stack([k[n] for k in kept]) for n in stored} if kept else {}
        return result


def examples_of(job: Job, leaving: Sequence[Phase], rows: np.ndarray, draws: Stream) -> float:
    """Return c_k: how many of a client's examples train what leaves it."""
    counts = [len(usable(job.data, rows, phase, draws)) for phase in leaving]
    return float(max(counts, default=len(allowed(job.data, rows, "opted_in"))))
