"""The reference engine: one client after the other."""

from __future__ import annotations

from collections.abc import Iterator

from fedkeep.core.params import Params
from fedkeep.engines.base import CohortResult, Job
from fedkeep.engines.client import ClientResult, collect, train_client


class Sequential:
    """Runs the clients of a cohort one by one in this process."""

    name = "sequential"

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        return collect(job, received, clients, one_by_one(job, received, clients, round, progress))

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def one_by_one(
    job: Job, received: Params, clients: list[int], round: int, progress: float
) -> Iterator[ClientResult]:
    """Train clients in this process, and yield what each gives back."""
    stored = job.private(clients)
    for position, client in enumerate(clients):
        own = {name: values[position] for name, values in stored.items()}
        yield train_client(job, received, own, client, round, progress)
