"""Adapting clients in processes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedkeep.core.params import Params
from fedkeep.engines import Adapted, Fitting, Job, fit
from fedkeep.experiments.processes import processes
from fedkeep.methods import Adapt, Sent
from fedkeep.store import MemoryStore


def side_by_side(job: Job, adapt: Adapt, fittings: Sequence[Fitting], workers: int) -> Iterator[Adapted]:
    """Fit clients in processes; results do not depend on how many there are."""
    # The stores' files stay with this process: clients' values travel with the task, and so does what a client is sent
    # where not all are sent the same; as arrays, since tensors would travel as open files.
    bare, sent = replace(job, store=MemoryStore(job.store.default, job.store.ids)), fittings[0].sent
    alike = all(each.sent is sent for each in fittings)
    given, threads = (bare, adapt, sent if alike else None), max(1, torch.get_num_threads() // workers)
    with processes(workers, threads, begin=_begin, given=given) as pool:
        tasks = (
            (each.client, each.rows, *map(_arrays, (each.start, *(() if alike else _parts(each.sent)))))
            for each in fittings
        )
        for own, stopped in pool.map(_fitted, tasks):
            yield Adapted(_tensors(own), stopped)


_GIVEN: list[Any] = []  # of a worker process: job, adaptation, and what every client is sent
_Arrays = dict[str, np.ndarray]


def _begin(*given: object) -> None:
    _GIVEN[:] = given


def _fitted(task: tuple[Any, ...]) -> tuple[_Arrays, tuple[int, ...]]:
    (job, adapt, alike), (client, rows, *values) = _GIVEN, task
    start, *parts = map(_tensors, values)
    sent = Sent(params=parts[0], state=parts[1]) if parts else alike
    found = fit(job, adapt, Fitting(client, sent, rows, start))
    return _arrays(found.own), found.stopped


def _parts(sent: Sent) -> tuple[Params, Params]:
    return sent.params, sent.state


def _arrays(values: Params) -> _Arrays:
    return {name: value.cpu().numpy() for name, value in values.items()}


def _tensors(values: _Arrays) -> Params:
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
