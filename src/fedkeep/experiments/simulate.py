"""Run a federated method on one machine: ``simulate``, and the engines that it has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedkeep.core.describe import check_kind
from fedkeep.core.errors import ConfigError, DataError, check_whole, instead_of, warn
from fedkeep.core.files import expanded, write_of_run, write_tensors
from fedkeep.core.modes import with_gradients
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Params, misfit, row
from fedkeep.data import FederatedData, class_counts, hold_out
from fedkeep.data.alike import check_codes, label_warnings
from fedkeep.data.federated import best_possible
from fedkeep.data.ids import SomeIds
from fedkeep.data.seen import FILE as SEEN
from fedkeep.data.seen import Seen
from fedkeep.engines import (
    Auto,
    Centralised,
    Engine,
    LocalDevice,
    Sequential,
    Vectorised,
    Workers,
    first_default,
    job_of,
)
from fedkeep.engines.adapt import one_by_one
from fedkeep.engines.faults import Faults
from fedkeep.engines.lanes import made_of_all
from fedkeep.engines.rehearsal import model_warnings, resolve, told_head
from fedkeep.engines.round import Sampling
from fedkeep.engines.workers import workers as processes
from fedkeep.experiments.conductor import (
    Conductor,
    Members,
    after_round,
    centralised_state,
    checkpoint,
    restored,
)
from fedkeep.experiments.continuing import ENCODING, Before, Origin, sizes_of
from fedkeep.experiments.drive import Drive, in_use
from fedkeep.experiments.environment import check_device, warn_of_changed_code
from fedkeep.experiments.personalize.kept import kept_in, read_fitted, write_fitted
from fedkeep.experiments.recommending import USUAL, Ranking
from fedkeep.experiments.run import Run, labelled
from fedkeep.experiments.run_directory import RunDirectory, removed_if_it_fails
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.trackers import Tracker
from fedkeep.methods import Global, Method
from fedkeep.methods.usual import usual_of
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.store import Default, MemoryStore, PrivateStore, VersionLedger
from fedkeep.store.versions import NONCE_BITS
from fedkeep.tasks import tasks_in


@with_gradients
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
    resume: bool | Literal["auto"] = False,
    epochs: float | None = None,
    sampling: Sampling = "shuffled",
    evaluate_every: int | None = None,
    evaluate_shared: bool = False,
    evaluate_adapted: bool = False,
    hold_out: float | Sequence[str | int] = 0.0,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    min_clients: int = 1,
    private: PrivateStore | None = None,
    continue_from: Run | None = None,
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
            differential privacy and noise from the system it does not: a run that goes on draws new cohorts.
            ``"auto"``: go on where ``out`` holds a run, else begin one.
        private: a store to begin with, e.g. of another task's run (only without ``out``). It stays as it is. Clients are
            the same where their ids are; one that the store lacks begins with the default.
        continue_from: a run whose rounds go on here, e.g. on next month's data: its federated and private values, and
            what method and server optimiser keep. ``rounds`` or ``epochs`` more follow. Clients are the same where their
            ids are. An example that it had stays in the part in which it was. Where labels or items were added, and the
            model has more outputs or rows at their end, old ones keep their values. ``run.continues`` says what has
            changed. On the same data the run ends with the bits of one that was never cut.
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
        hold_out=hold_out if isinstance(hold_out, float | int | str) else tuple(hold_out),  # type: ignore[arg-type]
        on_nonfinite=on_nonfinite,
        min_clients=min_clients,
        trackers=trackers,
        metrics=metrics,
    )
    if continue_from is not None:
        check_codes(continue_from.data.meta, data.meta)
    simulation = Simulation(
        model,
        method,
        data,
        settings,
        seed=seed,
        private=private,
        before=None if continue_from is None else Before.of(continue_from),
        privacy=privacy,
        name=name,
        config=config,
        config_text=config_text,
    )
    folder = None if out is None else expanded(out)
    if resume == "auto":
        resume = folder is not None and (folder / "run.json").exists()
    return simulation.run(folder, bool(resume), progress)


class Simulation:
    """A run whose clients are all here, put together and checked before anything is written.

    Args:
        settings: what the run is asked for; the rest is ``simulate``'s.
        before: the run that this one goes on from; None: none, or it has begun already, as ``origin`` says.
        origin: what the run's folder says of that one.
        first: what the method's module begins with, by name; None: the model's own values.
        ranking: how its runs rank all items, unless they are asked otherwise.
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
        before: Before | None = None,
        origin: Origin | None = None,
        privacy: DifferentialPrivacy | None = None,
        name: str = "",
        config: Mapping[str, Any] | None = None,
        config_text: str | None = None,
        data_folder: Path | None = None,
        first: Params | None = None,
        ranking: Ranking = USUAL,
    ) -> None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        check_kind(
            "method",
            method,
            Method,
            "a method, e.g. fedkeep.methods.furl('head.*'), which names what stays private",
        )
        check_kind(
            "data",
            data,
            FederatedData,
            "a fedkeep.FederatedData, e.g. FederatedData.from_columns(client=ids, columns={'x': array, 'label': labels}) "
            "with a client's id for each row, or from_datasets({client: dataset})",
        )
        check_whole({"seed": seed})
        data = labelled(divided(data), method)
        if before is not None:
            if private is not None:
                raise ConfigError(
                    "Give continue_from or private, not both: the older run has a store of its own."
                )
            data, origin = before.seen.kept_apart(data), before.origin(data)
        self.before, self.origin = before, origin
        if origin is not None and origin.charged is not None and privacy is None:
            raise ConfigError(
                "continue_from: the older run has differential privacy, and no ε would hold for it if this one had none. Give "
                "privacy, in a configuration [privacy]."
            )
        method = resolve(method, model, data)
        module, self.head = method.made_for(model, settings.accelerate), told_head(method, model, data)
        if first is not None and not misfit(values := tensors_of(module), first):
            with torch.no_grad():
                for name, value in first.items():
                    values[name].copy_(value)
        check_device(settings.device)
        check_engine(settings.engine, settings.workers, settings.device)
        self.data, self.given_store, self.ranking = data, private, ranking
        self.data_folder = data_folder
        self.net = Net(module.to(settings.device))
        self.clients, self.held_out = parted(data, settings.hold_out, int(seed))
        check_splits(settings, method, data, self.clients)
        # Who has no training examples is never drawn, but judged with default private values (FURL, §4.2).
        counts = train_counts(data, method)[self.clients]
        trains = self.clients[counts > 0]
        if privacy is None:  # a budget is of rounds that hang on nobody's examples
            settings = settings.decided(counts[counts > 0], usual_of(model))
        self.settings = settings
        self.conductor = Conductor(
            settings,
            Members(
                clients=data,
                trains=trains,
                judged=self.clients,
                tasks=tasks_in(data.meta),
                meta=data.meta,
                trained=data.counts("train"),
            ),
            name=name or method.name,
            seed=int(seed),
            method=method,
            net=self.net,
            privacy=privacy,
            carried=(lambda terms: terms) if origin is None else origin.carried,
            continues=None if origin is None else (origin.run, origin.round),
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
            raise ConfigError("resume=True wants the folder of the run that is to go on: out='FOLDER'.")
        if out is not None and self.given_store is not None:
            raise ConfigError(
                "A run with a folder keeps its private states there: give out or private, not both."
            )
        conductor = self.conductor
        with removed_if_it_fails(out):
            try:
                store = self._store(out, resume)
                conductor.recover(self.engine, store)
                if self.before is not None and not conductor.server.round:
                    self._take_over(self.before, store)
                drive = self._drive(store, resume, progress)
                with drive.under_way():
                    drive.go()
                self._note_engine()
            finally:
                self.engine.close()
                if conductor.directory is not None:
                    conductor.directory.close()
        name, reason = in_use(self.engine, self.reason)
        return self._run(out, store, name, reason)

    def _take_over(self, before: Before, store: PrivateStore) -> None:
        """Begin with what an older run has; with a folder that is its first commit."""
        conductor = self.conductor
        warn_of_changed_code("the run that goes on here", before.code, self.net.module)
        first, phases = conductor.server, len(self.method.client.phases)
        state = before.server(first, self.data)
        server = restored(Path("continue_from"), state, first, self.engine, phases)
        conductor.server = after_round(server, before.round, conductor.rounds)
        before.hand_over(store, self.data, conductor.versions)
        if conductor.directory is not None:
            whole = checkpoint(conductor.server) | centralised_state(self.engine)
            extra: dict[str, Any] = {"best": {}} | (
                {} if conductor.ledger is None else {"ledger": conductor.ledger.mark}
            )
            conductor.directory.commit(before.round, whole, conductor.versions, store.flush, [], [], extra)
            conductor.versions.committed()

    def read(self, folder: Path) -> Run:
        """Return what the folder of such a run holds after its last committed round; nothing in it is touched.

        Raises:
            RunError, StoreError: there is no run, or it is damaged or in use.
        """
        conductor = self.conductor
        directory = conductor.directory = RunDirectory.open(folder, write=False)
        try:
            store = directory.store(self._default(), self.data.ids)
            conductor.recover(self.engine, store)
        finally:
            directory.close()
        return self._run(folder, store, str(directory.read_info()["engine"]))

    def _run(
        self,
        folder: Path | None,
        store: PrivateStore,
        engine: str,
        reason: str = "",
    ) -> Run:
        """Return the run at its best round; ``last`` of it at its last one."""
        conductor = self.conductor
        last, best = conductor.server, conductor.chosen
        if best is None or best.round == last.round:
            run = self._run_at(last, folder, store, engine, reason)
        else:
            run = self._run_at(best, folder, store.marked(), engine, reason)
            run._last = self._run_at(last, folder, store, engine, reason)
        if (directory := conductor.directory) is not None:
            tell = not directory.writable  # else the run has just gone on
            run.fitted = read_fitted(directory.folder, directory.id, run.round, tell=tell)
        run.writer = self.write
        return run

    def _run_at(
        self, server: Global, folder: Path | None, store: PrivateStore, engine: str, reason: str
    ) -> Run:
        conductor, ids = self.conductor, self.data.ids
        run = Run(
            net=self.net,
            method=self.method,
            data=self.data,
            server=server.params,
            private=store,
            engine=engine,
            rounds_per_epoch=conductor.sampler.rounds_per_epoch,
            clients=SomeIds(ids, self.clients),
            held_out=SomeIds(ids, self.held_out),
            history=conductor.history,
            round=server.round,
            folder=folder,
            device=self.settings.device,
            engine_reason=reason,
            state=server.state,
            examples=conductor.examples,
            base=server,
            metrics=conductor.metrics,
            ranking=self.ranking,
        )
        run.continues = "" if self.origin is None else self.origin.told
        return run

    def write(self, run: Run, folder: Path) -> None:
        """Write a run's folder, as if the run had had it from the beginning; see ``Run.save``."""
        conductor = self.conductor
        if conductor.terms is not None:
            raise ConfigError(
                "A run with differential privacy keeps a ledger in its folder from the beginning: give it one, "
                "simulate(..., out=...)."
            )
        conductor.identity["data"] = self.data.fingerprint()
        with removed_if_it_fails(folder), closing(RunDirectory.create(folder, self._about())) as directory:
            self._fill(directory, run)
            write_tensors(folder / FIRST, dict(conductor.initial))
            self._write_data(folder)
        if run.fitted:
            write_fitted(folder, run.round, run.fitted)

    def _fill(self, directory: RunDirectory, run: Run) -> None:
        """Commit what a run has into a new folder: its best round, and the last, where that is another one."""
        store, ledger = directory.store(self._default(), self.data.ids), VersionLedger(len(self.data))
        directory.recover(ledger)
        chosen, extra, after = self.conductor.chosen, {"best": self.conductor.best}, -1
        for one in [run] if run.last is run else [run, run.last]:
            seen = np.flatnonzero(one.private.seen(range(len(self.data)))).tolist()
            attempt = max(1, one.round) << NONCE_BITS
            for client in seen:
                store.stage(client, row(one.private.read([client]), 0), attempt, one.round)
            store.begin(ledger.accept(seen, [attempt] * len(seen)))
            best = 0 if chosen is None else chosen.round
            if best == one.round:
                store.mark()
            if one.round:
                state = checkpoint(one.whole) | (centralised_state(self.engine) if one is run.last else {})
                records = [r for r in run.history if after < r.round <= one.round]
                directory.commit(
                    one.round, state, ledger, store.flush, records, [], extra, run.examples, best=best
                )
                ledger.committed()
            after = one.round
        directory.write_info({**directory.read_info(), "engine": run.engine, "status": "finished"})

    def _write_data(self, folder: Path) -> None:
        """Write what a run that goes on from this one wants of the data; files that are there stay."""
        if not (folder / SEEN).exists():
            write_of_run(folder / SEEN, self.seen)
        if (text := self.data.meta.get("encoded_by")) is not None and not (folder / ENCODING).exists():
            write_of_run(folder / ENCODING, text.encode())

    @cached_property
    def seen(self) -> bytes:
        """The examples that this run has, as its folder keeps them."""
        return Seen.of(self.data).to_bytes()

    def _default(self) -> Default:
        """Return what private values of a new client are."""
        default = first_default(self.method, self.net, self.conductor.seed)
        if self.given_store is not None:
            self.net.opted_out = self.given_store.default.opted_out
        made = made_of_all(self.method.client.phases, self.method.split, self.net, self.data)
        default.opted_out = self.net.opted_out | made
        return default

    def _store(self, out: Path | None, resume: bool) -> PrivateStore:
        """Return what keeps private values; with a folder, that is made or opened."""
        data, default = self.data, self._default()
        if out is None:
            return MemoryStore(default, data.ids, self.given_store)
        self.conductor.identity["data"] = data.fingerprint()
        directory = self.conductor.open(out, resume, lambda: self._about() | self._place(out))
        self._write_data(out)
        return directory.store(default, data.ids)

    def _drive(self, store: PrivateStore, resume: bool, progress: bool | None) -> Drive:
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
        said = model_warnings(job.method, self.net, self.data, conductor.seed, settings.device)
        for text in (*label_warnings(self.data), *said):
            warn(text)
        policy = settings.on_nonfinite
        folder = None if conductor.directory is None else conductor.directory.folder
        fits = one_by_one if folder is None else kept_in(folder)
        device = LocalDevice(
            job, self.engine, leaves="examples", judges="all", fits=fits, ledger=conductor.versions
        )
        drive = Drive(
            conductor,
            device,
            Faults(broken=policy, malformed=policy, minimum=settings.min_clients),
            state=lambda: centralised_state(self.engine),
            mark=store.mark,
            progress=progress,
        )
        if isinstance(self.engine, Auto):
            # A run that goes on keeps the engine that its folder names; one that was stopped before its first round was
            # over may not have decided yet, and decides now.
            directory = (
                conductor.directory if resume and conductor.directory and conductor.directory.round else None
            )
            self.engine.decide(device.job, str(directory.read_info()["engine"]) if directory else "")
            if directory is None:
                self._note_engine()
        return drive

    def _note_engine(self) -> None:
        """Say in the folder which engine is in use."""
        directory = self.conductor.directory
        if directory is not None:
            name, reason = in_use(self.engine, self.reason)
            directory.write_info({**directory.read_info(), "engine": name, "engine_reason": reason})

    def _place(self, out: Path) -> dict[str, str]:
        """Return where the data are, as seen from the run's folder; it names no folder above both."""
        if self.data_folder is None:
            return {}
        try:
            return {"data_folder": Path(os.path.relpath(self.data_folder, out.resolve())).as_posix()}
        except ValueError:  # another drive of Windows
            return {}

    def _about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of a new run."""
        data, meta, best = self.data, self.data.meta, dict(self.data.meta)
        # Of those who are judged, which meta's is not if some are held out.
        if "_best" in data.columns:
            judged = data.split_rows("test", self.clients)
            best |= best_possible(data.columns, judged, tasks_in(data.meta)[0].kind)
        about: dict[str, Any] = {
            "held_out": len(self.held_out),
            "counts": {s: int(data.counts(s).sum()) for s in ("train", "valid", "test")},
            "fingerprint": self.conductor.identity["data"],
            "source": meta.get("source"),
            "sizes": sizes_of(data),
            "encoded": "encoded_by" in meta,
            **{key: meta[key] for key in ("partition", "opt_out", "follows_seed", "encoding") if key in meta},
        }
        more = {
            "best": best.get("best"),
            "best_global": best.get("best_global"),
            "partition_counts": partition_counts(data),
            "seen": hashlib.sha256(self.seen).hexdigest(),
            **({} if self.origin is None else {"continues": asdict(self.origin)}),
        }
        return self.conductor.about(about, in_use(self.engine, self.reason), more, self.settings.device)


def parted(
    data: FederatedData, out: float | tuple[str | int, ...], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients that federate and those held out, two sorted index arrays.

    Raises:
        DataError: there is no such client.
        ConfigError: nobody is left.
    """
    if not isinstance(out, tuple):
        everyone = np.arange(len(data)), np.zeros(0, np.int64)
        return hold_out(data, out, seed) if out else everyone
    held = np.unique(np.array([data.index(client) for client in out], np.int64))
    if len(held) == len(data):
        raise ConfigError("hold_out names every client, so nobody would train. Name fewer.")
    return np.setdiff1d(np.arange(len(data)), held), held


def divided(data: FederatedData) -> FederatedData:
    """Return data that are split; those that are not, by the usual rule, which is said."""
    if data.bounds is not None:
        return data
    warn(
        "The data were not split: of each client's examples 80 % train, 10 % are valid and 10 % test, drawn with seed 0. "
        "data.split_per_user(...) divides them otherwise."
    )
    return data.split_per_user()


def check_splits(settings: RunSettings, method: Method, data: FederatedData, clients: np.ndarray) -> None:
    """Check that the splits that a run asks for by name have an example of some client.

    Raises:
        DataError: one has none.
    """
    adapts = settings.evaluate_adapted
    phases = (*method.client.phases, *(method.adapt.phases if adapts else ()))
    asked = {
        "test": {"evaluate_shared": settings.evaluate_shared, "evaluate_adapted": adapts},
        "valid": {"early_stopping": any(phase.early_stopping for phase in phases)},
    }
    for split, asks in asked.items():
        by = [name for name, wanted in asks.items() if wanted]
        if by and not data.counts(split)[clients].any():
            raise DataError(
                "{asks} wants examples in the split {split!r}, and no client has one. Hold some out, e.g. "
                "data.split_per_user((0.8, 0.1, 0.1)), or leave it out.",
                asks=by[0],
                split=split,
            )
    if settings.evaluate_every and not any(data.counts(s)[clients].any() for s in ("valid", "test")):
        raise DataError(
            "evaluate_every = {every} wants examples in 'valid' or 'test', and no client has one. Hold some out, e.g. "
            "data.split_per_user((0.8, 0.1, 0.1)), or leave it out.",
            every=settings.evaluate_every,
        )


def train_counts(data: FederatedData, method: Method) -> np.ndarray:
    """Return for each client how many examples a round would train on: where all phases want opted-in ones, those.

    A client that opted out wholly is then never drawn (mixture of experts, authors' later code), but judged. Where all
    clients did, all are drawn, and rounds change nothing.
    """
    opted = data.columns.get("opted_in")
    if opted is None or any(phase.examples == "all" for phase in method.client.phases):
        return data.counts("train")
    rows = data.split_rows("train")
    inside = np.bincount(data.clients_of(rows[np.asarray(opted)[rows]]), minlength=len(data))
    return inside if inside.any() else data.counts("train")


FIRST = "initial.safetensors"
"""Of a saved run: what the method's module began with."""

MOST = 20_000
"""Numbers of clients times classes above which no plot shows them, where a partition dealt the examples."""
MOST_OWN = 2_000
"""Likewise where clients brought their own: nobody asked how they were dealt, and each number is 500 bytes of a page."""


def partition_counts(data: FederatedData) -> dict[str, Any] | None:
    """Return how many training examples of each class each client has, for reports.

    None where an example has no single class, or where it is more than ``MOST`` numbers, or ``MOST_OWN``.
    """
    task, *others = tasks_in(data.meta)
    most = MOST if "partition" in data.meta else MOST_OWN
    if others or task.name or not task.kind.one_class or len(data) * int(data.meta["classes"]) > most:
        return None
    opted = data.columns.get("opted_in")
    inside = None if opted is None else np.asarray(opted, bool)
    return {
        "clients": [str(name) for name in data.ids],
        "classes": [str(c) for c in data.meta.get("label_names") or range(int(data.meta["classes"]))],
        "counts": class_counts(data, "train").tolist(),
        "opted_out": []
        if inside is None
        else [c for c in range(len(data)) if not inside[data.split_rows("train", [c])].any()],
    }


ENGINES: dict[str, Callable[[], Engine]] = {
    "sequential": Sequential,
    "workers": Workers,
    "vectorised": Vectorised,
}


def check_engine(name: str, workers: int | None, device: str) -> None:
    """Check what a user asks for.

    Raises:
        ConfigError: no such engine, it has no workers, or it can't compute on the device.
    """
    if name not in (*ENGINES, "auto"):
        gpu = " To compute on a GPU say device = 'cuda'." * (name in ("gpu", "cuda"))
        raise ConfigError(
            "engine: there is no engine {name!r}.{near}{gpu} auto takes the one that it expects to be fastest.",
            name=name,
            near=instead_of(name, ["auto", *ENGINES]),
            gpu=gpu,
        )
    if workers not in (None, 1) and name not in ("workers", "auto"):  # one process is what every engine has
        raise ConfigError(
            "workers={workers} is for engine='workers' or 'auto'; the engine is {name!r}.",
            workers=workers,
            name=name,
        )
    if name == "workers":
        processes.gpus_of(device)


def make_engine(name: str, workers: int | None, device: str, cohort: int, rounds: int) -> tuple[Engine, str]:
    """Return the engine of a name, and why it was chosen; for ``auto`` the best one here, or one that finds out."""
    if name == "auto":
        return Auto(cohort, rounds, workers, device), ""
    return (Workers(workers) if name == "workers" else ENGINES[name]()), ""
