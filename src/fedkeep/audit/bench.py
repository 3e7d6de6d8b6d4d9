"""The bench of an audit: a short federation over a transport in this process, whose every byte is kept, and the device
that can be asked the same again with something changed.

What is asked again goes through the code that a device runs (``remote.serving.serve``), and is packed as it would
travel.
"""

from __future__ import annotations

import glob
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.audit.canaries import out_counts
from fedkeep.core.copying import copied
from fedkeep.core.errors import FailedError, MethodError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer
from fedkeep.core.packet import Packet
from fedkeep.core.params import SERVER, Params, clone
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Ready
from fedkeep.engines import Job, Sequential, first_kept
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.methods import Finish, Finished, Method, SecureMean
from fedkeep.methods.client import accepted
from fedkeep.privacy import GaussianNoise
from fedkeep.remote.device_store import DeviceStore
from fedkeep.remote.messages import Answers, Work, message_of, packet_of
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.serving import serve
from fedkeep.remote.transport import MemoryTransport, Serve
from fedkeep.store import Default, LedgerLines

FIRST = "node-0"
K = TypeVar("K")


class SentItem(NamedTuple):
    """Something that leaves: whose it is (empty: of a device's clients together), its kind, and its name."""

    client: str
    kind: str
    name: str

    @property
    def label(self) -> str:
        """The report's word for it; columns of one table are one thing."""
        if self.kind in ("judged", "counts"):
            return f"{self.kind}/{self.name.partition('/')[0]}"
        return f"{self.kind}/{self.name}" if self.name else self.kind


Items = dict[SentItem, Tensor]


class States(DeviceStore):
    """What clients keep, in memory, in step with the orders; or exactly what is planted.

    Args:
        default: of a new client.
        ids: of the clients.
        accept: the method's rule.
        fixed: by client, what it begins with, whatever the order says.

    Attributes:
        values: by client, what it began with last.
    """

    def __init__(
        self, default: Default, ids: Sequence[str], accept: Any, fixed: Mapping[str, Params]
    ) -> None:
        super().__init__(Path(), "", "", default, ids, accept=accept)
        self.fixed = fixed
        self.values: dict[str, Params] = {}
        self._made: dict[tuple[int, int], tuple[Params, Params, int]] = {}

    def begin(self, lines: LedgerLines) -> None:
        """Let the versions of an order count."""
        for client, line in lines.by_client().items():
            who = self._id(client)
            if who in self.fixed:
                values = dict(self.fixed[who])
            elif line.version == 0:
                values = self.default(who)
            else:
                before, after, round = self._made[client, line.attempt]
                values = accepted(self.accept, before, after, line.share, f"{who!r} in round {round}")
            self.values[who] = values
            if line.version or who in self.fixed:
                self._rows[client] = values

    def stage(self, client: int, params: Mapping[str, Tensor], attempt: int, round: int = 0) -> None:
        """Note what a client would keep."""
        made = {n: params[n].detach().cpu().clone() for n in self.default.initial}
        self._made[client, attempt] = self.values[self._id(client)], made, round

    def name(self, client: int, last: object, best: object, message: int) -> str:
        """Return nothing: which round is the best is no matter of what leaves in one."""
        return ""

    def adapted(self, client: int) -> None:
        """Return None: nothing stays of one message to the next."""

    def stage_adapted(self, client: int, values: Mapping[str, Tensor], attempt: int, round: int) -> None:
        """Do nothing: it stays on the device."""

    def flush(self) -> None:
        """Do nothing: it is in memory."""


@dataclass(frozen=True)
class Steady:
    """A ``finish`` that is told the rates it would be told if the federated ones were not zero."""

    hook: Callable[[Finish], Finished]
    given: Optimizer
    still: Optimizer

    def __call__(self, done: Finish) -> Finished:
        """Return what the hook gives."""
        other = "\0"  # no parameter has this name, so both optimisers have the same rate of it
        scale = done.rate(other) / self.still.rate(other) if self.still.rate(other) else 1.0
        return self.hook(replace(done, rate=lambda name: self.given.rate(name) * scale))


def still(method: Method, names: Iterable[str]) -> Method:
    """Return a method that moves some parameters by no gradient, and adds no noise; all else is as it was.

    Noise is drawn for one tensor after the other: it is other noise, where a table before it has other rows.
    """
    zero = tuple((glob.escape(name), 0.0) for name in names)
    phases = tuple(
        p.but(optimizer=replace(p.optimizer, rates=zero + p.optimizer.rates)) for p in method.client.phases
    )
    hook = method.client.finish
    if hook is not None:
        hook = Steady(hook, method.client.phases[0].optimizer, phases[0].optimizer)
    upload = tuple(
        replace(link, sigma=0.0) if isinstance(link, GaussianNoise) else link for link in method.upload
    )
    return method.on_client(phases=phases, finish=hook).but(upload=upload)


@dataclass
class Recorded:
    """What went between the server and one device: requests and answers, in order, as bytes."""

    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)

    def tap(self, serve: Serve) -> Serve:
        """Return a node's function that is listened to."""

        def tapped(packet: Packet) -> Packet:
            answer = serve(packet)
            self.pairs.append((packet.to_bytes(), answer.to_bytes()))
            return answer

        return tapped

    def of(self, kind: str) -> list[tuple[Packet, bytes]]:
        """Return the requests of a kind, and their answers as bytes."""
        pairs = [(Packet.from_bytes(asked), answer) for asked, answer in self.pairs]
        return [pair for pair in pairs if pair[0].header["kind"] == kind]

    def answered(self) -> list[tuple[Packet, bytes]]:
        """Return the orders that were not refused, and their answers as bytes."""
        return [p for p in self.of("work") if Packet.from_bytes(p[1]).header["kind"] == "answers"]

    def answers(self) -> list[Packet]:
        """Return all that left the device."""
        return [Packet.from_bytes(answer) for _, answer in self.pairs]


class _MadeBefore(NamedTuple):
    """What a device makes of a method before it has any data; ``given`` is only there to hold on to its id."""

    given: Method
    module: nn.Module
    kept: Params


class _Tables(NamedTuple):
    """The method as a device runs it with some data, and which tables the model looks up (``Net.lookup``)."""

    method: Method
    lookup: Mapping[str, str]


@dataclass(frozen=True)
class Bench:
    """A model, a method and a few clients' data; the first ones are on one device (``here``).

    Attributes:
        model: the user's module, left as it is.
        method: the method, without masks (``unmasked``).
        data: of all clients.
        seed: the run's.
        told: what devices told their owners.
    """

    model: nn.Module
    method: Method
    data: FederatedData
    seed: int
    told: list[str] = field(default_factory=list)
    _ready: dict[int, _MadeBefore] = field(default_factory=dict)
    _tables: dict[int, _Tables] = field(default_factory=dict)

    @property
    def here(self) -> int:
        """How many clients are on the device that is looked at: two, and more until it has all kinds of examples."""
        kinds = self.data.counts("valid"), self.data.counts("test"), out_counts(self.data)
        return max([min(2, len(self.data)), *(int((n > 0).argmax()) + 1 for n in kinds)])

    @cached_property
    def device(self) -> FederatedData:
        """The data of the device that is looked at."""
        return self.data.select(list(range(self.here)))

    def federate(self, rounds: int) -> dict[str, Recorded]:
        """Run a federation, and return what went between the server and each node."""
        rest = list(range(self.here, len(self.data)))
        nodes = {FIRST: self.device} | ({"node-1": self.data.select(rest)} if rest else {})
        heard = {name: Recorded() for name in nodes}
        federation = Federation(
            name="audit",
            text="audit",
            build=lambda encoding: (copied(self.model), self.method),
            clients=len(self.data),
            rounds=rounds,
            cohort=len(self.data),
            seed=self.seed,
            evaluate_every=1,
            simulated_noise=True,
            on_nonfinite="skip",
            policy=RoundPolicy(minimum=0),
        )
        with tempfile.TemporaryDirectory() as folder, quiet():
            made = {name: self.node(data, Path(folder) / name) for name, data in nodes.items()}
            transport = MemoryTransport({name: heard[name].tap(node.serve) for name, node in made.items()})
            try:
                serve_run(federation, transport, Path(folder) / "run", progress=False, pause=0.0)
            finally:
                for node in made.values():
                    node.close()
        return heard

    def node(self, data: FederatedData, folder: Path) -> Node:
        """Return a device with some data."""
        terms = OwnerTerms(owner="audit", simulated_noise=True)
        return Node(
            Ready(data=data),
            folder,
            terms,
            lambda text, _: (copied(self.model), self.method),
            tell=self.told.append,
        )

    def met(self, asked: Sequence[Packet], data: FederatedData) -> Items:
        """Return what the device tells before the first round, with other data."""
        with tempfile.TemporaryDirectory() as folder, quiet(), closing(self.node(data, Path(folder))) as node:
            return {key: value for packet in asked for key, value in items(node.serve(packet)).items()}

    def asked(
        self,
        works: Sequence[Packet],
        *,
        data: FederatedData | None = None,
        method: Method | None = None,
        fixed: Mapping[str, Params] | None = None,
    ) -> Iterator[tuple[Packet, dict[str, Params]]]:
        """Ask the device again, with nothing left in its memory; yield each answer, and what clients began with.

        Raises:
            MethodError: the method or the model failed at a client.
        """
        told: list[str] = []
        with quiet():
            own, kept, net, data = self._begun(method or self.method, data)
            default = Default(kept, own.client.keep.value, self.seed, net.buffers())
            states = States(default, data.ids, own.client.accept, fixed or {})
            job = Job(own, net, data, states, self.seed)
            for packet in works:
                work: Work = message_of(packet, Work)
                found: Answers = serve(
                    work,
                    job,
                    states,
                    Sequential(),
                    on_missing="refuse",
                    tell=told.append,
                    judges_moves=method
                    is None,  # without the moves of one half, the other may have no gradient
                )
                if any(isinstance(answer.fault, FailedError) for answer in found.answers):
                    raise MethodError(told[-1])
                yield packet_of(found), dict(states.values)

    def _begun(self, given: Method, data: FederatedData | None) -> tuple[Method, Params, Net, FederatedData]:
        """Return the method as a device runs it, what a new client keeps, the model, and the data.

        Tables are looked for in another copy of the model, and once for the device's own data.
        """
        if id(given) not in self._ready:
            module = given.made_for(copied(self.model))
            self._ready[id(given)] = _MadeBefore(given, module, first_kept(given, Net(module)))
        made, here = self._ready[id(given)], self.device if data is None else data
        tables = self._tables.get(id(given)) if data is None else None
        if tables is None:
            net = Net(copied(made.module))
            tables = _Tables(with_declared_tables(given, net, here), net.lookup)
            if data is None:
                self._tables[id(given)] = tables
        net = Net(copied(made.module))
        net.lookup = tables.lookup
        return tables.method, clone(made.kept), net, here

    def answer(self, work: Packet, fixed: Mapping[str, Params], **changes: Any) -> Packet:
        """Return the answer to one message from exactly what clients keep."""
        ((answer, _),) = self.asked([work], fixed=fixed, **changes)
        return answer

    def once(self, work: Packet, fixed: Mapping[str, Params], **changes: Any) -> Items:
        """Return what leaves then."""
        return items(self.answer(work, fixed, **changes))


def unmasked(method: Method) -> Method:
    """Return a method without the masks of secure sums, which would be others each time, and hide what is looked at."""
    reduce = method.server.reduce
    return method.on_server(reduce=reduce.mean) if isinstance(reduce, SecureMean) else method


def quiet() -> warnings.catch_warnings[None]:
    """Hide warnings: the run itself gives them, and an audit would give each a hundred times."""
    return warnings.catch_warnings(action="ignore")


def items(packet: Packet) -> Items:
    """Return all that a device's message says, by client, kind and name; nothing of it is left out."""
    header, found = packet.header, Items()

    def text(value: object) -> Tensor:
        return torch.tensor(list(json.dumps(value, sort_keys=True).encode()), dtype=torch.uint8)

    if header["kind"] == "fits":
        for client, counts in header["clients"].items():
            found |= {SentItem(client, "counts", split): torch.tensor(n) for split, n in counts.items()}
        return found
    if header["kind"] != "answers":
        skip = ("kind", "run")
        return {SentItem("", header["kind"], k): text(v) for k, v in header.items() if k not in skip}
    told = header["answers"]
    for one, loss in zip(told, packet.tensors["losses"], strict=True):
        client, (number, weight) = str(one["client"]), one["upload"] or (-1, 0.0)
        found[SentItem(client, "loss", "")] = loss.clone()
        found[SentItem(client, "weight", "")] = torch.tensor(weight, dtype=torch.float64)
        found[SentItem(client, "status", "")] = text([one["upload"] is not None, one["fault"]])
        start = f"upload/{number}/"
        for full, value in packet.tensors.items():
            if full.startswith(start):
                half, _, name = full.removeprefix(start).partition("/")
                found[_upload(client, half, name)] = value
    for one in header["judged"]:
        task = f"{one['split']}/{one['name'] or one['label']}/{','.join(one['models'])}"
        found[SentItem("", "judged", f"{task}/clients")] = text(one["clients"])
        start = f"judged/{one['columns']}/columns/"
        for full, value in packet.tensors.items():
            if full.startswith(start):
                found[SentItem("", "judged", f"{task}/{full.removeprefix(start)}")] = value
    return found


def _upload(client: str, half: str, name: str) -> SentItem:
    if half == "rows":
        return SentItem(client, "rows", name)
    if name.startswith(SERVER):
        return SentItem(client, "sent", name.removeprefix(SERVER))
    if name.startswith("report/"):
        return SentItem(client, "report", name.removeprefix("report/"))
    return SentItem(client, "upload", name)


def unjudged(work: Packet, client: str = "") -> Packet:
    """Return a message that asks for training alone, of one client or of all."""
    orders = [
        {**o, "judge": [], "train": o["train"] and client in ("", o["client"])} for o in work.header["orders"]
    ]
    return Packet({**work.header, "orders": orders}, work.tensors)


def judging(work: Packet, client: str) -> Packet:
    """Return a message that asks for judging alone, of one client."""
    orders = [
        {**o, "train": False, "judge": o["judge"] * (o["client"] == client)} for o in work.header["orders"]
    ]
    return Packet({**work.header, "orders": orders}, work.tensors)


def adapting(work: Packet) -> Packet:
    """Return a message that asks its clients to adapt alone."""
    orders = [{**o, "judge": [], "train": False, "adapt": True} for o in work.header["orders"]]
    return Packet({**work.header, "orders": orders}, work.tensors)


def changed(one: Mapping[K, Tensor], other: Mapping[K, Tensor]) -> list[K]:
    """Return what differs in any bit, or is in one of them alone."""
    return [k for k in {**one, **other} if k not in one or k not in other or not same(one[k], other[k])]


def on_common_rows(one: Items, other: Items) -> tuple[Items, Items]:
    """Return two answers with uploads of tables cut to the rows that both hold, where the others did not move.

    Which rows there are is told apart from what is in them.
    """
    cut = dict(one), dict(other)
    for item in [item for item in one if item.kind == "rows" and item in other]:
        table, common = item._replace(kind="upload"), np.intersect1d(one[item], other[item])
        for found in cut:
            inside = torch.from_numpy(np.isin(found[item], common))
            if table in found and not found[table][~inside].any():
                found[table] = found[table][inside]
    return cut


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same type, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(*(v.contiguous().reshape(-1).view(torch.uint8) for v in (a, b))))
