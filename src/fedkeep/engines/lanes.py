"""Local training: the one loop over phases and mini-batches that every engine runs.

A *lane* is one client's training. ``Lanes`` holds the tensors of one client (``single_lane.py``) or of many side by side,
with a client axis (``vectorised/``). These differ in how a mini-batch is made, how its gradient is computed and
clipped, and how the optimiser's step is written back. All else is here: phases and their turns, early stopping,
watching, what opted-out examples may touch, buffers that stay, losses, and the search for NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, gradients
from fedkeep.core.seeds import without_draws
from fedkeep.engines.batches import Stream, float_type, load_batch, steps_per_pass, usable
from fedkeep.engines.dropout import InOrder
from fedkeep.engines.opt_out import Hidden, hidden, reads_hidden, trains_federated, veiled
from fedkeep.engines.stopping import Stopper, watched
from fedkeep.engines.tables.local_rows import Examples, LocalTable, narrow, widen
from fedkeep.engines.training_errors import MODEL_ERRORS, model_error, no_gradient, nonfinite_error
from fedkeep.methods import Client
from fedkeep.split import Split
from fedkeep.split.halves import Frozen

EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Watch:
    """Looks at a local run while it goes on.

    Attributes:
        every: mini-batches between two looks, counted over all phases.
        look: called with the number of mini-batches so far and all parameters as they are then, tables whole.
    """

    every: int
    look: Callable[[int, Params], None]


class Tap(Protocol):
    """Looks at the gradients of every step, as ``fedkeep prove`` does."""

    def gradients(self, step: Pass, grads: Params, *, clipped: bool) -> Params:
        """Return what goes on in place of the gradients, by name; ``clipped``: their norm has been bounded."""
        ...


TAP: ContextVar[Tap | None] = ContextVar("tap", default=None)


@dataclass
class LocalResult:
    """What local training gives.

    Attributes:
        trained: all parameters after training, federated and private; ``tables`` are cut to local rows.
        start: all parameters before, whole.
        tables: the tables that were trained by local rows.
        loss: the mean of the mini-batch losses of the last phase, of those on opted-in examples where others are
            opted out; NaN if no step was taken.
        looked_at: whether there is such a loss.
        dropped: why private values are as they were before, where opted-out examples made them NaN; else empty.
        steps: optimiser steps taken.
        states: the optimisers' states after each phase, of one client trained alone.
        stopped: for a phase with early stopping, the pass (from 1) with the lowest validation loss; else 0.
    """

    trained: Params
    start: Mapping[str, Tensor]
    tables: Sequence[LocalTable]
    loss: float = float("nan")
    looked_at: bool = False
    dropped: str = ""
    steps: int = 0
    states: list[OptimizerState] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    @property
    def params(self) -> Params:
        """All parameters after training, tables whole."""
        return widen(self.trained, self.start, self.tables)


class Step(Protocol):
    """A mini-batch of some lanes."""

    @property
    def lanes(self) -> Sequence[int]:
        """Whose it is: the lanes' positions."""
        ...

    def batch(self) -> Batch:
        """Return it; its own each time, as a model may change what it is given."""
        ...


class Lanes(ABC):
    """The local training of one client or of many side by side.

    Args:
        net: the model as a function.
        split: the method's split.
        client: the phases, how they take turns, and how tables are trained.
        data: the data set.
        rows: each lane's training examples in it.
        valid: each lane's validation examples, for phases with early stopping.
        draws: names each lane's random streams.
        device: where to train.
        progress: the finished part of the run in [0, 1), for learning-rate schedules.

    Attributes:
        params: all parameters; changed by training.
        received: what the server sent, for terms that compare with it.
        starts: each lane's parameters before training, whole.
        tables: each lane's tables that are trained by local rows.
        through: which lanes have stopped the present phase early.
        losses, looked_at, steps, dropped: of each lane, as in ``LocalResult``.
        stopped: by phase, then by lane, as in ``LocalResult``.
        after_step: called with the number of steps taken, e.g. to show progress.
        watch: looks at the parameters now and then; what it computes must not change them.
    """

    params: Params
    received: Params
    starts: Sequence[Params]
    tables: Sequence[Sequence[LocalTable]]

    def __init__(
        self,
        net: Net,
        split: Split,
        client: Client,
        data: Examples,
        rows: Sequence[np.ndarray],
        valid: Sequence[np.ndarray | None],
        draws: Sequence[Stream],
        device: str,
        progress: float,
    ) -> None:
        self.net, self.split, self.client, self.data = net, split, client, data
        self.rows, self.valid, self.draws = rows, valid, draws
        self.device, self.progress, self.trainable = device, progress, net.trainable()
        count = len(draws)
        self.through = [False] * count
        self.losses, self.looked_at = [math.nan] * count, [False] * count
        self.steps = [0] * count
        self.dropped, self.stopped = [""] * count, list[list[int]]()
        self.after_step: Callable[[int], None] | None = None
        self.watch: Watch | None = None
        self.taken, self.hidden = 0, Hidden()

    @abstractmethod
    def seed(self, number: int) -> None:
        """Begin each lane's stream of dropout's draws for a phase."""

    @abstractmethod
    def mini_batches(self, number: int) -> Iterator[Step]:
        """Yield the mini-batches of a phase; none of lanes that are ``through``."""

    @abstractmethod
    def begin(self, number: int) -> Pass:
        """Return the pass of a phase."""

    @abstractmethod
    def lane(self, position: int) -> Params:
        """Return one lane's parameters: what is changed in place in these changes the lane."""

    @abstractmethod
    def sent_to(self, position: int) -> Params:
        """Return what one lane received."""

    @abstractmethod
    def nonfinite(self, names: Sequence[str]) -> list[str | None]:
        """Return for each lane the first of some parameters with a NaN or an infinity."""

    def train(self) -> None:
        """Run all phases; what the module has and lanes have not is frozen, and as before (else SplitError)."""
        self.net.train()
        every, done = range(len(self.client.phases)), 0
        frozen = Frozen({n: v for n, v in self.net.parameters.items() if n not in self.params})
        with self.net.still(self.draws[0]), InOrder():
            self.hidden = hidden(self)
            for numbers in [every] if self.client.take_turns else [range(n, n + 1) for n in every]:
                self.seed(numbers[0])
                self.through[:] = [False] * len(self.through)
                with ExitStack() as held:
                    passes = [held.enter_context(self.begin(number)) for number in numbers]
                    for step in self.mini_batches(numbers[0]):
                        for each in passes:
                            each.take(step)
                        done += 1
                        if self.watch is not None and done % self.watch.every == 0:
                            self._show(self.watch, done, passes)
                    for each in passes:
                        each.finish()
        frozen.check(str(self.draws[0]))
        self._drop_what_opted_out_examples_broke()

    def _show(self, watch: Watch, done: int, passes: Sequence[Pass]) -> None:
        shown = dict(self.lane(0))
        for each in passes:
            each.catch_up()
            shown |= each.before
        watch.look(done, widen(shown, self.starts[0], self.tables[0]))
        self.net.train()  # whoever looked may have switched to evaluation

    def _drop_what_opted_out_examples_broke(self) -> None:
        """Put private values back as they were before in lanes where opted-out examples made one NaN."""
        hidden = sorted(self.hidden.names)
        for position, bad in enumerate(self.nonfinite(hidden) if hidden else ()):
            if bad is None:
                continue
            tables = [t for t in self.tables[position] if t.parameter in hidden]
            start, lane = narrow({n: self.starts[position][n] for n in hidden}, tables), self.lane(position)
            for name, value in start.items():
                (lane[name][: len(value)] if value.dim() else lane[name]).copy_(value)
            self.dropped[position] = (
                f"{self.draws[position]}: the private {bad!r} became NaN or infinite; the client keeps what it had."
            )

    def faults(self) -> list[NonFiniteError | None]:
        """Return for each lane the error of a loss or a value that is not finite."""
        found = list[NonFiniteError | None]()
        for position, bad in enumerate(self.nonfinite(list(self.params))):
            if self.looked_at[position] and not math.isfinite(self.losses[position]):
                bad = "the training loss"
            who, steps = str(self.draws[position]), self.steps[position]
            found.append(None if bad is None else nonfinite_error(who, bad, steps))
        return found

    def result(self, position: int) -> LocalResult:
        """Return what one lane's training gives."""
        tables, trained = self.tables[position], self.lane(position)
        for table in tables:
            trained[table.parameter] = trained[table.parameter][: len(table.rows)]
        return LocalResult(
            trained,
            self.starts[position],
            tables,
            self.losses[position],
            self.looked_at[position],
            self.dropped[position],
            self.steps[position],
            stopped=[each[position] for each in self.stopped],
        )


class Pass(ABC):
    """The steps of one phase: a context around them, closed by ``finish``.

    Attributes:
        names: what it trains.
        scale: the schedule's factor on the rates.
        seen: the parameters that its loss may see: a federated phase nothing that opted-out examples made.
        looks: whether opted-out examples, or what these made, influence it; then its loss does not leave.
        before: buffers that leave the client and that this phase must not move, as they were.
    """

    def __init__(self, lanes: Lanes, number: int) -> None:
        self.lanes, self.number, self.phase = lanes, number, lanes.client.phases[number]
        params, split, trainable = lanes.params, lanes.split, lanes.trainable
        self.names = self.phase.trained_names(split, [n for n in params if n in trainable])
        self.scale = self.phase.optimizer.scale(lanes.progress)
        self.repeats = lanes.client.steps(number) if self.names else 0
        opted_out, federated = lanes.hidden, trains_federated(self.names, split)
        self.looks, self.hides = number in opted_out.phases, bool(federated and opted_out.names)
        self.seen = veiled(params, opted_out.names, lanes.net.initial(), trainable) if self.hides else params
        leaving = [
            n for n in lanes.received if n in params and n not in trainable and not split.is_private(n)
        ]
        stays = self.looks or self.phase.examples == "all"
        self.before = {n: params[n].clone() for n in leaving if stays}
        self.steps = [0] * len(lanes.draws)
        self.stoppers = [] if self.phase.early_stopping is None else self._stoppers()

    def _stoppers(self) -> list[Stopper]:
        lanes, rule = self.lanes, self.phase.early_stopping
        assert rule is not None
        each_lane = zip(lanes.rows, lanes.draws, strict=True)
        counts = [len(usable(lanes.data, rows, self.phase, draws)) for rows, draws in each_lane]
        self.per_pass = [steps_per_pass(count, self.phase) for count in counts]
        self.batches = [0] * len(counts)
        self.watched = [
            watched(lanes.data, valid, self.phase, draws, trains=count > 0)
            for valid, draws, count in zip(lanes.valid, lanes.draws, counts, strict=True)
        ]
        losses = (partial(self.validation_loss, k) for k in range(len(counts)))
        each = [partial(without_draws, "validation loss", loss, lanes.device) for loss in losses]
        return [Stopper(rule, loss, lanes.lane(k)) for k, loss in enumerate(each)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027
        """Nothing is held."""

    @abstractmethod
    def gradients(self, step: Step) -> Params:
        """Return the gradients of the loss by name, and add the loss to ``totals``."""

    @abstractmethod
    def totals(self) -> list[float]:
        """Return the sum of each lane's losses so far."""

    @abstractmethod
    def clip(self, grads: Params, bound: float) -> Params:
        """Return gradients whose joint L2 norm is at most ``bound`` in each lane."""

    @abstractmethod
    def move(self, step: Step, grads: Params) -> None:
        """Take the optimiser's step."""

    @abstractmethod
    def lane(self, position: int) -> tuple[Params, Mapping[str, Tensor]]:
        """Return what one lane's loss may see, and what the lane received; tables at present."""

    def catch_up(self) -> None:
        """Bring every row of the tables to the present."""
        return

    def take(self, step: Step) -> None:
        """Take the optimiser steps of one mini-batch of some lanes."""
        tap = TAP.get()
        for _ in range(self.repeats):
            grads = self.gradients(step)
            if tap is not None:
                grads = tap.gradients(self, grads, clipped=False)
            if self.phase.clip_norm is not None:
                grads = self._clipped(grads, self.phase.clip_norm)
                if tap is not None:
                    grads = tap.gradients(self, grads, clipped=True)
            self.move(step, grads)
            for lane in step.lanes:
                self.steps[lane] += 1
            self.lanes.taken += 1
            if self.lanes.after_step is not None:
                self.lanes.after_step(self.lanes.taken)
        for lane in step.lanes if self.stoppers else ():
            self.batches[lane] += 1
            epoch, rest = divmod(self.batches[lane], self.per_pass[lane])
            self.lanes.through[lane] = not rest and self.stoppers[lane].done(epoch)

    def _clipped(self, grads: Params, bound: float) -> Params:
        """Return gradients within the bound, over all of them or over each half."""
        if self.phase.clip_over == "all":
            return self.clip(grads, bound)
        split = self.lanes.split
        return {**self.clip(split.federated(grads), bound), **self.clip(split.personal(grads), bound)}

    def loss(self, position: int, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the phase's loss on one lane's batch."""
        try:
            return self.phase.loss(self.lanes.net, params, batch, received)
        except MODEL_ERRORS as error:
            raise model_error(
                str(self.lanes.draws[position]), len(next(iter(batch.values()))), error
            ) from error

    @torch.no_grad()
    def validation_loss(self, position: int) -> float:
        """Return the phase's loss on the validation examples that stop one lane, in evaluation mode."""
        lanes, rows = self.lanes, self.watched[position]
        self.catch_up()
        params, received = self.lane(position)
        total = torch.zeros((), dtype=torch.float64)
        lanes.net.train(False)
        for start in range(0, len(rows), EVALUATION_BATCH):
            chosen = rows[start : start + EVALUATION_BATCH]
            kind, tables = float_type(lanes.params), lanes.tables[position]
            batch = load_batch(lanes.data, chosen, lanes.device, kind, tables)
            loss = self.loss(position, params, batch, received)
            total += len(chosen) * loss.double().cpu()
        lanes.net.train()
        return float(total) / len(rows)

    def finish(self) -> None:
        """Bring everything to the present, the best values back and buffers to their place; note the mean losses."""
        lanes = self.lanes
        self.catch_up()
        lanes.stopped.append([stopper.restore() for stopper in self.stoppers] or [0] * len(lanes.draws))
        self.stoppers = []  # they lead back here: until Python looks for circles, these would hold all tensors
        totals = self.totals()
        if self.hides and any(map(math.isnan, totals)):
            raise reads_hidden(lanes.net)
        lanes.params.update(self.before)
        for lane, steps in enumerate(self.steps):
            lanes.steps[lane] += steps
            if steps and not self.looks:  # its loss does not leave else
                lanes.losses[lane], lanes.looked_at[lane] = totals[lane] / steps, True


def slopes(loss: Tensor, leaves: Mapping[str, Tensor]) -> Params:
    """Return the loss's gradient by name; a leaf that the loss does not depend on has none. All leaves: MethodError."""
    if not loss.requires_grad:
        raise no_gradient(list(leaves))
    # Tables with sparse gradients (nn.Embedding(sparse=True)) are trained like others.
    return {name: s.to_dense() if s.is_sparse else s for name, s in gradients(loss, leaves).items()}
