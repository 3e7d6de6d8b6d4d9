"""Judging, on the device: predictions of clients' models on their own examples, many clients at a time.

Several models are computed on each batch, so that they are compared on the same examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep.core.net import Net, PooledNet
from fedkeep.core.params import Params, clone, is_state
from fedkeep.data import FederatedData
from fedkeep.engines.base import Job
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.centralised import WithClient
from fedkeep.engines.failures import MODEL_ERRORS, model_error
from fedkeep.engines.judgement import Judgement, Model, Task, tasks_in
from fedkeep.engines.tally import Judged, Leaves, Tallies, tallied
from fedkeep.methods import Sent
from fedkeep.methods.base import Predict, forward
from fedkeep.methods.terms import check_regression, label_of, output_of

CHUNK = 1024

Columns = tuple[np.ndarray, ...]
"""A piece of a ``Judgement``: client, loss, score, label, row."""

Parts = list[list[list[Columns]]]
"""By task and model, the pieces."""


@dataclass(frozen=True)
class Way:
    """How one of the models is computed.

    Attributes:
        model: its name.
        predict: makes predictions.
        own: returns clients' own values, stacked, given their indices.
    """

    model: Model
    predict: Predict
    own: Callable[[Sequence[int]], Params]


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
    parts = _by_group(job, asked, split, ways, tasks)
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


def _by_group(
    job: Job, asked: Iterable[tuple[int, Sent]], split: str, ways: Sequence[Way], tasks: Sequence[Task]
) -> Iterator[Parts]:
    """Yield by task and model the pieces of one group of clients after the other."""
    nets: dict[frozenset[str], PooledNet] = {}
    sent, flat = None, Params()
    for group in groups(job.data, asked, split):
        each = []
        for _, given in group:
            if given is not sent:
                sent, flat = given, given.flat
            each.append(flat)
        kind = float_type({**group[0][1].params, **job.store.default.initial})
        clients = [client for client, _ in group]
        yield _Group(job, clients, each, split, kind, nets).judged(ways, tasks)


@dataclass(frozen=True)
class _Group:
    """Clients that are judged together: their indices, what each is sent, and nets by names of private values."""

    job: Job
    clients: list[int]
    sent: list[Params]
    split: str
    kind: torch.dtype
    nets: dict[frozenset[str], PooledNet]

    @torch.no_grad()
    def judged(self, ways: Sequence[Way], tasks: Sequence[Task]) -> Parts:
        """Return by task and model the pieces of a judgement."""
        data, device = self.job.data, self.job.device
        view = WithClient(data, self.clients)
        rows = data.split_rows(self.split, self.clients)
        numbers = np.asarray(self.clients, np.int64)
        alike = all(sent is self.sent[0] for sent in self.sent)
        values = [self._own(way) for way in ways]
        parts: Parts = [[[] for _ in ways] for _ in tasks]
        for start in range(0, len(rows), CHUNK):
            chosen = rows[start : start + CHUNK]
            batch = load_batch(view, chosen, device, self.kind)
            for place, (way, own) in enumerate(zip(ways, values, strict=True)):
                mine = (
                    batch if place == len(ways) - 1 else clone(batch)
                )  # a model may change what it is given
                for net, params, piece, which in self._pieces(own, mine, alike):
                    owner = numbers[piece["client"].cpu().numpy()]
                    try:
                        output = way.predict(net, params, piece)
                        for number, task in enumerate(tasks):
                            parts[number][place].append(_reduce(task, output, piece, owner, chosen[which]))
                    except MODEL_ERRORS as error:
                        raise model_error(self._whose(owner), len(owner), error) from error
        return parts

    def _own(self, way: Way) -> Params:
        values = way.own(self.clients)
        if way.predict is forward:  # the model knows nothing of a method's state
            values = {n: v for n, v in values.items() if not is_state(n)}
        return values

    def _pieces(self, own: Params, batch: Params, alike: bool) -> Iterator[tuple[Net, Params, Params, Any]]:
        """Yield nets with the parameters and the examples to predict, and which of the batch these are."""
        device = self.job.device
        names = frozenset(own)
        if names not in self.nets:
            self.nets[names] = PooledNet(self.job.net.module, names)
        pooled = self.nets[names]
        pooled.train(False)
        if alike and (pooled.gathers or not own):
            yield pooled, {**self.sent[0], **{n: v.to(device) for n, v in own.items()}}, batch, slice(None)
            return
        for position in torch.unique(batch["client"]).tolist():
            mine = batch["client"] == position
            values = {n: v[position].to(device) for n, v in own.items()}
            piece = {n: v[mine] for n, v in batch.items()}
            yield self.job.net, {**self.sent[position], **values}, piece, mine.cpu().numpy()

    def _whose(self, owner: np.ndarray) -> str:
        names = [repr(str(self.job.data.ids[c])) for c in np.unique(owner)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"Judging the {self.split} examples of {', '.join(names[:3])}{more}"


def groups(
    data: FederatedData, asked: Iterable[tuple[int, Sent]], split: str
) -> Iterator[list[tuple[int, Sent]]]:
    """Yield groups of clients with about ``CHUNK`` examples of the split; clients without any are left out."""
    group: list[tuple[int, Sent]] = []
    count, counts = 0, data.counts(split)
    for client, sent in asked:
        own = int(counts[client])
        if not own:
            continue
        group.append((client, sent))
        count += own
        if count >= CHUNK:
            yield group
            group, count = [], 0
    if group:
        yield group


def _reduce(task: Task, output: Any, batch: Params, owner: np.ndarray, rows: np.ndarray) -> Columns:
    out = output_of(output, task.name).double()
    label = label_of(batch, task.label)
    known = ~torch.isnan(label) if label.is_floating_point() else label >= 0
    there = known.cpu().numpy()
    out, label = out[known], label[known]
    if task.kind == "regression":
        check_regression(out, label)
        score = out - label.double()
        loss = score**2
    else:
        loss = nn.functional.cross_entropy(out, label, reduction="none")
        score = (out.argmax(1) == label).double() if task.kind == "multiclass" else out[:, 1] - out[:, 0]
    return owner[there], loss.cpu().numpy(), score.cpu().numpy(), label.cpu().numpy(), rows[there]
