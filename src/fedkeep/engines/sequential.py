"""The reference engine: one client after the other."""

from __future__ import annotations

from fedkeep.core.params import Params
from fedkeep.engines.base import CohortResult, Job
from fedkeep.engines.client import collect, train_client


class Sequential:
    """Runs the clients of a cohort one by one in this process."""

    name = "sequential"

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        stored = job.private(clients)
        results = (
            train_client(job, received, {n: v[k] for n, v in stored.items()}, client, round, progress)
            for k, client in enumerate(clients)
        )
        return collect(job, received, clients, results)
