"""The reference engine: one client after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedkeep.engines.client_step import train_client
from fedkeep.engines.job import ClientResult, ClientToTrain, Job


class Sequential:
    """Trains clients one by one in this process."""

    name = "sequential"

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients, and yield what each gives."""
        stored = job.kept([each.client for each in work])
        for place, each in enumerate(work):
            kept = {name: values[place] for name, values in stored.items()}
            yield train_client(job, each.sent, kept, each.client, round, progress)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
