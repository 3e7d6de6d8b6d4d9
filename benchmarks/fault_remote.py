"""One fault at a time on a federation in this process: real nodes, device stores and folders, over a virtual clock.

A trial disturbs a run at an instant that its seed draws, lets it go on to its end, and compares it, to the bit, with a
run of the same rounds in one process in which the same clients took part: what the server has, what every client keeps,
and which version of it the server's ledger names.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.fault_grid import (
    COHORT,
    DATA,
    METHODS,
    NODES,
    ROUNDS,
    SEED,
    Grid,
    flat_of,
    ledger_of,
    same,
    server_of,
    undisturbed,
)
from fedkeep.engines import Sampler
from fedkeep.remote import Packet
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
