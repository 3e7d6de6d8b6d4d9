"""What a message across machines costs the processor, above a bare echo of the same bytes.

``python -m benchmarks.remote`` writes ``results/remote.json``. A message has one client. Both sides stand in this
process over ``MemoryTransport``; training is done beforehand, so a round is the server's work, the transport's, and
the node's with its durable state. Taken off are the same round with a device in this process, and nodes that send back
what they were told to. Its claim: at most 5 ms a message on W1, at most 3 ms for a FURL model of the conformance
table's size.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contenders.ours import federated, method_of, model_of
from benchmarks.fault_grid import DATA, experiment
from benchmarks.faults import commit
from benchmarks.measure import write
from benchmarks.workloads import WORKLOADS
from fedkeep import FederatedData, Method, Phase, methods, sgd
from fedkeep.core.net import Net
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.engines import (
    ClientResult,
    ClientToTrain,
    Job,
    LocalDevice,
    Sequential,
    first_global,
    first_kept,
    run_round,
)
from fedkeep.engines.first_values import declared
from fedkeep.methods import Sent
from fedkeep.remote import Packet, RoundPolicy, fingerprint
from fedkeep.remote.client_ledger import Ledger, RunClients
from fedkeep.remote.events import Events
from fedkeep.remote.exchange import ExchangeRules
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.messages import PROTOCOL, Encode, Hello
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.nodes import Nodes
from fedkeep.remote.transport import MemoryTransport
from fedkeep.store import Default, MemoryStore, VersionLedger
from fedkeep.tasks import tasks_in

CLIENTS, TURNS, SEED = 10, 21, 0
CLAIMS = {"W1": 5.0, "FURL": 3.0}


class Done:
    """An engine whose clients have been trained before."""

    name = "done"

    def __init__(self, result: ClientResult) -> None:
        self.result = result

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Yield the one result for each client."""
        for one in work:
            yield dataclasses.replace(self.result, client=one.client)

    def close(self) -> None:
        """Hold nothing."""


def workload(name: str) -> tuple[Callable[[], nn.Module], Method, FederatedData]:
    """Return a model, a method, and data of ``CLIENTS`` clients."""
    if name == "FURL":
        return (
            lambda: experiment("furl", {})[0],
            methods.furl("user", local=Phase(optimizer=sgd(0.1), batch_size=4)),
            DATA,
        )
    of = WORKLOADS[name]
    data = federated(of.data())
    return lambda: model_of(of, of.initial()), method_of(of), data.select(range(CLIENTS))


def cost(name: str, folder: Path) -> dict[str, Any]:
    """Return milliseconds of processor time a message: of a round over machines, and of its parts."""
    make, method, data = workload(name)
    module = method.made_for(make())
    net, count = Net(module), len(data)
    ids = [str(client) for client in data.ids]
    job = Job(method, net, data, MemoryStore(Default(first_kept(method, net)), data.ids), SEED)
    server = first_global(method, net, data)
    sent = Sent(params=server.params, state=server.state).flat
    (result,) = Sequential().train(job, [ClientToTrain(0, sent)], 0, 0.0)
    encoding = json.loads(Encoding.of(Ready(data=data).summary()).to_json())
    nodes = [
        Node(
            Ready(data=data.select([k])),
            folder / str(k),
            OwnerTerms(owner="ann"),
            lambda text, encoding: (make(), method),
            engine=Done(result),
        )
        for k in range(count)
    ]
    transport = MemoryTransport({f"node-{k}": node.serve for k, node in enumerate(nodes)})
    events = Events(transport.now)
    hello = Hello(protocol=PROTOCOL, run="a" * 32, code=fingerprint.code(), experiment="", seed=SEED)
    met = Nodes(transport, hello, events)
    parts = fingerprint.parts(module, method, net.initial(), encoding)
    met.encode(Encode(run=hello.run, hello=hello, encoding=dict(encoding), fingerprint=parts))
    while len(met.place) < count:
        met.look()
        assert not met.refusals, met.refusals
        transport.wait(1.0)
    ledger = Ledger(VersionLedger(len(ids)), RunClients(data.ids, []))
    rules = ExchangeRules(
        run=hello.run,
        fingerprint=fingerprint.digest(parts),
        encoding=parts["encoding"],
        split=method.split,
        tasks=tasks_in(data.meta),
    )
    fleet = Fleet(met, rules, ledger, RoundPolicy(), cohort=count, events=events)
    local = LocalDevice(job, Done(result))
    zeros = declared(method, net)
    answers = _answers(transport, fleet, method, server, ids, zeros)

    def remote(turn: int) -> None:
        run_round(method, fleet, server.but(round=turn), ids, zeros)
        fleet.committed()

    def here(turn: int) -> None:
        run_round(method, local, server.but(round=turn), ids, zeros)
        local.committed()

    def echo(turn: int) -> None:
        tickets = bare.send([(f"node-{k}", order) for k, (order, _) in enumerate(answers)])
        heard = 0
        while heard < count:
            heard += len(bare.receive(tickets))
            bare.wait(1.0)

    bare = MemoryTransport({f"node-{k}": lambda packet, a=answer: a for k, (_, answer) in enumerate(answers)})  # type: ignore[misc]
    times: dict[str, list[float]] = {"remote": [], "here": [], "echo": []}
    for turn in range(-3, TURNS):
        for what, call in (("remote", remote), ("here", here), ("echo", echo)):
            began = time.process_time()
            call(turn + 4)
            if turn >= 0:
                times[what].append(1e3 * (time.process_time() - began) / count)
    above = [r - h - e for r, h, e in zip(times["remote"], times["here"], times["echo"], strict=True)]
    for node in nodes:
        node.close()
    order, answer = (len(packet.to_bytes()) for packet in answers[0])
    return {
        "above_echo_ms": statistics.median(above),
        "claim_ms": CLAIMS[name],
        "messages_a_round": count,
        "rounds": TURNS,
        "order_bytes": order,
        "answer_bytes": answer,
        **{f"{k}_ms": statistics.median(v) for k, v in times.items()},
    }


def _answers(
    transport: MemoryTransport, fleet: Fleet, method: Method, server: Any, ids: Sequence[str], zeros: Any
) -> list[tuple[Packet, Packet]]:
    """Run a round and return each node's order and answer."""
    seen: list[tuple[Packet, Packet]] = []
    for name in transport.nodes():
        node = transport._nodes[name]
        serve = node.serve

        def noted(packet: Packet, serve: Callable[[Packet], Packet] = serve) -> Packet:
            answer = serve(packet)
            seen.append((packet, answer))
            return answer

        node.serve = noted
    run_round(method, fleet, server.but(round=0), ids, zeros)
    for name in transport.nodes():
        transport._nodes[name].serve = transport._nodes[name].serve.__defaults__[0]  # type: ignore[index]
    return seen


def main() -> int:
    """Return 0 if both claims hold."""
    torch.set_num_threads(1)
    found: dict[str, Mapping[str, Any]] = {}
    for name in CLAIMS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = cost(name, Path(folder))
        print(name, found[name], flush=True)
    write("remote", {"messages": found, "commit": commit()})
    return int(any(one["above_echo_ms"] > one["claim_ms"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
