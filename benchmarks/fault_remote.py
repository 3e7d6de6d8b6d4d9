"""One fault at a time on a federation in this process: real nodes, device stores and folders, over a virtual clock.

A trial disturbs a run at an instant that its seed draws, lets it go on to its end, and compares it, to the bit, with a
run of the same rounds in one process in which the same clients took part: what the server has, what every client keeps,
and which version of it the server's ledger names.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import fedkeep
from benchmarks.fault_grid import (
    COHORT,
    DATA,
    METHODS,
    NODES,
    ROUNDS,
    SEED,
    Grid,
    KeyOf,
    experiment,
    flat_of,
    ledger_of,
    same,
    server_of,
    undisturbed,
)
from fedkeep import FederatedData
from fedkeep.data.preparation import Ready
from fedkeep.engines import Sampler
from fedkeep.remote import Packet
from fedkeep.remote.client_ledger import Listed
from fedkeep.remote.device_tally import Limits, SignedWords
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.roll_back import kept_rounds, roll_back
from fedkeep.remote.transport import Died, Weather

Fault = Callable[[Grid, random.Random], None]
"""Sets a fault up before the run starts."""


def device_dies_at_a_write(grid: Grid, draw: random.Random) -> None:
    """A node is killed before or after one of its writes."""
    grid.instants.side, grid.instants.at, grid.instants.after = (
        "device",
        draw.randint(1, 140),
        draw.random() < 0.5,
    )


def device_dies_at_an_await(grid: Grid, draw: random.Random) -> None:
    """A node is killed as it has read a message, or before its answer leaves."""
    left = [draw.randint(1, 24)]

    def die(number: int, packet: Packet) -> None:
        left[0] -= 1
        if left[0] == 0:
            grid.hits += 1
            raise Died

    if draw.random() < 0.5:
        grid.before = die
    else:
        grid.behind = die


def server_dies_at_a_write(grid: Grid, draw: random.Random) -> None:
    """The server is killed before or after one of its writes: between any two steps of a commit."""
    grid.instants.side, grid.instants.at, grid.instants.after = (
        "server",
        draw.randint(1, 90),
        draw.random() < 0.5,
    )


def server_dies_at_an_await(grid: Grid, draw: random.Random) -> None:
    """The server is killed as it sends, waits, or has just received."""
    left, transport = [draw.randint(1, 34)], grid.transport
    for name in ("send", "receive", "wait"):
        inner = getattr(transport, name)

        def call(*given: Any, inner: Any = inner) -> Any:
            left[0] -= 1
            if left[0] == 0:
                grid.hits += 1
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
    grid.instants.side, grid.instants.at, grid.instants.full = "device", draw.randint(20, 140), True


def server_disk_is_full(grid: Grid, draw: random.Random) -> None:
    """The server's disk is full for a while."""
    grid.instants.side, grid.instants.at, grid.instants.full = "server", draw.randint(1, 90), True


def clock_jumps(grid: Grid, draw: random.Random) -> None:
    """The time of day jumps by up to a day, forth and back, and the server is killed beside."""
    real = time.time_ns
    time.time_ns = lambda: real() + draw.randint(-86_400, 86_400) * 10**9
    grid.undo = lambda: setattr(time, "time_ns", real)
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
            grid.hits += 1
        grid.transport.after(30.0, lambda: grid.restart(name))

    grid.before = die
    grid.transport.on_death = gone


def state_is_damaged(grid: Grid, draw: random.Random) -> None:
    """A byte of a node's state is another."""

    def change(number: int, path: Path) -> None:
        content = bytearray(path.read_bytes())
        used = [place for place, byte in enumerate(content) if byte]  # most of a small file is empty
        content[draw.choice(used)] ^= 1 << draw.randrange(8)
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
    grid.rolls_back = True


def network_is_down(grid: Grid, draw: random.Random) -> None:
    """No node is reached for up to two hours."""

    def down() -> None:
        grid.hits += 1
        there = list(grid.transport.nodes())
        for name in there:
            grid.transport.leave(name)

        def up() -> None:
            for name in there:
                grid.transport.join(name, grid._serve(grid.names[name]))

        grid.transport.after(draw.uniform(5, 7200), up)

    grid.transport.after(draw.uniform(1, 7), down)


def messages_are_replayed(grid: Grid, draw: random.Random) -> None:
    """A node gets an old message again, or the server an old answer."""
    asked: list[list[Packet]] = [[] for _ in range(NODES)]
    answered: list[list[Packet]] = [[] for _ in range(NODES)]

    def before(number: int, packet: Packet) -> None:
        if asked[number] and draw.random() < 0.3:
            grid.hits += 1
            grid.nodes[number].serve(draw.choice(asked[number]))
        asked[number].append(packet)

    def alter(number: int, answer: Packet) -> Packet:
        answered[number].append(answer)
        if len(answered[number]) > 1 and draw.random() < 0.15:
            grid.hits += 1
            return draw.choice(answered[number][:-1])
        return answer

    grid.before, grid.alter = before, alter


def answers_are_altered(grid: Grid, draw: random.Random) -> None:
    """An answer on its way gets another run, round, attempt or client, or other tensors, and a right checksum."""

    def alter(number: int, answer: Packet) -> Packet:
        if answer.header["kind"] != "answers" or draw.random() > 0.2:
            return answer
        grid.hits += 1
        header, tensors = json.loads(json.dumps(answer.header)), dict(answer.tensors)
        name = draw.choice(sorted(tensors)) if tensors else ""
        what = draw.choice(
            ("run", "round", "attempt", "client", *(("lost", "shape", "type") if name else ()))
        )
        if what == "client":
            header["answers"][0]["client"] = "user-99"
        elif what == "lost":
            del tensors[name]
        elif what == "shape":
            tensors[name] = torch.cat([tensors[name].flatten()] * 2)
        elif what == "type":
            tensors[name] = tensors[name].to(torch.int16)
        else:
            header[what] = "another" if what == "run" else header[what] + 1
        return Packet(header, tensors)

    grid.alter = alter


def uploads_are_hostile(grid: Grid, draw: random.Random) -> None:
    """A node sends NaN, infinite or huge tensors, or private ones."""

    def alter(number: int, answer: Packet) -> Packet:
        names = [name for name in answer.tensors if answer.tensors[name].is_floating_point()]
        if not names or draw.random() > 0.2:
            return answer
        grid.hits += 1
        tensors, name = dict(answer.tensors), draw.choice(sorted(names))
        private = f"{name.rpartition('/')[0]}/user"
        what = draw.choice(("nan", "inf", "huge", *(() if private in tensors else ("private",))))
        if what == "huge":
            tensors[name] = torch.zeros(5_000_000)
        elif what == "private":
            tensors[private] = torch.zeros(3)
        else:
            tensors[name] = torch.full_like(tensors[name], float(what))
        return Packet(answer.header, tensors)

    grid.alter = alter


def an_impostor_claims_clients(grid: Grid, draw: random.Random) -> None:
    """A node with a key of its own has the clients of another, with examples of its own; that one may be away."""
    victim, thief = draw.randrange(NODES), "thief"
    clients = list(range(victim, len(DATA), NODES))
    grid.transport.keys = KeyOf()
    if listed := draw.random() < 0.5:
        ids = [[str(DATA.ids[c]) for c in range(n, len(DATA), NODES)] for n in range(NODES)]
        grid.listed = Listed({f"key of node-{n}": names for n, names in enumerate(ids)})
    other = fedkeep.data.toy(users=7, examples=12, features=4, classes=3, seed=99).select(clients)
    terms = OwnerTerms(owner="thief", leaves="clients", simulated_noise=True, patience=0.2)
    node = Node(Ready(data=other), grid.folder / thief, terms, experiment)

    def come() -> None:
        grid.hits += 1
        grid.transport.join(thief, node.serve)
        if draw.random() < 0.5:
            grid.kill(victim)
            grid.back(victim, draw.uniform(5, 500))

    grid.transport.after(0.0 if listed and draw.random() < 0.5 else draw.uniform(3, 5), come)
    grid.must_say = "claims client"


def a_foreign_server_asks(grid: Grid, draw: random.Random) -> None:
    """Between the run's own messages nodes get those of another server, whose project nobody has signed for them."""
    grid.signed = {grid.method: SignedWords(preparation={})}
    for node in grid.nodes:
        node.signed = grid.signed

    def before(number: int, packet: Packet) -> None:
        if draw.random() < 0.5:
            return
        header = {**json.loads(json.dumps(packet.header)), "run": "0" * 32}
        if header["kind"] == "hello":
            header["experiment"] = next(name for name in METHODS if name != grid.method)
        if header["kind"] == "encoding":
            header["hello"] = {**header["hello"], "run": "0" * 32, "experiment": "foreign"}
        answer = grid.nodes[number].serve(Packet(header, packet.tensors))
        grid.hits += 1
        if answer.header["kind"] != "refused":
            grid.silent.append(f"a foreign {header['kind']} was answered by {answer.header['kind']}")

    grid.before = before


def server_asks_more_than_the_terms(grid: Grid, draw: random.Random) -> None:
    """After the last round a server asks on, with new attempts, for far more than was signed."""
    most = Limits(trainings=ROUNDS + draw.randint(0, 5), judgings=3 * ROUNDS)
    grid.signed = {grid.method: SignedWords(preparation={}, limits=most)}
    last: dict[int, Packet] = {}
    for node in grid.nodes:
        node.signed = grid.signed

    def before(number: int, packet: Packet) -> None:
        if packet.header["kind"] == "work" and any(one["train"] for one in packet.header["orders"]):
            last[number] = packet

    def ask_on() -> None:
        for number, packet in last.items():
            refused = 0
            for more in range(1, 4 * ROUNDS):
                header = {**packet.header, "attempt": packet.header["attempt"] + more}
                answer = grid.nodes[number].serve(Packet(header, packet.tensors))
                grid.hits += 1
                refused += (
                    answer.header["kind"] == "refused" and "agreed to at most" in answer.header["reason"]
                )
            if refused < 4 * ROUNDS - 1 - ROUNDS - 5:
                grid.silent.append(f"node {number} has refused {refused} of {4 * ROUNDS - 1} more orders")

    grid.before, grid.at_the_end = before, ask_on


def data_change(grid: Grid, draw: random.Random) -> None:
    """A node comes back with data of other columns, and later with its own."""
    left, number = [draw.randint(2, ROUNDS)], draw.randrange(NODES)

    def die(where: int, packet: Packet) -> None:
        if where == number and packet.header["kind"] == "work":
            left[0] -= 1
            if left[0] == 0:
                grid.hits += 1
                raise Died

    def come(name: str, data: FederatedData) -> None:
        grid.data[number] = data
        grid.transport.leave(name)
        grid.restart(name)

    def gone(name: str) -> None:
        wrong = fedkeep.data.toy(users=7, examples=12, features=5, classes=3)
        grid.transport.after(10.0, lambda: come(name, wrong))
        grid.transport.after(draw.uniform(40, 900), lambda: come(f"node-{number}.{grid.lives[number]}", DATA))

    def right() -> None:  # the run may be over before its owner has mended it
        grid.data[number] = DATA
        grid.nodes[number].close()
        grid.nodes[number] = grid._start(number)

    grid.before, grid.at_the_end = die, right
    grid.transport.on_death = gone
    grid.must_say = "takes no part"


FAULTS: Sequence[Fault] = (
    device_dies_at_a_write,
    device_dies_at_an_await,
    server_dies_at_a_write,
    server_dies_at_an_await,
    both_die,
    messages_are_lost,
    messages_are_delayed,
    messages_are_doubled,
    messages_are_damaged,
    device_disk_is_full,
    server_disk_is_full,
    clock_jumps,
    state_is_damaged,
    state_is_removed,
    state_is_of_another,
    server_rolled_back,
    network_is_down,
    messages_are_replayed,
    answers_are_altered,
    uploads_are_hostile,
    an_impostor_claims_clients,
    a_foreign_server_asks,
    server_asks_more_than_the_terms,
    data_change,
)
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
            if grid.rolls_back:
                _roll(grid, draw)
            told["starts"] = grid.serve_until_finished()
        grid.at_the_end()
    except Exception as error:  # noqa: BLE001  the campaign says what it was
        return told | {"verdict": "unfinished", "why": f"{type(error).__name__}: {error}"}
    finally:
        grid.undo()
    server, kept, versions = undisturbed(method, grid.took)
    found, missing = grid.kept()
    everybody = {str(c) for c in DATA.ids}
    all_took = grid.took == _cohorts()
    told |= {"hits": grid.hits + grid.instants.hits + (grid.transport.weather != Weather())}
    told |= {"sat_out": sum(len(c) for c in _cohorts().values()) - sum(map(len, grid.took.values()))}
    if missing and fault.__name__ not in HARMED:
        return told | {"verdict": "lost", "why": str(missing)[:400]}
    rows = [k for k, c in enumerate(DATA.ids) if str(c) in everybody - missing.keys()]
    if {c: e.version for c, e in ledger_of(grid.out).items()} != versions:
        return told | {"verdict": "wrong resume", "why": "the ledger's versions"}
    if not same(server_of(grid.out), flat_of(server)):
        return told | {"verdict": "wrong resume", "why": "the server's parameters"}
    if not same({n: v[rows] for n, v in found.items()}, {n: v[rows] for n, v in kept.items()}):
        return told | {"verdict": "mixed", "why": "private values"}
    events = (grid.out / "events.jsonl").read_text()
    if grid.silent or (grid.hits and grid.must_say not in events):
        return told | {
            "verdict": "silent",
            "why": "; ".join(grid.silent[:3]) or f"no event {grid.must_say!r}",
        }
    if missing:
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
