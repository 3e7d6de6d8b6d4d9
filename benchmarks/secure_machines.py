"""What secure sums cost across machines: a round over nodes of one client each, with them and without, in turn.

    python -m benchmarks.secure_machines [--clients 20] [--rounds 4] [--turns 3]

Server and nodes stand in this process and take turns on one core, over a transport that turns each message into bytes;
so seconds are the work of all of them together. In the field nodes work side by side. Claim: the federated parameters
are those of plain sums to 1e-6, at two messages a round to a node. Writes ``results/secure-machines.json``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep import FederatedData, Method, Phase, averaging, methods, models, sgd
from fedkeep.core.files import read_tensors
from fedkeep.data.preparation import Ready
from fedkeep.methods import SecureSums, securely
from fedkeep.remote import Packet
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.transport import MemoryTransport

SUMS = SecureSums(clip=10.0, bits=64)
FEATURES, CLASSES, EXAMPLES = 1000, 100, 20


def data_of(clients: int) -> FederatedData:
    """Return clients with 20 examples of 1,000 numbers and one of 100 classes."""
    rng = np.random.default_rng(0)
    count = clients * EXAMPLES
    columns = {
        "x": rng.standard_normal((count, FEATURES)).astype("f4"),
        "label": rng.integers(0, CLASSES, count),
    }
    owner = np.repeat([f"client-{k:03}" for k in range(clients)], EXAMPLES)
    return FederatedData.from_columns(
        owner, columns, ["train"] * count, meta={"task": "multiclass", "classes": CLASSES}
    )


def run(clients: int, rounds: int, secure: bool) -> dict[str, Any]:
    """Return seconds and bytes of a run, and its parameters."""
    local = Phase(optimizer=sgd(0.1), batch_size=32)
    plain = methods.fedavg(local=local, server=averaging(by="uniform"))
    method, data = securely(plain, SUMS) if secure else plain, data_of(clients)

    def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[torch.nn.Module, Method]:
        torch.manual_seed(0)
        return models.Linear(FEATURES, CLASSES), method

    sent = {"bytes_down": 0, "bytes_up": 0, "messages": 0}

    def counted(serve: Callable[[Packet], Packet]) -> Callable[[Packet], Packet]:
        def serving(packet: Packet) -> Packet:
            answer = serve(packet)
            if packet.header["kind"] == "work":
                sent["messages"] += 1
                sent["bytes_down"] += len(packet.to_bytes())
                sent["bytes_up"] += len(answer.to_bytes())
            return answer

        return serving

    with tempfile.TemporaryDirectory() as folder:
        nodes = [
            Node(Ready(data=data.select([k])), Path(folder) / str(k), OwnerTerms(owner="x"), experiment)
            for k in range(clients)
        ]
        transport = MemoryTransport({f"node-{k}": counted(node.serve) for k, node in enumerate(nodes)})
        federation = Federation(
            name="cost",
            text="cost",
            build=lambda encoding: experiment("", encoding),
            clients=clients,
            rounds=rounds,
            cohort=clients,
            evaluate_every=0,
        )
        began = time.process_time()
        serve_run(federation, transport, Path(folder) / "run", progress=False)
        seconds = time.process_time() - began
        for node in nodes:
            node.close()
        (file,) = (Path(folder) / "run").glob("server-*.safetensors")
        params = {n: v for n, v in read_tensors(file).items() if n.startswith("params/")}
    each = clients * rounds
    return {
        "seconds_a_round": seconds / rounds,
        **{f"{k}_a_client": v / each for k, v in sent.items()},
        "params": params,
    }


def main() -> None:
    """Measure, write, and fail if the parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    turns = [
        {kind: run(given.clients, given.rounds, kind == "secure") for kind in ("plain", "secure")}
        for _ in range(given.turns)
    ]
    furthest = max(
        float((turn["plain"]["params"][n] - turn["secure"]["params"][n]).abs().max())
        for turn in turns
        for n in turn["plain"]["params"]
    )
    rows = {
        kind: {k: statistics.median(t[kind][k] for t in turns) for k in turns[0][kind] if k != "params"}
        for kind in ("plain", "secure")
    }
    ratio = statistics.median(t["secure"]["seconds_a_round"] / t["plain"]["seconds_a_round"] for t in turns)
    about = {"parameters": FEATURES * CLASSES + CLASSES, "bits": SUMS.bits, **vars(given)}
    found = {**about, **rows, "work_ratio": ratio, "furthest_from_plain": furthest, "commit": commit()}
    write("secure-machines", found)
    if not furthest < 1e-6:
        raise SystemExit(f"The parameters differ by {furthest} from plain sums.")


if __name__ == "__main__":
    main()
