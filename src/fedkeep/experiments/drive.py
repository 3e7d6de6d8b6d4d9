"""The loop of a run: rounds, judging, records, results of examples, and a commit after each round."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch

from fedkeep.core.errors import warn
from fedkeep.core.params import Params, to
from fedkeep.core.records import Record, improves
from fedkeep.data.ids import SomeIds
from fedkeep.engines import (
    Adaptation,
    Auto,
    Defers,
    Device,
    Engine,
    Judged,
    Order,
    RoundReport,
    first_kept,
    orders_of,
    run_round,
    to_records,
)
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.experiments.conductor import Conductor, checkpoint
from fedkeep.experiments.personalize.kept import forget_adapting
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run_directory import failure_noted
from fedkeep.experiments.trackers import Tell, tracked
from fedkeep.methods import Global, Method
from fedkeep.tasks import KINDS, Task
from fedkeep.tasks.results import ExampleResults, JudgedClients, Model, before_task

SHARED, ADAPTED = "test/shared", "test/adapted"


class Drive:
    """A run on its way: the conductor's rounds, over a link.

    Args:
        conductor: what the run is; its server, history, best rounds, examples and pending evaluation go on with every
            round.
        device: carries orders to clients.
        faults: what rounds do about clients that break down, send something malformed, or are lost.
        method: as the link's rounds have it; None: the run's.
        state: returns what a round's checkpoint holds beside the server, e.g. what a device in this process needs.
        train: runs a round in place of ``run_round``.
        mark: keeps what clients have now until it is called again: at the best round so far; None: nothing does, so
            the run's answer is of its last round.
        progress: True or False to force or forbid the bar; None: shown on a terminal.
    """

    def __init__(
        self,
        conductor: Conductor,
        device: Device,
        faults: Faults,
        *,
        method: Method | None = None,
        state: Callable[[], Params] = dict,
        train: Callable[..., tuple[Global, RoundReport]] | None = None,
        mark: Callable[[], None] | None = None,
        progress: bool | None = None,
    ) -> None:
        self.conductor, self.device, self.faults = conductor, device, faults
        self.method = method = method or conductor.method
        self.state, self.train, self.mark, self.progress = state, train, mark, progress
        personal = first_kept(method, conductor.net) or method.predict is not method.predict_shared
        self.reference: Model = "shared" if personal else "own"
        self.declared = to(declared(method, conductor.net), "cpu")
        self.finished: Callable[[float], None] = lambda part: None
        self.told: Tell = lambda records, timings: None

    def go(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run the rounds that are left, or up to the end of one after which ``until`` holds."""
        run, shown = self.conductor, dict[str, float]()
        self.told([], [])
        with make_progress(self.progress, run.name, run.rounds, run.server.round) as bar:
            self.finished = lambda part: bar.update(run.server.round + part, shown)
            if run.pending is not None:
                self._announce(run.pending)
            while run.server.round < run.rounds and not until():
                report = self._round()
                began = time.perf_counter()
                judged = [] if run.pending is None else self.judged(run.pending)
                records = judged + self._measured(report)
                run.pending, done = None, run.server.round
                if run.every and (done % run.every == 0 or done == run.rounds):
                    if self._announce(run.server) and done < run.rounds:
                        run.pending = run.server
                    else:
                        judged = self.judged(run.server)
                        records += judged
                shown |= {"loss": report.loss} | headlines(judged)
                run.history += records
                timings = self._timings(report, time.perf_counter() - began)
                self._commit(records, timings)
                self.told(records, timings)
                bar.update(done, shown)
        if (
            run.server.round == run.rounds
            and self.method.note is not None
            and (note := self.method.note(run.history, run.members.meta))
        ):
            warn(note)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Tell trackers and the folder of the run while it trains, and the folder of its end."""
        run, directory = self.conductor, self.conductor.directory
        settings = run.config or {"seed": run.seed, "rounds": run.rounds, "method": run.method.name}
        told = tracked(run.trackers, directory, run.history, run.name, settings)
        with failure_noted(directory), told as self.told:
            yield
        if directory is not None and run.server.round == run.rounds:
            info = {n: v for n, v in directory.read_info().items() if n != "never_drawn"}
            info |= {"status": "finished", "chosen_round": directory.last.chosen}
            directory.write_info({**info, **run.undrawn()})

    def _epoch(self, round: int) -> float:
        """Return the passes over the training data that so many rounds make."""
        return round / self.conductor.sampler.rounds_per_epoch

    def _round(self) -> RoundReport:
        run = self.conductor
        server = run.server.but(progress=run.server.round / run.rounds)
        if run.ledger is not None:
            run.ledger.check(server.round, run.rounds - server.round)
        cohort = [str(run.members.clients.ids[c]) for c in run.sampler(server.round)]
        train = self.train or run_round
        after, report = train(self.method, self.device, server, cohort, self.declared, self.faults)
        if run.ledger is not None:
            run.ledger.charge(server.round)  # a round that failed released nothing
        run.server = after
        return report

    def _timings(self, report: RoundReport, judging: float) -> list[Record]:
        done = self.conductor.server.round
        return [
            Record(done, self._epoch(done), "time", None, metric, value, report.clients)
            for metric, value in (
                ("seconds", report.seconds),
                ("aggregate_seconds", report.aggregate_seconds),
                ("judge_seconds", judging),
            )
        ]

    def _commit(self, records: list[Record], timings: list[Record]) -> None:
        run = self.conductor
        if run.directory is not None:
            state = checkpoint(run.server) | self.state()
            extra = {"best": run.best} | ({"pending": run.server.round} if run.pending is not None else {})
            extra |= {} if run.ledger is None else {"ledger": run.ledger.mark}
            run.directory.commit(
                run.server.round,
                state,
                self.device.ledger,
                self.device.flush,
                records,
                timings,
                extra,
                run.examples,
                best=0 if run.chosen is None else run.chosen.round,
            )
            forget_adapting(run.directory.folder)
        self.device.committed()

    def _measured(self, report: RoundReport) -> list[Record]:
        done = self.conductor.server.round

        def record(split: str, metric: str, value: float, n: int) -> Record:
            return Record(done, self._epoch(done), split, None, metric, value, n)

        records = [record("train", "loss", report.loss, int(report.examples))]
        if not self.conductor.settings.centralised:
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

    def _orders(self, server: Global) -> Iterable[Order]:
        members = self.conductor.members
        return orders_of(self.method, server, SomeIds(members.clients.ids, members.judged))

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
        model: Model = "shared" if self.method.waits(sorted(self.conductor.server.trainable)) else "own"
        beside = self.conductor.settings.evaluate_shared and self.reference != model
        return [model, self.reference] if beside else [model]

    def judged_now(self) -> list[Record]:
        """Judge what the server has, without a round."""
        self._announce(self.conductor.server)
        return self.judged(self.conductor.server)

    def adapted_now(self) -> list[Record]:
        """Let clients adapt to what the server has, without a round; with ``evaluate_adapted`` judge them on ``test``."""
        models, server, settings = self._models(), self.conductor.server, self.conductor.settings
        split: Literal["", "test"] = "test" if settings.evaluate_adapted else ""
        test = self.device.adapt(self._orders(server), Adaptation(beside=tuple(models), split=split))
        metrics, round, epoch = settings.metrics or (), server.round, self._epoch(server.round)
        lines = to_records(test, models[0], round, epoch, "test", True, metrics)
        return lines + to_records(test, "adapted", round, epoch, ADAPTED, True, metrics)

    def judged(self, server: Global) -> list[Record]:
        """Judge ``valid`` and ``test``; what is kept by client or example is of the epoch that is best on ``valid``."""
        settings, round, models = self.conductor.settings, server.round, self._models()
        model = models[0]

        def records(judged: list[Judged], model: Model, split: str, per_client: bool = False) -> list[Record]:
            return to_records(
                judged, model, round, self._epoch(round), split, per_client, settings.metrics or ()
            )

        found = self._judge(server, "valid", [model])
        valid = records(found, model, "valid")
        improved, *_ = [self._improved(task, valid, round) for task in self.conductor.members.tasks]
        adapted: list[Model] = ["adapted"] if improved and settings.evaluate_adapted else []
        if adapted:
            test = self.device.adapt(self._orders(server), Adaptation(beside=tuple(models)))
        else:
            test = self._judge(server, "test", models)
        if improved:
            self.conductor.examples = self._kept(server, test, found, models + adapted)
        if improved and self.mark is not None:
            self.mark()
            then = copy.deepcopy(server.optimizer)  # later rounds change it in place
            self.conductor.chosen = server.but(optimizer=then)
        lines = valid + records(test, model, "test", per_client=improved)
        if adapted:
            lines += records(test, "adapted", ADAPTED)
        if settings.evaluate_shared:
            lines += records(test, models[-1], SHARED, per_client=improved)
        return lines

    def _improved(self, task: Task, valid: Sequence[Record], round: int) -> bool:
        """Tell whether a round is the best of a task so far, and take note of it."""
        value = next((r.value for r in valid if r.metric == task.headline), math.nan)
        known = self.conductor.best.get(task.headline, {}).get("value", math.nan)
        found = improves(value, known, lower_is_better=task.kind.headline.lower)
        if found:
            self.conductor.best[task.headline] = {"value": value, "round": round}
        return found

    def _kept(
        self, server: Global, test: Sequence[Judged], valid: Sequence[Judged], models: Sequence[Model]
    ) -> ExampleResults | None:
        """Return the results of examples; the references are judged on ``valid`` here, where the round is the best."""
        members, metrics = self.conductor.members, self.conductor.settings.metrics
        if not all(one.examples for one in test):
            return None
        if not any(one.count for one in valid):
            valid = ()
        elif len(models) > 1:
            valid = self._judge(server, "valid", models)
        roster = (
            None
            if members.trained is None
            else roster_of(members.judged, members.clients.ids, members.trained)
        )
        return examples_of(server.round, test, valid, roster, classes=bool(metrics))


def headlines(records: Sequence[Record]) -> dict[str, float]:
    """Return what a bar of progress shows of an evaluation."""
    known = {kind.headline.name for kind in KINDS.values()}
    return {f"{r.split} {r.metric}": r.value for r in records if r.client is None and r.metric in known}


def in_use(engine: Engine, reason: str) -> tuple[str, str]:
    """Return the name of the engine in use and why it was chosen."""
    if isinstance(engine, Auto):
        return engine.name, engine.choice.reason
    return engine.name, reason


def examples_of(
    round: int,
    test: Sequence[Judged],
    valid: Sequence[Judged] = (),
    roster: JudgedClients | None = None,
    *,
    classes: bool = False,
) -> ExampleResults | None:
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
    return ExampleResults(round=round, tensors=kept, kinds=kinds, valid=found, roster=roster)


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
        if kind.several:
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


def roster_of(clients: np.ndarray, ids: Sequence[str], trained: np.ndarray) -> JudgedClients:
    """Return clients by index, with their ids and numbers of training examples.

    Args:
        clients: indices in the data.
        ids: of all clients of the data.
        trained: (all clients,).
    """
    chosen = np.sort(clients.astype(np.int32))
    return JudgedClients(
        chosen, trained[chosen].astype(np.int64), tuple(str(ids[c]) for c in chosen.tolist())
    )
