"""A run across machines, from its server's side: preparation, rounds, a commit after each, and the end.

The server has no data. It keeps the usual run folder, with the ledger of versions in the place of private states, and
``events.jsonl`` beside it. Stopped at any instant and started again it goes on at the next round by itself.
"""

from __future__ import annotations

import datetime
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedkeep.core.describe import describe
from fedkeep.core.errors import ConfigError, RoundError, RunError
from fedkeep.core.net import Net
from fedkeep.core.records import Record, to_line
from fedkeep.data.preparation import Encoding
from fedkeep.engines import Leaves, Sampler, Sequential, first_global, first_kept, orders_of, run_round
from fedkeep.engines.faults import Faults
from fedkeep.engines.job import declared
from fedkeep.engines.round import Sampling
from fedkeep.experiments.budget import draw_anew, ledger_of, secret_seed
from fedkeep.experiments.drive import Drive, Plan, after_round, restored
from fedkeep.experiments.engine import check_judging
from fedkeep.experiments.environment import environment
from fedkeep.experiments.identity import initial_hashes, model_identity
from fedkeep.experiments.run_directory import RunDirectory, failure_noted, new_run_id, read_info
from fedkeep.experiments.taking_part import count_rounds
from fedkeep.experiments.trackers import Tracker, named_trackers, tracked
from fedkeep.methods import Method, newest
from fedkeep.privacy import DifferentialPrivacy, Terms
from fedkeep.remote import fingerprint
from fedkeep.remote.buffered import Buffered, check_buffered
from fedkeep.remote.continued import begun, older_for
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import Rules
from fedkeep.remote.headers import PROTOCOL, Encode, Hello
from fedkeep.remote.kept import Kept
from fedkeep.remote.ledger import COLUMNS, Attempts, Ledger
from fedkeep.remote.migration import OnChange
from fedkeep.remote.nodes import Nodes
from fedkeep.remote.policy import Retries, RoundPolicy
from fedkeep.remote.protection import protected
from fedkeep.remote.roster import Roster
from fedkeep.remote.secure_fleet import check_secure, fleet_of, summing
from fedkeep.remote.transport import Transport
from fedkeep.remote.waiting import wait_for_clients
from fedkeep.tasks import Task, kinds_of, tasks_in

Only = Literal["", "judge", "adapt"]
FOUND: Mapping[Only, str] = {"judge": "judged.jsonl", "adapt": "adapted.jsonl"}
"""Where the records of judging and adapting without a round are."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What runs, without any data.

    Attributes:
        name: for reports.
        text: the configuration that devices build the experiment from.
        build: makes model and method, given the encoding as JSON; devices do the same.
        encode: makes the encoding as JSON of what devices told of their data.
        summarise: what devices are asked to tell; None: nothing.
        clients: how many clients must be there for the run to begin.
        rounds, epochs, cohort, seed, sampling, evaluate_every, evaluate_shared, evaluate_adapted: as for ``simulate``.
        on_nonfinite: about clients whose training becomes NaN, as for ``simulate``.
        on_malformed: about clients whose upload is refused; on other machines that stops no run, unless it is said.
        policy: of the rounds.
        leaves: what of judging the server asks for.
        privacy: differential privacy of clients, as for ``simulate``; the server clips and adds the noise.
        cohort_seed: what cohorts are drawn by; None: the run's seed, or with ``privacy`` a secret of the server's.
        device_seed: what devices draw batches by; None: the run's seed, so that a simulation gives the same bits.
        simulated_noise: noise on uploads follows the seed too; for tests alone.
        continue_from: the folder of an older run that this one begins with: its encoding, its federated parameters, and
            what each client kept; it must be as it was until the first round has finished. None: there is none.
        on_change: about federated parameters that the older run does not have as the model does: ``"refuse"``, or begin
            them ``"anew"`` with the model's own values.
        config: the configuration, for the run's folder.
        trackers: who is told of the records, as for ``simulate``.
    """

    name: str
    text: str
    build: Callable[[Mapping[str, Any]], tuple[nn.Module, Method]]
    encode: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    summarise: Mapping[str, Any] | None = None
    clients: int = 1
    rounds: int | None = None
    epochs: float | None = None
    cohort: int = 10
    seed: int = 0
    sampling: Sampling = "shuffled"
    evaluate_every: int | None = None
    evaluate_shared: bool = False
    evaluate_adapted: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    on_malformed: Literal["stop", "skip"] = "skip"
    policy: RoundPolicy = field(default_factory=RoundPolicy)
    leaves: Leaves = "sums"
    privacy: DifferentialPrivacy | None = None
    cohort_seed: int | None = None
    device_seed: int | None = None
    simulated_noise: bool = False
    continue_from: Path | None = None
    on_change: OnChange = "refuse"
    config: Mapping[str, Any] = field(default_factory=dict)
    trackers: Sequence[str | Tracker] = ()


def serve_run(
    federation: Federation,
    transport: Transport,
    out: Path,
    *,
    patience: float = 3600.0,
    pause: float = 10.0,
    keep_rounds: int = 0,
    only: Only = "",
    poll: float = 1.0,
    again: float = 600.0,
    progress: bool | None = None,
) -> list[Record]:
    """Run a federation to its end, or judge one; a folder that holds a run already is gone on with.

    Args:
        federation: what runs.
        transport: reaches the devices.
        out: the run's folder.
        patience: seconds to wait for clients before the first round.
        pause: seconds after a round that did not count, before it is tried again.
        keep_rounds: how many finished rounds to keep beside the last, so that ``roll_back`` can return to them.
        only: train nothing. ``"judge"``: measure the finished rounds' models on all clients and write ``judged.jsonl``.
            ``"adapt"``: let all clients adapt on their devices, which keep the result; with ``evaluate_adapted`` measure
            it too, where devices' owners allow it, and write ``adapted.jsonl``.
        poll, again: as in ``Rules``.
        progress: as for ``simulate``.

    Returns:
        The run's records; with ``only`` those of judging or adapting.

    Raises:
        FedkeepError: with what was wanted, what was got and what to do.
    """
    goes_on = (out / "run.json").exists()
    if only and not goes_on:
        raise RunError(
            f"{out} holds no run to {only}. Name the folder of a run whose devices keep their states."
        )
    serving = _Serving(federation, transport, out, patience, poll, again)
    try:
        serving.begin(goes_on)
        return serving.finish(only) if only else serving.run(pause, keep_rounds, progress)
    finally:
        serving.close()


class _Serving:
    """The pieces of one run across machines."""

    def __init__(
        self,
        federation: Federation,
        transport: Transport,
        out: Path,
        patience: float,
        poll: float,
        again: float,
    ) -> None:
        self.federation, self.transport, self.out = federation, transport, out
        self.patience, self.poll, self.again = patience, poll, again
        self.events = Events(transport.now)
        self.trackers = named_trackers(federation.trackers)
        self.directory: RunDirectory | None = None

    def begin(self, goes_on: bool) -> None:
        """Meet the nodes, make or open the run's folder, and put all together."""
        info: Mapping[str, Any] = read_info(self.out) if goes_on else {"run": new_run_id()}
        if goes_on and "encoding" not in info:
            raise RunError(f"{self.out} is a simulation, not a run across machines. Name another folder.")
        self.older = older = older_for(self.federation.continue_from, self.out if goes_on else None)
        self.nodes = Nodes(
            self.transport, self._hello(str(info["run"])), self.events, patience=60 * self.poll
        )
        if not goes_on and older is None:
            self._wait("are there", lambda: sum(len(here.clients) for here in self.nodes.here.values()))
        self.encoding: Mapping[str, Any] = info["encoding"] if goes_on else self._encoding()
        module, self.method = self.federation.build(self.encoding)
        self.net = self.first = Net(self.method.made_for(module))
        if older is not None and older.values is not None:
            self.first = begun(self.net, self.method, older, self.federation.on_change, self.events)
        self.meta = Encoding.from_json(json.dumps(self.encoding)).meta
        self.tasks: Sequence[Task] = tasks_in(self.meta)
        self.parts = fingerprint.parts(self.net.module, self.method, self.net.initial(), self.encoding)
        self.nodes.encode(
            Encode(
                run=str(info["run"]),
                hello=self.nodes.hello,
                encoding=dict(self.encoding),
                fingerprint=dict(self.parts),
                versions={} if older is None else dict(older.versions),
            )
        )
        if goes_on:
            self.roster = Roster.from_plain(info["roster"])
        else:
            self._wait("fit the encoding", lambda: len(self.nodes.place))
            self.roster = Roster.of({client: self.nodes.counts[client] for client in self.nodes.place})
            if older is not None:
                older.tell_of(self.roster.ids, self.events)
        self._plan(info)
        self.directory = (
            RunDirectory.open(self.out, self.identity, length=self._length())
            if goes_on
            else RunDirectory.create(self.out, self._info(), run_id=str(info["run"]))
        )
        self.events.write_to(self.out / "events.jsonl")
        self._recover(self.directory)

    def run(self, pause: float, keep_rounds: int, progress: bool | None) -> list[Record]:
        """Run the rounds that are left, and tell devices of the last."""
        directory = self.directory
        assert directory is not None
        kept = Kept(self.out, keep_rounds, self.store.copy)
        self.fleet.committed = kept.keep
        drive, federation = self._drive(directory, progress), self.federation
        told = tracked(self.trackers, directory, drive.history, federation.name, federation.config)
        with failure_noted(directory), told as drive.told:
            retries = Retries(pause)
            while drive.server.round < self.rounds:
                try:
                    drive.go()
                except RoundError as error:
                    wait = retries.after(error, drive.server.round)
                    self.events.note("round", f"{error} It is tried again in {wait:g} s.")
                    self._pass(wait)
            self.fleet.settle(orders_of(self.method, drive.server, map(str, self.roster.ids)))
        if drive.server.round == self.rounds:
            directory.write_info({**directory.read_info(), "status": "finished"})
        return drive.history

    def finish(self, only: Only) -> list[Record]:
        """Judge all clients with what they keep and what the server has, or let them adapt to it."""
        assert self.directory is not None
        if only == "adapt" and not self.method.adapt.phases:
            raise ConfigError(
                f"{self.method.name!r} has no phases of adaptation, so there is nothing to adapt."
            )
        drive = self._drive(self.directory, None)
        records = drive.adapted_now() if only == "adapt" else drive.judged_now()
        if records:
            lines = "".join(map(to_line, records))
            (self.out / FOUND[only]).write_text(lines, encoding="utf-8")
        return records

    def close(self) -> None:
        """Release the folder."""
        if self.directory is not None:
            self.directory.close()

    def _hello(self, run: str) -> Hello:
        federation = self.federation
        seed = federation.seed if federation.device_seed is None else federation.device_seed
        asked = None if federation.summarise is None or self.older is not None else dict(federation.summarise)
        return Hello(
            protocol=PROTOCOL,
            run=run,
            code=fingerprint.code(),
            experiment=federation.text,
            seed=seed,
            simulated_noise=federation.simulated_noise,
            summarise=asked,
            continue_from="" if self.older is None else self.older.run,
        )

    def _wait(self, what: str, count: Callable[[], int]) -> None:
        wanted = self.federation.clients
        wait_for_clients(self.nodes, what, count, wanted=wanted, patience=self.patience, poll=self.poll)

    def _pass(self, seconds: float) -> None:
        end = self.transport.now() + seconds
        while self.transport.now() < end:
            self.transport.wait(end - self.transport.now())
            self.nodes.look()

    def _encoding(self) -> Mapping[str, Any]:
        if self.older is not None:
            return self.older.encoding
        told = [here.summary for here in self.nodes.here.values() if here.summary is not None]
        return self.federation.encode(told)

    def _plan(self, info: Mapping[str, Any]) -> None:
        federation = self.federation
        # Devices know the run's seed, and ε rests on cohorts that nobody knows.
        drawn_by = federation.seed if federation.privacy is None else secret_seed()
        own = drawn_by if federation.cohort_seed is None else federation.cohort_seed
        over = federation.policy.over_selection
        asked = -int(-(min(operator.index(federation.cohort), len(self.roster)) * over) // 1)
        self.sampler = Sampler(
            self.roster.trains, asked, federation.sampling, int(info.get("cohort_seed", own))
        )
        policy, population = federation.policy, len(self.roster.trains)
        self.terms: Terms | None = None
        if federation.privacy is not None:
            self.method, terms = protected(self.method, federation.privacy, self.sampler, policy)
            self.terms = terms if self.older is None else self.older.carried(terms)
        check_secure(self.method, self.sampler, policy)
        check_judging(self.method, federation.evaluate_shared, federation.evaluate_adapted)
        self.server = server = first_global(self.method, self.first, self.roster, self.sampler.count)
        if self.terms is not None:  # patterns of clip that don't fit are said now
            self.method.server.reduce.begin(server, {**server.params, **declared(self.method, self.net)}, ())
        if policy.mode == "buffered":
            check_buffered(self.method)
            if policy.buffer > population:
                raise ConfigError(
                    f"rounds.buffer must be at most the {population} clients that train; got {policy.buffer}."
                )
        self.rounds = count_rounds(federation.rounds, federation.epochs, self.sampler.rounds_per_epoch)
        every = federation.evaluate_every
        self.every = self.sampler.rounds_per_epoch if every is None else every
        self.identity = {
            "seed": federation.seed,
            "rounds": self.rounds,
            "cohort": federation.cohort,
            "sampling": federation.sampling,
            "pooled": False,
            "evaluate_every": self.every,
            "hold_out": 0.0,
            "on_nonfinite": federation.on_nonfinite,
            "min_clients": federation.policy.minimum,
            "method": describe(self.method),
            **({"evaluate_shared": True} if federation.evaluate_shared else {}),
            **({"evaluate_adapted": True} if federation.evaluate_adapted else {}),
            "model": model_identity(self.net.module, self.method, self.net.initial()),
            "encoding": self.parts["encoding"],
            "policy": asdict(federation.policy),
        }

    def _recover(self, directory: RunDirectory) -> None:
        federation = self.federation
        self.store = store = directory.store(COLUMNS, self.roster.ids)
        state = directory.recover(store)
        if state is not None:
            phases = len(self.method.client.phases)
            server = restored(directory.folder, state, self.server, Sequential(), phases)
            self.server = after_round(server, directory.round, self.rounds)
        self.budget = ledger_of(self.terms, directory)
        draw_anew(self.sampler, self.budget, directory)
        rules = Rules(
            run=directory.id,
            fingerprint=fingerprint.digest(self.parts),
            encoding=self.parts["encoding"],
            split=self.method.split,
            tasks=self.tasks,
            leaves=federation.leaves,
            poll=self.poll,
            again=self.again,
        )
        self.fleet = fleet_of(
            self.method, lambda number: self._cohort(number) if number < self.rounds else []
        )(
            self.nodes,
            rules,
            Ledger(store, self.roster, self.method.client.accept is not newest),
            federation.policy,
            cohort=min(federation.cohort, len(self.roster.trains)),
            events=self.events,
            attempts=Attempts(directory),
        )

    def _drive(self, directory: RunDirectory, progress: bool | None) -> Drive:
        federation, method = self.federation, summing(self.method, self.fleet)
        personal = bool(first_kept(method, self.net)) or method.predict is not method.predict_shared
        least = federation.policy.minimum
        faults = Faults(
            broken=federation.on_nonfinite,
            malformed=federation.on_malformed,
            minimum=least,
            tell=self.fleet.tell_fault,
        )
        plan = Plan(
            name=federation.name,
            method=method,
            rounds=self.rounds,
            sampler=self.sampler,
            roster=self.roster.ids,
            judged=range(len(self.roster)),
            tasks=self.tasks,
            meta=self.meta,
            every=self.every,
            faults=faults,
            evaluate_shared=federation.evaluate_shared,
            evaluate_adapted=federation.evaluate_adapted,
            reference="shared" if personal else "own",
            declared=declared(method, self.net),
            progress=progress,
        )
        train: Any = run_round
        if federation.policy.mode == "buffered":
            train = Buffered(method, self.fleet, self._cohort, self.sampler.cohort, self.sampler.count)
        extra = directory.extra
        pending = self.server if extra.get("pending") == self.server.round and self.server.round else None
        return Drive(
            plan=plan,
            server=self.server,
            device=self.fleet,
            history=directory.history(),
            best=dict(extra.get("best", {})),
            directory=directory,
            pending=pending,
            train=train,
            ledger=self.budget,
        )

    def _cohort(self, number: int) -> list[str]:
        return [str(self.roster.ids[place]) for place in self.sampler(number)]

    def _length(self) -> dict[str, Any]:
        return {"config": describe(dict(self.federation.config)), "config_text": self.federation.text}

    def _info(self) -> dict[str, Any]:
        federation, meta = self.federation, self.meta
        initial = self.net.initial()
        federated = self.method.split.halves(self.net.module).federated(initial)
        size = sum(v.numel() * v.element_size() for v in federated.values())
        counts = {s: sum(c.get(s, 0) for c in self.roster.counts) for s in ("train", "valid", "test")}
        return {
            "name": federation.name,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "running",
            **self._length(),
            "seed": federation.seed,
            "initial": initial_hashes(initial, self.net.trainable()),
            "method": self.method.name,
            "identity": self.identity,
            "split_table": self.method.split.table(self.net.module),
            "environment": environment(),
            "data": {
                "name": meta.get("name", "data"),
                "task": kinds_of(self.tasks),
                "clients": len(self.roster),
                "held_out": 0,
                "counts": counts,
                "fingerprint": {"encoding": self.parts["encoding"]},
                "source": None,
            },
            "engine": "remote",
            "engine_reason": "clients on other machines",
            "device": "cpu",
            "pooled": False,
            "rounds": self.rounds,
            "rounds_per_epoch": self.sampler.rounds_per_epoch,
            "cohort": self.sampler.cohort,
            "metric": self.tasks[0].kind.headline.name,
            "bytes_down": size,
            "bytes_up": size,
            "encoding": self.encoding,
            "roster": self.roster.plain(),
            "cohort_seed": self.sampler.seed,
            **({} if self.older is None else {"began_from": self.older.plain()}),
        }
