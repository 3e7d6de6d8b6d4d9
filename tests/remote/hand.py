"""A server by hand, for the tests of nodes: it keeps a ledger of versions, and every message goes through bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedkeep import FederatedData, Method
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.engines import Answer, Judged, Order, Sampler, first_global, run_round
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.experiments.simulate import train_counts
from fedkeep.methods import Sent
from fedkeep.remote import Packet, fingerprint
from fedkeep.remote.messages import (
    PROTOCOL,
    Answers,
    ClientOrder,
    Encode,
    EncodingFits,
    Hello,
    Judging,
    Message,
    Work,
    message_of,
    packet_of,
)
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.store import Line
from tests.remote.device_states import begun

RUN = "0123456789abcdef"


@dataclass
class Hand:
    """A run of a model and a method over nodes.

    Attributes:
        make: the model; server and nodes call it.
        method: the method.
        data: of all clients; ``nodes`` deals them out.
        changes: fields of the hello that differ.
        ledger: by client, the version accepted last.
        left: the bytes of all that nodes answered.
    """

    make: Callable[[], nn.Module]
    method: Method
    data: FederatedData
    seed: int = 0
    run: str = RUN
    changes: Mapping[str, Any] = field(default_factory=dict)
    ledger: dict[str, Line] = field(default_factory=dict)
    left: list[bytes] = field(default_factory=list)
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.encoding = Encoding.of(Ready(data=self.data).summary())
        model = self.make()
        self.given, self.method = self.method, self.method.resolved(model)  # a node fits it itself
        self.net = Net(self.method.made_for(model))
        self.parts = fingerprint.parts(self.net.module, self.method, self.net.initial(), self._plain())
        self.nodes: list[Node] = []
        self.place: dict[str, Node] = {}

    def _plain(self) -> dict[str, Any]:
        import json

        return json.loads(self.encoding.to_json())

    def experiment(self, text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
        return self.make(), self.given

    def node(self, folder: Path, clients: Sequence[int], **terms: Any) -> Node:
        """Return a node with some clients."""
        given = OwnerTerms(**{"owner": "ann", "simulated_noise": True, "patience": 0.1, **terms})
        return Node(Ready(data=self.data.select(clients)), folder, given, self.experiment)

    def met(self, folder: Path, clients: Sequence[int], **terms: Any) -> Node:
        """Return a node with some clients, which has been told of the run."""
        node = self.node(folder, clients, **terms)
        self.meet(node)
        return node

    def hello(self, **changes: Any) -> Hello:
        given = {
            "protocol": PROTOCOL,
            "run": self.run,
            "code": fingerprint.code(),
            "experiment": "text",
            "seed": self.seed,
            "simulated_noise": True,
            **self.changes,
            **changes,
        }
        return Hello(**given)

    def encode(self, **changes: Any) -> Encode:
        given = {"run": self.run, "hello": self.hello(), "encoding": self._plain(), "fingerprint": self.parts}
        return Encode(**{**given, **changes})

    def meet(self, *nodes: Node) -> None:
        """Tell nodes of the run and its encoding."""
        for node in nodes:
            fits = message_of(self.say(node, self.encode()), EncodingFits)
            self.nodes.append(node)
            self.place |= dict.fromkeys(fits.clients, node)

    def say(self, node: Node, message: Message | Packet) -> Packet:
        """Carry a message to a node and its answer back, as bytes."""
        packet = packet_of(message) if isinstance(message, Message) else message
        content = node.serve(Packet.from_bytes(packet.to_bytes())).to_bytes()
        self.left.append(content)
        return Packet.from_bytes(content)

    def work(self, orders: Sequence[ClientOrder], round: int, attempt: int, **changes: Any) -> Work:
        given = {
            "run": self.run,
            "fingerprint": fingerprint.digest(self.parts),
            "encoding": self.parts["encoding"],
            "round": round,
            "attempt": attempt,
            "orders": tuple(replace(one, round=round) for one in orders),
            **changes,
        }
        return Work(**given)

    def order(self, order: Order, *, train: bool = True, judge: Sequence[Judging] = ()) -> ClientOrder:
        return ClientOrder(
            **vars(order),
            train=train,
            judge=tuple(judge),
            **self.ledger.get(order.client, Line())._asdict(),
        )

    def ask(self, node: Node, work: Work) -> Answers:
        packet = self.say(node, packet_of(work))
        assert packet.header["kind"] == "answers", packet.header
        return message_of(packet, Answers, self.method.split)

    def first_order(self, client: str, round: int = 0) -> Order:
        server = first_global(self.method, self.net, self.data)
        return Order(round=round, client=client, sent=Sent(params=server.params, state=server.state))

    # The device's side of the seam, for ``run_round``.

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        self.attempt, found = next(self.attempts), dict[str, Answer]()
        for node in self.nodes:
            mine = [self.order(order) for order in orders if self.place[order.client] is node]
            if mine:
                answers = self.ask(node, self.work(mine, orders[0].round, self.attempt))
                found |= {answer.client: answer for answer in answers.answers}
        for order in orders:
            yield found[order.client]

    def accept(self, shares: Mapping[str, float]) -> None:
        for client, share in shares.items():
            before = self.ledger.get(client, Line())
            self.ledger[client] = Line(before.version + 1, self.attempt, share)

    def judge(self, *given: Any) -> list[Judged]:
        raise NotImplementedError

    adapt = judge

    def prepare(self, round: int) -> str:
        return ""

    def apply(self) -> None:
        return None

    def go(self, rounds: int, cohort: int, on_nonfinite: str = "stop", begin: int = 0) -> None:
        """Run rounds as ``simulate`` does, and let the devices know of the last."""
        trains = train_counts(self.data, self.method).nonzero()[0]
        sampler = Sampler(trains, cohort, "shuffled", self.seed)
        faults = Faults(broken=on_nonfinite, malformed=on_nonfinite)  # type: ignore[arg-type]
        if begin == 0:
            self.server = first_global(self.method, self.net, self.data, population=sampler.count)
        for round in range(begin, rounds):
            clients = [str(self.data.ids[c]) for c in sampler(round)]
            server = self.server.but(progress=round / rounds)
            self.server, _ = run_round(
                self.method, self, server, clients, declared(self.method, self.net), faults
            )
        self.settle()

    def settle(self) -> None:
        """Tell devices which versions the server accepted last."""
        for node in self.nodes:
            mine = [self.order(self.first_order(c), train=False) for c in node.clients]
            answers = self.ask(node, self.work(mine, 0, next(self.attempts)))
            assert [a.fault for a in answers.answers] == [None] * len(mine)

    def kept(self) -> Params:
        """Return what all clients keep, stacked in the order of the data."""
        rows = []
        for client in map(str, self.data.ids):
            store = self.place[client]._runs[self.run].store
            rows.append(begun(store, client, self.ledger.get(client, Line())))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def only(split: str = "test", *models: str) -> Judging:
    return Judging(split=split, models=models or ("own",))  # type: ignore[arg-type]
