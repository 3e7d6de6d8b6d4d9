"""A federation in this process that can be disturbed: real nodes, device stores and folders, over a virtual clock."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Method, Phase, methods, sgd
from fedkeep.core.errors import FedkeepError, LostError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.core.run_files import read_info
from fedkeep.data.preparation import Ready
from fedkeep.engines import (
    Answer,
    Job,
    LocalDevice,
    Order,
    Sampler,
    Sequential,
    first_global,
    first_kept,
    run_round,
)
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.methods import Global
from fedkeep.privacy import TopK
from fedkeep.remote import Packet, RoundPolicy
from fedkeep.remote.client_ledger import Ledger, Listed, RunClients
from fedkeep.remote.device_tally import SignedWords
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.transport import Died, MemoryTransport
from fedkeep.store import Default, Line, MemoryStore, VersionLedger
from fedkeep.store.database import Database
from tests.remote.device_states import begun

ROUNDS, COHORT, NODES, SEED = 5, 4, 3, 3
DATA = fedkeep.data.toy(users=7, examples=12, features=4, classes=3)


class Taste(nn.Module):
    """A linear model with a private vector."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.shared(x) + self.user
        return logits


LOCAL = Phase(optimizer=sgd(0.1), batch_size=4)
METHODS: dict[str, Method] = {
    "furl": methods.furl("user", local=LOCAL),
    "the share of FedAvg": methods.furl("user", private_scale="fedavg", local=LOCAL),
    "scaffold": methods.scaffold(local=LOCAL),
    "top-k with error feedback": methods.furl("user", local=LOCAL).but(upload=(TopK(0.3),)),
}


def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    """Return model and method of a name; server and nodes call it."""
    torch.manual_seed(0)
    return Taste(), METHODS[text]


@dataclass
class Instants:
    """Writes of a side, counted; one of them is not survived, or finds the disk full.

    Attributes:
        at: which, from 1; 0: none.
        side: ``device`` or ``server``.
        after: whether the write itself is done before the process dies.
        full: whether the disk is full from that write on, for ``long`` writes, and nobody dies.
        count: writes so far, by side.
    """

    at: int = 0
    side: str = "server"
    after: bool = False
    full: bool = False
    long: int = 6
    now: str = "server"
    hits: int = 0
    count: dict[str, int] = field(default_factory=lambda: {"device": 0, "server": 0})

    def around(self, write: Callable[[], Any], is_sql: bool) -> Any:
        """Do a write, or not."""
        self.count[self.now] += 1
        hit = self.now == self.side and self.at and self.count[self.now] >= self.at
        self.hits += bool(hit)
        if not hit:
            return write()
        if self.full:
            if self.count[self.now] < self.at + self.long:
                raise (
                    sqlite3.OperationalError("database or disk is full")
                    if is_sql
                    else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                )
            return write()
        self.at = 0
        if self.after:
            write()
        raise Died

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count writes: flushes, renames, and statements that write."""
        query, for_each, fsync, replace = Database.query, Database.for_each, os.fsync, os.replace

        writing: set[int] = set()

        def one(db: Database, text: str, values: Sequence[Any] = ()) -> Any:
            if text == "BEGIN IMMEDIATE":
                writing.add(id(db))
            if id(db) not in writing or text.startswith(("SELECT", "PRAGMA", "ROLLBACK")):
                return query(db, text, values)
            if text == "COMMIT":
                writing.remove(id(db))
            return self.around(lambda: query(db, text, values), True)

        with (
            mock.patch.object(Database, "query", one),
            mock.patch.object(Database, "for_each", lambda *a: self.around(lambda: for_each(*a), True)),
            mock.patch.object(os, "fsync", lambda *a: self.around(lambda: fsync(*a), False)),
            mock.patch.object(os, "replace", lambda *a: self.around(lambda: replace(*a), False)),
        ):
            yield


class KeyOf(dict[str, str]):
    """By the name of a node, whatever life of it that is, what stands for its key."""

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        """Return it."""
        return f"key of {name.partition('.')[0]}"


class Grid:
    """Nodes with their folders, a transport, and a server's folder."""

    def __init__(self, method: str, folder: Path, seed: int) -> None:
        self.method, self.folder, self.instants = method, folder, Instants()
        self.data = [DATA] * NODES
        self.signed: Mapping[str, SignedWords] | None = None
        self.listed: Listed | None = None
        self.alter: Callable[[int, Packet], Packet] = lambda number, answer: answer
        self.at_the_end: Callable[[], None] = lambda: None
        self.silent: list[str] = []  # what somebody should have been told of
        self.must_say = ""  # words of an event that there must be
        self.nodes = [self._start(number) for number in range(NODES)]
        self.lives = [0] * NODES
        self.names = {f"node-{number}": number for number in range(NODES)}
        self.transport = MemoryTransport(
            {name: self._serve(number) for name, number in self.names.items()},
            seed=seed,
            takes=lambda name, packet: 1.0,
        )
        self.transport.on_death = lambda name: self.transport.after(30.0, lambda: self.restart(name))
        wait = self.transport.wait

        def limited(seconds: float) -> None:
            if self.transport.now() > 1e6:
                raise RuntimeError("nothing happened for days")
            wait(seconds)

        self.transport.wait = limited  # type: ignore[method-assign]
        self.before: Callable[[int, Packet], None] = lambda number, packet: None
        self.behind: Callable[[int, Packet], None] = lambda number, packet: None
        self.took: dict[int, set[str]] = {}
        self.undo: Callable[[], None] = lambda: None
        self.rolls_back = False
        self.hits = 0

    @property
    def out(self) -> Path:
        """The server's folder."""
        return self.folder / "run"

    def _start(self, number: int) -> Node:
        data = self.data[number].select(list(range(number, len(DATA), NODES)))
        terms = OwnerTerms(owner="ann", leaves="clients", simulated_noise=True, patience=0.2, history=ROUNDS)
        node = Node(Ready(data=data), self.folder / f"device-{number}", terms, experiment)
        node.signed = self.signed
        return node

    def _serve(self, number: int) -> Callable[[Packet], Packet]:
        def serve(packet: Packet) -> Packet:
            before, self.instants.now = self.instants.now, "device"
            try:
                self.before(number, packet)
                answer = self.nodes[number].serve(packet)
                self.behind(number, packet)
                return self.alter(number, answer)
            finally:
                self.instants.now = before

        return serve

    def kill(self, number: int) -> None:
        """End a node's process between two messages."""
        name = next(n for n, k in reversed(self.names.items()) if k == number)
        self.transport.leave(name)
        self.nodes[number].close()

    def restart(self, name: str) -> None:
        """Let a node come back under another name."""
        number = self.names[name]
        self.nodes[number].close()
        self.nodes[number] = self._start(number)
        self.lives[number] += 1
        new = f"node-{number}.{self.lives[number]}"
        self.names[new] = number
        self.transport.join(new, self._serve(number))

    def back(self, number: int, seconds: float) -> None:
        """Let a node that was killed come back in a while."""
        self.transport.after(seconds, lambda: self.restart(f"node-{number}"))

    def serve(self) -> None:
        """Serve the run to its end, from where it stands."""
        federation = Federation(
            name="faults",
            text=self.method,
            build=lambda encoding: experiment(self.method, encoding),
            clients=len(DATA),
            rounds=ROUNDS,
            cohort=COHORT,
            seed=SEED,
            evaluate_every=2,
            leaves="clients",
            simulated_noise=True,
            policy=RoundPolicy(minimum=1),
            listed=self.listed,
        )
        accept, took = Fleet.accept, self.took

        def noted(fleet: Fleet, shares: Mapping[str, float]) -> None:
            if shares:
                took[fleet.events.round] = set(shares)
            accept(fleet, shares)

        with mock.patch.object(Fleet, "accept", noted):
            serve_run(
                federation,
                self.transport,
                self.out,
                progress=False,
                keep_rounds=ROUNDS,
                again=60.0,
                patience=1e5,
            )

    def serve_until_finished(self, most: int = 12) -> int:
        """Serve the run, started again whenever its server dies or says that it stopped; return how many starts."""
        for start in range(1, most + 1):
            try:
                self.serve()
                return start
            except (Died, FedkeepError) as error:
                if start == most:
                    raise RuntimeError(f"the run did not finish: {error!r}") from error
        raise AssertionError

    def kept(self) -> tuple[Params, dict[str, str]]:
        """Return what clients keep of the versions that the ledger names, and why it is not there, by client."""
        entries, found, missing = ledger_of(self.out), dict[str, Params](), dict[str, str]()
        run = str(read_info(self.out)["run"])
        for node in self.nodes:
            for client in node.clients:
                try:
                    store = node._running(run).store
                    e = entries[client]
                    found[client] = begun(store, client, Line(e.version, e.attempt, e.share))
                except FedkeepError as error:
                    missing[client] = str(error)
        names = next(iter(found.values()))
        every = [found.get(str(c), {n: torch.full_like(v, 7) for n, v in names.items()}) for c in DATA.ids]
        return {name: torch.stack([row[name] for row in every]) for name in names}, missing


def ledger_of(out: Path) -> dict[str, Line]:
    """Return the ledger that a run's folder keeps."""
    from fedkeep.experiments.run_directory import RunDirectory

    directory = RunDirectory.open(out, write=False)
    versions = VersionLedger(len(DATA.ids))
    directory.recover(versions)
    directory.close()
    return Ledger(versions, RunClients(DATA.ids, [])).entries([str(c) for c in DATA.ids])


class Dropping(LocalDevice):
    """Clients in this process, of which some take no part in some rounds."""

    took: Mapping[int, set[str]] = {}

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train; those who took no part are lost."""
        for answer in super().train(orders):
            there = answer.client in self.took[orders[0].round]
            yield answer if there else Answer(client=answer.client, fault=LostError("as in the other run"))


def undisturbed(method: str, took: Mapping[int, set[str]]) -> tuple[Global, Params, dict[str, int]]:
    """Return what the server has and what clients keep, each client's number of accepted rounds too."""
    module, what = experiment(method, {})
    net = Net(what.made_for(module))
    store = MemoryStore(Default(first_kept(what, net), what.client.keep.value, SEED), DATA.ids)
    job = Job(what, net, DATA, store, SEED)
    device = Dropping(job, Sequential())
    device.took = took
    sampler = Sampler(len(DATA), COHORT, "shuffled", SEED)
    server = first_global(what, net, DATA, sampler.count)
    for number in range(ROUNDS):
        cohort = [str(DATA.ids[c]) for c in sampler(number)]
        given = server.but(progress=number / ROUNDS)
        server, _ = run_round(
            what, device, given, cohort, declared(what, net), Faults(broken="skip", malformed="skip")
        )
    versions = {str(c): sum(str(c) in clients for clients in took.values()) for c in DATA.ids}
    return server, store.read(range(len(DATA))), versions


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Tell whether names and bits are the same."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def server_of(out: Path) -> Params:
    """Return parameters and state that a run's folder keeps of the server."""
    from fedkeep.core.files import read_tensors
    from fedkeep.core.run_files import read_commit, read_info

    path = out / read_commit(out, read_info(out)).server
    kinds = {"params/": "", "state/": "server/"}
    found = read_tensors(path)
    return {
        new + n.removeprefix(old): v
        for old, new in kinds.items()
        for n, v in found.items()
        if n.startswith(old)
    }


def flat_of(server: Global) -> Params:
    return {**server.params, **{f"server/{n}": v for n, v in server.state.items()}}
