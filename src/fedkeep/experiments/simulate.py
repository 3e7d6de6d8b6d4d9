"""Run a federated method on one machine: ``simulate``, and what it returns."""

from __future__ import annotations

import datetime
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedkeep.core.describe import check_kind, describe
from fedkeep.core.errors import ConfigError, RunError, check_whole
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.records import Record
from fedkeep.data import FederatedData
from fedkeep.data.federated import best_possible
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Auto, Device, Job, LocalDevice, Sampler, first_global, first_kept, tasks_of
from fedkeep.engines.faults import Faults
from fedkeep.engines.job import declared
from fedkeep.engines.opt_out import made_of_all
from fedkeep.engines.rehearsal import model_warnings
from fedkeep.engines.round import Sampling
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.experiments.budget import draw_anew, ledger_of, terms_of
from fedkeep.experiments.drive import Drive, Plan, after_round, in_use, pooled_state, restored
from fedkeep.experiments.engine import check_engine, check_judging, make_engine, named_metrics
from fedkeep.experiments.environment import check_device, environment
from fedkeep.experiments.failed_start import removed_if_it_fails
from fedkeep.experiments.identity import initial_hashes, model_identity
from fedkeep.experiments.partitions import partition_counts, write_partition
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import RunDirectory, failure_noted
from fedkeep.experiments.secure import check_cohorts
from fedkeep.experiments.taking_part import count_rounds, take_part, who_trains
from fedkeep.experiments.trackers import Tracker, named_trackers, tracked
from fedkeep.methods import Global, Method, differentially_private
from fedkeep.nn.accelerate import swaps_of
from fedkeep.privacy import DifferentialPrivacy, Terms
from fedkeep.store import Default, MemoryStore, PrivateStore, for_clients
from fedkeep.tasks import kinds_of


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
    sampling: Sampling = "shuffled",
    evaluate_every: int | None = None,
    evaluate_shared: bool = False,
    evaluate_adapted: bool = False,
    hold_out: float = 0.0,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    min_clients: int = 1,
    private: PrivateStore | None = None,
    privacy: DifferentialPrivacy | None = None,
    name: str = "",
    config: Mapping[str, Any] | None = None,
    config_text: str | None = None,
    progress: bool | None = None,
    trackers: Sequence[str | Tracker] = (),
    accelerate: bool = True,
    metrics: Sequence[str] | None = None,
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
        resume: go on with the run in ``out``; it ends with the same bits as one that was never stopped. With
            differential privacy and noise from the system it does not: rounds that are run again draw new cohorts.
        epochs: passes over the training data, instead of ``rounds``.
        sampling: ``"shuffled"`` (every client once an epoch), ``"independent"`` draws, or ``"poisson"`` (each client
            by a coin of its own, ``cohort`` of them on average).
        evaluate_every: rounds between evaluations on ``valid`` and ``test``; by default once an epoch. The last
            round is always evaluated. 0: never.
        evaluate_shared: evaluate the shared part alone on ``test`` too, as the split ``test/shared``.
        evaluate_adapted: at each evaluation that is the best on ``valid`` so far, adapt every client as the method says
            (e.g. fine-tuning) and evaluate that on ``test`` too, as the split ``test/adapted``. Nothing is uploaded.
        hold_out: fraction of clients kept out of federation, for cold-start measurements.
        on_nonfinite: ``"stop"`` with an error if a client's training becomes NaN or its upload is malformed, or
            ``"skip"`` that client's round. Pooled training has no client to skip, so it always stops.
        min_clients: how many clients of a cohort must take part; with fewer the run stops with an error.
        private: a store to go on with, e.g. of another task's run (only without ``out``). Clients are the same where
            their ids are; one that the store lacks begins with the default.
        privacy: differential privacy of clients; it wants ``sampling="poisson"``. A run with a folder keeps a ledger
            there.
        name: for reports.
        config, config_text: the configuration that led here, kept in the run's folder.
        progress: True or False to force or forbid the bar; by default it is shown on a terminal.
        trackers: where every record is sent once its round is committed: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``,
            ``"package.module:Class"``, or a tracker (``fedkeep.trackers.Tracker``).
        accelerate: run the model's own LSTM, GRU, large linear layers and convolutions on fedkeep's kernels where that
            gives the same; see ``fedkeep.accelerate``.
        metrics: measured beside the usual ones where labels are classes: ``"balanced_accuracy"``, ``"macro_f1"``
            (``fedkeep.metrics``); over all examples, as mean over clients, and for each client.

    Returns:
        The run: ``.server``, ``.private``, ``.history``, ``.evaluate(split)``.

    Raises:
        FedkeepError: with what was wanted, what was got and what to do.
    """
    simulation = Simulation(
        model,
        method,
        data,
        rounds=rounds,
        epochs=epochs,
        cohort=cohort,
        seed=seed,
        engine=engine,
        workers=workers,
        device=device,
        sampling=sampling,
        evaluate_every=evaluate_every,
        evaluate_shared=evaluate_shared,
        evaluate_adapted=evaluate_adapted,
        hold_out=hold_out,
        on_nonfinite=on_nonfinite,
        min_clients=min_clients,
        private=private,
        privacy=privacy,
        name=name,
        config=config,
        config_text=config_text,
        trackers=trackers,
        accelerate=accelerate,
        metrics=metrics,
    )
    with removed_if_it_fails(None if out is None else Path(out)) as folder:
        return simulation.run(folder, resume, progress)


class Simulation:
    """The pieces of one simulation, put together and checked before anything is written; the rest is ``simulate``'s."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: FederatedData,
        *,
        rounds: int | None,
        epochs: float | None,
        cohort: int,
        seed: int,
        engine: str,
        workers: int | None,
        device: str | torch.device,
        sampling: Sampling,
        evaluate_every: int | None,
        evaluate_shared: bool,
        evaluate_adapted: bool,
        hold_out: float,
        on_nonfinite: Literal["stop", "skip"],
        min_clients: int,
        privacy: DifferentialPrivacy | None,
        name: str,
        trackers: Sequence[str | Tracker],
        accelerate: bool,
        metrics: Sequence[str] | None = None,
        private: PrivateStore | None = None,
        config: Mapping[str, Any] | None = None,
        config_text: str | None = None,
    ) -> None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        check_kind("method", method, Method, "a method, e.g. fedkeep.methods.fedavg()")
        check_kind("data", data, FederatedData, "a data set, e.g. fedkeep.FederatedData.from_columns(...)")
        optional = {"rounds": rounds, "workers": workers, "evaluate_every": evaluate_every}
        check_whole({"cohort": cohort, "seed": seed, "min_clients": min_clients})
        check_whole({name: value for name, value in optional.items() if value is not None})
        seed, cohort, device = operator.index(seed), operator.index(cohort), str(device)
        rounds, evaluate_every = (None if n is None else operator.index(n) for n in (rounds, evaluate_every))
        self.trackers = named_trackers(trackers)
        module = method.made_for(model, accelerate)
        check_device(device)
        check_engine(engine, workers, device)
        self.module, self.method, self.data = module.to(device), method, data
        self.seed, self.device, self.name = seed, device, name or method.name
        self.config, self.config_text, self.given_store = config, config_text, private
        self.net = Net(self.module)
        self.initial = {n: v.detach() for n, v in tensors_of(self.module).items()}  # never changed
        self.default = Default(
            first_kept(method, self.net), method.client.keep.value, seed, self.net.buffers()
        )
        self.clients, self.held_out = take_part(data, hold_out, seed)
        trains = who_trains(data, method, self.clients)
        pooled = engine == "pooled"
        self.sampler = Sampler(trains, max(1, len(trains)) if pooled else cohort, sampling, seed)
        self.terms: Terms | None = None
        if privacy is not None:
            self.terms = terms_of(privacy, self.sampler, pooled)
            self.method = method = differentially_private(method, privacy, self.sampler.cohort)
        if not pooled:
            check_cohorts(method, self.sampler)
        self.rounds = count_rounds(rounds, epochs, self.sampler.rounds_per_epoch)
        self.engine, self.reason = make_engine(engine, workers, device, self.sampler.cohort, self.rounds)
        every = self.sampler.rounds_per_epoch if evaluate_every is None else evaluate_every
        if on_nonfinite not in ("stop", "skip"):
            raise ConfigError(f"on_nonfinite must be 'stop' or 'skip'; got {on_nonfinite!r}.")
        self.faults = Faults(broken=on_nonfinite, malformed=on_nonfinite, minimum=min_clients)
        if every < 0:
            raise ConfigError(f"evaluate_every must be at least 0 (0: never); got {every}.")
        check_judging(method, evaluate_shared, evaluate_adapted)
        self.every, self.evaluate_shared, self.evaluate_adapted = every, evaluate_shared, evaluate_adapted
        self.metrics = named_metrics(metrics or (), tasks_of(data))
        self.identity = {
            "seed": seed,
            "rounds": self.rounds,
            "cohort": self.sampler.cohort,
            "sampling": sampling,
            "pooled": pooled,
            "evaluate_every": every,
            "hold_out": hold_out,
            "on_nonfinite": on_nonfinite,
            "min_clients": min_clients,
            "method": describe(method),
            **({"evaluate_shared": True} if evaluate_shared else {}),
            **({"evaluate_adapted": True} if evaluate_adapted else {}),
            **({"metrics": list(self.metrics)} if self.metrics else {}),
            "model": model_identity(self.module, method, self.initial),
        }

    def first(self) -> Global:
        """Return what the server has before the first round; patterns of ``privacy.clip`` that don't fit are errors."""
        server = first_global(self.method, self.net, self.data, self.sampler.count)
        if self.terms is not None:
            self.method.server.reduce.begin(server, {**server.params, **declared(self.method, self.net)}, ())
        return server

    def run(self, out: Path | None, resume: bool, progress: bool | None) -> Run:
        """Train, or go on with what ``out`` holds."""
        server = self.first()
        directory: RunDirectory | None = None
        store: PrivateStore = MemoryStore(self.default, self.data.ids)
        if self.given_store is not None:
            store = for_clients(self.given_store, self.default, self.data.ids)
            self.net.opted_out = self.given_store.default.opted_out
        made = made_of_all(self.method.client.phases, self.method.split, self.net, self.data)
        store.default.opted_out = self.net.opted_out | made
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
                    phases = len(self.method.client.phases)
                    server = restored(directory.folder, state, server, self.engine, phases)
                    server = after_round(server, directory.round, self.rounds)
                    best = dict(directory.extra.get("best", {}))
                    history = directory.history()
            drive = self._drive(store, server, history, best, directory, progress)
            drive.ledger = ledger_of(self.terms, directory)
            if directory is not None:
                self.sampler.seed = int(directory.read_info().get("cohort_seed", self.sampler.seed))
                draw_anew(self.sampler, drive.ledger, directory)
            self._decide(drive.device, directory, resume)
            settings = self.config or {"seed": self.seed, "rounds": self.rounds, "method": self.method.name}
            told = tracked(self.trackers, directory, history, self.name, settings)
            with failure_noted(directory), told as drive.told:
                drive.go()
            name, reason = in_use(self.engine, self.reason)
            if directory is not None:
                about = {"engine": name, "engine_reason": reason}
                about |= {"status": "finished"} if drive.server.round == self.rounds else {}
                directory.write_info({**directory.read_info(), **about})
            return Run(
                self.net,
                self.method,
                self.data,
                drive.server.params,
                store,
                name,
                self.sampler.rounds_per_epoch,
                SomeIds(self.data.ids, self.clients),
                SomeIds(self.data.ids, self.held_out),
                history,
                drive.server.round,
                out,
                self.device,
                reason,
                drive.server.state,
                drive.examples,
                drive.server,
                self.metrics,
            )
        finally:
            self.engine.close()
            if directory is not None:
                directory.close()

    def _decide(self, device: Device, directory: RunDirectory | None, resume: bool) -> None:
        """Let ``auto`` decide before the first round; a run that goes on keeps the engine that its folder names.

        One that was stopped before its first round was over may not have decided yet: it decides now.
        """
        if not isinstance(self.engine, Auto) or not isinstance(device, LocalDevice):
            return
        info = directory.read_info() if directory is not None else {}
        begun = resume and directory is not None and directory.round > 0
        self.engine.decide(device.job, str(info["engine"]) if begun else "")
        if directory is not None and not begun:
            name, reason = in_use(self.engine, self.reason)
            directory.write_info({**info, "engine": name, "engine_reason": reason})

    def _drive(
        self,
        store: PrivateStore,
        server: Global,
        history: list[Record],
        best: dict[str, Any],
        directory: RunDirectory | None,
        progress: bool | None,
    ) -> Drive:
        method = with_declared_tables(self.method, self.net, self.data, self.device)
        for text in model_warnings(method, self.net, self.data, self.seed, self.device):
            warnings.warn(text, stacklevel=2)
        job = Job(
            method,
            self.net,
            self.data,
            store,
            self.seed,
            self.device,
            after_step=lambda part: drive.finished(part),
        )
        personal = bool(store.default.initial) or self.method.predict is not self.method.predict_shared
        plan = Plan(
            name=self.name,
            method=self.method,
            rounds=self.rounds,
            sampler=self.sampler,
            roster=self.data.ids,
            judged=self.clients.tolist(),
            tasks=tasks_of(self.data),
            meta=self.data.meta,
            every=self.every,
            faults=self.faults,
            evaluate_shared=self.evaluate_shared,
            evaluate_adapted=self.evaluate_adapted,
            trained=self.data.counts("train"),
            reference="shared" if personal else "own",
            pooled=self.identity["pooled"],
            declared=job.declared,
            progress=progress,
            metrics=self.metrics,
        )
        drive = Drive(
            plan=plan,
            server=server,
            device=LocalDevice(job, self.engine, leaves="examples"),
            history=history,
            best=best,
            examples=None if directory is None else directory.examples(),
            directory=directory,
            state=lambda: pooled_state(self.engine),
        )
        return drive

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
        federated = self.method.split.halves(self.module).federated(self.initial)
        size = sum(v.numel() * v.element_size() for v in federated.values())
        pooled, best = self.identity["pooled"], dict(meta)
        # Of those who are judged, which meta's is not if some are held out.
        if "_best" in self.data.columns:
            judged = self.data.split_rows("test", self.clients)
            best |= best_possible(self.data.columns, judged, tasks_of(self.data)[0].kind)
        name, reason = in_use(self.engine, self.reason)
        return {
            "name": self.name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "running",
            **self._length(),
            "seed": self.seed,
            "initial": initial_hashes(self.initial, self.net.trainable()),
            "method": self.method.name,
            "identity": self.identity,
            "split_table": self.method.split.table(self.module),
            "accelerated": asdict(swaps_of(self.module)),
            "environment": environment(self.device),
            "data": {
                "name": meta.get("name", "data"),
                "task": kinds_of(tasks_of(self.data)),
                "clients": len(self.data),
                "held_out": len(self.held_out),
                "counts": {s: int(self.data.counts(s).sum()) for s in ("train", "valid", "test")},
                "fingerprint": self.identity["data"],
                "source": meta.get("source"),
                **{
                    key: meta[key]
                    for key in ("partition", "opt_out", "follows_seed", "encoding")
                    if key in meta
                },
            },
            "engine": name,
            "engine_reason": reason,
            "device": self.device,
            "pooled": pooled,
            "rounds": self.rounds,
            "rounds_per_epoch": self.sampler.rounds_per_epoch,
            "cohort": self.sampler.cohort,
            "metric": tasks_of(self.data)[0].kind.headline.name,
            "bytes_down": None if pooled else size,
            "bytes_up": None if pooled else size,
            "best": best.get("best"),
            "best_global": best.get("best_global"),
            "partition_counts": partition_counts(self.data),
        }
