"""One fault at a time on a federation in this process: real nodes, device stores and folders, over a virtual clock.

A trial disturbs a run at an instant that its seed draws, lets it go on to its end, and compares it, to the bit, with a
run of the same rounds in one process in which the same clients took part: what the server has, what every client keeps,
and which version of it the server's ledger names.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Method, Phase, methods
from fedkeep.core.errors import FedkeepError, LostError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data.preparation import Encoding, Ready, Summary, merged
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
from fedkeep.engines.base import declared
from fedkeep.engines.faults import Faults
from fedkeep.methods import Global
from fedkeep.privacy import TopK
from fedkeep.remote import Packet, RoundPolicy
from fedkeep.remote.device_store import Wanted
from fedkeep.remote.kept import kept_rounds, roll_back
from fedkeep.remote.ledger import COLUMNS, Entry, Ledger, Made
from fedkeep.remote.memory import Died, MemoryTransport, Weather
from fedkeep.remote.node import Node, Terms
from fedkeep.remote.server import Federation, serve_run
from fedkeep.store import Default, MemoryStore
from fedkeep.store.database import Database

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


LOCAL = Phase(batch_size=4)
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


def encode(told: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the encoding of what nodes told."""
    summaries = [Summary.from_json(json.dumps(one)) for one in told]
    plain: Mapping[str, Any] = json.loads(Encoding.of(merged(summaries)).to_json())
    return plain


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
    count: dict[str, int] = field(default_factory=lambda: {"device": 0, "server": 0})

    def around(self, write: Callable[[], Any], is_sql: bool) -> Any:
        """Do a write, or not."""
        self.count[self.now] += 1
        hit = self.now == self.side and self.at and self.count[self.now] >= self.at
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


class Grid:
    """Nodes with their folders, a transport, and a server's folder."""

    def __init__(self, method: str, folder: Path, seed: int) -> None:
        self.method, self.folder, self.instants = method, folder, Instants()
        self.nodes = [self._start(number) for number in range(NODES)]
        self.lives = [0] * NODES
        self.names = {f"node-{number}": number for number in range(NODES)}
        self.transport = MemoryTransport(
            {name: self._serve(number) for name, number in self.names.items()}, seed=seed,
            takes=lambda name, packet: 1.0,
        )  # fmt: skip
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

    @property
    def out(self) -> Path:
        """The server's folder."""
        return self.folder / "run"

    def _start(self, number: int) -> Node:
        data = DATA.select(list(range(number, len(DATA), NODES)))
        terms = Terms(owner="ann", leaves="clients", simulated_noise=True, patience=0.2, history=ROUNDS)
        return Node(Ready(data=data), self.folder / f"device-{number}", terms, experiment)

    def _serve(self, number: int) -> Callable[[Packet], Packet]:
        def serve(packet: Packet) -> Packet:
            before, self.instants.now = self.instants.now, "device"
            try:
                self.before(number, packet)
                answer = self.nodes[number].serve(packet)
                self.behind(number, packet)
                return answer
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
            name="faults", text=self.method, build=lambda encoding: experiment(self.method, encoding), encode=encode,
            summarise={}, clients=len(DATA), rounds=ROUNDS, cohort=COHORT, seed=SEED, evaluate_every=2,
            leaves="clients", simulated_noise=True, policy=RoundPolicy(minimum=1),
        )  # fmt: skip
        accept, took = Ledger.accept, self.took

        def noted(ledger: Ledger, shares: Mapping[str, float], made: Mapping[str, Made]) -> None:
            if shares:
                took[made[next(iter(shares))].round] = set(shares)
            accept(ledger, shares, made)

        with mock.patch.object(Ledger, "accept", noted):
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
        for node in self.nodes:
            for client in node.clients:
                try:
                    ((run, running),) = node._runs.items() or [(None, None)]
                    store = running.store or node._open(run, running)
                    e = entries[client]
                    found[client] = store.begin(client, Wanted(e.version, e.attempt, e.share))
                except (FedkeepError, ValueError) as error:
                    missing[client] = str(error)
        names = next(iter(found.values()))
        every = [found.get(str(c), {n: torch.full_like(v, 7) for n, v in names.items()}) for c in DATA.ids]
        return {name: torch.stack([row[name] for row in every]) for name in names}, missing


def ledger_of(out: Path) -> dict[str, Entry]:
    """Return the ledger that a run's folder keeps."""
    from fedkeep.experiments.run_directory import RunDirectory

    directory = RunDirectory.open(out, write=False)
    store = directory.store(COLUMNS, DATA.ids)
    directory.recover(store)
    directory.close()
    return Ledger(store, DATA).entries([str(c) for c in DATA.ids])


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
    server = first_global(what, net, DATA, "cpu", sampler.count)
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


Fault = Callable[[Grid, random.Random], None]
"""Sets a fault up before the run starts."""


def device_dies_at_a_write(grid: Grid, draw: random.Random) -> None:
    """A node is killed before or after one of its writes."""
    grid.instants.side, grid.instants.at, grid.instants.after = (
        "device",
        draw.randint(1, 90),
        draw.random() < 0.5,
    )


def device_dies_at_an_await(grid: Grid, draw: random.Random) -> None:
    """A node is killed as it has read a message, or before its answer leaves."""
    left = [draw.randint(1, 25)]

    def die(number: int, packet: Packet) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Died

    if draw.random() < 0.5:
        grid.before = die
    else:
        grid.behind = die


def server_dies_at_a_write(grid: Grid, draw: random.Random) -> None:
    """The server is killed before or after one of its writes: between any two steps of a commit."""
    grid.instants.side, grid.instants.at, grid.instants.after = (
        "server",
        draw.randint(1, 110),
        draw.random() < 0.5,
    )


def server_dies_at_an_await(grid: Grid, draw: random.Random) -> None:
    """The server is killed as it sends, waits, or has just received."""
    left, transport = [draw.randint(1, 150)], grid.transport
    for name in ("send", "receive", "wait"):
        inner = getattr(transport, name)

        def call(*given: Any, inner: Any = inner) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Died
            return inner(*given)

        setattr(transport, name, call)


def both_die(grid: Grid, draw: random.Random) -> None:
    """A node is killed at an await and the server at a write, in one run."""
    device_dies_at_an_await(grid, draw)
    server_dies_at_a_write(grid, draw)


def messages_are_lost(grid: Grid, draw: random.Random) -> None:
    """One message in eight is lost."""
    grid.transport.weather = Weather(lose=0.125)


def messages_are_delayed(grid: Grid, draw: random.Random) -> None:
    """A third of the messages is overtaken by others, repetitions among them."""
    grid.transport.weather = Weather(delay=0.33, latest=200.0)


def messages_are_doubled(grid: Grid, draw: random.Random) -> None:
    """A third of the messages arrives twice, the second at any time."""
    grid.transport.weather = Weather(duplicate=0.33, delay=0.33, latest=200.0)


def messages_are_damaged(grid: Grid, draw: random.Random) -> None:
    """A bit of one message in ten is another."""
    grid.transport.weather = Weather(corrupt=0.1)


def device_disk_is_full(grid: Grid, draw: random.Random) -> None:
    """A node's disk is full for a while."""
    grid.instants.side, grid.instants.at, grid.instants.full = "device", draw.randint(20, 90), True


def server_disk_is_full(grid: Grid, draw: random.Random) -> None:
    """The server's disk is full for a while."""
    grid.instants.side, grid.instants.at, grid.instants.full = "server", draw.randint(10, 100), True


def clock_jumps(grid: Grid, draw: random.Random) -> None:
    """The time of day jumps by up to a day, forth and back, and the server is killed beside."""
    real = time.time_ns
    time.time_ns = lambda: real() + draw.randint(-86_400, 86_400) * 10**9
    grid.undo = lambda: setattr(time, "time_ns", real)  # type: ignore[attr-defined]
    server_dies_at_an_await(grid, draw)


def _between_rounds(grid: Grid, draw: random.Random, change: Callable[[int, Path], None]) -> None:
    """Kill a node at a message of a round, change its state while it is away, and let it come back."""
    left, number = [draw.randint(2, ROUNDS)], draw.randrange(NODES)

    def die(where: int, packet: Packet) -> None:
        if where == number and packet.header["kind"] == "work":
            left[0] -= 1
            if left[0] == 0:
                raise Died

    def gone(name: str) -> None:
        grid.nodes[number].close()
        for path in (grid.folder / f"device-{number}").glob("*.db"):
            change(number, path)
        grid.transport.after(30.0, lambda: grid.restart(name))

    grid.before = die
    grid.transport.on_death = gone


def state_is_damaged(grid: Grid, draw: random.Random) -> None:
    """A byte of a node's state is another."""

    def change(number: int, path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(content))

    _between_rounds(grid, draw, change)


def state_is_removed(grid: Grid, draw: random.Random) -> None:
    """A node's state is gone."""
    _between_rounds(grid, draw, lambda number, path: path.unlink())


def state_is_of_another(grid: Grid, draw: random.Random) -> None:
    """A node's state is another node's, or a renamed one of another run."""

    def change(number: int, path: Path) -> None:
        other = grid.folder / f"device-{(number + 1) % NODES}" / path.name
        if draw.random() < 0.5:
            shutil.copy(other, path)
        else:
            with sqlite3.connect(path) as sql:
                sql.execute('UPDATE about SET content = replace(content, \'"run": "\', \'"run": "0\')')

    _between_rounds(grid, draw, change)


def server_rolled_back(grid: Grid, draw: random.Random) -> None:
    """The server is killed and rolled back to an earlier round that it keeps; devices follow."""
    server_dies_at_an_await(grid, draw)
    grid.roll = True  # type: ignore[attr-defined]


FAULTS: Sequence[Fault] = (
    device_dies_at_a_write, device_dies_at_an_await, server_dies_at_a_write, server_dies_at_an_await, both_die,
    messages_are_lost, messages_are_delayed, messages_are_doubled, messages_are_damaged, device_disk_is_full,
    server_disk_is_full, clock_jumps, state_is_damaged, state_is_removed, state_is_of_another, server_rolled_back,
)  # fmt: skip
HARMED = {"state_is_damaged", "state_is_removed", "state_is_of_another"}
"""Faults that destroy a client's state: it must be reported, and nothing put in its place."""


def trial(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return what came of one fault."""
    draw = random.Random(f"{seed}/{number}")  # noqa: S311  which fault, and when
    fault, method = FAULTS[number % len(FAULTS)], draw.choice(list(METHODS))
    grid = Grid(method, folder, draw.randrange(2**32))
    fault(grid, draw)
    told: dict[str, Any] = {"number": number, "fault": fault.__name__, "method": method, "verdict": "equal"}
    try:
        with grid.instants.watched():
            if hasattr(grid, "roll"):
                _roll(grid, draw)
            told["starts"] = grid.serve_until_finished()
    except Exception as error:  # noqa: BLE001  the campaign says what it was
        return told | {"verdict": "unfinished", "why": f"{type(error).__name__}: {error}"}
    finally:
        getattr(grid, "undo", lambda: None)()
    server, kept, versions = undisturbed(method, grid.took)
    found, missing = grid.kept()
    everybody = {str(c) for c in DATA.ids}
    all_took = grid.took == _cohorts()
    told |= {"sat_out": sum(len(c) for c in _cohorts().values()) - sum(map(len, grid.took.values()))}
    if missing and fault.__name__ not in HARMED:
        return told | {"verdict": "lost", "why": str(missing)[:400]}
    rows = [k for k, c in enumerate(DATA.ids) if str(c) in everybody - missing.keys()]
    if {c: e.version for c, e in ledger_of(grid.out).items()} != versions:
        return told | {"verdict": "wrong resume", "why": "the ledger's versions"}
    if not same(server_of(grid.out), _flat(server)):
        return told | {"verdict": "wrong resume", "why": "the server's parameters"}
    if not same({n: v[rows] for n, v in found.items()}, {n: v[rows] for n, v in kept.items()}):
        return told | {"verdict": "mixed", "why": "private values"}
    if missing:
        events = (grid.out / "events.jsonl").read_text()
        quiet = [c for c in missing if f'"client": "{c}"' not in events and versions[c]]
        told |= {"reported": len(missing) - len(quiet)}
        if quiet:
            return told | {"verdict": "lost", "why": f"not reported: {quiet}"}
    for node in grid.nodes:
        node.close()
    return told | {"all_took_part": all_took}


def _roll(grid: Grid, draw: random.Random) -> None:
    with suppress(Died):
        grid.serve()
    if (grid.out / "run.json").exists() and (known := kept_rounds(grid.out)):
        to = draw.choice(known)
        roll_back(grid.out, to)
        grid.took = {number: clients for number, clients in grid.took.items() if number < to}


def _cohorts() -> dict[int, set[str]]:
    sampler = Sampler(len(DATA), COHORT, "shuffled", SEED)
    return {number: {str(DATA.ids[c]) for c in sampler(number)} for number in range(ROUNDS)}


def _flat(server: Global) -> Params:
    return {**server.params, **{f"server/{n}": v for n, v in server.state.items()}}


def server_of(out: Path) -> Params:
    """Return parameters and state that a run's folder keeps of the server."""
    from fedkeep.core.files import read_tensors

    (path,) = out.glob("server-*.safetensors")
    kinds = {"params/": "", "state/": "server/"}
    found = read_tensors(path)
    return {
        new + n.removeprefix(old): v
        for old, new in kinds.items()
        for n, v in found.items()
        if n.startswith(old)
    }
