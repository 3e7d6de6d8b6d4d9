"""Judging: predictions of every client's personalised model on its own examples, many clients at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, PooledNet
from fedkeep.core.params import Params, is_state
from fedkeep.core.records import Record
from fedkeep.data import FederatedData
from fedkeep.engines.base import defaults
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.centralised import WithClient
from fedkeep.engines.failures import MODEL_ERRORS, model_error
from fedkeep.methods import Global, Method, Sent
from fedkeep.methods.base import forward
from fedkeep.methods.terms import check_regression, label_of, output_of
from fedkeep.metrics import auc
from fedkeep.store import PrivateStore

CHUNK = 1024


@dataclass(frozen=True)
class Task:
    """What is judged: ``multiclass``, ``binary`` or ``regression``, and where label and output are found."""

    kind: str
    label: str = "label"
    name: str | None = None

    def metric(self, base: str) -> str:
        """Return the metric's name, with the task's name where there are several."""
        return base if self.name is None else f"{base}/{self.name}"

    @property
    def client_metric(self) -> str:
        """The name of what ``Judgement.per_client`` gives: accuracy, or RMSE for regression."""
        return self.metric("rmse" if self.kind == "regression" else "accuracy")


@dataclass(frozen=True)
class Judgement:
    """Predictions of one task, reduced to what the metrics need, example by example.

    Attributes:
        task: the task.
        client: (examples,) index of each example's client.
        loss: (examples,) cross-entropy in nats, or squared error.
        score: (examples,) 1 where the class is right, else 0 (multiclass); the positive class's score (binary);
            the error, predicted − true (regression).
        label: (examples,) the label.
    """

    task: Task
    client: np.ndarray
    loss: np.ndarray
    score: np.ndarray
    label: np.ndarray

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all examples pooled, and where it makes sense the unweighted mean over clients."""
        if not len(self.client):
            return {}
        name = self.task.metric
        own = self.per_client()
        out = {name("loss"): float(self.loss.mean())}
        if self.task.kind == "regression":
            out[name("rmse")] = float(np.sqrt(self.loss.mean()))
            out[name("mae")] = float(np.abs(self.score).mean())
            return out
        out[name("accuracy")] = float(self.right().mean())
        out[name("accuracy_user_mean")] = float(np.mean([value for value, _ in own.values()]))
        if self.task.kind == "binary":
            out[name("auc")] = auc(self.score, self.label)
        return out

    def right(self) -> np.ndarray:
        """Return 1.0 where the most probable class is the label, else 0.0."""
        return (
            self.score
            if self.task.kind == "multiclass"
            else ((self.score > 0) == (self.label > 0)).astype(float)
        )

    def per_client(self) -> dict[int, tuple[float, int]]:
        """Return by client (``Task.client_metric``, number of examples)."""
        values = self.loss if self.task.kind == "regression" else self.right()
        clients, count = np.unique(self.client, return_counts=True)
        sums = np.bincount(np.searchsorted(clients, self.client), weights=values, minlength=len(clients))
        means = sums / count
        if self.task.kind == "regression":
            means = np.sqrt(means)
        return {int(c): (float(m), int(n)) for c, m, n in zip(clients, means, count, strict=True)}


def tasks_of(data: FederatedData) -> list[Task]:
    """Return the tasks that the data set's description names."""
    several = data.meta.get("tasks")
    if several:
        return [Task(t["task"], t["label"], name) for name, t in several.items()]
    return [Task(data.meta.get("task", "multiclass"))]


def judge(
    method: Method,
    net: Net,
    server: Global,
    store: PrivateStore,
    data: FederatedData,
    clients: Sequence[int],
    split: str,
    *,
    device: str = "cpu",
    shared: bool = False,
) -> list[Judgement]:
    """Predict each client's examples of a split with its own model (or with the shared part alone).

    Args:
        method: says how to predict, and what the server sends a client.
        net: the model as a function.
        server: what the server has.
        store: what clients keep.
        data: the data set.
        clients: indices of the clients to judge.
        split: ``train``, ``valid`` or ``test``.
        shared: judge the shared part with default private values instead of the clients' own.

    Returns:
        A judgement for each task of the data set.

    Raises:
        MethodError: ``shared`` is asked of a method whose shared part can't predict, or the model does not fit the
            examples; says whose.
    """
    predict = method.predict_shared if shared else method.predict
    if predict is None:
        raise MethodError(
            f"The shared part of {method.name!r} cannot predict alone, so it has no global metric."
        )
    tasks = tasks_of(data)
    parts: list[list[tuple[np.ndarray, ...]]] = [[] for _ in tasks]
    with torch.no_grad():
        for judged, params, batch, owner in _batches(
            method, net, server, store, data, clients, split, device, shared
        ):
            try:
                output = predict(judged, params, batch)
                for number, task in enumerate(tasks):
                    parts[number].append(_reduce(task, output, batch, owner))
            except MODEL_ERRORS as error:
                raise model_error(_whose(data, owner, split), len(owner), error) from error
    empty = tuple(np.zeros(0) for _ in range(4))
    return [
        Judgement(task, *(np.concatenate(column) for column in zip(*(rows or [empty]), strict=True)))
        for task, rows in zip(tasks, parts, strict=True)
    ]


def _batches(
    method: Method, net: Net, server: Global, store: PrivateStore, data: FederatedData, clients: Sequence[int],
    split: str, device: str, shared: bool,
) -> Iterator[tuple[Net, Params, Params, np.ndarray]]:  # fmt: skip
    """Yield nets with the parameters and the batch to predict, and each example's client."""
    kind = float_type({**server.params, **store.default.initial})
    common = Sent(params=server.params, state=server.state).flat
    predicts = method.predict_shared if shared else method.predict
    for group in groups(data, clients, split):
        values = defaults(store, group) if shared else store.read(group)
        if predicts is forward:  # the model knows nothing of a method's state
            values = {n: v for n, v in values.items() if not is_state(n)}
        pooled = PooledNet(net.module, frozenset(values))
        pooled.train(False)
        view = WithClient(data, group)
        rows = np.concatenate([np.arange(r.start, r.stop) for r in (data.rows(c, split) for c in group)])
        each = [common] * len(group)
        if method.server.send is not None:
            each = [method.server.sent(server, str(data.ids[c])).flat for c in group]
        alike = all(sent is each[0] for sent in each)
        for start in range(0, len(rows), CHUNK):
            chosen = rows[start : start + CHUNK]
            batch = load_batch(view, chosen, device, kind)
            if alike and (pooled.gathers or not values):
                params = {**each[0], **{n: v.to(device) for n, v in values.items()}}
                yield pooled, params, batch, np.asarray(group, np.int64)[batch["client"].cpu().numpy()]
            else:
                yield from _one_by_one(net, each, values, batch, group, device)


def _one_by_one(
    net: Net, sent: Sequence[Params], values: Params, batch: Params, group: list[int], device: str
) -> Iterator[tuple[Net, Params, Params, np.ndarray]]:
    net.train(False)
    for position in torch.unique(batch["client"]).tolist():
        mine = batch["client"] == position
        own = {n: v[position].to(device) for n, v in values.items()}
        part = {n: v[mine] for n, v in batch.items()}
        yield net, {**sent[position], **own}, part, np.full(int(mine.sum()), group[position], np.int64)


def _whose(data: FederatedData, owner: np.ndarray, split: str) -> str:
    names = [repr(str(data.ids[c])) for c in np.unique(owner)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Judging the {split} examples of {', '.join(names[:3])}{more}"


def groups(data: FederatedData, clients: Sequence[int], split: str) -> Iterator[list[int]]:
    """Yield groups of clients with about ``CHUNK`` examples of the split; clients without any are left out."""
    group: list[int] = []
    count = 0
    for client in clients:
        own = len(data.rows(int(client), split))
        if not own:
            continue
        group.append(int(client))
        count += own
        if count >= CHUNK:
            yield group
            group, count = [], 0
    if group:
        yield group


def _reduce(task: Task, output: Any, batch: Params, owner: np.ndarray) -> tuple[np.ndarray, ...]:
    out = output_of(output, task.name).double()
    label = label_of(batch, task.label)
    known = ~torch.isnan(label) if label.is_floating_point() else label >= 0
    out, label, client = out[known], label[known], owner[known.cpu().numpy()]
    if task.kind == "regression":
        check_regression(out, label)
        score = out - label.double()
        loss = score**2
    else:
        loss = nn.functional.cross_entropy(out, label, reduction="none")
        score = (out.argmax(1) == label).double() if task.kind == "multiclass" else out[:, 1] - out[:, 0]
    return client, loss.cpu().numpy(), score.cpu().numpy(), label.cpu().numpy()


def to_records(
    judgements: Sequence[Judgement],
    data: FederatedData,
    round: int,
    epoch: float,
    split: str,
    per_client: bool,
) -> list[Record]:
    """Return the records of judgements: the aggregates, and with ``per_client`` a line for each client too."""
    records = []
    for judgement in judgements:
        n = len(judgement.client)
        records += [Record(round, epoch, split, None, m, v, n) for m, v in judgement.metrics().items()]
        if per_client:
            metric = judgement.task.client_metric
            for client, (value, count) in judgement.per_client().items():
                records.append(Record(round, epoch, split, str(data.ids[client]), metric, value, count))
    return records
