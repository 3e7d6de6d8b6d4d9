"""A run across machines, from its server's side: preparation, rounds, a commit after each, and the end.

The server has no data. It keeps the usual run folder, with the ledger of versions in the place of private states, and
``events.jsonl`` beside it. Stopped at any instant and started again it goes on at the next round by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn

from fedkeep.core.errors import ConfigError, DataError, RoundError, RunError, check_range
from fedkeep.core.net import Net
from fedkeep.core.records import Record, to_line
from fedkeep.data.preparation import Encoding, Summary, agreeing
from fedkeep.data.preparation.label_columns import LabelError, LabelSummary
from fedkeep.engines import Leaves, Sequential, orders_of, run_round
from fedkeep.engines.faults import Faults
from fedkeep.experiments.conductor import Conductor, Members, secret_seed
from fedkeep.experiments.drive import Drive
from fedkeep.experiments.run_directory import RunDirectory, new_run_id, read_info
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.methods import Method, SecureMean, newest
from fedkeep.methods.aggregate import sums_in_files
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.remote import fingerprint
from fedkeep.remote.attendance import attendance_of, dropped_from
from fedkeep.remote.buffered import Buffered, check_buffered
from fedkeep.remote.client_ledger import Attempts, Ledger, Listed, RunClients
from fedkeep.remote.continued import begun, encoding_from, older_for
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import ExchangeRules
from fedkeep.remote.joining import added_to, check_growth, listed_with
from fedkeep.remote.messages import PROTOCOL, Encode, Hello
from fedkeep.remote.migration import OnChange
from fedkeep.remote.nodes import Nodes, some_of, wait_for_clients
from fedkeep.remote.policy import Retries, RoundPolicy
from fedkeep.remote.pooled import pooled
from fedkeep.remote.roll_back import KeptRounds
from fedkeep.remote.secure_fleet import fleet_of, summing
from fedkeep.remote.transport import Transport
from fedkeep.tasks import Task, tasks_in

Only = Literal["", "judge", "adapt"]
FOUND: Mapping[Only, str] = {"judge": "judged.jsonl", "adapt": "adapted.jsonl"}
"""Where the records of judging and adapting without a round are."""


@dataclass(frozen=True, kw_only=True)
class Federation(RunSettings):
    """What runs, without any data: the settings of any run, and what a run across machines has besides.

    Devices say for themselves on what they compute, and that no client is held out, so ``engine``, ``workers``,
    ``device``, ``accelerate`` and ``hold_out`` have no meaning here; ``min_clients`` is the policy's ``minimum``.

    Attributes:
        name: for reports.
        text: the configuration that devices build the experiment from.
        build: makes model and method, given the encoding as JSON; devices do the same.
        summarise: the rules by which devices tell of their data, see ``ExchangeRules``.
        secure: the numbers of what they tell leave in secure sums alone, whose threshold this is; None: in the clear.
        clients: how many clients must be there for the run to begin.
        seed: everything random follows from it, as for ``simulate``.
        on_malformed: about clients whose upload is refused; on other machines that stops no run, unless it is said.
        policy: of the rounds.
        leaves: what of judging the server asks for.
        privacy: differential privacy of clients, as for ``simulate``; the server clips and adds the noise.
        cohort_seed: what cohorts are drawn by; None: the run's seed, or with ``privacy`` a secret of the server's.
        device_seed: what devices draw batches by; None: the run's seed, so that a simulation gives the same bits.
        simulated_noise: noise on uploads follows the seed too; for tests alone.
        continue_from: the folder of an older run that this one begins with: its encoding, extended by what devices tell
            of their data now, its federated parameters, and what each client kept; it must be as it was until the first round has finished. None: there is none.
        on_change: about federated parameters that the older run does not have as the model does: ``"refuse"``, or begin
            them ``"anew"`` with the model's own values.
        listed: which clients are of which node's key, by the owner's word; it may change between two starts. None: a
            client is of the key that first brought it.
        config: the configuration, for the run's folder.
    """

    name: str
    text: str
    build: Callable[[Mapping[str, Any]], tuple[nn.Module, Method]]
    summarise: Mapping[str, Any] = field(default_factory=dict)
    secure: float | None = None
    clients: int = 1
    seed: int = 0
    on_malformed: Literal["stop", "skip"] = "skip"
    policy: RoundPolicy = field(default_factory=RoundPolicy)
    leaves: Leaves = "sums"
    privacy: DifferentialPrivacy | None = None
    cohort_seed: int | None = None
    device_seed: int | None = None
    simulated_noise: bool = False
    continue_from: Path | None = None
    on_change: OnChange = "refuse"
    listed: Listed | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


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
        only: train nothing. ``"judge"``: measure the models of the best round on all clients and write
            ``judged.jsonl``. ``"adapt"``: let all clients adapt to them on their devices, which keep the result; with ``evaluate_adapted`` measure
            it too, where devices' owners allow it, and write ``adapted.jsonl``.
        poll, again: as in ``ExchangeRules``.
        progress: as for ``simulate``.

    Returns:
        The run's records; with ``only`` those of judging or adapting.

    Raises:
        FedkeepError: with what was wanted, what was got and what to do.
    """
    check_range("[0, inf]", keep_rounds=keep_rounds)
    goes_on = (out / "run.json").exists()
    if only and not goes_on:
        raise RunError(
            "{out} holds no run to {only}. Name the folder of a run whose devices keep their states.",
            out=out,
            only=only,
        )
    with sums_in_files(), closing(_Serving(federation, transport, out, patience, poll, again)) as serving:
        serving.begin(goes_on)
        return serving.finish(only) if only else serving.run(pause, keep_rounds, progress)


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
        self.conductor: Conductor | None = None
        self.turned_away = set[str]()

    def begin(self, goes_on: bool) -> None:
        """Meet the nodes, make or open the run's folder, and put all together."""
        info: Mapping[str, Any] = read_info(self.out) if goes_on else {"run": new_run_id()}
        if goes_on and "encoding" not in info:
            raise RunError(
                "{out} is a simulation, not a run across machines. Name another folder.", out=self.out
            )
        self.older = older = older_for(self.federation.continue_from, self.out if goes_on else None)
        listed = self.federation.listed
        self.nodes = Nodes(
            self.transport,
            self._hello(str(info["run"])),
            self.events,
            patience=60 * self.poll,
            listed=lambda: listed_with(listed, added_to(self.out)),
        )
        if goes_on:
            self.roster = RunClients.from_plain(info["roster"]).listed(self.nodes.listed)
            self.nodes.owners = self.roster.owners
        else:
            self.nodes.owners = {} if older is None else dict(older.owners)
            self._wait("are there", lambda: sum(len(here.clients) for here in self.nodes.here.values()))
        encoding = encoding_from(info["encoding"]) if goes_on else self._encoding()
        self.encoding: Mapping[str, Any] = json.loads(encoding.to_json())
        module, method = self.federation.build(self.encoding)
        self.method = method = method.resolved(module)
        self.net = first = Net(method.made_for(module))
        if older is not None and older.values is not None:
            change, grown = self.federation.on_change, older.grown(encoding)
            first = begun(self.net, method, older, change, self.events, grown)
        self.meta = encoding.meta
        self.tasks: Sequence[Task] = tasks_in(self.meta)
        self.parts = fingerprint.parts(self.net.module, method, self.net.initial(), self.encoding)
        self.nodes.encode(
            Encode(
                run=str(info["run"]),
                hello=self.nodes.hello,
                encoding=dict(self.encoding),
                fingerprint=dict(self.parts),
                versions={} if older is None else dict(older.versions),
            )
        )
        if not goes_on:
            self._wait("fit the encoding", lambda: len(self.nodes.place))
            counts = {client: self.nodes.counts[client] for client in self.nodes.place}
            self.roster = RunClients.of(counts, self.nodes.owners)
            if older is not None:
                older.tell_of(self.roster.ids, self.events)
        self.first = first
        self.conductor = self._conducted()
        directory = self.conductor.open(self.out, goes_on, self._about, str(info["run"]))
        if goes_on:
            directory.write_info({**directory.read_info(), **self._whose()})
        self.events.write_to(self.out / "events.jsonl")
        self._meet(self.conductor, directory)

    def run(self, pause: float, keep_rounds: int, progress: bool | None) -> list[Record]:
        """Run the rounds that are left, and tell devices of the last."""
        kept, retries = KeptRounds(self.out, keep_rounds), Retries(pause)
        while not self._ends(retries, kept, progress):
            self._take_in()
        conductor = self._conductor
        if lines := attendance_of(self.out).lines():
            assert conductor.directory is not None
            conductor.directory.write_info({**conductor.directory.read_info(), "attendance": lines})
        for line in lines:
            self.events.note("round", line)
        return conductor.history

    def _ends(self, retries: Retries, kept: KeptRounds, progress: bool | None) -> bool:
        """Run rounds, and tell devices of the last; False: there are other clients to draw from before it."""
        conductor, drive = self._conductor, self._drive(progress)
        self.fleet.after_commit = kept.keep
        with drive.under_way():
            while conductor.server.round < conductor.rounds and not self._others():
                try:
                    drive.go(self._others)
                except RoundError as error:
                    wait = retries.after(error, conductor.server.round)
                    self.events.note("round", f"{error} It is tried again in {wait:g} s.")
                    end = self.transport.now() + wait
                    while self.transport.now() < end:
                        self.transport.wait(end - self.transport.now())
                        self.nodes.look()
            if conductor.server.round < conductor.rounds:
                return False
            self.fleet.settle(orders_of(conductor.method, conductor.server, map(str, self.roster.ids)))
        return True

    def _others(self) -> bool:
        """Tell whether the next round draws from other clients than the last."""
        server = self._conductor.server
        there: int = self._conductor.sampler.population(server.round)
        return bool(self._newcomers()) or server.population != there

    def _newcomers(self) -> dict[str, Mapping[str, int]]:
        """Return by client of an added party, if it fits and is not in the run yet, its numbers of examples."""
        added = added_to(self.out)
        new = {
            client: self.nodes.counts[client]
            for client, node in self.nodes.place.items()
            if self.transport.key(node) in added and self.roster.ids.position(client) < 0
        }
        new = {client: counts for client, counts in new.items() if client not in self.turned_away}
        if new:
            conductor, after = self._conductor, self.roster.grown(new, {}, 0)
            try:
                check_growth(
                    self.method, self.first, self.roster, after, conductor.sampler, self.federation.policy
                )
            except ConfigError as error:
                self.turned_away.update(new)
                self.events.note("refused", f"{some_of(new)} cannot join the run on its way: {error}")
                return {}
        return new

    def _take_in(self) -> None:
        """Let those who were added join, and go on from the last finished round with them."""
        directory, round = self._conductor.directory, self._conductor.server.round
        assert directory is not None
        if new := self._newcomers():
            self.roster = self.roster.grown(new, self.nodes.owners, round)
            info = directory.read_info()
            directory.write_info({**info, **self._whose(), "data": {**info["data"], **self._size()}})
            self.events.note("joined", f"{some_of(new)} take part from round {round + 1} on.")
        run = directory.id
        directory.close()
        self.conductor = self._conducted()
        self._meet(self.conductor, self.conductor.open(self.out, True, self._about, run))

    def finish(self, only: Only) -> list[Record]:
        """Judge all clients with what they keep and what the server has, or let them adapt to it."""
        method = self._conductor.method
        if only == "adapt" and not method.adapt.phases:
            raise ConfigError(
                "{method!r} has no phases of adaptation, so there is nothing to adapt.", method=method.name
            )
        if self._conductor.chosen is not None:
            self._conductor.server = self._conductor.chosen  # a run is of its best round
        drive = self._drive(None)
        records = drive.adapted_now() if only == "adapt" else drive.judged_now()
        if records:
            lines = "".join(map(to_line, records))
            (self.out / FOUND[only]).write_text(lines, encoding="utf-8")
        return records

    def close(self) -> None:
        """Release the folder."""
        if self.conductor is not None and self.conductor.directory is not None:
            self.conductor.directory.close()

    @property
    def _conductor(self) -> Conductor:
        assert self.conductor is not None
        return self.conductor

    def _hello(self, run: str) -> Hello:
        federation = self.federation
        seed = federation.seed if federation.device_seed is None else federation.device_seed
        return Hello(
            protocol=PROTOCOL,
            run=run,
            code=fingerprint.code(),
            experiment=federation.text,
            seed=seed,
            simulated_noise=federation.simulated_noise,
            summarise=dict(federation.summarise),
            secure=federation.secure,
            continue_from="" if self.older is None else self.older.run,
        )

    def _wait(self, what: str, count: Callable[[], int]) -> None:
        wanted = self.federation.clients
        wait_for_clients(self.nodes, what, count, wanted=wanted, patience=self.patience, poll=self.poll)

    def _encoding(self) -> Encoding:
        """Return the encoding that follows from what devices tell of their data, or the older run's, extended by that.

        Raises:
            DataError: none does. Where a label is no class, the nodes that told it are named if they told it openly.
            ConfigError: the older run's cannot be extended.
        """
        summaries = dict[str, Summary]()
        if self.federation.secure is not None:
            told = pooled(self.nodes, patience=self.patience, poll=self.poll)
        else:
            here = self.nodes.here.items()
            summaries = {
                n: Summary.from_json(json.dumps(h.summary)) for n, h in here if h.summary is not None
            }
            told, _ = agreeing(summaries)
        try:
            return Encoding.of(told) if self.older is None else self.older.extended(told)
        except LabelError as error:
            columns = [(node, one) for node, its in summaries.items() for one in its.columns.values()]
            who = {
                node for node, one in columns if isinstance(one, LabelSummary) and error.label in one.words
            }
            place = f"Labels of node {some_of(who)}" if who else "Labels"
            raise DataError("{place}: {why}", place=place, label=error.label, why=error.why) from None

    def _conducted(self) -> Conductor:
        """Return the run, checked before its folder is made."""
        federation, policy, method = self.federation, self.federation.policy, self.method
        trains, later = self.roster.drawn
        check_policy(method, federation.privacy, policy)
        # Devices know the run's seed, and ε rests on cohorts that nobody knows.
        drawn_by = federation.seed if federation.privacy is None else secret_seed()
        own = drawn_by if federation.cohort_seed is None else federation.cohort_seed
        cohort = min(federation.cohort, self.roster.first)
        conductor = Conductor(
            federation,
            Members(
                clients=self.roster,
                trains=trains,
                judged=np.arange(len(self.roster)),
                tasks=self.tasks,
                meta=self.meta,
                joined=later,
            ),
            name=federation.name,
            seed=federation.seed,
            method=method,
            net=self.net,
            begins=self.first,
            privacy=federation.privacy,
            cohort=math.ceil(cohort * policy.over_selection)
            if policy.over_selection > 1
            else federation.cohort,
            drawn_by=own,
            carried=lambda terms: terms if self.older is None else self.older.carried(terms),
            config=federation.config,
            text=federation.text,
        )
        if policy.mode == "buffered" and policy.buffer > len(trains):
            raise ConfigError(
                "rounds.buffer must be at most the {trains} clients that train; got {buffer}.",
                trains=len(trains),
                buffer=policy.buffer,
            )
        conductor.identity |= {
            "cohort": federation.cohort,
            "min_clients": policy.least(cohort),
            "encoding": self.parts["encoding"],
            "policy": {
                k: v for k, v in asdict(policy).items() if k != "deadline"
            },  # which may change on the way
        }
        return conductor

    def _meet(self, conductor: Conductor, directory: RunDirectory) -> None:
        """Return to the last finished round, and put together what reaches the devices."""
        federation, sampler, method = self.federation, conductor.sampler, conductor.method
        conductor.recover(Sequential())
        conductor.server = conductor.server.but(population=sampler.population(conductor.server.round))
        rules = ExchangeRules(
            run=directory.id,
            fingerprint=fingerprint.digest(self.parts),
            encoding=self.parts["encoding"],
            split=method.split,
            tasks=self.tasks,
            leaves=federation.leaves,
            poll=self.poll,
            again=self.again,
        )
        self.fleet = fleet_of(
            method, lambda number: self._cohort(number) if number < conductor.rounds else []
        )(
            self.nodes,
            rules,
            Ledger(conductor.versions, self.roster, method.client.accept is not newest),
            federation.policy,
            cohort=min(federation.cohort, sampler.count),
            events=self.events,
            attempts=Attempts(directory),
            dropped=lambda: dropped_from(self.out),
        )
        if conductor.chosen is not None and conductor.marked is not None:
            self.fleet.best = conductor.chosen.round, conductor.marked

    def _drive(self, progress: bool | None) -> Drive:
        federation, conductor = self.federation, self._conductor
        method, sampler = summing(conductor.method, self.fleet), conductor.sampler
        cohort = min(federation.cohort, sampler.population(conductor.server.round))
        faults = Faults(
            broken=federation.on_nonfinite,
            malformed=federation.on_malformed,
            minimum=federation.policy.least(cohort),
            tell=self.fleet.tell_fault,
        )
        train: Any = run_round
        if federation.policy.mode == "buffered":
            train = Buffered(method, self.fleet, self._cohort, sampler.cohort, sampler.count)
        return Drive(
            conductor, self.fleet, faults, method=method, train=train, mark=self.fleet.mark, progress=progress
        )

    def _cohort(self, number: int) -> list[str]:
        return [str(self.roster.ids[place]) for place in self._conductor.sampler(number)]

    def _whose(self) -> dict[str, Any]:
        """Return what ``run.json`` says of whose clients are."""
        return {"roster": self.roster.plain(), "listed": self.federation.listed is not None}

    def _size(self) -> dict[str, Any]:
        """Return how many clients there are, and how many examples by split."""
        counts = {s: sum(c.get(s, 0) for c in self.roster.counts) for s in ("train", "valid", "test")}
        return {"clients": len(self.roster), "counts": counts}

    def _about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of a new run."""
        data = {
            "held_out": 0,
            **self._size(),
            "fingerprint": {"encoding": self.parts["encoding"]},
            "source": None,
        }
        more = {
            "encoding": self.encoding,
            **self._whose(),
            "cohort_seed": self._conductor.sampler.seed,
            **({} if self.older is None else {"began_from": self.older.plain()}),
        }
        return self._conductor.about(data, ("remote", "clients on other machines"), more)


def check_policy(method: Method, privacy: DifferentialPrivacy | None, policy: RoundPolicy) -> None:
    """Refuse rounds that a method, or differential privacy, cannot have.

    Raises:
        ConfigError: more clients are asked than are taken, or rounds overlap.
        MethodError: the method's rounds cannot overlap.
    """
    early = policy.over_selection > 1 or policy.mode == "buffered"
    if privacy is not None and early:
        raise ConfigError(
            "Differential privacy counts on a coin for each client and round: the first answers of more are none. "
            "Leave out rounds.over_selection and rounds.mode."
        )
    if isinstance(method.server.reduce, SecureMean) and early:
        raise ConfigError(
            "Secure sums take a vector of each client that has sent shares, in rounds one after another. Leave out "
            "rounds.over_selection and rounds.mode."
        )
    if policy.mode == "buffered":
        check_buffered(method)
