"""Whether clients are so small that a cohort trains faster as one tensor program than client by client, on a CPU.

A small client's time goes into calling operations, not into what they compute. Stacked, one call serves all clients
that step at once, so it pays where many do; the answer follows from the model, the method, the data's sizes and the
cohort, never from a clock, so that a run gives the same bits again. ``benchmarks/small.py`` measures what it is worth.
"""

from __future__ import annotations

import warnings

import numpy as np

from fedkeep.core.errors import FedkeepError
from fedkeep.core.params import nbytes
from fedkeep.engines.base import Job, train_rows
from fedkeep.engines.local import Stream, batches
from fedkeep.engines.tables.local_rows import local_tables
from fedkeep.engines.vectorised.batches import lockstep
from fedkeep.engines.vectorised.engine import Vectorised
from fedkeep.engines.vectorised.memory import CPU_BYTES, room

SMALL = 320 << 10
"""A client is small if training takes at most so many bytes: its share of a core's cache."""
WIDE = 10.0
"""Clients that must step at once on average: a stacked step costs about as much as five of one client's."""
ENOUGH = 256
"""Clients of a cohort that are looked at; of so many small ones memory holds about as many at once."""


def as_one_program(job: Job, cohort: int) -> str | None:
    """Return why a job's cohorts are best trained as one tensor program on a CPU, or None: they are not.

    Args:
        job: what is trained.
        cohort: clients a round.
    """
    counts = job.data.counts("train")
    try:
        if _least_bytes(job, int(np.argmax(counts))) > SMALL:
            return None
        cohort = min(cohort, ENOUGH)
        wide = width(job, cohort)
        if wide < WIDE or not _suits(job) or room(job) < CPU_BYTES // SMALL:
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
    for number, phase in enumerate(job.method.phases):
        plans = [
            list(batches(job.data, train_rows(job.data, k), phase, Stream(job.seed, job.data.ids[k]), number))
            for k in chosen
        ]
        alone += sum(map(len, plans))
        together += sum(1 for _ in lockstep(plans, phase.batch_size))
    return alone / max(together, 1)


def _suits(job: Job) -> bool:
    """Tell whether a job can be trained as one tensor program without an operation that is called for each client."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reason = Vectorised.suits(job)
    return reason is None and not any("batching rule" in str(each.message) for each in said)


def _least_bytes(job: Job, client: int) -> int:
    """Return the bytes that training a client takes at least: values, gradients, moments, and room to work.

    Of tables a client takes its own rows alone; these are left out. Costs next to nothing, where ``room`` computes.
    """
    initial, method = job.net.initial(), job.method
    rows = train_rows(job.data, client)
    tables = {
        t.parameter for t in local_tables(job.net, method.phases, initial, job.data, rows, mode=method.tables)
    }
    names = [n for n in initial if n in job.net.trainable()]
    least = 0
    for phase in method.phases:
        trained = nbytes({n: initial[n] for n in phase.trained_names(method.split, names) if n not in tables})
        least = max(least, (3 + phase.optimizer.moments) * trained)
    return least
