"""Claim: the memory of a federation's server does not grow with the cohort, where its reduction is a sum.

    python -m benchmarks.server_memory [--kinds mean private secure median] [--cohorts 10 100 1000] [--out FOLDER]

A round of FedAvg of a model of 20 MB, each client on a node of its own. The nodes are scripted: all answers are there at the
first look, which is the worst case, and each is made when it is pulled. Each cohort is measured in a process of its own; rows that are not measured anew are kept.
``private`` has clipping and noise; ``median`` needs all uploads, so it has a cohort of 10 alone; of ``secure`` it is the adding of masked vectors alone,
8 bytes a number, of cohorts up to 100. ``results/server-memory.json`` has the peak of the server's memory beyond what it had before the
round. The link, which keeps messages, is not in it. The sum of a block of 16 clients is in double precision, two models, and an
upload is a third; the sum of all waits in a temporary file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from fedkeep.core.allocator import give_large_back
from fedkeep.core.net import Net
from fedkeep.core.optim import sgd
from fedkeep.core.packet import Packet
from fedkeep.engines import first_global, run_round
from fedkeep.methods import Phase, SecureSums, fedavg
from fedkeep.methods.aggregate import sums_in_files
from fedkeep.methods.private import differentially_private
from fedkeep.methods.robust import Median
from fedkeep.methods.secure import Vectors
from fedkeep.privacy import DifferentialPrivacy
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_server import SecureServer
from fedkeep.remote.client_ledger import Ledger, RunClients
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import ExchangeRules
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.messages import Answers, ClientAnswer, packet_of
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.transport import Reply
from fedkeep.store import VersionLedger

WIDTH = 2236
"""A layer of so many by so many: five million numbers."""
FEW = {"median": 10, "secure": 100}
"""Clients at most where all uploads are held, five times over while they are sorted, or all clients have keys with each other."""


class Scripted:
    """Answers every order at once; an answer is made when it is pulled."""

    def __init__(self, split: Any) -> None:
        self.split, self.orders = split, dict[str, Any]()

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        new = [packet.header for _, packet in messages]
        tickets = [str(len(self.orders) + number) for number in range(len(new))]
        self.orders |= dict(zip(tickets, new, strict=True))
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        return [Reply(ticket, self._answer(self.orders[ticket])) for ticket in tickets]

    def _answer(self, header: Any) -> Packet:
        number = int(header["orders"][0]["client"])
        deltas = {
            "weight": torch.full((WIDTH, WIDTH), number * 1e-4),
            "bias": torch.full((WIDTH,), number * 1e-4),
        }
        answer = ClientAnswer(
            client=str(number), upload=self.split.arrived(deltas, 1.0 + number % 3, {}), loss=1.0
        )
        told = {name: header[name] for name in ("run", "round", "attempt")}
        return packet_of(Answers(answers=(answer,), **told))

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


def measured(cohort: int, kind: str) -> dict[str, Any]:
    """Return the peak of this process's memory in one round, beyond what it had before, in bytes."""
    give_large_back()  # as Flower's server app does
    ids = [str(number) for number in range(cohort)]
    if kind == "secure":
        return masked(ids)
    net = Net(nn.Linear(WIDTH, WIDTH))
    method = fedavg(local=Phase(optimizer=sgd(0.1), batch_size=4)).resolved(net.module)  # nobody trains
    if kind == "private":
        method = differentially_private(
            method, DifferentialPrivacy(noise=1.0, clip=1.0, heaviest=3.0), cohort
        )
    if kind == "median":
        method = method.on_server(reduce=Median())
    roster = RunClients.of({client: {"train": 1} for client in ids}, {})
    transport = Scripted(method.split)
    nodes: Any = SimpleNamespace(
        transport=transport, place={c: c for c in ids}, look=lambda: None, refusal=lambda client: None
    )
    fleet = Fleet(
        nodes,
        ExchangeRules(run="r", fingerprint="", encoding="", split=method.split, tasks=()),
        Ledger(VersionLedger(cohort), roster),
        RoundPolicy(),
        cohort=cohort,
        events=Events(transport.now),
        attempts=lambda: 1,
    )
    server = first_global(method, net, roster, cohort)
    before, began = now(), time.perf_counter()
    with sums_in_files():
        after, report = run_round(method, fleet, server, ids, {})
    most, seconds = peak() - before, time.perf_counter() - began
    assert report.clients == cohort
    if kind != "mean":
        return {"cohort": cohort, "bytes": most, "seconds": seconds}
    weights = sum(1.0 + number % 3 for number in range(cohort))
    mean = sum((1.0 + number % 3) * number * 1e-4 for number in range(cohort)) / weights
    moved = after.params["weight"] - server.params["weight"]
    assert torch.allclose(moved, torch.full_like(moved, mean), atol=1e-5)
    return {"cohort": cohort, "bytes": most, "seconds": seconds}


def masked(ids: Sequence[str]) -> dict[str, Any]:
    """Return the peak while masked vectors are added to a secure sum."""
    start = {"weight": torch.zeros(WIDTH, WIDTH), "bias": torch.zeros(WIDTH)}
    vectors = Vectors(SecureSums(clip=1.0), start, len(ids))
    server = SecureServer("r", vectors.threshold, vectors.size, vectors.ring.dtype)
    clients = {name: SecureClient(name, "r", vectors.threshold) for name in ids}
    for name, client in clients.items():
        server.add_keys(name, client.keys())
    keys = server.keys()
    for name, client in clients.items():
        server.add_shares(name, client.shares(keys))
    server.shares_for(ids[0])
    before, began = now(), time.perf_counter()
    for number, name in enumerate(ids):  # a masked vector is one of random numbers
        server.add_masked(name, np.full(vectors.size, number, vectors.ring.dtype))
    return {"cohort": len(ids), "bytes": peak() - before, "seconds": time.perf_counter() - began}


def now() -> int:
    """Return the memory that this process has, of which ``peak`` is the most from now on (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """Measure each cohort in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--kinds", nargs="*", default=["mean", "private", "secure", "median"])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, *args.kinds)))
        return
    model = 4 * (WIDTH * WIDTH + WIDTH)
    file = args.out / "server-memory.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    for kind, cohort in itertools.product(args.kinds, args.cohorts):
        if cohort > FEW.get(kind, cohort):
            continue
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.server_memory", f"--one={cohort}", "--kinds", kind],
            check=True,
            capture_output=True,
            text=True,
        )
        row = {"kind": kind, **json.loads(told.stdout), "commit": commit()}
        row["models"] = round(row["bytes"] / model, 1)
        rows = [old for old in rows if (old["kind"], old["cohort"]) != (kind, cohort)] + [row]
        write("server-memory", {"model": model, "rows": rows}, folder=args.out)


if __name__ == "__main__":
    main()
