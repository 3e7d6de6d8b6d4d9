"""The loop of a run: rounds, judging, records, results of examples, and a commit after each round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.files import check_tensors, layout
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, prefixed, under
from fedkeep.core.records import Record, improves
from fedkeep.engines import (
    Adaptation,
    Auto,
    Centralised,
    Defers,
    Device,
    Engine,
    Judged,
    Order,
    RoundReport,
    Sampler,
    orders_of,
    run_round,
    to_records,
)
from fedkeep.engines.faults import Faults
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.trackers import Tell
from fedkeep.methods import Global, Method
from fedkeep.privacy import Ledger
from fedkeep.tasks import KINDS, Task
from fedkeep.tasks.results import Examples, Model, Roster, before_task

SHARED, ADAPTED = "test/shared", "test/adapted"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does; of clients it knows ids alone.

    Attributes:
        name: for the bar of progress.
        method: the method.
        settings: what the run is asked for.
        rounds: how many.
        sampler: draws the cohorts, as places in ``roster``.
        roster: the ids of all clients.
        judged: the places of those who are judged.
        tasks: what is judged.
        meta: what the data say of themselves, for the method's note.
        every: rounds between evaluations; the last round is evaluated too. 0: never.
        faults: what rounds do about clients that break down, send something malformed, or are lost.
        reference: the model that ``settings.evaluate_shared`` judges: ``own`` where nothing is private.
        trained: (clients,) numbers of training examples; None where the server does not know them.
        declared: zeros of what clients send along, under ``server/NAME``.
        progress: True or False to force or forbid the bar; None: shown on a terminal.
    """

    name: str
    method: Method
    settings: RunSettings
    rounds: int
    sampler: Sampler
    roster: Sequence[str]
    judged: Sequence[int]
    tasks: Sequence[Task]
    meta: Mapping[str, Any]
    every: int
    faults: Faults
    reference: Model = "shared"
    trained: np.ndarray | None = None
    declared: Params = field(default_factory=dict)
    progress: bool | None = None


@dataclass(kw_only=True)
class Drive:
    """A run on its way: what the server's side has of it.

    Attributes:
        plan: what it does.
        server: what the server has.
        device: where the clients live.
        history: records, in order.
        best: of each task's headline the best value on ``valid`` so far, and its round.
        examples: every test example's result at that round, where the device's policy lets it leave.
        directory: where each round is committed; None: nowhere.
        state: returns what a round's checkpoint holds beside the server, e.g. what a device in this process needs.
        train: runs a round in place of ``run_round``.
        finished: called with the finished part of a round in (0, 1].
        pending: what the server had when an evaluation became due that the device makes with the next round's training
            (``Defers``); None: none is due.
        ledger: charged for each round before anything of it is released; None: there is no differential privacy.
        told: called with the records and timings of each committed round.
    """

    plan: Plan
    server: Global
    device: Device
    history: list[Record] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    examples: Examples | None = None
    directory: RunDirectory | None = None
    state: Callable[[], Params] = dict
    train: Callable[..., tuple[Global, RoundReport]] | None = None
    finished: Callable[[float], None] = lambda part: None
    pending: Global | None = None
    ledger: Ledger | None = None
    told: Tell = lambda records, timings: None

    def go(self) -> None:
        """Run the rounds that are left."""
        plan, shown = self.plan, dict[str, float]()
        self.told([], [])
        with make_progress(plan.progress, plan.name, plan.rounds, self.server.round) as bar:
            self.finished = lambda part: bar.update(self.server.round + part, shown)
            if self.pending is not None:
                self._announce(self.pending)
            while self.server.round < plan.rounds:
                report = self._round()
                judged = [] if self.pending is None else self.judged(self.pending)
                records = judged + self._measured(report)
                self.pending, done = None, self.server.round
                if plan.every and (done % plan.every == 0 or done == plan.rounds):
                    if self._announce(self.server) and done < plan.rounds:
                        self.pending = self.server
                    else:
                        judged = self.judged(self.server)
                        records += judged
                shown |= {"loss": report.loss} | headlines(judged)
                self.history += records
                timings = self._timings(report)
                self._commit(records, timings)
                self.told(records, timings)
                bar.update(done, shown)
        if plan.method.note is not None and (note := plan.method.note(self.history, plan.meta)):
            warnings.warn(note, stacklevel=4)  # whoever called simulate

    @property
    def epoch(self) -> float:
        """Passes over the training data that the finished rounds make."""
        return self._epoch(self.server.round)

    def _epoch(self, round: int) -> float:
        return round / self.plan.sampler.rounds_per_epoch

    def _round(self) -> RoundReport:
        plan = self.plan
        server = self.server.but(progress=self.server.round / plan.rounds)
        if self.ledger is not None:
            self.ledger.check(server.round, plan.rounds - server.round)
        cohort = [str(plan.roster[c]) for c in plan.sampler(server.round)]
        run = self.train or run_round
        after, report = run(plan.method, self.device, server, cohort, plan.declared, plan.faults)
        if self.ledger is not None:
            self.ledger.charge(server.round)  # a round that failed released nothing
        self.server = after
        return report

    def _timings(self, report: RoundReport) -> list[Record]:
        return [
            Record(self.server.round, self.epoch, "time", None, metric, value, report.clients)
            for metric, value in (
                ("seconds", report.seconds),
                ("aggregate_seconds", report.aggregate_seconds),
            )
        ]

    def _commit(self, records: list[Record], timings: list[Record]) -> None:
        if self.directory is not None:
            state = checkpoint(self.server) | self.state()
            extra = {"best": self.best} | ({"pending": self.server.round} if self.pending is not None else {})
            extra |= {} if self.ledger is None else {"ledger": self.ledger.mark}
            self.directory.commit(
                self.server.round,
                state,
                self.device.ledger,
                self.device.flush,
                records,
                timings,
                extra,
                self.examples,
            )
        self.device.committed()

    def _measured(self, report: RoundReport) -> list[Record]:
        def record(split: str, metric: str, value: float, n: int) -> Record:
            return Record(self.server.round, self.epoch, split, None, metric, value, n)

        records = [record("train", "loss", report.loss, int(report.examples))]
        if not self.plan.settings.centralised:
            records.append(record("traffic", "download_bytes", report.download_bytes, report.downloads))
            records.append(record("traffic", "upload_bytes", report.upload_bytes, report.clients))
        if report.held_bytes:
            records.append(record("traffic", "held_bytes", report.held_bytes, report.clients))
        if report.refused:
            records.append(record("train", "refused_clients", len(report.refused), report.clients))
        if report.lost:
            records.append(record("train", "lost_clients", report.lost, report.clients))
        if report.late:
            records.append(record("train", "late_clients", report.late, report.clients))
        return records

    def _orders(self, server: Global) -> Iterator[Order]:
        ids = (str(self.plan.roster[c]) for c in self.plan.judged)
        return orders_of(self.plan.method, server, ids)

    def _judge(self, server: Global, split: str, models: Sequence[Model]) -> list[Judged]:
        return self.device.judge(self._orders(server), split, models)

    def _announce(self, server: Global) -> bool:
        """Tell a device that judges later what it will be asked; False: it judges at once."""
        if not (isinstance(self.device, Defers) and self.device.defers):
            return False
        models = self._models()
        self.device.announce(list(self._orders(server)), {"valid": models[:1], "test": models})
        return True

    def _models(self) -> list[Model]:
        """Return the models that are judged on ``test``; the first is judged on ``valid`` too."""
        plan = self.plan
        model: Model = "shared" if plan.method.waits(sorted(self.server.trainable)) else "own"
        return (
            [model, plan.reference] if plan.settings.evaluate_shared and plan.reference != model else [model]
        )

    def judged_now(self) -> list[Record]:
        """Judge what the server has, without a round."""
        self._announce(self.server)
        return self.judged(self.server)

    def adapted_now(self) -> list[Record]:
        """Let clients adapt to what the server has, without a round; with ``evaluate_adapted`` judge them on ``test``."""
        models, round = self._models(), self.server.round
        split: Literal["", "test"] = "test" if self.plan.settings.evaluate_adapted else ""
        test = self.device.adapt(self._orders(self.server), Adaptation(beside=tuple(models), split=split))
        metrics, epoch = self.plan.settings.metrics or (), self._epoch(round)
        lines = to_records(test, models[0], round, epoch, "test", True, metrics)
        return lines + to_records(test, "adapted", round, epoch, ADAPTED, True, metrics)

    def judged(self, server: Global) -> list[Record]:
        """Judge ``valid`` and ``test``; what is kept by client or example is of the epoch that is best on ``valid``."""
        plan, round = self.plan, server.round
        models = self._models()
        model = models[0]

        def records(judged: list[Judged], model: Model, split: str, per_client: bool = False) -> list[Record]:
            return to_records(
                judged, model, round, self._epoch(round), split, per_client, plan.settings.metrics or ()
            )

        found = self._judge(server, "valid", [model])
        valid = records(found, model, "valid")
        improved, *_ = [self._improved(task, valid, round) for task in plan.tasks]
        adapted: list[Model] = ["adapted"] if improved and plan.settings.evaluate_adapted else []
        if adapted:
            test = self.device.adapt(self._orders(server), Adaptation(beside=tuple(models)))
        else:
            test = self._judge(server, "test", models)
        if improved:
            self.examples = self._kept(server, test, found, models + adapted)
        lines = valid + records(test, model, "test", per_client=improved)
        if adapted:
            lines += records(test, "adapted", ADAPTED)
        if plan.settings.evaluate_shared:
            lines += records(test, models[-1], SHARED, per_client=improved)
        return lines

    def _improved(self, task: Task, valid: Sequence[Record], round: int) -> bool:
        """Tell whether a round is the best of a task so far, and take note of it."""
        value = next((r.value for r in valid if r.metric == task.headline), math.nan)
        known = self.best.get(task.headline, {}).get("value", math.nan)
        found = improves(value, known, lower_is_better=task.kind.headline.lower)
        if found:
            self.best[task.headline] = {"value": value, "round": round}
        return found

    def _kept(
        self, server: Global, test: Sequence[Judged], valid: Sequence[Judged], models: Sequence[Model]
    ) -> Examples | None:
        """Return the results of examples; the references are judged on ``valid`` here, where the round is the best."""
        plan = self.plan
        if not all(one.examples for one in test):
            return None
        if not any(one.count for one in valid):
            valid = ()
        elif len(models) > 1:
            valid = self._judge(server, "valid", models)
        roster = None if plan.trained is None else roster_of(plan.judged, plan.roster, plan.trained)
        return examples_of(server.round, test, valid, roster, classes=bool(plan.settings.metrics))


def headlines(records: Sequence[Record]) -> dict[str, float]:
    """Return what a bar of progress shows of an evaluation."""
    known = {kind.headline.name for kind in KINDS.values()}
    return {f"{r.split} {r.metric}": r.value for r in records if r.client is None and r.metric in known}


def in_use(engine: Engine, reason: str) -> tuple[str, str]:
    """Return the name of the engine in use and why it was chosen."""
    if isinstance(engine, Auto):
        return engine.name, engine.choice.reason
    return engine.name, reason


def checkpoint(server: Global) -> Params:
    """Return all that a server needs to go on, as named tensors."""
    state = prefixed("params/", server.params) | prefixed("state/", server.state)
    state |= prefixed("links/", server.links)
    return state | prefixed("optimizer/", server.optimizer.tensors())


def centralised_state(engine: Engine) -> Params:
    """Return what centralised training needs to go on beside the server: its optimisers' states."""
    states = (engine.states or ()) if isinstance(engine, Centralised) else ()
    return {
        name: value
        for number, phase in enumerate(states)
        for name, value in prefixed(f"centralised/{number}/", phase.tensors()).items()
    }


def restored(
    folder: Path, tensors: Mapping[str, Tensor], server: Global, engine: Engine, phases: int
) -> Global:
    """Return the server that ``checkpoint`` was made of; a centralised engine's optimisers are put back.

    Args:
        folder: the run's, for messages.
        tensors: what ``checkpoint`` and ``centralised_state`` returned, on the device.
        server: a new one; gives what does not change in a run, and names, shapes and types.
        engine: as for ``centralised_state``.
        phases: the method's.

    Raises:
        RunError: a name is missing or not known, a shape or type differs, or a value is NaN or infinite.
    """
    for part in ("params", "state", "links"):
        want, have = getattr(server, part), under(f"{part}/", tensors)
        check_tensors(folder, layout(want), layout(have), have)
    prefixes = [f"centralised/{k}/" for k in range(phases)] if isinstance(engine, Centralised) else []
    steps = {f"{prefix}step": "int64 scalar" for prefix in ("optimizer/", *prefixes)}
    counted = {name: tensors[name] for name in steps if name in tensors}
    check_tensors(folder, steps, layout(counted), counted)
    if isinstance(engine, Centralised):
        engine.states = [OptimizerState.from_tensors(under(prefix, tensors)) for prefix in prefixes]
    return server.but(
        params=ordered(under("params/", tensors), server.params),
        state=ordered(under("state/", tensors), server.state),
        links=under("links/", tensors),
        optimizer=OptimizerState.from_tensors(under("optimizer/", tensors)),
    )


def after_round(server: Global, round: int, rounds: int) -> Global:
    """Return a restored server as it was after a round, by its number from 1, of a run of so many."""
    return server.but(round=round, progress=max(0, round - 1) / max(1, rounds))


def ordered(tensors: Params, like: Params) -> Params:
    """Return the tensors in the order of names of others: a file has none, and sums over names go by it."""
    return {**{name: tensors[name] for name in like if name in tensors}, **tensors}


def examples_of(
    round: int,
    test: Sequence[Judged],
    valid: Sequence[Judged] = (),
    roster: Roster | None = None,
    *,
    classes: bool = False,
) -> Examples | None:
    """Return what was judged, as it is kept; None where the device's policy lets no example's result leave.

    Args:
        round: after which it was judged.
        test, valid: what was judged on either split, one for each task.
        roster: the clients.
        classes: whether labels and predicted classes are kept, for ``metrics.CLASS_METRICS``.
    """
    kept = columns_of(test, classes)
    if kept is None:
        return None
    kinds = {one.task.name: one.task.kind for one in test}
    found = columns_of(valid, classes) or {}
    return Examples(round=round, tensors=kept, kinds=kinds, valid=found, roster=roster)


def columns_of(judged: Sequence[Judged], classes: bool = False) -> Params | None:
    """Return the columns of what was judged; None where there is no example's result.

    Args:
        judged: one for each task.
        classes: as for ``examples_of``.
    """
    tensors = Params()
    for one in judged:
        if not one.examples:
            return None
        before, first = before_task(one.task.name), one.examples[0]
        columns = {"client": first.client.astype(np.int32), "row": first.row.astype(np.int64)}
        kind = one.task.kind
        if kind.kept_label:
            columns["label"] = (first.label > 0).astype(np.uint8)
        if kind.kept_place:
            columns["place"] = places_of(first.row)
        several = classes and kind.keeps_classes
        if several:
            columns["class"] = first.label.astype(np.int32)
        for model, found in zip(one.models, one.examples, strict=True):
            columns |= {
                f"{model}/loss": found.loss.astype(np.float64),
                f"{model}/score": found.score.astype(kind.kept_score),
            }
            if several:
                assert found.predicted is not None  # a simulation tells it
                columns[f"{model}/class"] = found.predicted.astype(np.int32)
        tensors |= {before + name: torch.from_numpy(column) for name, column in columns.items()}
    return tensors


def places_of(rows: np.ndarray) -> np.ndarray:
    """Return the place of each result among those of its example, int32; an example's results are neighbours."""
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    starts = np.repeat(first, np.diff(first, append=len(rows)))
    return (np.arange(len(rows)) - starts).astype(np.int32)


def roster_of(clients: Sequence[int], ids: Sequence[str], trained: np.ndarray) -> Roster:
    """Return clients by index, with their ids and numbers of training examples.

    Args:
        clients: indices in the data.
        ids: of all clients of the data.
        trained: (all clients,).
    """
    chosen = np.sort(np.asarray(clients, np.int32))
    return Roster(chosen, trained[chosen].astype(np.int64), tuple(str(ids[c]) for c in chosen.tolist()))
