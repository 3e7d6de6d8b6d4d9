"""A run from its server's side, put together in one place wherever its clients are; the caller hands over the link."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedkeep.core.describe import describe, digest
from fedkeep.core.errors import ConfigError, RunError, check_choice
from fedkeep.core.files import check_tensors, layout
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, prefixed, under
from fedkeep.core.records import Record
from fedkeep.engines import Centralised, Engine, Sampler, first_global
from fedkeep.engines.first_values import declared
from fedkeep.experiments.environment import code_of, environment, warn_of_changed_code
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.trackers import Tracker, named_trackers
from fedkeep.methods import Global, Method, SecureMean, differentially_private
from fedkeep.methods.private import check_variances
from fedkeep.methods.server import Roster
from fedkeep.metrics import CLASS_METRICS
from fedkeep.nn.accelerate import swaps_of
from fedkeep.privacy import BudgetLedger, BudgetTerms, DifferentialPrivacy, epsilon
from fedkeep.privacy.budget_ledger import FILE, marks
from fedkeep.privacy.secure.secure_messages import LEAST
from fedkeep.store import PrivateStore, SqliteStore, VersionLedger
from fedkeep.tasks import Task, kinds_of
from fedkeep.tasks.results import ExampleResults

NAMED = 20
"""How many of the clients that were never drawn ``run.json`` names."""


class Clients(Roster, Protocol):
    """All clients, by id."""

    @property
    def ids(self) -> Sequence[str]:
        """Their ids."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Who is in a run, and what its server knows of their data.

    Attributes:
        clients: all of them.
        trains: the places of those from whom cohorts are drawn.
        judged: the places of those who are judged, int64.
        tasks: what is predicted.
        meta: what the data say of themselves.
        trained: (clients,) numbers of training examples; None where the server does not know them.
        joined: by a round, the places of those from whom cohorts are drawn from then on, as for ``Sampler``.
    """

    clients: Clients
    trains: np.ndarray
    judged: np.ndarray
    tasks: Sequence[Task]
    meta: Mapping[str, Any]
    trained: np.ndarray | None = None
    joined: Sequence[tuple[int, np.ndarray]] = ()


class Conductor:
    """What a run is, checked and drawn before its first round; then its folder, and what its rounds go on from.

    Args:
        settings: what the run is asked for.
        members: who is in it.
        name: for reports.
        seed: everything random follows from it.
        method: the method, without differential privacy.
        net: the model as a function.
        begins: the same with the federated values that the first round begins with; None: the net's own.
        privacy: differential privacy of clients.
        cohort: how many clients a round asks; None: the settings' number.
        drawn_by: what cohorts are drawn by; None: the seed.
        carried: adds what was charged before the run to the terms of its privacy.
        continues: of a run that goes on from another one, that one's id and its last round; its own rounds follow.
        config: the configuration that led here, kept in the run's folder.
        text: the text of its file; None: there is none.
    """

    def __init__(
        self,
        settings: RunSettings,
        members: Members,
        *,
        name: str,
        seed: int,
        method: Method,
        net: Net,
        begins: Net | None = None,
        privacy: DifferentialPrivacy | None = None,
        cohort: int | None = None,
        drawn_by: int | None = None,
        carried: Callable[[BudgetTerms], BudgetTerms] = lambda terms: terms,
        continues: tuple[str, int] | None = None,
        config: Mapping[str, Any] = {},
        text: str | None = None,
    ) -> None:
        self.settings, self.members, self.name, self.seed, self.net = settings, members, name, seed, net
        self.config, self.secretly = config, drawn_by is not None
        self.initial = {name: value.detach() for name, value in tensors_of(net.module).items()}
        self.trackers: Mapping[str, Tracker] = named_trackers(settings.trackers)
        self.sampler = Sampler(
            members.trains,
            settings.cohort if cohort is None else cohort,
            settings.sampling,
            seed if drawn_by is None else drawn_by,
            members.joined,
        )
        self.terms: BudgetTerms | None = None
        if privacy is not None:
            self.terms = carried(terms_of(privacy, self.sampler, settings.centralised))
            method = differentially_private(method, privacy, self.sampler.cohort)
        self.method = method
        if not settings.centralised:
            check_cohorts(method, self.sampler)
            check_variances(method, net.module)
        check_judging(method, settings.evaluate_shared, settings.evaluate_adapted)
        self.metrics = named_metrics(settings.metrics or (), members.tasks)
        self.first = 0 if continues is None else continues[1]
        self.rounds = self.first + settings.length(self.sampler.rounds_per_epoch)
        every = settings.evaluate_every
        self.every = self.sampler.rounds_per_epoch if every is None else every
        self.server = first_global(method, begins or net, members.clients, self.sampler.count)
        if self.terms is not None:  # patterns of clip that don't fit are said now
            start = {**self.server.params, **declared(method, net)}
            method.server.reduce.begin(self.server, start, ())
        self.versions = VersionLedger(len(members.clients))
        self.directory: RunDirectory | None = None
        self.history: list[Record] = []
        self.best: dict[str, Any] = {}
        self.examples: ExampleResults | None = None
        self.chosen: Global | None = None
        self.marked: VersionLedger | None = None
        self.pending: Global | None = None
        self.ledger: BudgetLedger | None = None
        self.identity: dict[str, Any] = {
            "seed": seed,
            **settings.identity(
                rounds=self.rounds,
                cohort=self.sampler.cohort,
                evaluate_every=self.every,
                metrics=list(self.metrics) or None,
            ),
            "method": describe(method),
            **({} if continues is None else {"continues": list(continues)}),
            "model": {
                "layers": repr(net.module),
                "initial_sha256": digest(self.initial),
                "frozen_sha256": method.split.halves(net.module).frozen_digest(self.initial),
            },
        }
        self.length = {
            "config": describe(dict(config)),
            "config_text": text,
        }  # goes along with the number of rounds

    def open(
        self, folder: Path, resume: bool, about: Callable[[], Mapping[str, Any]], run: str = ""
    ) -> RunDirectory:
        """Make the run's folder, or open it to go on.

        Args:
            folder: which.
            resume: whether it is there.
            about: returns what ``run.json`` says of a new run.
            run: the id of a new run; empty: one is drawn.

        Raises:
            RunError: as for ``RunDirectory``.
        """
        if resume:
            self.directory = RunDirectory.open(folder, self.identity, length=self.length)
        else:
            self.directory = RunDirectory.create(folder, about(), run_id=run)
        return self.directory

    def about(
        self, data: Mapping[str, Any], engine: tuple[str, str], more: Mapping[str, Any], device: str = "cpu"
    ) -> dict[str, Any]:
        """Return what ``run.json`` says of a new run.

        Args:
            data: what it says of the data, beside their name, task and number of clients.
            engine: the engine's name, and why it was chosen.
            more: what it says besides.
            device: where models compute.
        """
        initial, module = self.initial, self.net.module
        federated = self.method.split.halves(module).federated(initial)
        size = (
            None
            if self.settings.centralised
            else sum(v.numel() * v.element_size() for v in federated.values())
        )
        tasks = self.members.tasks
        return {
            "name": self.name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "running",
            **self.length,
            "seed": self.seed,
            "initial": initial_hashes(initial, self.net.trainable()),
            "method": self.method.name,
            "identity": self.identity,
            "split_table": self.method.split.table(module),
            **({} if self.method.head is None else {"head": self.method.head.layer}),
            "accelerated": asdict(swaps_of(module)),
            "environment": environment(device),
            "code": code_of(module),
            "data": {
                "name": self.members.meta.get("name", "data"),
                "task": kinds_of(tasks),
                "clients": len(self.members.clients),
                **data,
            },
            "engine": engine[0],
            "engine_reason": engine[1],
            "device": device,
            "centralised": self.settings.centralised,
            "rounds": self.rounds,
            "rounds_per_epoch": self.sampler.rounds_per_epoch,
            "cohort": self.sampler.cohort,
            "metric": tasks[0].kind.headline.name,
            "bytes_down": size,
            "bytes_up": size,
            **more,
        }

    def recover(self, engine: Engine, store: PrivateStore | None = None) -> None:
        """Return to the last round of the folder, if there is one; of one that is read no more is to be spent.

        Args:
            engine: as for ``restored``.
            store: of what clients keep, where they live in this process; the committed versions count from then on.
        """
        directory = self.directory
        if directory is not None:
            known = directory.read_info().get("code") or {}
            warn_of_changed_code(f"the run in {directory.folder}", known, self.net.module)
            state = directory.recover(self.versions, store if isinstance(store, SqliteStore) else None)
            extra, done = directory.extra, directory.round
            if state is not None:
                phases = len(self.method.client.phases)
                server = restored(directory.folder, state, self.server, engine, phases)
                self.server = after_round(server, done, self.rounds)
                if directory.best is not None:
                    then, best = (
                        restored(directory.folder, directory.best, self.server, None, phases),
                        directory.last.best,
                    )
                    self.chosen, self.marked = after_round(then, best.round, self.rounds), directory.marked
            self.history, self.examples = directory.history(), directory.examples()
            self.best = dict(extra.get("best", {}))
            self.pending = self.server if done and extra.get("pending") == done else None
        if directory is not None and not directory.writable:
            return
        self.ledger = ledger_of(self.terms, directory)
        if directory is not None:
            self.sampler.seed = int(directory.read_info().get("cohort_seed", self.sampler.seed))
            if self.ledger is not None and self.ledger.resumed and not self.ledger.terms.repeatable:
                # Rounds that may have been released may come again: one cohort that is released twice costs more than
                # two, each by coins of its own, which is what is charged. Noise from a seed comes again too.
                self.sampler.seed = secret_seed()
                directory.write_info({**directory.read_info(), "cohort_seed": self.sampler.seed})

    def undrawn(self) -> dict[str, Any]:
        """Return what ``run.json`` says of clients that no round drew: how many, and the first ones' ids."""
        if self.settings.centralised or self.secretly:
            return {}
        never = self.sampler.never(self.rounds, self.first)
        ids = [str(self.members.clients.ids[c]) for c in never[:NAMED]]
        return {"never_drawn": {"count": len(never), "ids": ids}} if never else {}


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
    folder: Path, tensors: Mapping[str, Tensor], server: Global, engine: Engine | None, phases: int
) -> Global:
    """Return the server that ``checkpoint`` was made of; a centralised engine's optimisers are put back.

    Args:
        folder: the run's, for messages.
        tensors: what ``checkpoint`` and ``centralised_state`` returned, on the device.
        server: a new one; gives what does not change in a run, and names, shapes and types.
        engine: as for ``centralised_state``; None: no round follows.
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


def check_judging(method: Method, shared: bool, adapted: bool) -> None:
    """Raise ConfigError where the method has no shared part that predicts, or no adaptation, and it is to be judged."""
    if shared and method.predict_shared is None:
        raise ConfigError(
            "evaluate_shared: the shared part of {method!r} cannot predict alone. Leave it out.",
            method=method.name,
        )
    if adapted and not method.adapt.phases:
        raise ConfigError(
            "evaluate_adapted: {method!r} has no phases of adaptation. Leave it out.", method=method.name
        )


def named_metrics(names: Sequence[str], tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the metrics that are measured beside the usual ones.

    Raises:
        ConfigError: one is not known or named twice, or no task is of classes.
    """
    for name in names:
        check_choice("metrics must be of", name, CLASS_METRICS)
    if len(set(names)) < len(names):
        raise ConfigError("metrics names one twice: {there}.", there=list(names))
    if names and not any(task.kind.has_classes for task in tasks):
        raise ConfigError(
            "metrics: {name} is of classes, and the data's task is {task!r}. Leave it out.",
            name=names[0],
            task=tasks[0].kind.name,
        )
    return tuple(names)


def check_cohorts(method: Method, sampler: Sampler) -> None:
    """Refuse a method that sums securely where a cohort may be of one client or none.

    Raises:
        ConfigError: says which cohorts there would be.
    """
    if not isinstance(method.server.reduce, SecureMean):
        return
    rest = sampler.count % sampler.cohort if sampler.mode == "shuffled" else 0
    if sampler.mode == "poisson" or (rest or sampler.cohort) < LEAST:
        raise ConfigError(
            "Secure sums want at least {least} clients in every cohort; of {count} clients, {cohort} "
            "a round, with sampling {mode!r}, one may be smaller. Take another cohort, or sampling = "
            "'independent'.",
            least=LEAST,
            count=sampler.count,
            cohort=sampler.cohort,
            mode=sampler.mode,
        )


def initial_hashes(initial: Params, trained: frozenset[str]) -> dict[str, Any]:
    """Return a hash of each initial value by name, for reports: of what is frozen, and of what is trained."""
    hashes = {n: digest({n: v})[:16] for n, v in initial.items()}
    return {
        "trained": {n: h for n, h in hashes.items() if n in trained},
        "frozen": {n: h for n, h in hashes.items() if n not in trained},
    }


def terms_of(privacy: DifferentialPrivacy, sampler: Sampler, centralised: bool = False) -> BudgetTerms:
    """Return what a run's rounds cost.

    Raises:
        ConfigError: rounds are not such that their cost is known, δ is not below 1 / N, or accounting isn't installed.
    """
    if centralised:
        raise ConfigError(
            "Differential privacy wants cohorts of clients, and centralised training has none: all data are in one "
            "place. Leave out centralised=True."
        )
    if sampler.mode != "poisson":
        raise ConfigError(
            "A budget wants a cohort that is drawn client by client: sampling must be 'poisson'; got "
            "{mode!r}. No other sampling has an ε that is known to hold.",
            mode=sampler.mode,
        )
    privacy.check_clients(sampler.count)
    if privacy.budget is not None:
        epsilon({}, privacy.delta)  # says now if the package is missing
    return BudgetTerms(
        clients=sampler.count,
        cohort=sampler.cohort,
        release=privacy.release(sampler.rate),
        delta=privacy.delta,
        budget=privacy.budget,
        accountant=privacy.accountant,
        repeatable=privacy.noise_seed is not None,
    )


def ledger_of(terms: BudgetTerms | None, directory: RunDirectory | None) -> BudgetLedger | None:
    """Return the ledger of a run, to go on with or begun; None without differential privacy.

    Raises:
        RunError: the ledger of a run that goes on is missing or damaged, or lacks a charge.
    """
    if terms is None or directory is None:
        return None if terms is None else BudgetLedger(terms)
    known = marks(directory.read_info(), directory.extra)
    if directory.round and not known:
        raise RunError(
            "{file} knows of no ledger. Restore the run from a copy.", file=directory.folder / "commit.json"
        )
    ledger = BudgetLedger.open(directory.folder / FILE, directory.id, terms, known)
    ledger.bind = directory.charged
    return ledger


def secret_seed() -> int:
    """Return what cohorts are drawn by that nobody can know."""
    return secrets.randbits(63)
