"""Run a federated method on one machine: ``simulate``, and what it returns."""

from __future__ import annotations

import copy
import datetime
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.allocator import tune_allocator
from fedkeep.core.describe import check_kind, describe, digest
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, to
from fedkeep.core.records import Record
from fedkeep.data import FederatedData, hold_out
from fedkeep.engines import (
    Auto,
    AutoDevice,
    Job,
    Pooled,
    RoundReport,
    Sampler,
    Server,
    judge,
    run_round,
    tasks_of,
    to_records,
)
from fedkeep.experiments.engine import check_engine, make_engine
from fedkeep.experiments.environment import check_device, environment
from fedkeep.experiments.partitions import partition_counts, write_partition
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run_directory import RunDirectory, check_tensors, layout
from fedkeep.methods import Method
from fedkeep.store import Default, MemoryStore, PrivateStore

SHARED = "test/shared"
HEADLINE = {"multiclass": "accuracy", "binary": "auc", "regression": "rmse"}


@dataclass
class Run:
    """A finished or resumed simulation.

    Attributes:
        net: the model as a function.
        method: the method.
        data: the data set.
        server: federated parameters, by name.
        private: the store of private parameters, by client.
        history: records, in order.
        engine: the engine that ran, as ``auto`` picked it.
        engine_reason: why ``auto`` picked it.
        round: finished rounds.
        rounds_per_epoch: rounds that use every training example once.
        clients: indices of the clients that take part in federation.
        held_out: indices of those that don't.
        folder: the run's folder, or None.
        device: where it computes.
    """

    net: Net
    method: Method
    data: FederatedData
    server: Params
    private: PrivateStore
    engine: str
    rounds_per_epoch: int
    clients: np.ndarray
    held_out: np.ndarray
    history: list[Record] = field(default_factory=list)
    round: int = 0
    folder: Path | None = None
    device: str = "cpu"
    engine_reason: str = ""

    def evaluate(
        self, split: str = "test", *, clients: Sequence[int] | None = None, shared: bool = False
    ) -> dict[str, float]:
        """Return metrics of the clients' personalised models on their own examples of a split.

        Args:
            split: ``train``, ``valid`` or ``test``.
            clients: indices; by default the clients that take part in federation.
            shared: judge the shared part alone, with default private values; so too where clients have models of their
                own only after adapting (mixture of experts).

        Returns:
            Metrics over all examples pooled; ``accuracy_user_mean`` is the unweighted mean over clients.
        """
        chosen = self.clients if clients is None else np.asarray(clients)
        out: dict[str, float] = {}
        for judgement in judge(
            self.method, self.net, self.server, self.private, self.data, chosen.tolist(), split,
            device=self.device, shared=shared or self.method.waits(sorted(self.net.trainable())),
        ):  # fmt: skip
            out |= judgement.metrics()
        return out

    def parameters(self, client: str) -> Params:
        """Return a client's whole model, federated and private parameters by name."""
        stacked = self.private.read([self.data.index(client)])
        return self.method.split.merge(self.server, {n: v[0] for n, v in stacked.items()})

    @property
    def epoch(self) -> float:
        """Passes over the training data that the finished rounds make."""
        return self.round / self.rounds_per_epoch


def simulate(
    model: nn.Module,
    method: Method,
    data: FederatedData,
    *,
    rounds: int | None = None,
    cohort: int = 10,
    seed: int = 0,
    engine: str = "auto",
    workers: int | None = None,
    device: str | torch.device = "cpu",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    epochs: float | None = None,
    sampling: Literal["shuffled", "independent"] = "shuffled",
    evaluate_every: int | None = None,
    evaluate_shared: bool = False,
    hold_out: float = 0.0,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    private: PrivateStore | None = None,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    config_text: str | None = None,
    progress: bool | None = None,
) -> Run:
    """Train ``model`` with ``method`` over the clients of ``data``, on this machine.

    Args:
        model: the module; its values are the initial ones, and it is not changed.
        method: e.g. ``methods.furl("user")``.
        data: the federated data set; training uses its split ``train``.
        rounds: how many rounds; or give ``epochs``.
        cohort: clients a round (all of them, where there are fewer).
        seed: everything random follows from it.
        engine: ``"auto"`` (the fastest of the following here), ``"sequential"`` (one client after the other),
            ``"workers"`` (clients side by side in processes of one thread each), ``"vectorised"`` (clients side by
            side as one tensor program, for a GPU or small clients), or ``"pooled"`` (centralised training: each round
            is one pass over all clients' pooled examples; ``cohort`` is not used).
        workers: how many processes at most, for ``"workers"`` and ``"auto"``; by default the physical cores that this
            process may use. The result doesn't depend on it.
        device: e.g. ``"cpu"`` or ``"cuda"``.
        out: a folder for the run: configuration, records, states. Every round is committed there. None: memory only.
        resume: go on with the run in ``out``; it ends with the same bits as one that was never stopped.
        epochs: passes over the training data, instead of ``rounds``.
        sampling: ``"shuffled"`` (every client once an epoch) or ``"independent"`` draws.
        evaluate_every: rounds between evaluations on ``valid`` and ``test``; by default once an epoch. The last
            round is always evaluated. 0: never.
        evaluate_shared: evaluate the shared part alone on ``test`` too, as the split ``test/shared``.
        hold_out: fraction of clients kept out of federation, for cold-start measurements.
        on_nonfinite: ``"stop"`` with an error if a client's training becomes NaN, or ``"skip"`` that client's round.
        private: a store to go on with, e.g. of another task's run (only without ``out``).
        name: for reports.
        config, config_text: the configuration that led here, kept in the run's folder.
        progress: True or False to force or forbid the bar; by default it is shown on a terminal.

    Returns:
        The run: ``.server``, ``.private``, ``.history``, ``.evaluate(split)``.

    Raises:
        FedkeepError: with what was wanted, what was got and what to do.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    check_kind("method", method, Method, "a method, e.g. fedkeep.methods.fedavg()")
    check_kind("data", data, FederatedData, "a data set, e.g. fedkeep.FederatedData.from_columns(...)")
    seed, cohort = operator.index(seed), operator.index(cohort)
    rounds = None if rounds is None else operator.index(rounds)
    evaluate_every = None if evaluate_every is None else operator.index(evaluate_every)
    return _Simulation(
        model, method, data, rounds, epochs, cohort, seed, engine, workers, str(device), sampling, evaluate_every,
        evaluate_shared, hold_out, on_nonfinite, private, name, config, config_text,
    ).run(None if out is None else Path(out), resume, progress)  # fmt: skip


class _Simulation:
    """The pieces of one simulation, put together and checked before anything is written."""

    def __init__(
        self, model: nn.Module, method: Method, data: FederatedData, rounds: int | None, epochs: float | None,
        cohort: int, seed: int, engine: str, workers: int | None, device: str,
        sampling: Literal["shuffled", "independent"], evaluate_every: int | None, evaluate_shared: bool,
        hold_out: float, on_nonfinite: Literal["stop", "skip"], private: PrivateStore | None, name: str,
        config: Mapping[str, Any] | None, config_text: str | None,
    ) -> None:  # fmt: skip
        module = copy.deepcopy(model)
        module = method.extend(module) if method.extend else module
        method.check(module)
        check_device(device)
        check_engine(engine, workers, device)
        self.module, self.method, self.data = module.to(device), method, data
        self.seed, self.device, self.name = seed, device, name or method.name
        self.config, self.config_text, self.given_store = config, config_text, private
        self.on_nonfinite = on_nonfinite
        self.net = Net(self.module)
        self.initial = self.net.initial()
        self.default = Default(method.split.personal(self.initial), method.private_init, seed)
        self.clients, self.held_out = take_part(data, hold_out, seed)
        trains = self.clients[train_counts(data, method)[self.clients] > 0]
        pooled = engine == "pooled"
        self.sampler = Sampler(trains, max(1, len(trains)) if pooled else cohort, sampling, seed)
        self.rounds = count_rounds(rounds, epochs, self.sampler.rounds_per_epoch)
        self.engine, self.reason = make_engine(engine, workers, device, self.sampler.cohort, self.rounds)
        every = self.sampler.rounds_per_epoch if evaluate_every is None else evaluate_every
        if on_nonfinite not in ("stop", "skip"):
            raise ConfigError(f"on_nonfinite must be 'stop' or 'skip'; got {on_nonfinite!r}.")
        if every < 0:
            raise ConfigError(f"evaluate_every must be at least 0 (0: never); got {every}.")
        if evaluate_shared and method.predict_shared is None:
            raise ConfigError(
                f"evaluate_shared: the shared part of {method.name!r} cannot predict alone. Leave it out."
            )
        self.every, self.evaluate_shared = every, evaluate_shared
        self.identity = {
            "seed": seed,
            "rounds": self.rounds,
            "cohort": self.sampler.cohort,
            "sampling": sampling,
            "pooled": pooled,
            "evaluate_every": every,
            "hold_out": hold_out,
            "on_nonfinite": on_nonfinite,
            "method": describe(method),
            **({"evaluate_shared": True} if evaluate_shared else {}),
            "model": {"layers": repr(self.module), "initial_sha256": digest(self.initial)},
        }

    def run(self, out: Path | None, resume: bool, progress: bool | None) -> Run:
        tune_allocator()
        split = self.method.split
        server = Server(to(split.federated(self.initial), self.device))
        directory, store = None, self.given_store or MemoryStore(self.default, self.data.ids)
        history: list[Record] = []
        best: dict[str, Any] = {}
        if out is not None:
            if self.given_store is not None:
                raise ConfigError(
                    "A run with a folder keeps its private states there: give out or private, not both."
                )
            self.identity["data"] = self.data.fingerprint()
            directory = self._directory(out, resume)
        elif resume:
            raise ConfigError("resume=True needs the folder of the run: pass out=....")
        try:
            if directory is not None:
                store = directory.store(self.default, self.data.ids)
                state = directory.recover(store)
                if state is not None:
                    self._restore(server, state)
                    wanted = layout(split.federated(self.initial))
                    check_tensors(directory.folder, wanted, layout(server.params), server.params)
                    server.round = directory.round
                    best = dict(directory.extra.get("best", {}))
                    history = directory.history()
            run = Run(
                self.net, self.method, self.data, server.params, store, self._engine()[0],
                self.sampler.rounds_per_epoch, self.clients, self.held_out, history, server.round, out, self.device,
                self._engine()[1],
            )  # fmt: skip
            self._rounds(run, server, directory, best, progress)
            if directory is not None:
                about = {"engine": run.engine, "engine_reason": run.engine_reason, "status": "finished"}
                directory.write_info({**directory.read_info(), **about})
            return run
        finally:
            self.engine.close()
            if directory is not None:
                directory.close()

    def _engine(self) -> tuple[str, str]:
        """Return the name of the engine in use and why it was chosen."""
        if isinstance(self.engine, Auto | AutoDevice):
            return self.engine.name, self.engine.choice.reason
        return self.engine.name, self.reason

    def _rounds(
        self,
        run: Run,
        server: Server,
        directory: RunDirectory | None,
        best: dict[str, Any],
        show: bool | None,
    ) -> None:
        shown: dict[str, float] = {}
        with make_progress(show, self.name, self.rounds, server.round) as bar:
            job = Job(
                self.method, self.net, self.data, run.private, self.seed, self.device, self.on_nonfinite,
                after_step=lambda part: bar.update(server.round + part, shown), keep_uploads=False,
            )  # fmt: skip
            while server.round < self.rounds:
                report = run_round(
                    job, self.engine, server, self.sampler(server.round), server.round / self.rounds
                )
                run.round, run.server = server.round, server.params
                run.engine, run.engine_reason = self._engine()
                records = self._measured(run, report)
                shown |= {"loss": report.loss}
                if self.every and (server.round % self.every == 0 or server.round == self.rounds):
                    judged = self._judged(run, best)
                    records += judged
                    shown |= {
                        f"{r.split} {r.metric}": r.value
                        for r in judged
                        if r.client is None and r.metric in HEADLINE.values()
                    }
                run.history += records
                if directory is not None:
                    timings = self._timed(run, report)
                    directory.commit(
                        server.round, self._state(server), run.private, records, timings, {"best": best}
                    )
                else:
                    run.private.apply()
                bar.update(server.round, shown)

    def _measured(self, run: Run, report: RoundReport) -> list[Record]:
        def record(split: str, metric: str, value: float, n: int) -> Record:
            return Record(run.round, run.epoch, split, None, metric, value, n)

        records = [record("train", "loss", report.loss, int(report.examples))]
        if run.engine != "pooled":
            records.append(record("traffic", "download_bytes", report.download_bytes, report.clients))
            records.append(record("traffic", "upload_bytes", report.upload_bytes, report.clients))
        if report.refused:
            records.append(record("train", "refused_clients", len(report.refused), report.clients))
        return records

    def _timed(self, run: Run, report: RoundReport) -> list[Record]:
        return [
            Record(run.round, run.epoch, "time", None, metric, value, report.clients)
            for metric, value in (
                ("seconds", report.seconds),
                ("aggregate_seconds", report.aggregate_seconds),
            )
        ]

    def _judged(self, run: Run, best: dict[str, Any]) -> list[Record]:
        """Judge ``valid`` and ``test``; clients' own records are kept for the epoch that is best on ``valid``."""
        task = tasks_of(self.data)[0]
        metric = task.metric(HEADLINE[task.kind])
        sign = -1.0 if task.kind == "regression" else 1.0
        records: list[Record] = []
        improved = False
        for split in ("valid", "test"):
            judged = judge(
                self.method, self.net, run.server, run.private, self.data, self.clients.tolist(), split,
                device=self.device, shared=self.method.waits(sorted(self.net.trainable())),
            )  # fmt: skip
            lines = to_records(judged, self.data, run.round, run.epoch, split, per_client=False)
            value = next((r.value for r in lines if r.metric == metric), float("nan"))
            known = best.get("value", float("nan"))
            if split == "valid" and (np.isnan(known) or sign * value > sign * known):
                best |= {"metric": metric, "value": value, "round": run.round}
                improved = True
            if split == "test" and improved:
                lines = to_records(judged, self.data, run.round, run.epoch, split, per_client=True)
            records += lines
        if self.evaluate_shared:
            if self.default.initial or self.method.predict is not self.method.predict_shared:
                judged = judge(
                    self.method, self.net, run.server, run.private, self.data, self.clients.tolist(), "test",
                    device=self.device, shared=True,
                )  # fmt: skip
            # else nothing is private, and the test above was the shared part's
            last = run.round == self.rounds
            records += to_records(judged, self.data, run.round, run.epoch, SHARED, per_client=last)
        return records

    def _state(self, server: Server) -> Params:
        state = {f"params/{n}": v for n, v in server.params.items()}
        state |= {f"optimizer/{n}": v for n, v in server.optimizer.tensors().items()}
        if isinstance(self.engine, Pooled):
            for number, phase in enumerate(self.engine.states or ()):
                state |= {f"pooled/{number}/{n}": v for n, v in phase.tensors().items()}
        return state

    def _restore(self, server: Server, state: Mapping[str, Tensor]) -> None:
        def part(prefix: str) -> Params:
            return {
                n.removeprefix(prefix): v.to(self.device) for n, v in state.items() if n.startswith(prefix)
            }

        server.params = part("params/")
        server.optimizer = OptimizerState.from_tensors(part("optimizer/"))
        if isinstance(self.engine, Pooled):
            count = len(self.method.phases)
            self.engine.states = [OptimizerState.from_tensors(part(f"pooled/{k}/")) for k in range(count)]

    def _directory(self, out: Path, resume: bool) -> RunDirectory:
        directory = (
            RunDirectory.open(out, self.identity, length=self._length())
            if resume
            else RunDirectory.create(out, self._info())
        )
        try:
            write_partition(out, self.data)
        except RunError:
            directory.close()
            raise
        return directory

    def _length(self) -> dict[str, Any]:
        """Return what ``run.json`` says of a run's length, beside the number of rounds."""
        return {"config": describe(self.config or {}), "config_text": self.config_text}

    def _info(self) -> dict[str, Any]:
        meta = self.data.meta
        federated = self.method.split.federated(self.initial)
        size = sum(v.numel() * v.element_size() for v in federated.values())
        pooled = self.identity["pooled"]
        return {
            "name": self.name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "running",
            **self._length(),
            "seed": self.seed,
            "initial": self._initial(),
            "method": self.method.name,
            "identity": self.identity,
            "split_table": self.method.split.table(self.module),
            "environment": environment(),
            "data": {
                "name": meta.get("name", "data"),
                "task": meta.get("task", "multiclass"),
                "clients": len(self.data),
                "held_out": len(self.held_out),
                "counts": {s: int(self.data.counts(s).sum()) for s in ("train", "valid", "test")},
                "fingerprint": self.identity["data"],
                "source": meta.get("source"),
                **{key: meta[key] for key in ("partition", "opt_out", "follows_seed") if key in meta},
            },
            "engine": self._engine()[0],
            "engine_reason": self._engine()[1],
            "device": self.device,
            "pooled": pooled,
            "rounds": self.rounds,
            "rounds_per_epoch": self.sampler.rounds_per_epoch,
            "cohort": self.sampler.cohort,
            "metric": HEADLINE[tasks_of(self.data)[0].kind],
            "bytes_down": None if pooled else size,
            "bytes_up": None if pooled else size,
            "best": meta.get("best"),
            "best_global": meta.get("best_global"),
            "partition_counts": partition_counts(self.data),
        }

    def _initial(self) -> dict[str, Any]:
        """Return a hash of each initial value by name, for reports: of what is frozen, and of what is trained."""
        trained = self.net.trainable()
        hashes = {n: digest({n: v})[:16] for n, v in self.initial.items()}
        return {
            "trained": {n: h for n, h in hashes.items() if n in trained},
            "frozen": {n: h for n, h in hashes.items() if n not in trained},
        }


def take_part(data: FederatedData, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of clients in federation and of those held out of it.

    A client without training examples is never drawn, but judged with default private values (FURL, §4.2).
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"hold_out must be a fraction in [0, 1); got {fraction}.")
    return hold_out(data, fraction, seed) if fraction else (np.arange(len(data)), np.zeros(0, np.int64))


def train_counts(data: FederatedData, method: Method) -> np.ndarray:
    """Return for each client how many examples a round would train on: where all phases want opted-in ones, those.

    A client that opted out wholly is then never drawn (mixture of experts, authors' later code), but judged. Where all
    clients did, all are drawn, and rounds change nothing.
    """
    opted = data.columns.get("opted_in")
    if opted is None or any(phase.examples == "all" for phase in method.phases):
        return data.counts("train")
    rows = data.split_rows("train")
    inside = np.bincount(data.clients_of(rows[np.asarray(opted)[rows]]), minlength=len(data))
    return inside if inside.any() else data.counts("train")


def count_rounds(rounds: int | None, epochs: float | None, per_epoch: int) -> int:
    """Return the number of rounds that ``rounds`` or ``epochs`` asks for."""
    if (rounds is None) == (epochs is None):
        raise ConfigError("Give either rounds or epochs.")
    if epochs is not None and not math.isfinite(epochs):
        raise ConfigError(f"epochs must be a number of at least 0; got {epochs}.")
    wanted = rounds if rounds is not None else round(float(epochs or 0) * per_epoch)
    if wanted < 0:
        raise ConfigError(f"rounds must be at least 0; got {wanted}.")
    return wanted
