"""Some clients of a cohort side by side: their mini-batches, their lanes, and a phase of theirs as one tensor program.

What each starts from is stacked, (clients, *shape). The gradient of a phase's loss is mapped over the clients by
``torch.func.vmap``; clipping, optimiser and bounds work on stacked tensors. A client that has no mini-batch (left) for
a step takes no part in it, so it is frozen exactly: momentum and Adam would move it even at a gradient of zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, is_state, nbytes, row, to
from fedkeep.core.records import by_key
from fedkeep.core.seeds import stream
from fedkeep.data import Ragged
from fedkeep.engines.batches import Stream, batches, load_batch
from fedkeep.engines.client_step import (
    ClientResult,
    ClientToTrain,
    Job,
    before_start,
    begin,
    finish,
)
from fedkeep.engines.dropout import Noise
from fedkeep.engines.lanes import MODEL_ERRORS, Lanes, LaneStep, Pass, columns_of, model_error, slopes
from fedkeep.engines.tables.local_rows import ExampleRows, LocalTable, local_tables


@dataclass(frozen=True)
class Together:
    """A step that some clients take together.

    Attributes:
        lanes: their positions, ascending.
        rows: (clients, examples) row numbers of their mini-batches, all of one size.
        gathered: where the examples are.
    """

    lanes: list[int]
    rows: np.ndarray
    gathered: GatheredExamples

    def batch(self) -> Batch:
        """Return the mini-batches, columns (clients, examples, …)."""
        return self.gathered.batch(self.lanes, self.rows)


def lockstep(
    plans: Sequence[Sequence[np.ndarray]], full: int, through: Sequence[bool]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the steps of clients who go through their own mini-batches, each in its own order, together where they can:
    their positions, ascending, and (clients, examples) row numbers.

    Whoever has a full mini-batch (of ``full`` examples) next, steps; the others wait. When nobody has, those with
    mini-batches of the same size step together. So nothing is padded, whoever is through is left out, and clients
    meet again at the start of each pass.

    Args:
        plans: each client's mini-batches.
        full: how many examples a full one has.
        through: who takes no more steps, by client; may change on the way.
    """
    at = [0] * len(plans)
    while ahead := [k for k, plan in enumerate(plans) if at[k] < len(plan) and not through[k]]:
        groups = by_key((len(plans[k][at[k]]), k) for k in ahead)
        for who in [groups[full]] if full in groups else groups.values():
            yield who, np.stack([plans[k][at[k]] for k in who])
            for k in who:
                at[k] += 1


class GatheredExamples:
    """The training examples of some clients, brought to the device at once.

    Args:
        data: the data set.
        rows: each client's row numbers, consecutive.
        tables: each client's local tables; ids become positions in them.
        kind: the floating type of the columns.
        device: where they go.
    """

    def __init__(
        self,
        data: ExampleRows,
        rows: Sequence[np.ndarray],
        tables: Sequence[Sequence[LocalTable]],
        kind: torch.dtype,
        device: str,
    ) -> None:
        ends = np.cumsum([len(r) for r in rows])
        starts = ends - [len(r) for r in rows]
        self.device = device
        # A client's row r lies at r + shift.
        self.shift = np.array([start - r[0] if len(r) else 0 for start, r in zip(starts, rows, strict=True)])
        columns = load_batch(data, np.concatenate(rows), "cpu", kind)
        for start, end, own in zip(starts, ends, tables, strict=True):
            for column, table in {t.column: t for t in own}.items():
                columns[column][start:end] = table.local(columns[column][start:end])
        ragged = [name for name in columns if isinstance(data.columns.get(name), Ragged)]
        self.lengths = {name: columns[f"{name}_length"].numpy() for name in ragged}
        self.columns = {name: self._sent(value) for name, value in columns.items()}

    def _sent(self, value: Tensor) -> Tensor:
        if not self.device.startswith("cuda"):
            return value.to(self.device)
        return value.pin_memory().to(self.device, non_blocking=True)

    def batch(self, who: Sequence[int], rows: np.ndarray) -> Batch:
        """Return clients' mini-batches, columns (clients, examples, …); texts are padded to the longest of them."""
        places = rows + self.shift[who][:, None]
        index = self._sent(torch.from_numpy(places.reshape(-1)))
        batch: Batch = {}
        for name, column in self.columns.items():
            if name in self.lengths:
                column = column[:, : int(self.lengths[name][places].max())]
            batch[name] = column.index_select(0, index).reshape(*places.shape, *column.shape[1:])
        return batch

    @property
    def nbytes(self) -> int:
        """The bytes of all columns."""
        return sum(c.numel() * c.element_size() for c in self.columns.values())


def lengthened(column: Tensor, length: int) -> Tensor:
    """Return clients' texts or series (clients, examples, length, …) padded behind to a length; longer ones as they are."""
    return F.pad(column, (*(0, 0) * (column.dim() - 3), 0, max(0, length - column.shape[2])))


Pick = slice | Tensor
"""Some of the stacked clients: a slice, which is a view and costs nothing, or their positions."""


class StackedPass(Pass):
    """The steps of one phase on stacked tensors."""

    lanes: Stacked

    def __init__(self, clients: Stacked, number: int) -> None:
        super().__init__(clients, number)
        params = clients.params
        buffers, written = clients.changing - clients.trainable, clients.net.written.keys() - {*self.names}
        moved = [n for n in params if n in clients.stacked and (n in buffers or n in written)]
        self.buffers = [n for n in moved if self.seen[n] is params[n]]
        self.state = OptimizerState()
        self.updates = {n: np.zeros(len(clients.clients), np.int64) for n in self.names}
        self.total = torch.zeros(len(clients.clients), dtype=torch.float32, device=clients.device)

    def gradients(self, step: LaneStep) -> Params:
        """Return the gradients of the clients who step, (clients, *shape)."""
        self.pick = self.lanes.pick(step.lanes)
        self.values, losses, grads = self.computed(step, self.pick, step.batch())
        self.total = self.total.to(torch.promote_types(self.total.dtype, losses.dtype))
        self.total[self.pick] += losses
        return grads

    def totals(self) -> list[float]:
        """Return the sum of each client's losses so far."""
        found: list[float] = self.total.double().tolist()
        return found

    def computed(
        self, step: LaneStep, pick: Pick, batch: Batch, values: Mapping[str, Tensor] = MappingProxyType({})
    ) -> tuple[Params, Tensor, Params]:
        """Return some clients' values (with buffers as the step left them), losses and gradients.

        Args:
            step: who steps.
            pick: the same, to pick by.
            batch: their mini-batches.
            values: what is taken in place of their own, (clients, *shape).
        """
        stacked = {**picked({n: v for n, v in self.seen.items() if n in self.lanes.stacked}, pick), **values}
        leaves = {n: stacked[n].detach().requires_grad_() for n in self.names}
        try:
            losses = self._losses(step, {**self.seen, **stacked, **leaves}, pick, batch)
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            raise self._failed(step, batch, error) from error
        return stacked, losses.detach(), slopes(losses.sum(), leaves)

    def _losses(self, step: LaneStep, params: Params, pick: Pick, batch: Batch) -> Tensor:
        clients = self.lanes
        cut = picked({n: clients.received[n] for n in clients.cut}, pick)
        axes = (
            {n: 0 if n in clients.stacked else None for n in params},
            {n: 0 if n in cut else None for n in clients.received},
        )

        def loss(mine: Params, theirs: Params, examples: Batch, client: Tensor) -> Tensor:
            clients.noise.client = client
            return self.phase.loss(clients.net, mine, examples, theirs)

        numbers = torch.arange(len(step.lanes), device=clients.device)
        with clients.noise.of(step.lanes):
            return torch.func.vmap(loss, (*axes, 0, 0))(params, clients.received | cut, batch, numbers)

    def _failed(self, step: LaneStep, batch: Batch, error: Exception) -> MethodError:
        names = list(dict.fromkeys(self.lanes.draws[k].client for k in step.lanes))  # one may be tried twice
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        several = len(names) > 1
        who = f"Client{'s' * several} {', '.join(map(repr, names[:3]))}{more}, round {self.lanes.round}"
        examples = next(iter(batch.values())).shape[1]
        hint = " engine='sequential' says which client it is." * several
        return model_error(who, examples, error, hint, columns_of(batch, axes=2))

    @torch.no_grad()
    def clip(self, grads: Params, bound: float) -> Params:
        """Return each client's gradients scaled down to a joint L2 norm of at most ``bound``."""
        if not grads:
            return grads
        norms = [torch.linalg.vector_norm(flat(g), dim=1) for g in grads.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)  # (clients,)
        scale = (bound / (norm + 1e-6)).clamp(max=1.0)
        return {n: g * scale.to(g.dtype).reshape(-1, *[1] * (g.dim() - 1)) for n, g in grads.items()}

    def move(self, step: LaneStep, grads: Params) -> None:
        """Let the optimiser step on some clients; those who have taken equally many steps at once."""
        optimizer, whole, pick, values, who = (
            self.phase.optimizer,
            self.lanes.params,
            self.pick,
            self.values,
            np.array(step.lanes),
        )
        for kept in (self.state.first, self.state.second)[: optimizer.moments]:
            kept.update({n: torch.zeros_like(whole[n]) for n in grads if n not in kept})
        first, second = picked(self.state.first, pick), picked(self.state.second, pick)
        taken = {n: self.updates[n][who] for n in grads}
        for part in alike(taken, len(who)) if optimizer.moments == 2 else [slice(None)]:
            state = OptimizerState(
                0, picked(first, part), picked(second, part), {n: int(k[part][0]) for n, k in taken.items()}
            )
            optimizer.update(
                picked({n: values[n] for n in grads}, part), picked(grads, part), state, self.scale
            )
        for n in grads:
            self.updates[n][who] += 1
        write_back(whole, pick, {n: values[n] for n in [*grads, *self.buffers]})
        write_back(self.state.first, pick, first)
        write_back(self.state.second, pick, second)

    def lane(self, position: int) -> tuple[Params, Mapping[str, Tensor]]:
        """Return what one client's loss may see, and what the client received."""
        clients = self.lanes
        return one_of(self.seen, clients.stacked, position), clients.sent_to(position)


class Stacked(Lanes):
    """Some clients of a cohort, and their parameters while they train.

    What no phase changes and all clients share is kept once. A local table is padded with rows of zeros to the longest
    of these clients, in ``params`` as in ``received``; no id names a padding row, so it stays zero.

    Args:
        job: what the rounds have in common.
        work: the clients, and what each was sent.
        own: what they kept, (clients, *shape).
        round: the round's number.
        progress: the finished part of the run in [0, 1).

    Attributes:
        params: all parameters, those named in ``stacked`` with a client axis.
        received: what terms compare with; those named in ``cut`` with a client axis.
        broken: each client's error of its ``start``, or None.
    """

    pass_of = StackedPass

    def __init__(
        self, job: Job, work: Sequence[ClientToTrain], own: Params, round: int, progress: float
    ) -> None:
        rows = [job.rows(each.client) for each in work]
        # The largest first: those who still have full mini-batches then stand side by side, and are a slice.
        self.order = sorted(range(len(work)), key=lambda k: -len(rows[k]))
        self.job, self.round, method = job, round, job.method
        self.clients = [work[k].client for k in self.order]
        stops = any(phase.early_stopping for phase in method.client.phases)
        super().__init__(
            job.net,
            method.split,
            method.client,
            job.data,
            [rows[k] for k in self.order],
            [job.rows(client, "valid") if stops else None for client in self.clients],
            [Stream(job.seed, job.data.ids[client], round) for client in self.clients],
            job.device,
            progress,
        )
        self.sent = [work[k].sent for k in self.order]
        self.own = [row(own, k) for k in self.order]
        self.broken = list[NonFiniteError | None]()
        self.starts = [self._start(k) for k in range(len(self.clients))]
        self.tables = [
            local_tables(job.net, self.client.phases, start, job.data, rows, valid, self.client.tables)
            for start, rows, valid in zip(self.starts, self.rows, self.valid, strict=True)
        ]
        self._stack()
        self.check_written()  # before anything runs under vmap, of which an assigned .data would keep a dead tensor
        self.examples = GatheredExamples(job.data, self.rows, self.tables, job.net.float_type, job.device)

    def _start(self, position: int) -> Params:
        """Return what a client trains from. If its ``start`` breaks down, it trains in vain, from what was before."""
        sent, own = self.sent[position], self.own[position]
        try:
            start = begin(self.job, sent, own, self.clients[position], self.rows[position], self.round)
        except NonFiniteError as error:
            self.broken.append(error)
            return before_start(self.job, sent, own)
        self.broken.append(None)
        return start

    def _stack(self) -> None:
        first, method = self.starts[0], self.job.method
        names = [n for n in first if n in self.trainable]
        self.changing = {n for p in self.client.phases for n in p.trained_names(self.split, names)}
        plain = self.trainable - self.net.written.keys()
        self.changing |= {
            n for n in first if n not in plain and not is_state(n)
        }  # the model writes into them
        tables = {t.parameter: [own[k] for own in self.tables] for k, t in enumerate(self.tables[0])}
        apart = method.server.send is not None
        own = {n for n in first if apart or first[n] is not self.sent[0].get(n)}
        self.params, self.stacked = self._side_by_side(self.starts, tables, copy=self.changing, own=own)
        # A term may run the model at what was received, which writes into all but plain parameters.
        moved = {n for n in self.sent[0] if n not in plain and not is_state(n)}
        sent = set(self.sent[0]) if apart else set()
        self.received, self.cut = self._side_by_side(self.sent, tables, copy=moved, own=sent)

    def _side_by_side(
        self, each: Sequence[Params], tables: Mapping[str, list[LocalTable]], copy: set[str], own: set[str]
    ) -> tuple[Params, set[str]]:
        """Return every client's tensors by name, and which names have a client axis: tables, those to be copied, and
        those that are not one tensor for all, which of a client alone is said by ``own``; of the others there is one.
        """
        out, stacked = Params(), set()
        for name, value in each[0].items():
            same = all(tensors[name] is value for tensors in each) and (len(each) > 1 or name not in own)
            if name in tables:
                out[name] = padded([t[name].detach() for t in each], tables[name]).to(self.job.device)
            elif same and name in copy:
                wide = value.detach().to(self.job.device).expand(len(each), *value.shape)
                out[name] = wide.clone(memory_format=torch.contiguous_format)
            elif same:
                out[name] = value.detach().to(self.job.device)
                continue
            else:
                out[name] = torch.stack([tensors[name].detach() for tensors in each]).to(self.job.device)
            stacked.add(name)
        return out, stacked

    def seed(self, number: int) -> None:
        """Begin each client's stream of dropout's draws."""
        seeds = [stream(d.seed, f"noise/{number}", d.client, d.round) for d in self.draws]
        self.noise = Noise(seeds, self.device)

    def mini_batches(self, number: int) -> Iterator[LaneStep]:
        """Yield who steps when, and on what."""
        phase, every = self.client.phases[number], zip(self.rows, self.draws, strict=True)
        plans = [list(batches(self.data, rows, phase, draws, number)) for rows, draws in every]
        for who, rows in lockstep(plans, phase.batch_size, self.through):
            yield Together(who, rows, self.examples)

    def lane(self, position: int) -> Params:
        """Return views of one client's parameters."""
        return one_of(self.params, self.stacked, position)

    def sent_to(self, position: int) -> Params:
        """Return views of what one client received."""
        return one_of(self.received, self.cut, position)

    def nonfinite(self, names: Sequence[str]) -> list[str | None]:
        """Look at every client's values, with one transfer from the device."""
        names = [n for n in names if n in self.stacked and self.params[n].is_floating_point()]
        if not names:
            return [None] * len(self.clients)
        finite = torch.stack([torch.isfinite(flat(self.params[n])).all(1) for n in names], 1).cpu().numpy()
        return [None if each.all() else names[int(each.argmin())] for each in finite]

    def faults(self) -> list[NonFiniteError | None]:
        """Return each client's error of its ``start``, or of a loss or a value that is not finite."""
        return [first or later for first, later in zip(self.broken, super().faults(), strict=True)]

    def results(self) -> Iterator[ClientResult]:
        """Yield what each client gives back, in the order given; a breakdown to NaN is a result with ``fault``."""
        faults = self.faults()
        if self.job.method.client.finish is None:
            self.params = to(self.params, "cpu")  # in one go for all clients
        for k in np.argsort(self.order).tolist():
            client, own, start = self.clients[k], self.own[k], self.starts[k]
            if (fault := faults[k]) is not None:
                yield ClientResult(client, fault=fault)
                continue
            local = self.result(k)
            rows, draws = self.rows[k], self.draws[k]
            yield finish(self.job, self.sent[k], own, start, local, client, rows, draws, self.progress)

    def pick(self, who: Sequence[int]) -> Pick:
        """Return how to pick the clients at these (ascending) positions."""
        if who[-1] - who[0] == len(who) - 1:
            return slice(who[0], who[-1] + 1)
        return torch.tensor(who).to(self.job.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """The bytes that these clients hold by themselves."""
        mine = {n: v for n, v in self.params.items() if n in self.stacked}
        return nbytes(mine) + nbytes({n: self.received[n] for n in self.cut}) + self.examples.nbytes


def alike(taken: Mapping[str, np.ndarray], clients: int) -> list[slice]:
    """Return the runs of neighbours who have taken equally many steps: Adam corrects its moments by their number."""
    ends = {clients}
    for counts in taken.values():
        ends |= {int(k) + 1 for k in np.flatnonzero(np.diff(counts))}
    bounds = [0, *sorted(ends)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def one_of(values: Mapping[str, Tensor], stacked: Collection[str], position: int) -> Params:
    """Return one client's values, views of those that are ``stacked``."""
    return {n: v[position] if n in stacked else v for n, v in values.items()}


def picked(values: Mapping[str, Tensor], pick: Pick) -> Params:
    """Return some clients' values of stacked tensors; a slice's are views."""
    if isinstance(pick, slice):
        return {n: v[pick] for n, v in values.items()}
    return {n: v.index_select(0, pick) for n, v in values.items()}


def write_back(values: Mapping[str, Tensor], pick: Pick, changed: Params) -> None:
    """Write what was picked and changed back into the stacked tensors (views need none)."""
    if not isinstance(pick, slice):
        for name, value in changed.items():
            values[name].index_copy_(0, pick, value)


def flat(value: Tensor) -> Tensor:
    """Return a stacked tensor as (clients, numbers)."""
    return value.reshape(len(value), value[0].numel())


def padded(values: Sequence[Tensor], tables: Sequence[LocalTable]) -> Tensor:
    """Return each client's rows of its table, stacked, with rows of zeros behind the shorter ones."""
    longest = max(len(t.rows) for t in tables)
    out = values[0].new_zeros(len(tables), longest, *values[0].shape[1:])
    for mine, value, table in zip(out, values, tables, strict=True):
        mine[: len(table.rows)] = value[table.rows.to(value.device)]
    return out
