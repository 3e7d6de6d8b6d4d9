"""Both apps of the conformance table on Flower: a node is told which case a run is by the run's own messages."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeep.core.params import Params
from fedkeep.core.records import Record
from fedkeep.data.preparation import Ready
from fedkeep.flower.client_app import answered
from fedkeep.flower.grid import GridTransport
from fedkeep.remote import Packet
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.served_run import serve_run
from fedkeep.store import Line
from tests.engines.test_conformance import CASES, reference
from tests.remote.device_states import begun
from tests.remote.federations import experiment, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import everyone, on_server, same_bits

FOLDER, ROWS = "FEDKEEP_CASES", "FEDKEEP_ROWS"
"""Environment variables: where states and results go, and the rows, as JSON: ``[[case, type], …]``."""

POLL = 2.0
"""Seconds between two looks for nodes; a node that has not answered a hello after 60 of them is asked again."""

client = ClientApp()
server = ServerApp()


@client.query()
def serve(message: Message, context: Context) -> Message:
    """Answer a message of any case."""
    torch.set_num_threads(1)
    number, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return answered(message, lambda packet: node(case_of(packet), number, count))


def case_of(packet: Packet) -> str:
    """Return the case of a packet's run; the first messages name it, and it is noted for the others."""
    header = packet.header
    noted = Path(os.environ[FOLDER]) / f"{header['run']}.case"
    told = header.get("experiment") or header.get("hello", {}).get("experiment")
    if told:
        part = noted.with_suffix(f".{os.getpid()}")
        part.write_text(told)
        part.replace(noted)
    return noted.read_text()


@lru_cache(maxsize=32)
def node(text: str, number: int, count: int) -> Node:
    """Return a node that has every ``count``-th client of a case."""
    data = CASES[text.rsplit(", ", 1)[0]].data
    places = list(range(number, len(data), count))
    terms = OwnerTerms(owner="ann", leaves="clients", simulated_noise=True)
    folder = Path(os.environ[FOLDER]) / text.replace("/", "-") / str(number)
    return Node(Ready(data=data.select(places)), folder, terms, experiment)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train every row, and write a line about each."""
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    transport = GridTransport(grid)
    while not (nodes := list(transport.nodes())):
        transport.wait(1)
    for case, kind in json.loads(os.environ[ROWS]):
        line = {
            "case": case,
            "kind": kind,
            **row(transport, case, kind, folder, int(os.environ.get("FEDKEEP_NODES", len(nodes)))),
        }
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def row(transport: GridTransport, case: str, kind: str, folder: Path, count: int) -> dict[str, Any]:
    """Train a row; say whether the server's values, all private ones and the records are those of ``sequential``."""
    out, began = folder / "runs" / f"{case}, {kind}", time.monotonic()
    try:
        history = serve_run(federation(case, kind), transport, out, progress=False, poll=POLL)
        seconds = time.monotonic() - began
        expected = reference(case, kind)
        return {
            "server": same_bits(server_of(out), on_server(expected)),
            "private": same_bits(
                kept(case, kind, out, count), everyone(expected.private, len(expected.data))
            ),
            "records_apart": apart(history, expected.history),
            "seconds": round(seconds, 1),
        }
    except Exception:  # noqa: BLE001  the other rows shall be trained too
        return {"error": traceback.format_exc(limit=-1)[-400:]}


def apart(found: Sequence[Record], expected: Sequence[Record]) -> float:
    """Return the largest difference of records; a node judges its own clients, so sums are formed in another order."""
    pairs = list(zip(found, expected, strict=True))
    if any(replace(one, value=0.0) != replace(other, value=0.0) for one, other in pairs):
        return math.inf
    return max(abs(a.value - b.value) for a, b in pairs if not math.isnan(a.value * b.value))


def kept(case: str, kind: str, out: Path, count: int) -> Params:
    """Return what all clients keep of the versions that the server's ledger names, stacked in the order of the data."""
    rows: dict[str, Params] = {}
    entries = ledger_of(out)
    run = json.loads((out / "run.json").read_text())["run"]
    for number in range(min(count, len(CASES[case].data))):
        one = node(f"{case}, {kind}", number, count)
        store = one._running(run).store
        for client_id in one.clients:
            entry = entries[client_id]
            rows[client_id] = begun(store, client_id, Line(entry.version, entry.attempt, entry.share))
        one.close()
    every = [rows[str(client_id)] for client_id in CASES[case].data.ids]
    return {name: torch.stack([r[name] for r in every]) for name in every[0]}
