"""One training of W1, for ``benchmarks.flower``: in Flower's simulation by fedkeep or Flower's own FedAvg, or on plain
actors of Ray's by fedkeep.

``python -m benchmarks.flower_rounds ours|theirs|actors ROUNDS FOLDER`` prints a line of JSON: each round's seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.contenders import Options
from benchmarks.contenders.flower import Flower
from benchmarks.contenders.flower import client as flower_client
from benchmarks.contenders.ours import federated, method_of, model_of
from benchmarks.workloads import WORKLOADS
from fedkeep import Method
from fedkeep.data.preparation import Ready
from fedkeep.flower.client_app import answered
from fedkeep.flower.grid import GridTransport
from fedkeep.remote import Packet
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.transport import Reply

FOLDER, NODES, SEED = "FEDKEEP_BENCH", 2, 0
OF = WORKLOADS["W1"]
BACKEND: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
client = ClientApp()


@client.query()
def serve(message: Message, context: Context) -> Message:
    """Answer for the clients of one of the nodes: several clients an actor."""
    torch.set_num_threads(1)
    number = int(context.node_config["partition-id"])
    return answered(message, lambda packet: node(number))


@lru_cache(maxsize=NODES)
def node(number: int) -> Node:
    """Return a node that has every second client."""
    data = federated(OF.data()).select(list(range(number, OF.clients, NODES)))
    return Node(
        Ready(data=data), Path(os.environ[FOLDER]) / str(number), OwnerTerms(owner="bench"), experiment
    )


def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    """Return W1's model and method."""
    return model_of(OF, OF.initial()), method_of(OF)


class Timed:
    """Notes when each round's first message goes out, and leaves all else to another transport."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.began = transport, list[float]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Send packets."""
        named = list(messages)
        if any(packet.header["kind"] == "work" for _, packet in named):
            self.began.append(time.perf_counter())
        return list(self.transport.send(named))


class Actors:
    """A transport to plain actors of Ray's, one for each node."""

    def __init__(self) -> None:
        import ray

        self.ray, made = ray, ray.remote(num_cpus=1)(Actor)
        self.actors, self.sent = (
            {str(number): made.remote(number) for number in range(NODES)},
            dict[str, Any](),
        )

    def nodes(self) -> list[str]:
        """Return all."""
        return list(self.actors)

    def send(self, messages: Iterable[tuple[str, Packet]]) -> list[str]:
        """Hand packets to actors, as bytes."""
        tickets = []
        for name, packet in messages:
            tickets.append(str(len(self.sent)))
            self.sent[tickets[-1]] = self.actors[name].serve.remote(packet.to_bytes())
        return tickets

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """Return what is there."""
        asked = {self.sent[ticket]: ticket for ticket in tickets if self.sent[ticket] is not None}
        done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for one in done:
            self.sent[asked[one]] = None
        return [Reply(asked[one], Packet.from_bytes(self.ray.get(one))) for one in done]

    def now(self) -> float:
        """Return a clock that never goes back."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait for any reply."""
        waiting = [one for one in self.sent.values() if one is not None]
        if waiting:
            self.ray.wait(waiting, timeout=seconds)


class Actor:
    """Answers for a node's clients."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        self.number = number

    def serve(self, content: bytes) -> bytes:
        """Answer a packet."""
        found = node(self.number)
        reply = found.serve(Packet.from_bytes(content))
        found.release()
        return reply.to_bytes()


def ours(transport: Any, rounds: int) -> list[float]:
    """Train with fedkeep; the last round's message tells devices of its end and is no round."""
    transport = Timed(transport)
    made = Federation(
        name="W1",
        text="",
        build=lambda encoding: experiment("", encoding),
        clients=OF.clients,
        rounds=rounds,
        cohort=OF.cohort,
        seed=SEED,
        evaluate_every=0,
    )
    serve_run(made, transport, Path(os.environ[FOLDER]) / "run", progress=False, poll=0.05)
    return [b - a for a, b in zip(transport.began, transport.began[1:], strict=False)][:rounds]


def theirs(grid: Grid, rounds: int) -> list[float]:
    """Train with Flower's strategy, its clients' arrays as NumPy's."""
    options = Options("flower", "W1", None, False, 1, False, "cpu")
    flower, seconds = Flower(options, grid), []
    for turn in range(rounds):
        clients = [(turn * OF.cohort + k) % OF.clients for k in range(OF.cohort)]
        began = time.perf_counter()
        flower.round(turn, clients)
        seconds.append(time.perf_counter() - began)
    return seconds


def on_actors(rounds: int) -> list[float]:
    """Train on plain actors."""
    import ray

    from benchmarks.flower_rounds import Actors

    torch.set_num_threads(1)
    ray.init(include_dashboard=False, configure_logging=False, **BACKEND["init_args"])
    return ours(Actors(), rounds)


def main() -> None:
    """Train once."""
    which, rounds, os.environ[FOLDER] = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if which == "actors":
        print(json.dumps(on_actors(rounds)))
        return
    server, found = ServerApp(), list[float]()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        found.extend(ours(GridTransport(grid), rounds) if which == "ours" else theirs(grid, rounds))

    from benchmarks import (
        flower_rounds,
    )  # Ray's actors import it too, which they cannot do with a main module

    run_simulation(
        server,
        flower_rounds.client if which == "ours" else flower_client,
        num_supernodes=NODES if which == "ours" else len(OF.data()),
        backend_config=BACKEND,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
