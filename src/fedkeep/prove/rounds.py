"""Rounds of a few clients under the tracer, until labels no longer spread.

It is an engine, so the whole round runs as it does in a simulation: what is sent, hooks, phases, the upload chain, what
is kept, the server's update.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.audit.canaries import OUT
from fedkeep.core.copying import copied
from fedkeep.core.errors import FedkeepError
from fedkeep.core.net import Net, every_tensor
from fedkeep.core.params import Batch, Params, clone, is_state
from fedkeep.data import FederatedData
from fedkeep.data.splits import SPLITS
from fedkeep.engines import (
    Adaptation,
    ClientResult,
    ClientToTrain,
    Job,
    LocalDevice,
    Order,
    Sequential,
    first_default,
    first_global,
    run_round,
)
from fedkeep.engines.client_step import train_client
from fedkeep.engines.device import orders_of
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.engines.lanes import TAP, Pass
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.engines.tally import ROWS
from fedkeep.methods import Method, Phase
from fedkeep.methods.secure import SecureMean
from fedkeep.prove.rules import OUTSIDE
from fedkeep.prove.sites import CHANCE, CLIP, DATA, GRADIENTS, HELD, OPTED_OUT, RECEIVED
from fedkeep.prove.traced_labels import LabelNode, Tracer
from fedkeep.store import MemoryStore, PrivateStore
from fedkeep.tasks.results import Model

OPEN = (GRADIENTS, CLIP, RECEIVED, DATA, CHANCE)
"""Labels of what may leave, as such or by a channel; all others are of what must stay."""
MOST_ROUNDS = 5
WHO = ("ids", "index", "__class__")
"""What a server is told of its clients (``methods.Roster``)."""

Items = dict[str, Tensor]


class Labelled(FederatedData):
    """The same examples; what is read of them has labels."""

    tracer: Tracer

    def batch(self, rows: Any) -> Batch:
        """Return the rows' columns."""
        batch = super().batch(rows)
        chosen = np.asarray(rows, np.int64)
        labels = [self.tracer.own(DATA, self.ids[c]) for c in np.unique(self.clients_of(chosen))]
        if OUT in self.columns and not np.asarray(self.columns[OUT])[chosen].all():
            labels.append(OPTED_OUT)
        assert self.bounds is not None
        if (chosen >= self.bounds[self.clients_of(chosen)][:, 1]).any():
            labels.append(HELD)
        for value in batch.values():
            for label in labels:
                self.tracer.begin(value, label)
        return batch


class Handed(Labelled):
    """The same examples, as a simulation hands them to the server: as the list of clients.

    What the server takes beside ids is noted: across machines it has no examples, and where these go nobody says.
    """

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute, and note it unless it says who takes part."""
        if name not in WHO:
            tracer: Tracer = super().__getattribute__("tracer")
            tracer.cross(
                LabelNode("", OUTSIDE), f"the data's {name}, which a server in a simulation is handed,"
            )
        return super().__getattribute__(name)


@dataclass
class Taken:
    """A client's part in a round.

    Attributes:
        work: its client, and what it was sent.
        kept: what it began with.
        round, progress: of the run.
        left: what left, by its label in the report.
        gradients: of what is federated, in the order of steps.
        nodes: what is known of what left, by label.
        after: by name, the labels of what it will keep.
        phases: those that took steps; none, where training broke down.
        fault: how it broke down; or empty.
    """

    work: ClientToTrain
    kept: Params
    round: int
    progress: float
    left: Items = field(default_factory=dict)
    gradients: list[Params] = field(default_factory=list)
    nodes: dict[str, LabelNode] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    fault: str = ""


@dataclass
class Channels:
    """The tap of gradients: what passes is named as the channel that it is, and is noted or replayed.

    A federated gradient may depend on the client's own training examples (``examples``), and on what it keeps itself
    (``own``), which is what a split declares. What else it depends on stays with it.
    """

    tracer: Tracer | None
    own: int = 0
    examples: int = 0
    noted: list[Params] = field(default_factory=list)
    replay: Iterator[Params] | None = None
    phases: list[Phase] = field(default_factory=list)

    def gradients(self, step: Pass, grads: Params, *, clipped: bool) -> Params:
        """Return the gradients, federated ones with the channel's label, or as they were noted."""
        self.phases.append(step.phase)
        federated = step.lanes.split.federated(grads)
        if not federated:
            return grads
        if self.replay is not None:
            self.noted.append({n: v.detach().clone() for n, v in federated.items()})
            again = next(self.replay, {})
            return {**grads, **{n: v.clone() for n, v in again.items() if n in federated}}
        made = {n: v.detach().clone() for n, v in federated.items()}
        if self.tracer is not None:
            for name, value in federated.items():
                self._relabel(name, value, made[name], clipped)
        self.noted.append({n: v.clone() for n, v in made.items()})
        return {**grads, **made}

    def _relabel(self, name: str, value: Tensor, made: Tensor, clipped: bool) -> None:
        tracer = self.tracer
        assert tracer is not None
        old = tracer.node(value)
        assert old is not None
        private = old.labels & self.own
        channel = tracer.bit(CLIP if clipped else GRADIENTS) if private else 0
        what = f"the {'clipped ' if clipped else ''}gradient of {name}"
        tracer.put(made, LabelNode(what, old.labels & ~self.own & ~self.examples | channel, (old,)))


@dataclass
class TracedEngine:
    """An engine that trains clients one by one under the tracer.

    Attributes:
        tracer: what sees them.
        taken: what each did.
    """

    tracer: Tracer
    taken: list[Taken] = field(default_factory=list)
    name: str = "traced"

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients, and yield what each gives."""
        for each in work:
            kept = {n: v[0].clone() for n, v in job.kept([each.client]).items()}
            for name, value in each.sent.items():
                self.tracer.put(value, LabelNode(f"received {name}", self.tracer.bit(RECEIVED)))
            own, who = 0, job.data.ids[each.client]
            for name, value in kept.items():
                label = self.tracer.own(kept_label(name), who)
                self.tracer.begin(value, label)
                own |= self.tracer.bit(label)
            taken = Taken(each, kept, round, progress)
            examples = self.tracer.bit(self.tracer.own(DATA, who))
            tap = Channels(self.tracer, own=own, examples=examples, noted=taken.gradients)
            result = trained(job, taken, tap)
            taken.fault = str(result.fault or "")
            taken.phases = [] if taken.fault else tap.phases
            self.note(result, taken)
            yield result

    def note(self, result: ClientResult, taken: Taken) -> None:
        """Note what left and what is known of it, and name it as what arrived."""
        taken.left = left(result)
        for label, value in tensors_of(result).items():
            taken.nodes[label] = self.tracer.known(value, label)
        for name, value in (result.kept or {}).items():
            taken.after[name] = self.tracer.known(value, name).labels
        if result.upload is not None:
            deltas = {n: v.clone() for n, v in result.upload.deltas.items()}
            for name, value in deltas.items():
                self.tracer.put(value, LabelNode(f"the upload {name}", self.tracer.bit(RECEIVED)))
            result.upload = result.upload.but(deltas)
        self.taken.append(taken)

    def close(self) -> None:
        """Do nothing."""


def trained(job: Job, taken: Taken, tap: Channels) -> ClientResult:
    """Train a client from what it began with, past a tap."""
    token = TAP.set(tap)
    try:
        return train_client(
            job, dict(taken.work.sent), dict(taken.kept), taken.work.client, taken.round, taken.progress
        )
    finally:
        TAP.reset(token)


def tensors_of(result: ClientResult) -> Items:
    """Return the tensors that leave with a result, by what a report calls them."""
    found: Items = {}
    if result.upload is not None:
        for name, value in result.upload.deltas.items():
            kind = (
                "sent" if name.startswith("server/") else "report" if name.startswith("report/") else "upload"
            )
            found[f"{kind}/{name.removeprefix('server/').removeprefix('report/')}"] = value
        found |= {f"rows/{name}": rows for name, rows in result.upload.rows.items()}
    return found


def left(result: ClientResult) -> Items:
    """Return all that leaves with a result."""
    numbers = {"loss": result.loss, "status": float(result.fault is not None)}
    if result.upload is not None:
        numbers["weight"] = result.upload.weight
    return clone(tensors_of(result)) | {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}


@dataclass
class SeenRounds:
    """Some rounds, and what was seen of them.

    Attributes:
        tracer: with the labels.
        job: what the clients have in common.
        taken: what each client did.
        stable: whether labels had stopped spreading.
        server: nodes of what the server has at the end, by name, as far as they tell of what must stay.
        elsewhere: nodes of tensors with private labels that were there at the end beside what is kept.
        error: why rounds broke off; or empty.
        orders: what clients are asked to judge at the end.
        unjudged: why judging broke down; or empty.
    """

    tracer: Tracer
    job: Job
    taken: list[Taken]
    orders: list[Order] = field(default_factory=list)
    unjudged: str = ""
    stable: bool = False
    server: dict[str, LabelNode] = field(default_factory=dict)
    elsewhere: list[LabelNode] = field(default_factory=list)
    error: str = ""


def run(model: nn.Module, method: Method, data: FederatedData, seed: int) -> SeenRounds:
    """Run rounds until no label spreads any further, at least two."""
    reduce = method.server.reduce
    if isinstance(reduce, SecureMean):  # masks are on top of what is proved here
        method = method.on_server(reduce=reduce.mean)
    net = Net(method.made_for(copied(model)))
    labelled = Labelled(data.columns, data.offsets, data.ids, data.bounds, data.meta, check=False)
    tracer = labelled.tracer = Tracer(net.module)
    method = with_declared_tables(method, net, data)
    default = first_default(method, net, seed)
    job = Job(method, net, labelled, MemoryStore(default, data.ids), seed)
    engine = TracedEngine(tracer)
    made = SeenRounds(tracer, job, engine.taken)
    handed = copy.copy(labelled)
    handed.__class__ = Handed
    server = first_global(method, net, handed)
    promised = declared(method, net)
    for value in (
        *every_tensor(net.module).values(),
        *net.module.buffers(),
        *default.initial.values(),
        *server.params.values(),
        *server.state.values(),
        *server.links.values(),
        *promised.values(),
        *job.declared.values(),
    ):
        tracer.put(value, LabelNode("a first value", 0))
    device = LocalDevice(job, engine)
    before: Mapping[Any, int] = {}
    for number in range(MOST_ROUNDS):
        try:
            with tracer:
                server, _ = run_round(
                    method,
                    device,
                    server.but(progress=number / MOST_ROUNDS),
                    list(data.ids),
                    promised,
                    Faults(broken="skip", malformed="skip", minimum=0),
                )
        except (FedkeepError, RuntimeError) as error:
            if isinstance(error, FedkeepError) and not engine.taken:
                raise  # they do not fit each other
            made.error = f"round {number + 1} broke off: {error}"
            break
        last = engine.taken[-len(data) :]
        now = {(t.work.client, n): mask for t in last for n, mask in t.after.items()}
        now |= {(t.work.client, n): node.labels for t in last for n, node in t.nodes.items()}
        made.stable = number > 0 and all(now[k] | before.get(k, 0) == before.get(k, 0) for k in now)
        if made.stable:
            break
        before = now
    made.error = made.error or _untrained(made)
    with tracer:
        made.orders = list(orders_of(method, server, data.ids))
    if not made.error:
        made.unjudged = _judge(made)
    secret = ~tracer.bits(*OPEN) & ~OUTSIDE
    for prefix, values in (("", server.params), ("state/", server.state)):
        nodes = {f"server/{prefix}{n}": tracer.node(v) for n, v in values.items()}
        made.server |= {
            n: node for n, node in nodes.items() if node is not None and node.labels & (secret | OUTSIDE)
        }
    made.elsewhere = _elsewhere(made, secret)
    return made


def _judge(made: SeenRounds) -> str:
    """Let the first client judge its models by itself under the tracer, and those it adapts; return why it broke down.

    What a client keeps is its own: whatever trained it, judging tells how good it is.
    """
    try:
        with made.tracer:
            judged(
                made.job, made.orders[:1], made.tracer
            )  # all run the same code, it has most kinds of examples
    except (FedkeepError, RuntimeError) as error:
        return f"judging broke down: {error}"
    return ""


def judged(job: Job, orders: Sequence[Order], tracer: Tracer | None = None) -> list[Items]:
    """Return the sums that each client's judging gives, by what a report calls them.

    Args:
        job: what clients have in common.
        orders: what each client is sent.
        tracer: labels what clients keep; they adapt too, if the method lets them, and that model is judged.
    """
    device, found = LocalDevice(job, Sequential(), leaves="clients"), [Items() for _ in orders]
    models: list[Model] = ["own", "shared"] if job.method.predict_shared is not None else ["own"]
    if tracer is not None:
        _own(tracer, job.store, job.data.ids)
        if job.method.adapt.phases:
            device.adapt(orders, Adaptation(split=""))
            _own(tracer, device.held("adapted"), job.data.ids)
            models.append("adapted")
    for split in SPLITS:
        for one in device.judge(orders, split, models):
            for name in ROWS:
                rows = torch.from_numpy(np.array(getattr(one.tallies, name), np.float64))
                for items, row in zip(found, rows, strict=False):  # of a split without examples there is none
                    items[f"judged/{split}/{one.task.name}/{name}"] = row
    return found


def _own(tracer: Tracer, store: PrivateStore, ids: Sequence[str]) -> None:
    """Label what clients keep as theirs alone, whichever of their own examples trained it."""
    assert isinstance(store, MemoryStore)
    drop = tracer.bit(OPTED_OUT) | tracer.bit(HELD)
    for client, row in store._rows.items():
        for name, value in row.items():
            old, label = tracer.known(value, name), tracer.own(kept_label(name), ids[client])
            tracer.put(value, LabelNode(label, old.labels & ~drop | tracer.bit(label)))


def kept_label(name: str) -> str:
    """Return the label of a value that a client keeps."""
    return f"{'kept' if is_state(name) else 'private'} {name.removeprefix('client/')}"


def _untrained(made: SeenRounds) -> str:
    """Say which phase no client came through with a step, so that nothing was seen of it; or nothing."""
    seen = [phase for taken in made.taken for phase in taken.phases]
    for phase in made.job.method.client.phases:
        if phase not in seen and (phase.epochs if phase.steps is None else phase.steps):
            why = next((t.fault for t in made.taken if t.fault), "no client has an example to train on")
            return f"the phase that trains {phase.trains!r} took no step: {why}"
    return ""


@contextmanager
def set_aside() -> Iterator[None]:
    """Keep what is there from the collector of garbage, which then looks at what is made here alone.

    A module's whole libraries are ten times as much. A program that has set things aside itself is left as it is.
    """
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


def _elsewhere(made: SeenRounds, secret: int) -> list[LabelNode]:
    """Return what still holds private values, beside the store and the notes of the prover."""
    gc.collect()
    store = made.job.store
    assert isinstance(store, MemoryStore)
    kept = {v.untyped_storage()._cdata for row in store._rows.values() for v in row.values()}
    for t in made.taken:
        noted = (
            *t.kept.values(),
            *t.work.sent.values(),
            *t.left.values(),
            *(v for g in t.gradients for v in g.values()),
        )
        kept |= {v.untyped_storage()._cdata for v in noted}
    return [
        node
        for place, (ref, node) in made.tracer._nodes.items()
        if node.labels & secret and not ref.expired() and place not in kept  # type: ignore[no-untyped-call]
    ]
