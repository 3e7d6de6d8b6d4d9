"""Run a federated method on one machine: ``simulate``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedkeep.core.describe import check_kind
from fedkeep.core.errors import ConfigError, check_whole
from fedkeep.core.net import Net
from fedkeep.data import FederatedData
from fedkeep.data.federated import best_possible
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Auto, Centralised, Engine, LocalDevice, first_default, job_of, tasks_of
from fedkeep.engines.faults import Faults
from fedkeep.engines.opt_out import made_of_all
from fedkeep.engines.rehearsal import model_warnings
from fedkeep.engines.round import Sampling
from fedkeep.experiments.conductor import Conductor, Members
from fedkeep.experiments.drive import Drive, centralised_state, in_use
from fedkeep.experiments.engine import check_engine, make_engine
from fedkeep.experiments.environment import check_device
from fedkeep.experiments.failed_start import removed_if_it_fails
from fedkeep.experiments.partitions import partition_counts, write_partition
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.taking_part import take_part, who_trains
from fedkeep.experiments.trackers import Tracker
from fedkeep.methods import Method
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.store import MemoryStore, PrivateStore


def simulate(
    model: nn.Module,
    method: Method,
    data: FederatedData,
    *,
    rounds: int | None = None,
    cohort: int = 10,
    seed: int = 0,
    centralised: bool = False,
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
        rounds, epochs, cohort, sampling: how long, and with whom: as in :class:`RunSettings`.
        centralised, engine, workers, device, accelerate: how and on what: as in :class:`RunSettings`.
        evaluate_every, evaluate_shared, evaluate_adapted, metrics: what is measured: as in :class:`RunSettings`.
        hold_out, on_nonfinite, min_clients, trackers: the run's further settings: as in :class:`RunSettings`.
        seed: everything random follows from it.
        out: a folder for the run: configuration, records, states. Every round is committed there. None: memory only.
        resume: go on with the run in ``out``; it ends with the same bits as one that was never stopped. With
            differential privacy and noise from the system it does not: rounds that are run again draw new cohorts.
        private: a store to begin with, e.g. of another task's run (only without ``out``). It stays as it is. Clients are
            the same where their ids are; one that the store lacks begins with the default.
        privacy: differential privacy of clients; it wants ``sampling="poisson"``. A run with a folder keeps a ledger
            there.
        name: for reports.
        config, config_text: the configuration that led here, kept in the run's folder.
        progress: True or False to force or forbid the bar; by default it is shown on a terminal.

    Returns:
        The run: ``.server``, ``.private``, ``.history``, ``.evaluate(split)``.

    Raises:
        FedkeepError: with what was wanted, what was got and what to do.
    """
    settings = RunSettings(
        rounds=rounds,
        epochs=epochs,
        cohort=cohort,
        sampling=sampling,
        centralised=centralised,
        engine=engine,
        workers=workers,
        device=str(device),
        accelerate=accelerate,
        evaluate_every=evaluate_every,
        evaluate_shared=evaluate_shared,
        evaluate_adapted=evaluate_adapted,
        hold_out=hold_out,
        on_nonfinite=on_nonfinite,
        min_clients=min_clients,
        trackers=trackers,
        metrics=metrics,
    )
    simulation = Simulation(
        model,
        method,
        data,
        settings,
        seed=seed,
        private=private,
        privacy=privacy,
        name=name,
        config=config,
        config_text=config_text,
    )
    return simulation.run(None if out is None else Path(out), resume, progress)


class Simulation:
    """A run whose clients are all here, put together and checked before anything is written.

    Args:
        settings: what the run is asked for; the rest is ``simulate``'s.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: FederatedData,
        settings: RunSettings,
        *,
        seed: int = 0,
        private: PrivateStore | None = None,
        privacy: DifferentialPrivacy | None = None,
        name: str = "",
        config: Mapping[str, Any] | None = None,
        config_text: str | None = None,
    ) -> None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        check_kind("method", method, Method, "a method, e.g. fedkeep.methods.fedavg()")
        check_kind("data", data, FederatedData, "a data set, e.g. fedkeep.FederatedData.from_columns(...)")
        check_whole({"seed": seed})
        module = method.made_for(model, settings.accelerate)
        check_device(settings.device)
        check_engine(settings.engine, settings.workers, settings.device)
        self.settings, self.data, self.given_store = settings, data, private
        self.net = Net(module.to(settings.device))
        self.clients, self.held_out = take_part(data, settings.hold_out, int(seed))
        trains = who_trains(data, method, self.clients)
        self.conductor = Conductor(
            settings,
            Members(
                clients=data,
                trains=trains,
                judged=self.clients.tolist(),
                tasks=tasks_of(data),
                meta=data.meta,
                trained=data.counts("train"),
            ),
            name=name or method.name,
            seed=int(seed),
            method=method,
            net=self.net,
            privacy=privacy,
            cohort=max(1, len(trains)) if settings.centralised else None,
            config=config or {},
            text=config_text,
        )
        self.method, rounds = self.conductor.method, self.conductor.rounds
        cohort = self.conductor.sampler.cohort
        self.engine: Engine = Centralised()
        self.reason = ""
        if not settings.centralised:
            self.engine, self.reason = make_engine(
                settings.engine, settings.workers, settings.device, cohort, rounds
            )

    def run(self, out: Path | None, resume: bool, progress: bool | None) -> Run:
        """Train, or go on with what ``out`` holds."""
        if out is None and resume:
            raise ConfigError("resume=True needs the folder of the run: pass out=....")
        if out is not None and self.given_store is not None:
            raise ConfigError(
                "A run with a folder keeps its private states there: give out or private, not both."
            )
        conductor = self.conductor
        with removed_if_it_fails(out):
            try:
                store = self._store(out, resume)
                conductor.recover(self.engine, store)
                device, drive = self._drive(store, progress)
                self._decide(device, resume)
                with conductor.under_way(drive):
                    drive.go()
                self._note_engine()
            finally:
                self.engine.close()
                if conductor.directory is not None:
                    conductor.directory.close()
        name, reason = in_use(self.engine, self.reason)
        return Run(
            self.net,
            self.method,
            self.data,
            drive.server.params,
            store,
            name,
            conductor.sampler.rounds_per_epoch,
            SomeIds(self.data.ids, self.clients),
            SomeIds(self.data.ids, self.held_out),
            drive.history,
            drive.server.round,
            out,
            self.settings.device,
            reason,
            drive.server.state,
            drive.examples,
            drive.server,
            conductor.metrics,
        )

    def _store(self, out: Path | None, resume: bool) -> PrivateStore:
        """Return what keeps private values; with a folder, that is made or opened."""
        method, net, data = self.method, self.net, self.data
        default = first_default(method, net, self.conductor.seed)
        if self.given_store is not None:
            net.opted_out = self.given_store.default.opted_out
        default.opted_out = net.opted_out | made_of_all(method.client.phases, method.split, net, data)
        if out is None:
            return MemoryStore(default, data.ids, self.given_store)
        self.conductor.identity["data"] = data.fingerprint()
        directory = self.conductor.open(out, resume, self._about)
        write_partition(out, data)
        return directory.store(default, data.ids)

    def _drive(self, store: PrivateStore, progress: bool | None) -> tuple[LocalDevice, Drive]:
        conductor, settings = self.conductor, self.settings
        job = job_of(
            self.method,
            self.net,
            self.data,
            store,
            conductor.seed,
            settings.device,
            after_step=lambda part: drive.finished(part),
        )
        for text in model_warnings(job.method, self.net, self.data, conductor.seed, settings.device):
            warnings.warn(text, stacklevel=2)
        policy = settings.on_nonfinite
        device = LocalDevice(job, self.engine, leaves="examples", ledger=conductor.versions)
        drive = conductor.drive(
            device,
            Faults(broken=policy, malformed=policy, minimum=settings.min_clients),
            state=lambda: centralised_state(self.engine),
            progress=progress,
        )
        return device, drive

    def _decide(self, device: LocalDevice, resume: bool) -> None:
        """Let ``auto`` decide before the first round; a run that goes on keeps the engine that its folder names.

        One that was stopped before its first round was over may not have decided yet: it decides now.
        """
        if not isinstance(self.engine, Auto):
            return
        directory = self.conductor.directory
        begun = resume and directory is not None and directory.round > 0
        self.engine.decide(device.job, str(directory.read_info()["engine"]) if begun and directory else "")
        if not begun:
            self._note_engine()

    def _note_engine(self) -> None:
        """Say in the folder which engine is in use."""
        directory = self.conductor.directory
        if directory is not None:
            name, reason = in_use(self.engine, self.reason)
            directory.write_info({**directory.read_info(), "engine": name, "engine_reason": reason})

    def _about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of a new run."""
        data, meta, best = self.data, self.data.meta, dict(self.data.meta)
        # Of those who are judged, which meta's is not if some are held out.
        if "_best" in data.columns:
            judged = data.split_rows("test", self.clients)
            best |= best_possible(data.columns, judged, tasks_of(data)[0].kind)
        about: dict[str, Any] = {
            "held_out": len(self.held_out),
            "counts": {s: int(data.counts(s).sum()) for s in ("train", "valid", "test")},
            "fingerprint": self.conductor.identity["data"],
            "source": meta.get("source"),
            **{key: meta[key] for key in ("partition", "opt_out", "follows_seed", "encoding") if key in meta},
        }
        more = {
            "best": best.get("best"),
            "best_global": best.get("best_global"),
            "partition_counts": partition_counts(data),
        }
        return self.conductor.about(about, in_use(self.engine, self.reason), more, self.settings.device)
