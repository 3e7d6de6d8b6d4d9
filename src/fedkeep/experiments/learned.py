"""Whether a run learned: its test results beside answers that need no model, and what to do where it did not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedkeep.core.records import Record, best_round
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.preparation.texts import CALLED
from fedkeep.experiments.drive import places_of
from fedkeep.experiments.run import Run
from fedkeep.experiments.worth import counted_rows
from fedkeep.report.wording import count, lower_is_better, metric_inline, number
from fedkeep.tasks import Task, tasks_in
from fedkeep.tasks.results import before_task

ROSE = 10.0
"""How many times its first value a training loss must reach before it counts as diverged."""
JUDGED = 3
"""Evaluations from which on a last one that is the best counts as still improving."""
ASKED = 50
"""Clients whose private values are looked at."""
FIT = 0.1
"""A loss of classes, in nats, of answers that are nearly sure and right."""
READ = {"text": "texts", "x": "series"}
"""What stands in columns that may be cut."""
CUT = 0.05
"""The share of texts cut from which on it is said."""


@dataclass(frozen=True)
class BestEpoch:
    """A run's metrics at its best epoch.

    Attributes:
        metric: the metric that chose the epoch.
        round, epoch: when it was best on ``valid``; the last evaluation where nothing was measured there.
        valid, test: all metrics there, over all clients.
    """

    metric: str
    round: int
    epoch: float
    valid: dict[str, float]
    test: dict[str, float]

    @property
    def value(self) -> float:
        """The test metric; NaN where there is none."""
        return self.test.get(self.metric, math.nan)


def summarize(records: Iterable[Record], metric: str, lower_is_better: bool = False) -> BestEpoch | None:
    """Return the metrics at the round whose ``valid`` is best, the earliest of equals; None if nothing was judged.

    Args:
        records: a run's history.
        metric: e.g. ``accuracy``.
        lower_is_better: as for an error.
    """
    judged = [r for r in records if r.client is None and r.split in ("valid", "test")]
    if not judged:
        return None
    valid = [r for r in judged if r.split == "valid" and r.metric == metric and math.isfinite(r.value)]
    chosen = best_round({r.round: r.value for r in valid}, lower_is_better=lower_is_better)
    best = max((r for r in judged if chosen in (None, r.round)), key=lambda r: r.round)
    found: dict[str, dict[str, float]] = {"valid": {}, "test": {}}
    for r in judged:
        if r.round == best.round:
            found[r.split][r.metric] = r.value
    return BestEpoch(metric, best.round, best.epoch, found["valid"], found["test"])


@dataclass(frozen=True)
class Simplest:
    """Test results of answers that need no model.

    Attributes:
        metric: the share of right answers, or the root of the mean squared error.
        one: of one answer for all clients: the most frequent label, or the mean.
        each: of each client's own most frequent label, or own mean.
    """

    metric: str
    one: float
    each: float


def simplest(run: Run) -> Simplest | None:
    """Return what answers without a model reach on the run's test examples; None where there are none, or labels are not counted.

    Training labels of all clients are counted for it, here, where the simulation has them.
    """
    task = tasks_in(run.data.meta)[0]
    rows = None if run.examples is None else run.examples.tensors.get(f"{before_task(task.name)}row")
    if rows is None or not len(rows) or task.kind.counting is None or not len(run.data.split_rows("train")):
        return None
    one, each = (_reached(run, task, rows.numpy(), together) for together in (True, False))
    return Simplest(task.client_metric, one, each)


def _reached(run: Run, task: Task, rows: np.ndarray, together: bool) -> float:
    found = counted_rows(run.data, task, rows, together=together)
    if task.kind.right is None:
        return math.sqrt(float(found["loss"].mean()))
    label = np.asarray(run.data.columns[task.label])
    label = label[rows] if label.ndim == 1 else label[rows, places_of(rows)]
    return float(task.kind.right(found["score"], label).mean())


def remarks(run: Run, best: BestEpoch | None = None) -> list[str]:
    """Return what one should know of a run before one believes its numbers: a sentence each, with what to do.

    Args:
        run: the run, as it was trained.
        best: its metrics at the best epoch, if they are known already.
    """
    task = tasks_in(run.data.meta)[0]
    best = best or summarize(run.history, task.headline, lower_is_better(task.headline))
    if best is None:
        return []
    found = [
        _rose(run.history),
        _diverged(run, task),
        _no_better(run, task, best),
        _improving(run.history, best),
        _unmoved(run),
        _unstopped(run),
        cut_inputs(run.data),
    ]
    return [remark for remark in found if remark]


def _unstopped(run: Run) -> str:
    """Return that clients adapt without a validation example to stop them, where a phase would stop by these."""
    rules = [phase.early_stopping for phase in run.method.adapt.phases]
    if all(rule is None or rule.required for rule in rules):
        return ""
    train, valid = (run.data.counts(split)[run.clients.positions] for split in ("train", "valid"))
    without = int(((train > 0) & (valid == 0)).sum())
    if not without:
        return ""
    return f"{count(without, 'client')} without a validation example took all passes of the last step."


def _rose(history: Sequence[Record]) -> str:
    losses = [r.value for r in history if r.split == "train" and r.metric == "loss" and r.client is None]
    if len(losses) < 2 or not losses[-1] > ROSE * losses[0] > 0:
        return ""
    return (
        f"The training loss rose from {number(losses[0], 'loss')} to {number(losses[-1], 'loss')}. Take a smaller "
        f"method.optimizer.learning_rate, or clip gradients by method.clip_norm."
    )


def _no_better(run: Run, task: Task, best: BestEpoch) -> str:
    simple = simplest(run)
    if simple is None or simple.metric not in best.test:
        return ""
    metric, lower = simple.metric, lower_is_better(simple.metric)
    if simple.one == (0 if lower else 1):
        return ""  # one label alone: nothing can be better
    history = [r.value for r in run.history if (r.split, r.metric, r.client) == ("test", metric, None)]
    reached = min(history) if lower else max(history)
    if task.kind.ranks_scores and best.test.get(task.headline, 0.0) > 0.5:
        return ""  # where most labels are the same an order may be right though no answer changes
    if reached < simple.one if lower else reached > simple.one:
        return ""
    return (
        f"Never better on test than one answer for all ({metric_inline(metric)} {number(simple.one, metric)}): nothing "
        f"was learned that helps. Look at the data by `fedkeep check`, then try other learning rates by `fedkeep sweep`."
    )


def _diverged(run: Run, task: Task) -> str:
    """Tell of clients whose test loss is ten times what one answer for all reaches, on theirs and on all examples."""
    before = before_task(task.name)
    tensors = {} if run.examples is None else run.examples.tensors
    losses = [loss for name, loss in tensors.items() if name.startswith(before) and name.endswith("/loss")]
    if not losses or task.kind.counting is None or not len(run.data.split_rows("train")):
        return ""
    client = tensors[f"{before}client"].numpy()
    one = counted_rows(run.data, task, tensors[f"{before}row"].numpy(), together=True)["loss"]
    least = (
        FIT if task.kind.right else one.mean()
    )  # nearly all labels of one class: any doubt would be tenfold
    names, place, count = np.unique(client, return_inverse=True, return_counts=True)
    reached, simple = (np.bincount(place, loss) / count for loss in (losses[0].numpy(), one))
    wrong = np.flatnonzero(~(reached <= ROSE * np.maximum(simple, max(least, one.mean()))))
    if not len(wrong) or not least:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong):,} of {len(names):,} users answer far worse than one answer for all, the first "
        f"{run.data.ids[names[first]]!r} (loss {number(reached[first], 'loss')}, without a model "
        f"{number(simple[first], 'loss')}). Their training diverged: take a smaller method.optimizer.learning_rate, or "
        f"clip gradients by method.clip_norm."
    )


def cut_inputs(data: FederatedData) -> str:
    """Say how many texts or series of data are as long as the longest that is kept; empty where few are."""
    most = data.meta.get("max_length")
    called, column = next(((n, data.columns[c]) for c, n in READ.items() if c in data.columns), ("", None))
    if not isinstance(column, Ragged) or not isinstance(most, int):
        return ""
    share = float((np.diff(column.offsets) >= most).mean())
    if share < CUT:
        return ""
    kind = (data.meta.get("vocabulary") or {}).get("kind")
    what = CALLED.get(str(kind), "tokens") if column.holds_ids else "steps"
    return (
        f"{number(share, 'accuracy')} of the {called} are cut at {most:,} {what}; what follows is not read. Keep more: "
        f"data.max_length = {4 * most}."
    )


def still_improving(history: Sequence[Record], best: BestEpoch) -> bool:
    """Tell whether the last evaluation on ``valid`` was the best of several."""
    rounds = {r.round for r in history if r.split == "valid" and r.client is None}
    return bool(best.valid) and len(rounds) >= JUDGED and best.round == max(rounds)


def _improving(history: Sequence[Record], best: BestEpoch) -> str:
    if not still_improving(history, best):
        return ""
    return f"Still improving at the last round. Train longer: run.epochs = {math.ceil(2 * best.epoch)}, or more rounds."


def _unmoved(run: Run) -> str:
    halves = run.method.split.halves(run.net.module)
    names = halves.trainable.intersection(halves.private_names)
    places = run.clients.positions[:ASKED].tolist()
    trained = [i for i, seen in zip(places, run.private.seen(places), strict=True) if seen]
    clients = [run.data.ids[place] for place in trained]
    if run.method.adapt.everyone:  # the last step may be what trains them
        clients = [client for client in clients if client in run.fitted]
    if not names or not clients:
        return ""
    for client in clients:
        own, default = (run.own(client, stage=stage) for stage in ("own", "shared"))
        if any(not torch.equal(own[n], default[n]) for n in names):
            return ""
    return "Private values never moved. `fedkeep check` says what each phase trains, and at which rate."
