"""The loop of a run: rounds, judging, records, and a commit after each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, prefixed, under
from fedkeep.core.records import Record
from fedkeep.engines import (
    Auto,
    AutoDevice,
    Centralised,
    Device,
    Engine,
    Judgement,
    RoundReport,
    Sampler,
    judge,
    run_round,
    tasks_of,
    to_records,
)
from fedkeep.engines.faults import Faults
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import RunDirectory, check_tensors, layout
from fedkeep.methods import Global

SHARED = "test/shared"
HEADLINE = {"multiclass": "accuracy", "binary": "auc", "regression": "rmse"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does.

    Attributes:
        name: for the bar of progress.
        rounds: how many.
        sampler: draws the cohorts.
        every: rounds between evaluations; the last round is evaluated too. 0: never.
        evaluate_shared: evaluate the shared part alone on ``test`` too.
        faults: what rounds do about clients that break down, send something malformed, or are lost.
        progress: True or False to force or forbid the bar; None: shown on a terminal.
    """

    name: str
    rounds: int
    sampler: Sampler
    every: int
    faults: Faults
    evaluate_shared: bool = False
    progress: bool | None = None


@dataclass
class Drive:
    """A run on its way.

    Attributes:
        plan: what it does.
        run: what it has made so far; changed as it goes on.
        server: what the server has.
        device: where the clients live.
        engine: trains them there.
        declared: zeros of what clients send along, under ``server/NAME``.
        directory: where each round is committed; None: nowhere.
        best: the best value on ``valid`` so far, and its round.
        finished: told the finished part of a round in (0, 1].
    """

    plan: Plan
    run: Run
    server: Global
    device: Device
    engine: Engine
    declared: Params
    directory: RunDirectory | None = None
    best: dict[str, Any] = field(default_factory=dict)
    finished: Callable[[float], None] = lambda part: None

    def go(self) -> None:
        """Run the rounds that are left."""
        plan, run, shown = self.plan, self.run, dict[str, float]()
        with make_progress(plan.progress, plan.name, plan.rounds, self.server.round) as bar:
            self.finished = lambda part: bar.update(self.server.round + part, shown)
            while self.server.round < plan.rounds:
                report = self._round()
                records = self._measured(report)
                shown |= {"loss": report.loss}
                if plan.every and (run.round % plan.every == 0 or run.round == plan.rounds):
                    judged = self._judged()
                    records += judged
                    shown |= {
                        f"{r.split} {r.metric}": r.value
                        for r in judged
                        if r.client is None and r.metric in HEADLINE.values()
                    }
                run.history += records
                self._commit(records, report)
                bar.update(run.round, shown)

    def _round(self) -> RoundReport:
        plan, run, data = self.plan, self.run, self.run.data
        server = self.server.but(progress=self.server.round / plan.rounds)
        cohort = [str(data.ids[c]) for c in plan.sampler(server.round)]
        self.server, report = run_round(run.method, self.device, server, cohort, self.declared, plan.faults)
        run.round, run.server, run.state = self.server.round, self.server.params, self.server.state
        run.engine, run.engine_reason = in_use(self.engine, run.engine_reason)
        return report

    def _commit(self, records: list[Record], report: RoundReport) -> None:
        if self.directory is None:
            self.run.private.apply()
            return
        timings = [
            Record(self.run.round, self.run.epoch, "time", None, metric, value, report.clients)
            for metric, value in (
                ("seconds", report.seconds),
                ("aggregate_seconds", report.aggregate_seconds),
            )
        ]
        state = checkpoint(self.server, self.engine)
        self.directory.commit(self.run.round, state, self.run.private, records, timings, {"best": self.best})

    def _measured(self, report: RoundReport) -> list[Record]:
        run = self.run

        def record(split: str, metric: str, value: float, n: int) -> Record:
            return Record(run.round, run.epoch, split, None, metric, value, n)

        records = [record("train", "loss", report.loss, int(report.examples))]
        if run.engine != "pooled":
            records.append(record("traffic", "download_bytes", report.download_bytes, report.clients))
            records.append(record("traffic", "upload_bytes", report.upload_bytes, report.clients))
        if report.refused:
            records.append(record("train", "refused_clients", len(report.refused), report.clients))
        if report.lost:
            records.append(record("train", "lost_clients", report.lost, report.clients))
        return records

    def _judge(self, split: str, *, shared: bool) -> list[Judgement]:
        run = self.run
        return judge(
            run.method, run.net, run.whole, run.private, run.data, run.clients.tolist(), split, device=run.device,
            shared=shared,
        )  # fmt: skip

    def _judged(self) -> list[Record]:
        """Judge ``valid`` and ``test``; clients' own records are kept for the epoch that is best on ``valid``."""
        run, best = self.run, self.best
        task = tasks_of(run.data)[0]
        metric = task.metric(HEADLINE[task.kind])
        sign = -1.0 if task.kind == "regression" else 1.0
        records: list[Record] = []
        improved = False
        waits = run.method.waits(sorted(run.net.trainable()))
        for split in ("valid", "test"):
            judged = self._judge(split, shared=waits)
            lines = to_records(judged, run.data, run.round, run.epoch, split, per_client=False)
            value = next((r.value for r in lines if r.metric == metric), float("nan"))
            known = best.get("value", float("nan"))
            if split == "valid" and (np.isnan(known) or sign * value > sign * known):
                best |= {"metric": metric, "value": value, "round": run.round}
                improved = True
            if split == "test" and improved:
                lines = to_records(judged, run.data, run.round, run.epoch, split, per_client=True)
            records += lines
        if self.plan.evaluate_shared:
            if run.private.default.initial or run.method.predict is not run.method.predict_shared:
                judged = self._judge("test", shared=True)
            # else nothing is private, and the test above was the shared part's
            last = run.round == self.plan.rounds
            records += to_records(judged, run.data, run.round, run.epoch, SHARED, per_client=last)
        return records


def in_use(engine: Engine, reason: str) -> tuple[str, str]:
    """Return the name of the engine in use and why it was chosen."""
    if isinstance(engine, Auto | AutoDevice):
        return engine.name, engine.choice.reason
    return engine.name, reason


def checkpoint(server: Global, engine: Engine) -> Params:
    """Return all that a run needs to go on but what clients keep, as named tensors."""
    state = prefixed("params/", server.params) | prefixed("state/", server.state)
    state |= prefixed("links/", server.links)
    state |= prefixed("optimizer/", server.optimizer.tensors())
    if isinstance(engine, Centralised):
        for number, phase in enumerate(engine.states or ()):
            state |= prefixed(f"pooled/{number}/", phase.tensors())
    return state


def restored(
    folder: Path, tensors: Mapping[str, Tensor], server: Global, engine: Engine, phases: int
) -> Global:
    """Return the server that ``checkpoint`` was made of; a centralised engine's optimisers are put back.

    Args:
        folder: the run's, for messages.
        tensors: what ``checkpoint`` returned, on the device.
        server: a new one; gives what does not change in a run, and names, shapes and types.
        engine: as for ``checkpoint``.
        phases: the method's.

    Raises:
        RunError: a name is missing or not known, a shape or type differs, or a value is NaN or infinite.
    """
    for part in ("params", "state", "links"):
        want, have = getattr(server, part), under(f"{part}/", tensors)
        check_tensors(folder, layout(want), layout(have), have)
    pooled = [f"pooled/{k}/" for k in range(phases)] if isinstance(engine, Centralised) else []
    steps = {f"{prefix}step": "int64 scalar" for prefix in ("optimizer/", *pooled)}
    counted = {name: tensors[name] for name in steps if name in tensors}
    check_tensors(folder, steps, layout(counted), counted)
    if isinstance(engine, Centralised):
        engine.states = [OptimizerState.from_tensors(under(prefix, tensors)) for prefix in pooled]
    return server.but(
        params=ordered(under("params/", tensors), server.params), state=ordered(under("state/", tensors), server.state),
        links=under("links/", tensors),
        optimizer=OptimizerState.from_tensors(under("optimizer/", tensors)),
    )  # fmt: skip


def ordered(tensors: Params, like: Params) -> Params:
    """Return the tensors in the order of names of others: a file has none, and sums over names go by it."""
    return {**{name: tensors[name] for name in like if name in tensors}, **tensors}
