"""One client's local training: a lane of its own, on plain tensors.

A client of a federation, a cohort's member in another process, a new user who personalises, and centralised training
over pooled examples all come through ``local_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Params, nonfinite, to
from fedkeep.core.seeds import forked, seed_all, stream
from fedkeep.engines.batches import Loaded, Stream, batches, float_type, gathered, steps_per_pass, usable
from fedkeep.engines.lanes import Lanes, LocalResult, Pass, Step, Watch, slopes
from fedkeep.engines.rehearsal import rehearse
from fedkeep.engines.tables.lazy_rows import LazyRows, lazy_tables
from fedkeep.engines.tables.local_rows import Examples, Owned, local_tables, narrow, narrow_alike
from fedkeep.methods import Client, Phase
from fedkeep.split import Split


def local_run(
    net: Net,
    split: Split,
    client: Client,
    params: Mapping[str, Tensor],
    received: Params,
    data: Examples,
    rows: np.ndarray,
    draws: Stream,
    *,
    valid: np.ndarray | None = None,
    device: str = "cpu",
    progress: float = 0.0,
    states: Sequence[OptimizerState] | None = None,
    after_step: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    falls: bool = False,
) -> LocalResult:
    """Train on a client's own examples, phase after phase.

    Args:
        net: the model as a function.
        split: the method's split.
        client: its phases, how they take turns, and how tables are trained.
        params: all parameters at the start, state under ``client/NAME``; they are not changed.
        received: what the server sent, state under ``server/NAME``, for the terms that compare with it.
        data: the data set; ``rows`` are the client's examples in it.
        draws: names the random streams of batches and of dropout.
        valid: the client's validation examples, for phases with early stopping.
        device: where to train.
        progress: the finished part of the run in [0, 1), for learning-rate schedules.
        states: optimiser states to go on from (centralised training); fresh ones by default.
        after_step: called with the number of steps taken, e.g. to show progress.
        watch: looks at the parameters now and then; what it computes must not change them.
        falls: the rates of each phase fall linearly to zero: its step t of T takes 1 − t / T of them, t from 0.

    Raises:
        NonFiniteError: the loss or a parameter became NaN or infinite; names the client.
        MethodError: a phase that trains federated parameters reads private ones that were trained on opted-out
            examples, or a phase is to stop early and there are no validation examples.
    """
    lane = Lane(net, split, client, data, [rows], [valid], [draws], device, progress)
    lane.falls = falls
    lane.hold(dict(params), received, states)
    lane.after_step, lane.watch = after_step, watch
    with forked(device), own_dropout(net, device):
        lane.train()
    if (fault := lane.faults()[0]) is not None:
        raise fault
    result = lane.result(0)
    result.states = lane.states
    return result


def own_dropout(net: Net, device: str) -> AbstractContextManager[object]:
    """Keep cuDNN out where a recurrent layer has dropout between its layers: its masks follow no seed of a client's."""
    layers = net.module.modules() if device.startswith("cuda") else ()
    if any(isinstance(m, nn.RNNBase) and m.dropout and m.num_layers > 1 for m in layers):
        return torch.backends.cudnn.flags(enabled=False, allow_tf32=False)
    return nullcontext()


class Lane(Lanes):
    """The only lane; its parameters have no client axis."""

    falls = False

    def hold(self, params: Params, received: Params, states: Sequence[OptimizerState] | None) -> None:
        """Take the values to train from: copies of them, tables cut to local rows."""
        rows, valid, client = self.rows[0], self.valid[0], self.client
        rehearse(self.net, params, self.data, rows, self.device)
        cut = local_tables(self.net, client.phases, params, self.data, rows, valid, client.tables)
        mine = narrow(params, cut)
        self.params = {name: value.detach().to(self.device, copy=True) for name, value in mine.items()}
        self.received = to(narrow_alike(received, params, mine, cut), self.device)
        self.starts, self.tables = [params], [cut]
        # All clients share what was sent. A term may run the model at it, also at state that is a model's, and that
        # writes into all but plain parameters.
        plain = self.trainable - self.net.written.keys()
        moved = [n for n in self.received if n.rpartition("/")[2] not in plain]
        self.received |= {n: self.received[n].detach().clone() for n in moved}
        self.states = list(states or (phase.optimizer.init() for phase in client.phases))
        for state in self.states:  # a run that goes on has read them
            state.first, state.second = to(state.first, self.device), to(state.second, self.device)
        # Other phases in turn would read stale rows, so rows wait only where a skipped update would be zero.
        late = any(p.optimizer.momentum or p.loss.pull != 0 for p in client.phases)
        # Nor may some phases wait and others not: the model holds either a batch's rows or all.
        differ = len({bool(lazy_tables(p, cut)) for p in client.phases}) > 1
        all_now = client.take_turns and (late or differ)
        self.lazy = not all_now and not self.falls  # rows that wait know one rate

    def seed(self, number: int) -> None:
        """Seed torch's own generators, which dropout draws from."""
        draws = self.draws[0]
        seed = stream(draws.seed, f"noise/{number}", draws.client, draws.round)
        seed_all(seed, self.device)

    def mini_batches(self, number: int) -> Iterator[Loaded]:
        """Yield the mini-batches of a phase, gathered several at a time."""
        pooled = self.client.pools == "clients" and isinstance(self.data, Owned)
        owners = self.data.owners if pooled and isinstance(self.data, Owned) else None
        plan = batches(self.data, self.rows[0], self.client.phases[number], self.draws[0], number, owners)
        for loaded in gathered(self.data, plan, self.device, float_type(self.params), self.tables[0]):
            yield loaded
            if self.through[0]:
                return

    def begin(self, number: int) -> Pass:
        """Return the pass of a phase."""
        return LanePass(self, number)

    def lane(self, position: int) -> Params:
        """Return all parameters."""
        return self.params

    def sent_to(self, position: int) -> Params:
        """Return what the client received."""
        return self.received

    def nonfinite(self, names: Sequence[str]) -> list[str | None]:
        """Return the first of some parameters with a NaN or an infinity."""
        return [nonfinite({name: self.params[name] for name in names})]


class LanePass(Pass):
    """The steps of one phase on plain tensors, which the model holds as long as they last."""

    def __init__(self, lane: Lane, number: int) -> None:
        super().__init__(lane, number)
        self.state = lane.states[number]
        self.total = torch.zeros((), dtype=torch.float32)  # losses of fewer bits are summed in these
        self.planned = self.repeats * planned_batches(lane, self.phase) if lane.falls else 0
        tables = lazy_tables(self.phase, lane.tables[0]) if lane.lazy and not self.hides else []
        self.lazy: LazyRows | None = None
        if tables:
            self.lazy = LazyRows(
                tables,
                self.names,
                lane.params,
                lane.received,
                self.phase.optimizer,
                self.state,
                self.scale,
                self.phase.loss.pull or 0.0,
            )
            self.seen = dict(lane.params)
        dense = [n for n in self.names if self.lazy is None or n not in self.lazy.of]
        self.leaves = {name: lane.params[name] for name in dense}
        self.bound = lane.net.bound(self.seen)
        self.rows = Params()

    def __enter__(self) -> Self:
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.bound.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bound.__exit__()
        for leaf in self.leaves.values():
            leaf.requires_grad_(False)

    def gradients(self, step: Step) -> Params:
        """Return the gradients of the loss on a mini-batch, of tables those of the rows that it looks up."""
        batch, leaves = step.batch(), self.leaves
        received: Mapping[str, Tensor] = self.lanes.received
        if self.lazy is not None:
            self.rows, received = self.lazy.look_up(batch)
            self.bound.put(self.rows)
            leaves = {**leaves, **{n: self.rows[n] for n in self.lazy.trained}}
        loss = self.loss(0, self.seen, batch, received)
        self.total = self.total + loss.detach()
        if self.lazy is not None:
            self.total = self.total + self.lazy.penalty
        found = slopes(loss, leaves)
        self.lanes.net.settle()
        return found

    def totals(self) -> list[float]:
        """Return the sum of the losses so far."""
        return [float(self.total)]

    def clip(self, grads: Params, bound: float) -> Params:
        """Scale the gradients in place."""
        clip_(grads, bound)
        return grads

    def move(self, step: Step, grads: Params) -> None:
        """Take the optimiser's step."""
        if self.lazy is not None:
            self.lazy.update(self.rows, {n: grads.pop(n) for n in self.lazy.trained if n in grads})
        left = 1 - self.steps[0] / self.planned if self.planned else 1.0
        self.phase.optimizer.update(self.lanes.params, grads, self.state, self.scale * left)

    def lane(self, position: int) -> tuple[Params, Mapping[str, Tensor]]:
        """Return all that the loss may see, tables whole."""
        if self.lazy is not None:
            self.bound.put({n: self.lanes.params[n] for n in self.lazy.of})
        return self.seen, self.lanes.received

    def catch_up(self) -> None:
        """Bring every row of the tables to the present."""
        if self.lazy is not None:
            self.lazy.finish()


def planned_batches(lane: Lane, phase: Phase) -> int:
    """Return how many mini-batches a phase makes of the lane's examples, unless it stops early."""
    if phase.steps is not None:
        return phase.steps
    return phase.epochs * steps_per_pass(len(usable(lane.data, lane.rows[0], phase, lane.draws[0])), phase)


@torch.no_grad()
def clip_(grads: Params, bound: float) -> None:
    """Scale gradients in place so that their joint L2 norm is at most ``bound``."""
    if grads:
        norms = torch._foreach_norm(list(grads.values()))
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        torch._foreach_mul_(list(grads.values()), (bound / (norm + 1e-6)).clamp(max=1.0))
