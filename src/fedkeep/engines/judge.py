"""Judging, on the device: predictions of clients' models on their own examples, reduced to what metrics need.

Several models predict the same examples, so that they are compared on these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.engines.job import Job
from fedkeep.engines.judgement import Judgement
from fedkeep.engines.tally import Judged, Leaves, Tallies, tallied
from fedkeep.engines.window import Way, windows
from fedkeep.methods import Sent
from fedkeep.methods.labels import label_of, output_of
from fedkeep.tasks import Task, tasks_in
from fedkeep.tasks.results import Model

Columns = tuple[np.ndarray, ...]
"""A piece of a ``Judgement``: client, loss, score, label, row (or place in a window), predicted class."""

Parts = list[list[list[Columns]]]
"""By task and model, the pieces."""


def tasks_of(data: FederatedData) -> list[Task]:
    """Return the tasks that the data set's description names."""
    return tasks_in(data.meta)


def judge(
    job: Job, asked: Iterable[tuple[int, Sent]], split: str, ways: Sequence[Way], leaves: Leaves
) -> list[Judged]:
    """Let clients' models predict the clients' examples of a split.

    Args:
        job: what all clients have in common.
        asked: the clients' indices, and what the server sends each.
        split: ``train``, ``valid`` or ``test``.
        ways: the models; all see the same examples.
        leaves: what of it leaves the device.

    Returns:
        For each task of the data set what is allowed to leave.

    Raises:
        MethodError: a model does not fit the examples; says whose.
    """
    tasks, models = tasks_of(job.data), tuple(way.model for way in ways)
    none: Parts = [[[] for _ in ways] for _ in tasks]
    parts = _by_window(job, asked, split, ways, tasks)
    if leaves == "examples":
        whole = none
        for part in parts:
            for number, place in np.ndindex(len(tasks), len(ways)):
                whole[number][place] += part[number][place]
        return [
            Judged(task=task, models=models, leaves=leaves, examples=each, roster=job.data.ids)
            for task, each in zip(tasks, _judgements(tasks, whole), strict=True)
        ]
    found = []
    tables = [_tallied(tasks, models, part, job.data.ids) for part in (none, *parts)]
    for task, (first, *others) in zip(tasks, zip(*tables, strict=True), strict=True):
        rows = first.joined(others)
        table = rows.total() if leaves == "sums" else rows
        found.append(Judged(task=task, models=models, leaves=leaves, table=table))
    return found


def _tallied(
    tasks: Sequence[Task], models: Sequence[Model], parts: Parts, ids: Sequence[str]
) -> list[Tallies]:
    pieces = zip(tasks, _judgements(tasks, parts), strict=True)
    return [tallied(task, models, each, ids) for task, each in pieces]


def _judgements(tasks: Sequence[Task], parts: Parts) -> list[tuple[Judgement, ...]]:
    return [
        tuple(Judgement.joined(task, columns) for columns in of_task)
        for task, of_task in zip(tasks, parts, strict=True)
    ]


def _by_window(
    job: Job, asked: Iterable[tuple[int, Sent]], split: str, ways: Sequence[Way], tasks: Sequence[Task]
) -> Iterator[Parts]:
    """Yield by task and model the pieces of some clients after the others."""

    def reduced(output: Any, batch: Params, owner: np.ndarray, places: np.ndarray) -> list[Columns]:
        return [_reduce(task, output, batch, owner, places) for task in tasks]

    for window in windows(job, asked, split):
        found = window.predicted(ways, reduced)
        yield [
            [[_in_order([piece[number] for piece in pieces], window.rows)] for pieces in found]
            for number in range(len(tasks))
        ]


def outputs(
    job: Job, asked: Iterable[tuple[int, Sent]], split: str, way: Way
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each task a model's outputs, (examples, …), and the labels, (examples,), where there is a label."""
    tasks = tasks_of(job.data)

    def found(
        output: Any, batch: Params, owner: np.ndarray, places: np.ndarray
    ) -> list[tuple[np.ndarray, ...]]:
        return [tuple(_numpy(v) for v in labelled(task, output, batch)[:2]) for task in tasks]

    pieces = [piece for window in windows(job, asked, split) for piece in window.predicted([way], found)[0]]
    joined = (
        [np.concatenate(column) for column in zip(*each, strict=True)] for each in zip(*pieces, strict=True)
    )
    return [(out, label) for out, label in joined]


def _in_order(pieces: Sequence[Columns], rows: np.ndarray) -> Columns:
    """Return one piece of several, in the order of the examples; places in a window become rows of the data."""
    *columns, places, predicted = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = np.argsort(places, kind="stable")  # an example's tokens stay in their order
    return (*(column[order] for column in columns), rows[places[order]], predicted[order])


def labelled(task: Task, output: Any, batch: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Return a task's outputs and labels where there is a label, and where there is one: (B,), of tokens (B, T)."""
    out, label = output_of(output, task.name), label_of(batch, task.label)
    known = ~torch.isnan(label) if label.is_floating_point() else label >= 0
    task.kind.check_output(out, label)
    return out[known], label[known], known


def _numpy(values: Tensor) -> np.ndarray:
    """Return an array; numpy has no bfloat16."""
    found: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
    return found


def _reduce(task: Task, output: Any, batch: Params, owner: np.ndarray, places: np.ndarray) -> Columns:
    out, label, known = labelled(task, output, batch)
    out, there = out.double(), np.nonzero(known.cpu().numpy())[0]
    loss, score, predicted = task.kind.judge(out, label)
    predicted = torch.full(label.shape, -1) if predicted is None else predicted
    columns = loss.cpu().numpy(), score.cpu().numpy(), _numpy(label)
    return owner[there], *columns, places[there], predicted.cpu().numpy()
