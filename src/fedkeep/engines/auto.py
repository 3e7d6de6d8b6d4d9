"""Which engine is the fastest here, and why."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedkeep.core.params import Params
from fedkeep.engines.base import CohortResult, Engine, Job
from fedkeep.engines.client import ClientResult, collect, train_client
from fedkeep.engines.sequential import Sequential
from fedkeep.engines.small import as_one_program
from fedkeep.engines.vectorised.engine import Vectorised
from fedkeep.engines.workers.cores import available_cores
from fedkeep.engines.workers.engine import Workers
from fedkeep.engines.workers.pool import start_method

STARTING = {"fork": 0.2, "spawn": 8.0}
"""Seconds to start workers."""
WORTH = 5
"""Workers are started if they save this many times what starting them costs."""
HANDING_OVER = 0.0005
"""Seconds that it takes to hand a client to another process and to take back what it gives."""
LONG = 2.0
"""Seconds after which the first client counts, although it pays for what torch loads but once."""


@dataclass(frozen=True)
class Choice:
    """An engine's name, and in a few words why it was chosen."""

    name: str
    reason: str


def choose(device: str, cohort: int, workers: int | None) -> Choice | None:
    """Return the engine for clients that aren't small, where it is known beforehand; None: measure (``Measured``).

    Args:
        device: where to compute.
        cohort: clients a round.
        workers: how many processes there may be, if the user says so; None: as many as there are cores.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        return Choice("vectorised", f"the device is {kind}")
    if cohort == 1:
        return Choice("sequential", "a round has one client")
    if (workers or available_cores()) == 1:
        return Choice("sequential", "there is one core to use")
    if multiprocessing.current_process().daemon:
        return Choice("sequential", "a daemon process may not start others")
    if workers is None and start_method() == "spawn":
        # A script without a guard of __main__ would be run again in each of them.
        return Choice("sequential", "processes cannot be forked here; workers=N starts them anew")
    return None


class Auto:
    """Trains small clients in large cohorts as one tensor program, and others with another engine.

    The program computes with one thread: more would only wait for each other, and the bits shall not depend on them.

    Args:
        cohort: clients a round.
        other: trains what isn't small.
        reason: why it is this one, unless it says so itself.
    """

    def __init__(self, cohort: int, other: Measured | Sequential, reason: str = "") -> None:
        self.cohort, self.other, self.reason = cohort, other, reason
        self._program: Vectorised | None = None
        self._why = ""
        self._job: Job | None = None

    @property
    def name(self) -> str:
        """The engine in use."""
        return self.choice.name

    @property
    def choice(self) -> Choice:
        """The engine in use, and why."""
        if self._program is not None:
            return Choice(self._program.name, self._why)
        return self.other.choice if isinstance(self.other, Measured) else Choice(self.other.name, self.reason)

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        if job is not self._job:
            with one_thread():
                why = as_one_program(job, self.cohort)
            self._job, self._why = job, why or ""
            self._program = Vectorised() if why else None
        if self._program is None:
            return self.other.run_cohort(job, received, clients, round, progress)
        with one_thread():
            return self._program.run_cohort(job, received, clients, round, progress)

    def close(self) -> None:
        """End the workers, if there are any."""
        self.other.close()


class Measured:
    """Trains one client after the other, until workers would save more time than it takes to start them.

    It computes with one thread either way, so the result does not depend on when it changes over, or if it does.

    Args:
        rounds: of the whole run.
        cohort: clients a round.
        workers: the processes that may be started.
    """

    def __init__(self, rounds: int, cohort: int, workers: Workers) -> None:
        self.rounds, self.cohort, self.workers = rounds, cohort, workers
        self.trained, self.seconds = 0, 0.0
        self.choice = Choice("sequential", "too little was trained to tell whether processes pay")
        self.starting = STARTING[workers.start or start_method()]

    @property
    def name(self) -> str:
        """The engine in use."""
        return self.choice.name

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        return collect(job, received, clients, self.results(job, received, clients, round, progress))

    def results(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients here or in workers, and yield what each gives back, in their order."""
        stored = job.private(clients) if self.name == "sequential" else {}
        for place, client in enumerate(clients):
            left = len(clients) - place + (self.rounds - round - 1) * self.cohort
            if self.name == "workers" or self._pays(left):
                yield from self.workers.results(job, received, clients[place:], round, progress)
                return
            own = {name: values[place] for name, values in stored.items()}
            began = time.perf_counter()
            with one_thread():
                result = train_client(job, received, own, client, round, progress)
            self._measured(time.perf_counter() - began)
            yield result

    def _measured(self, seconds: float) -> None:
        if self.trained == 1:
            self.seconds = 0.0  # the first one paid for what is loaded but once
        self.seconds += seconds
        self.trained += 1

    def _pays(self, left: int) -> bool:
        """Decide whether the clients that are left are better trained in workers."""
        if self.trained < 2 and self.seconds < LONG:
            return False
        one = self.seconds / max(self.trained - 1, 1)
        side_by_side = min(self.workers.count, self.cohort)
        saved = left * (one - one / side_by_side - HANDING_OVER)
        if saved > WORTH * self.starting:
            self.choice = Choice(
                "workers",
                f"{side_by_side} clients side by side save about {_time(saved)} of {_time(left * one)}",
            )
            return True
        self.choice = Choice("sequential", f"a client takes {_time(one)}; processes would save too little")
        return False

    def close(self) -> None:
        """End the workers, if there are any."""
        self.workers.close()


class AutoDevice:
    """Trains clients as one tensor program if the job suits that, else one after the other.

    Args:
        choice: ``vectorised``, and why it is tried.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._engine: Engine | None = None

    @property
    def name(self) -> str:
        """The engine in use."""
        return self.choice.name

    def run_cohort(
        self, job: Job, received: Params, clients: list[int], round: int, progress: float
    ) -> CohortResult:
        """Train the clients from ``received`` and their own private values."""
        if self._engine is None:
            reason = Vectorised.suits(job)
            if reason is not None:
                self.choice = Choice("sequential", f"'vectorised' is no choice: {reason.rstrip('.')}")
            self._engine = Vectorised() if reason is None else Sequential()
        return self._engine.run_cohort(job, received, clients, round, progress)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as a worker does."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
