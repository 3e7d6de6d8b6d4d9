"""Which engine is the fastest here, and why.

On a CPU a small client's time goes into calling operations, not into what they compute. Stacked, one call serves all
clients that step at once, so one tensor program pays where many do. How much follows from the model, the method, the
data's sizes, the cohort and a model of costs (``vectorised/costs.py``), never from a clock, so that a run gives the
same bits again (``benchmarks/costs.py`` and ``small.py`` measure what it is worth). Other clients are trained
one after the other, or in workers where these save time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedkeep.core.errors import FedkeepError, MethodError
from fedkeep.core.net import compiled_layer
from fedkeep.core.params import nbytes
from fedkeep.engines.batches import Stream, batches
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Job, Sequential
from fedkeep.engines.tables.local_rows import local_tables
from fedkeep.engines.vectorised.costs import CPU_BYTES, room, step_cost, times_faster
from fedkeep.engines.vectorised.stacked_lanes import lockstep
from fedkeep.engines.vectorised.vectorised import Vectorised
from fedkeep.engines.workers.pool import start_method
from fedkeep.engines.workers.workers import Workers, available_cores, one_thread, size

STARTING = {"fork": 0.2, "spawn": 8.0}
"""Seconds to start workers."""
WORTH = 5
"""Workers are started if they save this many times what starting them costs."""
HANDING_OVER, HANDING_OVER_BYTE = 0.0005, 4e-10
"""Seconds that it takes to hand a client to another process, and to take back each byte that it gives."""
LONG = 10.0
"""Seconds after which the first client counts. It pays for what torch loads but once: seconds, on busy cores."""

LARGE = 2 << 20
"""Bytes that training a client takes beyond which it is not looked at any more: it never pays side by side."""
SMALL = 320 << 10
"""Bytes of a client's training up to which operations are looked at that the model of costs was not measured on."""
WORTHWHILE = 1.5
"""How many times faster than one after the other clients side by side must be: two cores are faster, too."""
WIDE = 10.0
"""Clients that must step at once on average: a stacked step costs about as much as five of one client's."""
ENOUGH = 256
"""Clients of a cohort that are looked at; of so many small ones memory holds about as many at once."""


@dataclass(frozen=True)
class Choice:
    """An engine's name, and in a few words why it was chosen."""

    name: str
    reason: str


def known_beforehand(device: str, cohort: int, workers: int | None) -> Choice | None:
    """Return the engine for clients that aren't small; None: how long they take decides.

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
        return Choice("sequential", "processes cannot be forked here; workers=N starts new ones")
    return None


class Auto:
    """Trains clients with the engine that is the fastest here.

    On a CPU small clients in large cohorts are one tensor program. Others are trained one after the other, until
    workers would save more time than it takes to start them. All of it computes with one thread, so that the bits do
    not depend on when workers begin; but where there can be no workers, clients one after the other have all threads.
    On another device clients are one tensor program if the job suits that.

    Args:
        cohort: clients a round.
        rounds: of the whole run.
        workers: how many processes there may be; None: as many as there are cores.
        device: where to compute.
    """

    def __init__(self, cohort: int, rounds: int = 1, workers: int | None = None, device: str = "cpu") -> None:
        self.cohort, self.rounds, self.workers = cohort, rounds, Workers(workers)
        self.known = known_beforehand(device, cohort, workers)
        self.apart = self.known or Choice(
            "sequential", "too little was trained to tell whether processes pay"
        )
        self.together: Choice | None = None
        self.trained, self.seconds, self.largest = 0, 0.0, 0
        self._job: Job | None = None
        self._program = Vectorised()

    @property
    def name(self) -> str:
        """The engine in use."""
        return self.choice.name

    @property
    def choice(self) -> Choice:
        """The engine in use, and why."""
        return self.together or self.apart

    def decide(self, job: Job, before: str = "") -> None:
        """Decide on a job; a run that goes on keeps the engine ``before``, whatever would be chosen now.

        Only between one tensor program and the others: these give the same bits.
        """
        self._job, self.together = job, None
        if self.known is not None and self.known.name == "vectorised":
            if (reason := _unfit(job)) is None:
                self.together = self.known
            else:
                self.apart = Choice("sequential", f"'vectorised' is no choice: {reason.rstrip('.')}")
            return
        with one_thread():
            why = as_one_program(job, self.cohort) if before in ("", "vectorised") else None
        if why or before == "vectorised":
            self.together = Choice("vectorised", why or "this run began so")

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients, and yield what each gives, in their order."""
        if job is not self._job:
            self.decide(job)
        if self.together is not None:
            with one_thread() if job.device == "cpu" else contextlib.nullcontext():
                yield from self._program.train(job, work, round, progress)
        elif self.known is not None:
            yield from Sequential().train(job, work, round, progress)
        else:
            yield from self._timed(job, work, round, progress)

    def _timed(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train one client after the other, until workers pay, and the rest in these."""
        compiled = compiled_layer(job.net.module)
        if compiled:
            self.apart = Choice("sequential", f"{compiled} is compiled, which workers cannot do")
        results = Sequential().train(job, work, round, progress)
        for place in range(len(work)):
            left = len(work) - place + (self.rounds - round - 1) * self.cohort
            if not compiled and (self.name == "workers" or self._pays(left)):
                yield from self.workers.train(job, work[place:], round, progress)
                return
            began = time.perf_counter()
            with one_thread():
                result = next(results)
            self._took(time.perf_counter() - began)
            self.largest = max(self.largest, size(result))
            yield result
            del result  # its upload is large: it goes before the next client is trained

    def _took(self, seconds: float) -> None:
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
        handing_over = HANDING_OVER + HANDING_OVER_BYTE * self.largest
        saved = left * (one - one / side_by_side - handing_over)
        if saved > WORTH * STARTING[self.workers.start or start_method()]:
            why = f"{side_by_side} clients side by side save about {_time(saved)} of {_time(left * one)}"
            self.apart = Choice("workers", why)
            return True
        why = f"a client takes {_time(one)}; processes would save too little"
        self.apart = Choice("sequential", why)
        return False

    def close(self) -> None:
        """End the workers, if there are any."""
        self.workers.close()


def _unfit(job: Job) -> str | None:
    """Return why a job cannot be one tensor program, or None: it can."""
    try:
        return Vectorised.suits(job)
    except MethodError as error:  # of the method on many clients at once; one alone may have none
        return str(error)


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def as_one_program(job: Job, cohort: int) -> str | None:
    """Return why a job's cohorts are best trained as one tensor program on a CPU, or None: they are not.

    Args:
        job: what is trained.
        cohort: clients a round.
    """
    counts = job.data.counts("train")
    if any(phase.early_stopping for phase in job.method.client.phases):
        return None  # validation examples are looked at client by client
    try:
        largest = int(np.argmax(counts))
        if _least_bytes(job, largest) > LARGE:
            return None
        cohort = min(cohort, ENOUGH)
        wide = width(job, cohort)
        if wide < WIDE:
            return None
        refused, one_by_one = Vectorised.tried(job)
        if refused is not None:
            return None
        if one_by_one:  # torch's word to its developers, of which a user can make nothing
            warnings.filterwarnings("ignore", "There is a performance drop .* the batching rule", UserWarning)
        at_once, step = room(job), step_cost(job, largest)
        together = min(wide, at_once)
        # What an operation takes that torch computes client by client is not known.
        if together < WIDE or times_faster(step, together) < WORTHWHILE * (2 if one_by_one else 1):
            return None
        if not step.measured and (_least_bytes(job, largest) > SMALL or at_once < CPU_BYTES // SMALL):
            return None
    except FedkeepError:
        return None  # the model does not fit the data: training says so, and for which client
    return f"clients are small, and of {cohort} about {wide:.0f} take each step at once"


def width(job: Job, cohort: int) -> float:
    """Return how many clients of a cohort take a step together on average.

    The cohort is made of clients at equal distances in the order of their numbers of examples. Those with mini-batches
    of other sizes step apart (``lockstep``), and who has more steps than others takes the last ones alone.
    """
    counts = job.data.counts("train")
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0]
    cohort = min(cohort, len(order))
    chosen = order[((np.arange(cohort) + 0.5) * len(order) / max(cohort, 1)).astype(np.int64)].tolist()
    alone = together = 0
    for number, phase in enumerate(job.method.client.phases):
        plans = [
            list(batches(job.data, job.rows(k), phase, Stream(job.seed, job.data.ids[k]), number))
            for k in chosen
        ]
        alone += sum(map(len, plans))
        together += sum(1 for _ in lockstep(plans, phase.batch_size, [False] * len(plans)))
    return alone / max(together, 1)


def _least_bytes(job: Job, client: int) -> int:
    """Return the bytes that training a client takes at least: values, gradients, moments, and room to work.

    Of tables a client takes its own rows alone; these are left out. Costs next to nothing, where ``room`` computes.
    """
    initial, rule = job.net.initial(), job.method.client
    rows = job.rows(client)
    tables = {
        t.parameter for t in local_tables(job.net, rule.phases, initial, job.data, rows, mode=rule.tables)
    }
    names = [n for n in initial if n in job.net.trainable()]
    least = 0
    for phase in rule.phases:
        trained = nbytes(
            {n: initial[n] for n in phase.trained_names(job.method.split, names) if n not in tables}
        )
        least = max(least, (3 + phase.optimizer.moments) * trained)
    return least
