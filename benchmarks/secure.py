"""What a secure sum costs: 100 clients of a million parameters, 30 of which drop out, and smaller ones.

    python -m benchmarks.secure [--clients 100] [--parameters 1000000] [--only-client]

Beside it: one client's work in Flower's SecAgg+, by the functions that its ``secaggplus_mod`` calls, with all others as
neighbours: shares of two secrets, their encryption for each neighbour, then quantising and all masks of the vector.
``--only-client`` measures just the two clients' work, fedkeep's and Flower's in turn, ``results/secure-flower.json``.

Claim: the sum is that of the fixed-point numbers, exactly, whoever drops out. Seconds are of one core's work; on
devices clients compute side by side. Beside it: a table of rows, where all clients send all rows so that none
says which it has. Writes ``results/secure.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep.privacy.secure.ring import FixedPoint
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_messages import Keys
from fedkeep.privacy.secure.secure_server import SecureServer, threshold_for
from fedkeep.privacy.secure.shamir import SHARE

LOST, THRESHOLD = 0.3, 2 / 3
ROW_WISE = {"rows": 30_000, "width": 300, "held": 2_000}
"""A table of words: its rows, their width, and how many of them a client holds."""


def measured(clients: int, parameters: int, lost: int, bits: Any = 32) -> dict[str, Any]:
    """Return times, bytes and the error of one secure sum."""
    ring = FixedPoint(bound=1.0, clients=clients, bits=bits)
    threshold = threshold_for(clients, THRESHOLD)
    names = [f"client-{k:03}" for k in range(clients)]
    sides = {name: SecureClient(name, "1", threshold) for name in names}
    server, rng = SecureServer("1", threshold, parameters, ring.dtype), np.random.default_rng(0)
    for name in names:
        server.add_keys(name, sides[name].keys())
    keys, sealing, masking, unmasking = server.keys(), list[float](), list[float](), list[float]()
    sealed = 0
    for name in names:
        began = time.process_time()
        made = sides[name].shares(keys)
        sealing.append(time.process_time() - began)
        server.add_shares(name, made)
        sealed = sum(map(len, made.values()))
    boxes = {name: server.shares_for(name) for name in names}
    wanted, adding = np.zeros(parameters, np.int64), 0.0
    for name in names[lost:]:
        values = ring.encode(rng.uniform(-1, 1, parameters))
        wanted += values.view(np.int32 if bits == 32 else np.int64)
        began = time.process_time()
        vector = sides[name].masked(boxes[name], values)
        masking.append(time.process_time() - began)
        began = time.process_time()
        server.add_masked(name, vector)
        adding += time.process_time() - began
    survivors = server.survivors()
    for name in survivors:
        began = time.process_time()
        shares = sides[name].revealed(survivors)
        unmasking.append(time.process_time() - began)
        server.add_revealed(name, shares)
    began = time.process_time()
    total = server.total()
    taking_off = time.process_time() - began
    key = len(Keys.__dataclass_fields__) * 32
    return {
        "clients": clients,
        "parameters": parameters,
        "dropped_out": lost,
        "threshold": threshold,
        "bits": bits,
        "step": ring.step,
        "steps_off": int(np.abs(total.view(f"int{bits}") - wanted).max()),
        "client_seconds": {
            "shares": statistics.median(sealing),
            "masking": statistics.median(masking),
            "unmasking": statistics.median(unmasking),
        },
        "server_seconds": {"adding": adding, "taking_masks_off": taking_off},
        "client_bytes_up": {
            "keys": key,
            "shares": sealed,
            "vector": parameters * bits // 8,
            "unmasking": clients * SHARE,
        },
        "client_bytes_down": {"keys": key * clients, "shares": sealed},
        "plain_bytes_up": 4 * parameters,
    }


def beside_flower(clients: int, parameters: int, turns: int = 3) -> dict[str, Any]:
    """Return the seconds of a processor that a client works, fedkeep's and Flower's in turn; medians."""
    from benchmarks.contenders.secagg import Flower

    ring, threshold = FixedPoint(bound=1.0, clients=clients), threshold_for(clients, THRESHOLD)
    seconds: dict[str, list[float]] = {
        f"{who} {what}": [] for who in ("fedkeep", "flower") for what in ("shares", "masking")
    }
    values = np.random.default_rng(0).uniform(-1, 1, parameters)
    names = [f"client-{k:03}" for k in range(clients)]
    for _ in range(turns):
        sides = {name: SecureClient(name, "1", threshold) for name in names}
        keys = {name: side.keys() for name, side in sides.items()}
        boxes = {name: side.shares(keys)[names[0]] for name, side in sides.items() if name != names[0]}
        theirs, first = Flower(clients, threshold), sides[names[0]]
        for what, work in (
            ("fedkeep shares", lambda f=first, k=keys: f.shares(k)),
            ("flower shares", theirs.shares),
            ("fedkeep masking", lambda f=first, b=boxes: f.masked(b, ring.encode(values))),
            ("flower masking", lambda t=theirs: t.masked(values)),
        ):
            began = time.process_time()
            work()
            seconds[what].append(time.process_time() - began)
    return {
        "clients": clients,
        "parameters": parameters,
        "threshold": threshold,
        "turns": turns,
        "client_cpu_seconds": {what: statistics.median(each) for what, each in seconds.items()},
        "vector_bytes_up": {"fedkeep": 4 * parameters, "flower": 8 * parameters},
    }


def row_wise() -> dict[str, Any]:
    """Return what it costs that all clients send all rows of a table."""
    rows, width, held = ROW_WISE.values()
    plain, whole = held * width * 4 + held * 8, rows * width * 4
    return {**ROW_WISE, "plain_bytes_up": plain, "whole_bytes_up": whole, "times": whole / plain}


def main() -> None:
    """Measure, write ``results/secure.json``, and fail if a sum is not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--only-client", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    write("secure-flower", {**beside_flower(given.clients, given.parameters), "commit": commit()})
    if given.only_client:
        return
    cases = [
        (10, given.parameters // 10, 32),
        (given.clients, given.parameters // 10, 32),
        (given.clients, given.parameters // 10, 64),
        (given.clients, given.parameters, 32),
    ]
    lines = [
        measured(clients, parameters, round(LOST * clients), bits) for clients, parameters, bits in cases
    ]
    write("secure", {"sums": lines, "row_wise": row_wise(), "commit": commit()})
    assert all(line["steps_off"] == 0 for line in lines), [line["steps_off"] for line in lines]


if __name__ == "__main__":
    main()
