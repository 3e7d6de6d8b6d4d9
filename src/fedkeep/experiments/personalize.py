"""Clients' own models after federation: adapted, measured on few examples, tested while the whole model is fine-tuned.

One FedAvg run serves many methods of personalisation: local training, fine-tuning, mixtures. ``rooted`` puts its
federated values under another method and model; ``adapt_clients`` runs the method's adaptation on each client, on all
of its training examples; ``cold_start`` on the first k of clients that were held out. ``personalization_curve``
fine-tunes a copy of each client's whole model. Nothing is uploaded, and the run is not changed.

Sources: FURL, §6 (future work); the local step of Federated Reconstruction (Singhal et al., 2021); for the curve KTEPS
(arXiv 2107.11956), §5.3: after the last round, shared and private parameters are fine-tuned on each client with the
method's own loss, a fresh optimiser and a small learning rate; every few steps its test accuracy is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from numbers import Integral
from typing import get_args

import numpy as np
from torch import nn

from fedkeep.core.errors import ConfigError, MethodError, RunError, check_choice
from fedkeep.core.files import write_of_run
from fedkeep.core.net import Net
from fedkeep.core.optim import Kind, Optimizer
from fedkeep.core.params import misfit
from fedkeep.core.records import Record, read_sealed_records, sealed_records
from fedkeep.core.run_files import read_info
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.engines import (
    first_default,
    first_global,
    to_records,
)
from fedkeep.engines.adapt import Tuning, first_rows
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run import Run, adapt_clients
from fedkeep.methods import Method, Phase
from fedkeep.methods.base import Predict
from fedkeep.metrics.scores import Personalized, ap
from fedkeep.metrics.worth.gains import FEW
from fedkeep.metrics.worth.intervals import Interval, chance_of_users, users_like_these
from fedkeep.metrics.worth.signs import holm
from fedkeep.nn.accelerate import swaps_of
from fedkeep.report.wording import is_fraction, lower_is_better
from fedkeep.store import MemoryStore
from fedkeep.tasks import Task, tasks_in


def rooted(run: Run, model: nn.Module, method: Method, prefix: str = "") -> Run:
    """Return a run of another method and model that starts from a run's federated values.

    Args:
        run: gives data, seed, clients and federated values.
        model: the other method's model; its values are the initial private ones.
        method: the other method.
        prefix: what stands before the run's names in ``model``, e.g. ``"global_expert."``.

    Raises:
        MethodError: the run's federated values are not those that the method federates (a method that federates
            nothing takes none).
    """
    module = method.made_for(model, bool(swaps_of(run.net.module).swapped))
    net = Net(module.to(run.device))
    initial = net.initial()
    wanted = method.split.halves(module).federated(initial)
    server = {prefix + name: value for name, value in run.server.items()} if wanted else {}
    fault = misfit(wanted, server)
    if fault:
        raise MethodError(
            "The federated values of this run of {trained!r} don't fit {method!r} on "
            "{module}: {fault}. Take the model that the run was made with, and the prefix of its names.",
            trained=run.method.name,
            method=method.name,
            module=type(module).__name__,
            fault=fault,
        )
    default = first_default(method, net, run.private.default.seed)
    first = first_global(method, net, run.data)
    base = run.base.but(links=first.links, optimizer=first.optimizer)
    return replace(
        run,
        net=net,
        method=method,
        server=server,
        state=first.state,
        base=base,
        private=MemoryStore(default, run.data.ids),
        history=[],
        folder=None,
        examples=None,
    )


ALPHA = 0.05
DEFAULT_K: tuple[int | None, ...] = (0, 1, 2, 5, 10, 20, 50, None)


@dataclass(frozen=True)
class ColdStart:
    """A metric against the number k of own examples.

    Attributes:
        metric: the metric of ``pooled``: accuracy, AUC or RMSE.
        user_metric: the metric of ``mean`` and ``std``; accuracy for a binary task, as a user's few examples may
            all have one label, which leaves no AUC.
        k: the numbers of examples; None means all.
        pooled: the metric over all clients' test examples.
        records: a line per k, split ``cold_start``; ``n`` is the number of test examples, ``metric`` carries k.
        each: a row per k, ``user_metric`` of every client with test examples, in one order.
        frequent: mean over clients of the accuracy of the label that is most frequent among the same k examples.
            Labels that tie count by their mean. None with no example, and where there are no classes.
    """

    metric: str
    user_metric: str
    k: tuple[int | None, ...]
    pooled: tuple[float, ...]
    records: tuple[Record, ...] = field(repr=False)
    each: tuple[tuple[float, ...], ...] = field(repr=False)
    frequent: tuple[float | None, ...] = field(repr=False)

    @property
    def clients(self) -> int:
        """How many clients were measured: those with test examples."""
        return len(self.each[0])

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean over clients, each counted once."""
        return tuple(float(np.mean(row)) for row in self.each)

    @property
    def std(self) -> tuple[float, ...]:
        """Deviation between clients."""
        return tuple(float(np.std(row)) for row in self.each)

    @property
    def changes(self) -> tuple[Interval | None, ...]:
        """From the k before to each k: the mean change and its 95 % interval for users like these.

        None at the first k, everywhere with fewer than ten clients, and where all change alike: nothing says then how
        much of it is chance. Ends of fractions lie within ±1.
        """
        return (None, *(self._change(i, j) for i, j in pairwise(range(len(self.k)))))

    @property
    def falls(self) -> tuple[tuple[int, int | None, Interval], ...]:
        """The pairs (k, larger k) between which the metric becomes significantly worse, with the mean change.

        Of all that are named, the chance that any is named wrongly is at most 5 %: p is corrected for the number of
        pairs (Holm). The intervals are each pair's own.
        """
        size = [float("inf") if k is None else k for k in self.k]
        rising = sorted(range(len(size)), key=size.__getitem__)
        pairs = [(i, j) for i, j in combinations(rising, 2) if self.k[i] is not None]
        if not pairs or len(self.each[0]) < FEW:
            return ()
        chance = holm([float(chance_of_users(self._each_change(i, j))) for i, j in pairs])
        found = []
        for (i, j), p in zip(pairs, chance, strict=True):
            few, change = self.k[i], self._change(i, j)
            assert few is not None  # left out above
            if change is None:
                continue
            worse = change.mean > 0 if lower_is_better(self.user_metric) else change.mean < 0
            if worse and p <= ALPHA:
                found.append((few, self.k[j], change))
        return tuple(found)

    def _each_change(self, first: int, second: int) -> np.ndarray:
        """Return every client's change, as one seed's: (1, clients)."""
        return np.subtract(self.each[second], self.each[first])[None]

    def _change(self, first: int, second: int) -> Interval | None:
        change = self._each_change(first, second)
        if change.size < FEW:
            return None
        mean, low, high = users_like_these(change).tolist()
        most = 1.0 if is_fraction(self.user_metric) else math.inf
        return None if low == high else Interval(mean, max(low, -most), min(high, most))


def cold_start(
    run: Run,
    clients: Iterable[str | int] | None = None,
    ks: Sequence[int | None] = DEFAULT_K,
    *,
    split: str = "test",
    progress: bool | None = None,
) -> ColdStart:
    """Measure a metric against the number of own examples, on clients that were not in federation.

    Args:
        run: a finished run.
        clients: their ids; by default of the clients that the run held out. Those without such examples are left out.
        ks: numbers of training examples of each client; None means all. A client that has fewer uses all.
        split: where to measure.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to measure, or a k is no whole number from 0 on.
        DataError: there is no such client.
    """
    named = run.members(run.held_out if clients is None else clients)
    if not named:
        raise ConfigError(
            "No client was held out of this run. Run with hold_out=0.1, or name clients to measure."
        )
    chosen = SomeIds(run.data.ids, named.positions[run.data.counts(split)[named.positions] > 0])
    if not chosen:
        raise ConfigError(
            "None of the {count} clients has {split} examples, so there is no cold start.",
            count=len(named),
            split=split,
        )
    if any(not (k is None or (isinstance(k, Integral) and k >= 0)) for k in ks):
        raise ConfigError("k must be a whole number from 0 on, or None for all; got {ks}.", ks=list(ks))
    task, records = tasks_in(run.data.meta)[0], list[Record]()
    pooled, each = list[float](), list[tuple[float, ...]]()
    with make_progress(progress, "cold start", len(ks) * len(chosen)) as bar:
        for number, k in enumerate(ks, 1):
            found = adapt_clients(run, chosen, begin="default", examples=k, progress=False)
            judged = found.judge(("adapted",), split)
            bar.update(number * len(chosen), {})
            each.append(tuple(value for value, _ in judged[0].per_client("adapted").values()))
            pooled.append(judged[0].metrics("adapted")[task.headline])
            name = f"cold_start/{'all' if k is None else k}"
            records += to_records(judged, "adapted", run.round, run.epoch, name, per_client=True)
    return ColdStart(
        metric=task.headline,
        user_metric=task.client_metric,
        k=tuple(ks),
        pooled=tuple(pooled),
        records=tuple(records),
        each=tuple(each),
        frequent=tuple(_frequent(run, task, chosen, k, split) for k in ks),
    )


def _frequent(run: Run, task: Task, clients: SomeIds, k: int | None, split: str) -> float | None:
    """Return the mean over clients of the accuracy of the label most frequent among k examples of their own."""
    if k == 0 or not task.kind.one_class:
        return None
    shares = []
    for client in clients.positions.tolist():
        seen = labels_of(run.data, task, first_rows(run.job, client, k))
        judged = labels_of(run.data, task, np.asarray(run.data.rows(client, split), np.int64))
        if len(judged):
            labels, count = np.unique(seen, return_counts=True)
            shares.append(
                (judged[:, None] == labels[count == count.max(initial=0)]).mean() if len(seen) else 0.0
            )
    return float(np.mean(shares))


def labels_of(data: FederatedData, task: Task, rows: np.ndarray) -> np.ndarray:
    """Return a task's labels of examples by row number, those without its label left out."""
    labels: np.ndarray = task.judged(np.asarray(data.columns[task.label])[rows])
    return labels[~np.isnan(labels) if labels.dtype.kind == "f" else labels >= 0]


SPLIT = "personalization"
FILE = "personalization.jsonl"
OWN = "own"
"""The name of the method's own prediction among several."""


@dataclass(frozen=True)
class Protocol:
    """How clients are fine-tuned and tested.

    Attributes:
        ratio: the learning rates, as a multiple of those in federation.
        steps: mini-batches to train on.
        every: mini-batches between two tests.
        optimizer: another kind of optimiser than the method's, e.g. ``"adam"``, at the same rates; None: the method's.
    """

    ratio: float = 0.01
    steps: int = 200
    every: int = 20
    optimizer: Kind | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            check_choice("The optimiser of personalisation must be", self.optimizer, get_args(Kind))
        if not (self.ratio >= 0 and self.steps >= 1 and self.every >= 1 and self.steps % self.every == 0):
            raise ConfigError(
                "Personalisation wants a ratio of at least 0, and steps that are a multiple of every, both at least "
                "1; got ratio {ratio}, steps {steps} and every {every}.",
                ratio=self.ratio,
                steps=self.steps,
                every=self.every,
            )


@dataclass(frozen=True)
class Curves:
    """Test accuracies while each client is fine-tuned.

    Attributes:
        protocol: how.
        steps: mini-batches before each test: 0, every, 2·every, …
        accuracy: by prediction, then by client, one value for each of ``steps``.
        examples: test examples with a label of the first task, by client; of tokens their number.
        round, epoch: of the run when it was fine-tuned.
    """

    protocol: Protocol
    steps: tuple[int, ...]
    accuracy: Mapping[str, Mapping[str, tuple[float, ...]]]
    examples: Mapping[str, int]
    round: int
    epoch: float

    def scores(self, predict: str = OWN) -> Personalized:
        """Return Ap of a prediction."""
        return ap(self.accuracy[predict])

    def records(self) -> list[Record]:
        """Return the whole curves: a line per client, step and prediction, split ``personalization/STEP``."""
        lines = []
        for predict, curves in self.accuracy.items():
            metric = "accuracy" if predict == OWN else f"accuracy/{predict}"
            for place, step in enumerate(self.steps):
                where = f"{SPLIT}/{step}"
                for client, curve in curves.items():
                    lines.append(
                        Record(
                            self.round, self.epoch, where, client, metric, curve[place], self.examples[client]
                        )
                    )
        return lines


def personalization_curve(
    run: Run,
    protocol: Protocol = Protocol(),
    *,
    predicts: Mapping[str, Predict] | None = None,
    clients: Iterable[str | int] | None = None,
    split: str = "test",
    progress: bool | None = None,
) -> Curves:
    """Fine-tune every client from the run's present state, and test it before, on the way and after.

    Args:
        run: a finished run; it is not changed.
        protocol: how.
        predicts: further ways to predict that are tested at the same steps, by name.
        clients: their ids; by default of all in federation. Those without examples that have a label of the first task
            are left out.
        split: the examples that clients are tested on; ``"valid"`` to choose among methods.
        progress: as for ``simulate``.

    Raises:
        ConfigError: no client has labelled examples to test on, or the task has no classes.
        NonFiniteError: fine-tuning broke down to NaN; names the client.
    """
    check_task(run.data)
    task, named = tasks_in(run.data.meta)[0], run.members(clients).positions
    labels = [
        len(labels_of(run.data, task, np.asarray(run.data.rows(int(c), split), np.int64))) for c in named
    ]
    examples = {str(run.data.ids[c]): n for c, n in zip(named, labels, strict=True) if n}
    chosen = SomeIds(run.data.ids, named[np.array(labels, np.int64) > 0])
    if not len(chosen):
        raise ConfigError(
            "No client has {split} examples with a label of the first task, so there is no personalisation curve.",
            split=split,
        )
    ways = {OWN: run.method.predict, **(predicts or {})}
    found: dict[str, dict[str, tuple[float, ...]]] = {way: {} for way in ways}
    phases = tuning_phases(run.method, sorted(run.net.trainable()), protocol) if protocol.ratio else ()
    tuning = Tuning(
        phases=phases,
        tests=protocol.steps // protocol.every,
        every=protocol.every,
        round=run.round,
        predicts=ways,
        split=split,
    )
    curves = run.local_device().curves(run.orders(chosen), tuning)
    with make_progress(progress, "personalisation", len(chosen)) as bar:
        for number, (name, curve) in enumerate(zip(chosen, curves, strict=True), 1):
            for way, accuracies in curve.items():
                found[way][name] = accuracies
            bar.update(number, {})
    steps = tuple(range(0, protocol.steps + 1, protocol.every))
    return Curves(protocol, steps, found, examples, run.round, run.epoch)


def check_task(data: FederatedData) -> None:
    """Raise ConfigError unless the data's task has an accuracy."""
    task = tasks_in(data.meta)[0]
    if not task.kind.has_classes:
        raise ConfigError(
            "The personalisation curve measures accuracy; this task is a {task}.", task=task.kind.name
        )


def add_curve(run: Run, protocol: Protocol, progress: bool | None = None) -> None:
    """Add the curve's records to a run's history; with a folder, they are kept there and read when they exist.

    Raises:
        ConfigError, NonFiniteError: as for ``personalization_curve``.
        RunError: the file cannot be written or read, is damaged, or is of another run. One that was made after another
            round is made anew.
    """
    path = None if run.folder is None else run.folder / FILE
    about = {} if run.folder is None else {"run": read_info(run.folder)["run"], "round": run.round}
    if path is not None and path.exists():
        records, of = read_sealed_records(path)
        if of.get("run") != about["run"]:
            raise RunError(
                "{path} is of another run than run.json beside it. Delete it, or restore the run's own.",
                path=path,
            )
        if of.get("round") == run.round:
            run.history += records
            return
    records = personalization_curve(run, protocol, progress=progress).records()
    if path is not None:
        write_of_run(path, sealed_records(records, about))
    run.history += records


def scores_of(records: Iterable[Record]) -> Personalized | None:
    """Return Ap of the method's own prediction from the records of a curve; None where there are none."""
    curves: dict[str, dict[int, float]] = {}
    for r in records:
        split, _, step = r.split.partition("/")
        if split == SPLIT and r.metric == "accuracy" and r.client is not None:
            curves.setdefault(r.client, {})[int(step)] = r.value
    if not curves:
        return None
    return ap({client: [curve[step] for step in sorted(curve)] for client, curve in curves.items()})


def tuning_phases(method: Method, trainable: list[str], protocol: Protocol) -> tuple[Phase, ...]:
    """Return the phases that fine-tune everything: the method's own losses and optimisers, at lower rates.

    A method of one phase trains all parameters with it. Where a method has several, each trains its own, and they take
    turns on every mini-batch.
    """
    phases = method.client.phases
    several = len(phases) > 1
    batch_size = phases[0].batch_size
    return tuple(
        replace(
            phase,
            trains=tuple(phase.trained_names(method.split, trainable)) if several else "all",
            optimizer=slower(phase.optimizer, protocol.ratio, protocol.optimizer),
            steps=protocol.steps,
            batch_size=batch_size,
            examples="all",
            early_stopping=None,
        )
        for phase in phases
    )


def slower(optimizer: Optimizer, ratio: float, kind: Kind | None = None) -> Optimizer:
    """Return an optimiser, of another kind if one is given, whose rates are ``ratio`` times as high, and constant."""
    return replace(
        optimizer,
        kind=kind or optimizer.kind,
        learning_rate=ratio * optimizer.learning_rate,
        rates=tuple((pattern, ratio * rate) for pattern, rate in optimizer.rates),
        schedule="constant",
    )
