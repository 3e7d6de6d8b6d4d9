"""Judging, on the device: predictions of clients' models on their own examples, reduced to what metrics need.

Several models predict the same examples, so that they are compared on these. Many clients' are computed at a time.
Models without private values, and those that take a private row for each example (declared as ``per_example``), see the examples
of many clients as one batch. Of other models, clients with equally many examples are computed side by side
(``torch.func.vmap``), so many tiny clients cost a few calls. What cannot be computed so is computed client by client,
and so is who has few companions; the numbers are the same but for rounding.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.net import Net, PooledNet
from fedkeep.core.params import CLIENT, Params, clone, is_state, nbytes, prefixed, to
from fedkeep.core.seeds import without_draws
from fedkeep.data import FederatedData
from fedkeep.data.columns import offsets_of
from fedkeep.engines.batches import batch_bytes, load_batch
from fedkeep.engines.centralised import WithClient
from fedkeep.engines.client_step import Job, outputs
from fedkeep.engines.lanes import MODEL_ERRORS, columns_of, model_error
from fedkeep.engines.rehearsal import rehearse
from fedkeep.engines.tables.local_rows import allowed
from fedkeep.engines.tally import Judged, Judgement, Leaves, Tallies, tallied
from fedkeep.methods import Sent
from fedkeep.methods.base import Predict, Recall, Recalls, forward
from fedkeep.methods.labels import label_of, output_of
from fedkeep.tasks import Task, tasks_in
from fedkeep.tasks.results import Model

T = TypeVar("T")

CHUNK = 1024
"""Examples that are computed at once; of small models, examples and outputs up to ``SMALL`` times as many."""
SMALL = 8
WINDOW = 128 * CHUNK
"""Examples among which clients with equally many are looked for."""
BYTES = 64 << 20
"""What clients who are looked at together may keep, and be sent apart from each other."""
SEVERAL = 16
"""Clients with equally many examples from which on they are computed side by side."""
CACHED = 1 << 20
"""Bytes of examples or outputs computed at once, and of a model that is small: of more, they leave the caches."""

ExamplesOf = Literal["opted_in", "all"]
"""Which examples: those that opted in, or all, as of ``Phase.examples``."""

Use = Callable[[Any, Params, np.ndarray, np.ndarray], T]
"""What is made of an output: given it, the batch, each example's client by index, and its place in the window."""


@dataclass(frozen=True)
class Way:
    """How one of the models is computed.

    Attributes:
        model: its name.
        predict: makes predictions.
        own: returns clients' own values, stacked, given their indices.
    """

    model: Model
    predict: Predict
    own: Callable[[np.ndarray], Params]

    @cached_property
    def recalls(self) -> bool:
        """Whether it looks at the client's own examples first."""
        return self.model in ("own", "adapted") and isinstance(self.predict, Recalls)


@dataclass(frozen=True)
class ExamplePiece:
    """Examples that are computed at once.

    Attributes:
        places: (examples,) their places in the window.
        clients: whose they are, by position in the window: each one's examples, equally many, after the other's. None:
            anybody's.
    """

    places: np.ndarray
    clients: np.ndarray | None

    @property
    def single(self) -> list[ExamplePiece]:
        """The examples of each client by itself."""
        if self.clients is None:
            return []
        rows = self.places.reshape(len(self.clients), -1)
        return [ExamplePiece(mine, self.clients[k : k + 1]) for k, mine in enumerate(rows)]


@dataclass
class Nets:
    """The model as functions, and which of the clients' models cannot be computed side by side."""

    net: Net
    pooled: dict[frozenset[str], PooledNet] = field(default_factory=dict)
    alone: set[Model] = field(default_factory=set)

    def of(self, names: Iterable[str]) -> PooledNet:
        """Return the model that takes tables of the private values of these names."""
        wanted = frozenset(names)
        if wanted not in self.pooled:
            self.pooled[wanted] = PooledNet(self.net.module, wanted)
            self.pooled[wanted].written = self.net.written
        return self.pooled[wanted]


@dataclass(frozen=True)
class Window:
    """Clients who are looked at together.

    Attributes:
        job: what all clients have in common.
        split: which of their examples.
        clients: their indices, int64.
        sent: what the server sends each.
        nets: what all windows have in common.
        examples: which of the split's examples, by ``Phase.examples``.
    """

    job: Job
    split: str
    clients: np.ndarray
    sent: list[Params]
    nets: Nets
    examples: ExamplesOf

    @cached_property
    def rows(self) -> np.ndarray:
        """The row numbers of all examples, client after client."""
        return allowed(self.job.data, self.job.data.split_rows(self.split, self.clients), self.examples)

    @torch.no_grad()
    def predicted(self, ways: Sequence[Way], use: Use[T]) -> list[list[T]]:
        """Return, for each way, what ``use`` makes of the outputs of one piece after the other.

        Raises:
            MethodError: a model does not fit the examples, and says whose; or it draws random numbers.
        """
        job = self.job
        view = WithClient(job.data, self.clients)
        rehearse(job.net, {**self.sent[0], **job.store.default.initial}, view, self.rows, job.device)
        with job.net.still():
            what = f"judging of {self.split!r} examples"
            return without_draws(what, lambda: self._predicted(ways, use), job.device)

    def _predicted(self, ways: Sequence[Way], use: Use[T]) -> list[list[T]]:
        found: list[list[T]] = [[] for _ in ways]
        values = [self._own(way) for way in ways]
        pools = [self._pools(own) and not way.recalls for own, way in zip(values, ways, strict=True)]
        for apart in (False, True):
            chosen = [k for k, pooled in enumerate(pools) if pooled is not apart]
            for piece in (self._apart() if apart else self._pooled()) if chosen else ():
                batch = self._load(piece)
                for k in chosen:  # a model may change what it is given
                    mine = batch if k == chosen[-1] else clone(batch)
                    found[k] += self._used(ways[k], values[k], piece, mine, use)
        return found

    def _own(self, way: Way) -> Params:
        values = way.own(self.clients)
        if way.predict is forward:  # the model knows nothing of a method's state
            values = {n: v for n, v in values.items() if not is_state(n)}
        return {n: v.to(self.job.device) for n, v in values.items()}

    def _pools(self, own: Params) -> bool:
        """Tell whether one batch may hold anybody's examples."""
        return self._alike and (not own or self.nets.of(own).gathers)

    @cached_property
    def _alike(self) -> bool:
        return len(set(map(id, self.sent))) == 1

    @cached_property
    def _starts(self) -> np.ndarray:
        return offsets_of(counts_of(self.job.data, self.split, self.examples)[self.clients])

    def _pooled(self) -> Iterator[ExamplePiece]:
        every = np.arange(len(self.rows))
        for some in np.array_split(
            every, max(1, len(every) // self._at_once)
        ):  # each of less than two times that
            yield ExamplePiece(some, None)

    def _apart(self) -> Iterator[ExamplePiece]:
        """Yield pieces of many clients with equally many examples, and of those with few companions alone."""
        counts = np.diff(self._starts)
        chunk, most = self._chunk, min(self._at_once, CACHED // self._example_bytes)
        for count in np.unique(counts).tolist():
            who = np.flatnonzero(counts == count)
            at_once = most // count
            if min(len(who), at_once) < SEVERAL:
                for client in who.tolist():
                    start = int(self._starts[client])
                    for place in range(start, start + count, chunk):
                        places = np.arange(place, min(place + chunk, start + count))
                        yield ExamplePiece(places, np.array([client]))
                continue
            for at in range(0, len(who), at_once):
                some = who[at : at + at_once]
                yield ExamplePiece((self._starts[some][:, None] + np.arange(count)).reshape(-1), some)

    @cached_property
    def _chunk(self) -> int:
        """Examples that are computed at once: fewer where each has outputs for many tokens."""
        label = self.job.data.columns.get("label")
        return max(1, CHUNK // math.prod(label.shape[1:])) if isinstance(label, np.ndarray) else CHUNK

    @cached_property
    def _at_once(self) -> int:
        """Examples of many clients that are computed at once."""
        outputs = 8 * int(self.job.data.meta.get("classes") or CACHED)
        if nbytes(self.sent[0]) > CACHED:
            return self._chunk
        return max(self._chunk, min(SMALL * self._chunk, CACHED // max(outputs, self._example_bytes)))

    @cached_property
    def _example_bytes(self) -> int:
        return batch_bytes(self.job.data.columns, self.rows) // len(self.rows)

    @cached_property
    def _owner(self) -> np.ndarray:
        """Each example's client, by position."""
        return np.repeat(np.arange(len(self.clients)), np.diff(self._starts))

    def _load(self, piece: ExamplePiece) -> Params:
        rows, owner = self.rows[piece.places], self._owner[piece.places]
        batch = load_batch(self.job.data, rows, self.job.device, self.job.net.float_type)
        return batch | {"client": torch.from_numpy(owner).to(self.job.device)}

    def _used(self, way: Way, own: Params, piece: ExamplePiece, batch: Params, use: Use[T]) -> list[T]:
        owner, net = self.clients[self._owner[piece.places]], self.job.net
        if piece.clients is None:
            net, params = self.nets.of(own), {**self.sent[0], **own}
        elif len(piece.clients) > 1:
            if way.model not in self.nets.alone and not way.recalls and net.functional and not net.switches:
                try:
                    return [use(self._side_by_side(way, own, piece, batch), batch, owner, piece.places)]
                except MODEL_ERRORS:
                    self.nets.alone.add(way.model)
            each = (self._used(way, own, one, self._load(one), use) for one in piece.single)
            return [found for single in each for found in single]
        else:
            place = int(piece.clients[0])
            params = {**self.sent[place], **{n: v[place] for n, v in own.items()}}
            params |= self._recalled(way, params, place)
        try:
            with net.judging(params) as values:
                return [use(way.predict(net, values, batch), batch, owner, piece.places)]
        except MODEL_ERRORS as error:
            raise model_error(self._whose(owner), len(owner), error, columns=columns_of(batch)) from error

    def _recalled(self, way: Way, params: Params, place: int) -> Params:
        """Return what one client's prediction makes of the client's own examples."""
        if not way.recalls:
            return {}
        assert isinstance(way.predict, Recalls)
        return recalled(self.job, way.predict, params, int(self.clients[place]))

    def _side_by_side(self, way: Way, own: Params, piece: ExamplePiece, batch: Params) -> Any:
        """Return the predictions of clients with equally many examples, one client's after the other's."""
        clients, net, sent = piece.clients, self.job.net, self.sent
        assert clients is not None
        net.train(False)
        which = torch.from_numpy(clients).to(self.job.device)
        mine = {n: v.index_select(0, which) for n, v in own.items()}
        if not self._alike:
            theirs = [sent[k] for k in clients.tolist()]
            mine = {n: torch.stack([each[n] for each in theirs]) for n in theirs[0]} | mine
        examples = {n: v.reshape(len(clients), -1, *v.shape[1:]) for n, v in batch.items()}
        shared = {n: v for n, v in sent[0].items() if n not in mine}

        def one(values: Params, columns: Params) -> Any:
            return way.predict(net, {**shared, **values}, columns)

        with warnings.catch_warnings():
            # An operation that is computed client by client after all is no slower than all of them so.
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            return _joined(torch.func.vmap(one)(mine, examples))

    def _whose(self, owner: np.ndarray) -> str:
        names = [repr(str(self.job.data.ids[int(c)])) for c in np.unique(owner)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"Judging the {self.split} examples of {', '.join(names[:3])}{more}"


def recalled(job: Job, predict: Recalls, params: Params, client: int) -> Params:
    """Return what a way to predict makes of a client's own examples, as the client's state by name.

    Args:
        job: what all clients have in common.
        predict: the way.
        params: the client's whole model, on the job's device.
        client: its index.
    """

    def outputs_of(function: Predict, split: str) -> Iterator[tuple[Any, Params]]:
        return outputs(job, params, job.rows(client, split), function)

    return prefixed(CLIENT, predict.recall(Recall(net=job.net, params=params, outputs=outputs_of)))


def _joined(output: Any) -> Any:
    """Return outputs (clients, examples, …) as (clients · examples, …)."""
    if isinstance(output, Mapping):
        return {name: _joined(value) for name, value in output.items()}
    return output.flatten(0, 1) if isinstance(output, Tensor) else output


def counts_of(data: FederatedData, split: str, examples: ExamplesOf) -> np.ndarray:
    """Return how many examples of a split each client has, int64 (clients,): all, or the opted-in ones."""
    if examples == "all" or "opted_in" not in data.columns:
        return data.counts(split)
    rows = allowed(data, data.split_rows(split), examples)
    return np.bincount(data.clients_of(rows), minlength=len(data))


Asked = tuple[np.ndarray, Sent]
"""Clients by index, int64, and what the server sends each of them."""


def windows(job: Job, asked: Iterable[Asked], split: str, which: ExamplesOf = "all") -> Iterator[Window]:
    """Yield clients who are looked at together; those without such examples of the split are left out.

    A window ends with about ``WINDOW`` examples, or with ``BYTES``.
    """
    counts, nets = counts_of(job.data, split, which), Nets(job.net)
    own = nbytes(job.store.default.initial)
    if not counts.any():
        return
    last: Sent | None = None
    given = flat = Params()
    chosen, models, examples, held = list[np.ndarray](), list[Params](), 0, 0
    for clients, sent in asked:
        left = clients[counts[clients] > 0]
        if len(left) and sent is not last:
            held += 0 if last is None else nbytes(sent.flat)
            last = sent
            if sent.flat is not given:  # who is sent the same is looked at together
                given, flat = sent.flat, to(sent.flat, job.device)
        while len(left):
            some = left[:WINDOW]
            total = examples + np.cumsum(counts[some])
            full = (total >= WINDOW) | (held + own * np.arange(1, len(some) + 1) >= BYTES)
            many = int(full.argmax()) + 1 if full.any() else len(some)
            chosen.append(some[:many])
            models += [flat] * many
            examples, held, left = int(total[many - 1]), held + own * many, left[many:]
            if full.any():
                yield Window(job, split, np.concatenate(chosen), models, nets, which)
                chosen, models, examples, held = [], [], 0, 0
    if chosen:
        yield Window(job, split, np.concatenate(chosen), models, nets, which)


Columns = tuple[np.ndarray, ...]
"""A piece of a ``Judgement``: client, loss, score, label, row (or place in a window), predicted class."""

Parts = list[list[list[Columns]]]
"""By task and model, the pieces."""


def judge(
    job: Job,
    asked: Iterable[Asked],
    split: str,
    ways: Sequence[Way],
    leaves: Leaves,
    examples: ExamplesOf = "all",
) -> list[Judged]:
    """Let clients' models predict the clients' examples of a split.

    Args:
        job: what all clients have in common.
        asked: the clients, those who are sent the same together.
        split: ``train``, ``valid`` or ``test``.
        ways: the models; all see the same examples.
        leaves: what of it leaves the device.
        examples: which of the split's examples, by ``Phase.examples``.

    Returns:
        For each task of the data set what is allowed to leave.

    Raises:
        MethodError: a model does not fit the examples; says whose.
    """
    tasks, models = tasks_in(job.data.meta), tuple(way.model for way in ways)
    none: Parts = [[[] for _ in ways] for _ in tasks]
    parts = _by_window(windows(job, asked, split, examples), ways, tasks)
    if leaves == "examples":
        whole = none
        for part in parts:
            for number, place in np.ndindex(len(tasks), len(ways)):
                whole[number][place] += part[number][place]
        return [
            Judged(task=task, models=models, leaves=leaves, examples=each, roster=job.data.ids)
            for task, each in zip(tasks, _judgements(tasks, whole), strict=True)
        ]
    found = []
    tables = [_tallied(tasks, models, part, job.data.ids) for part in (none, *parts)]
    for task, (first, *others) in zip(tasks, zip(*tables, strict=True), strict=True):
        rows = first.joined(others)
        table = rows.total() if leaves == "sums" else rows
        found.append(Judged(task=task, models=models, leaves=leaves, table=table))
    return found


def _tallied(
    tasks: Sequence[Task], models: Sequence[Model], parts: Parts, ids: Sequence[str]
) -> list[Tallies]:
    pieces = zip(tasks, _judgements(tasks, parts), strict=True)
    return [tallied(task, models, each, ids) for task, each in pieces]


def _judgements(tasks: Sequence[Task], parts: Parts) -> list[tuple[Judgement, ...]]:
    return [
        tuple(Judgement.joined(task, columns) for columns in of_task)
        for task, of_task in zip(tasks, parts, strict=True)
    ]


def _by_window(every: Iterable[Window], ways: Sequence[Way], tasks: Sequence[Task]) -> Iterator[Parts]:
    """Yield by task and model the pieces of some clients after the others."""

    def reduced(output: Any, batch: Params, owner: np.ndarray, places: np.ndarray) -> list[Columns]:
        return [_reduce(task, output, batch, owner, places) for task in tasks]

    for window in every:
        found = window.predicted(ways, reduced)
        yield [
            [[_in_order([piece[number] for piece in pieces], window.rows)] for pieces in found]
            for number in range(len(tasks))
        ]


def outputs_and_labels(
    job: Job, asked: Iterable[Asked], split: str, way: Way
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each task a model's outputs, (examples, …), and the labels, (examples,), where there is a label."""
    tasks = tasks_in(job.data.meta)

    def found(
        output: Any, batch: Params, owner: np.ndarray, places: np.ndarray
    ) -> list[tuple[np.ndarray, ...]]:
        return [tuple(_numpy(v) for v in labelled(task, output, batch)[:2]) for task in tasks]

    pieces = [piece for window in windows(job, asked, split) for piece in window.predicted([way], found)[0]]
    joined = (
        [np.concatenate(column) for column in zip(*each, strict=True)] for each in zip(*pieces, strict=True)
    )
    return [(out, label) for out, label in joined]


def _in_order(pieces: Sequence[Columns], rows: np.ndarray) -> Columns:
    """Return one piece of several, in the order of the examples; places in a window become rows of the data."""
    *columns, places, predicted = (np.concatenate(column) for column in zip(*pieces, strict=True))
    if (np.bincount(places, minlength=len(rows)) == 1).all():
        order = np.empty_like(places)
        order[places] = np.arange(len(places))
    else:
        order = np.argsort(places, kind="stable")  # an example's tokens stay in their order
    return (*(column[order] for column in columns), rows[places[order]], predicted[order])


def labelled(task: Task, output: Any, batch: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Return a task's outputs and labels where there is a label, and where there is one: (B,), of tokens (B, T), of pixels
    (B, H, W).

    Numbers are in the units that labels were read in, or of several outputs in standard deviations.
    """
    out, label = output_of(output, task.name), label_of(batch, task.label)
    known = ~torch.isnan(label) if label.is_floating_point() else label >= 0
    task.kind.check_output(out, label)
    out = task.kind.classes_last(out)
    if known.all():
        return task.judged(out.flatten(0, known.dim() - 1)), task.judged(label.flatten()), known
    return task.judged(out[known]), task.judged(label[known]), known


def _numpy(values: Tensor) -> np.ndarray:
    """Return an array; numpy has no bfloat16."""
    found: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
    return found


def _reduce(task: Task, output: Any, batch: Params, owner: np.ndarray, places: np.ndarray) -> Columns:
    out, label, known = labelled(task, output, batch)
    out, there = out.double(), np.nonzero(known.cpu().numpy())[0]
    loss, score, predicted = task.kind.judge(out, label)
    predicted = torch.full(label.shape, -1) if predicted is None else predicted
    columns = loss.cpu().numpy(), score.cpu().numpy(), _numpy(label)
    return owner[there], *columns, places[there], predicted.cpu().numpy()
