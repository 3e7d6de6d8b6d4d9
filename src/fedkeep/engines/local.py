"""THE local run: the only place where fedkeep takes gradients to train (the split checker's probes aside).

A client of a federation, a cohort's member in another process, a new user who personalises, and centralised training
over pooled examples all come through ``local_run``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import DataError, MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, clone, nonfinite
from fedkeep.core.seeds import numpy_generator, stream
from fedkeep.data import Ragged
from fedkeep.data.columns import Column
from fedkeep.engines.tables.lazy import LazyRows, lazy_tables
from fedkeep.engines.tables.local_rows import (
    Examples,
    LocalTable,
    Owned,
    Tables,
    allowed,
    local_tables,
    narrow,
    widen,
)
from fedkeep.methods import EarlyStopping, Phase
from fedkeep.split import Split

EVALUATION_BATCH = 512
WINDOW_BYTES = 256 << 10
"""Mini-batches of this size together are gathered at once."""
READS_HIDDEN = (
    "A phase that trains federated parameters reads private ones that another phase trains on opted-out "
    "examples too, so these would influence what leaves the client. Train that phase with "
    "examples='opted_in', or leave those parameters out of the federated phase's loss."
)


@dataclass(frozen=True)
class Stream:
    """Names the random streams of one local run; every draw depends on these alone.

    Attributes:
        seed, client, round: the names.
        who: who trains, in messages; by default the client and the round.
    """

    seed: int
    client: str
    round: int = 0
    who: str = ""

    def __str__(self) -> str:
        return self.who or f"Client {self.client!r}, round {self.round}"


@dataclass(frozen=True)
class Watch:
    """Looks at a local run while it goes on.

    Attributes:
        every: mini-batches between two looks, counted over all phases.
        look: called with the number of mini-batches so far and all parameters as they are then, tables whole.
    """

    every: int
    look: Callable[[int, Params], None]


@dataclass
class LocalResult:
    """What local training gives.

    Attributes:
        trained: all parameters after training, federated and private; ``tables`` are cut to local rows.
        start: all parameters before, whole.
        tables: the tables that were trained by local rows.
        loss: the mean of the mini-batch losses of the last phase; NaN if no step was taken.
        steps: optimiser steps taken.
        states: the optimisers' states after each phase.
        stopped: for a phase with early stopping, the pass (from 1) with the lowest validation loss; else 0.
    """

    trained: Params
    start: Mapping[str, Tensor]
    tables: list[LocalTable]
    loss: float = float("nan")
    steps: int = 0
    states: list[OptimizerState] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)

    @property
    def params(self) -> Params:
        """All parameters after training, tables whole."""
        return widen(self.trained, self.start, self.tables)


def local_run(
    net: Net,
    split: Split,
    phases: Sequence[Phase],
    params: Mapping[str, Tensor],
    received: Params,
    data: Examples,
    rows: np.ndarray,
    draws: Stream,
    *,
    valid: np.ndarray | None = None,
    turns: Literal["phases", "batches"] = "phases",
    tables: Tables = "exact",
    device: str = "cpu",
    progress: float = 0.0,
    states: Sequence[OptimizerState] | None = None,
    after_step: Callable[[int], None] | None = None,
    watch: Watch | None = None,
) -> LocalResult:
    """Train on a client's own examples, phase after phase.

    Args:
        net: the model as a function.
        split: the method's split.
        phases: the passes, in order.
        params: all parameters at the start; they are not changed.
        received: the federated parameters as the server sent them, for the terms that compare with them.
        data: the data set; ``rows`` are the client's examples in it.
        draws: names the random streams of batches and of dropout.
        valid: the client's validation examples, for phases with early stopping.
        turns: as ``Method.turns``.
        tables: as ``Method.tables``.
        device: where to train.
        progress: the finished part of the run in [0, 1), for learning-rate schedules.
        states: optimiser states to go on from (centralised training); fresh ones by default.
        after_step: called with the number of steps taken, e.g. to show progress.
        watch: looks at the parameters now and then; what it computes must not change them.

    Raises:
        NonFiniteError: the loss or a parameter became NaN or infinite; names the client.
        MethodError: a phase that trains federated parameters reads private ones that were trained on opted-out
            examples, or a phase is to stop early and there are no validation examples.
    """
    cut = local_tables(net, phases, params, data, rows, valid, tables)
    current = {
        name: value.detach().to(device, copy=True) for name, value in narrow(dict(params), cut).items()
    }
    run = _LocalRun(
        net, split, phases, current, narrow(received, cut), data, rows, valid, cut, draws, device, progress,
        after_step, watch,
    )  # fmt: skip
    net.train()
    result = LocalResult(current, params, cut, states=list(states or (p.optimizer.init() for p in phases)))
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        run.all(turns, result)
    fault = "the training loss" if result.steps and not np.isfinite(result.loss) else nonfinite(current)
    if fault is not None:
        raise broken(draws, fault, result.steps)
    return result


def broken(draws: Stream, fault: str, steps: int) -> NonFiniteError:
    """Return the error of a client whose training broke down."""
    return NonFiniteError(
        f"{draws}: {fault} became NaN or infinite after {steps} steps. "
        f"Lower the learning rate, set clip_norm, or look for NaN in this client's data."
    )


MODEL_ERRORS = (ValueError, IndexError, RuntimeError, DataError)
"""What a model raises that does not fit its data."""


def failed(who: str, examples: int, error: Exception, more: str = "") -> MethodError:
    """Return the error of a model that failed on a batch, with what usually helps."""
    advice = "Check its forward and the data's columns"
    if isinstance(error, torch.OutOfMemoryError):
        advice = "Use a smaller batch_size, or another device"
    elif isinstance(error, IndexError):
        advice += ": an id or a label may be beyond what it was made for"
    elif examples == 1:
        advice += "; batch normalisation needs more than one example"
    batch = f"a batch of {examples} example{'s' * (examples != 1)}"
    return MethodError(
        f"{who}: the model failed on {batch}: {str(error).strip().rstrip('.')}. {advice}.{more}"
    )


@dataclass(frozen=True)
class _Loaded:
    """A mini-batch among others that were gathered with it.

    Attributes:
        columns: of all of them.
        start, end: its rows.
        longest: by ragged column, the length of its longest row.
    """

    columns: Batch
    start: int
    end: int
    longest: Mapping[str, int]

    def batch(self) -> Batch:
        """Return the mini-batch, its own each time: a model may change what it is given."""
        mine = {name: value[self.start : self.end] for name, value in self.columns.items()}
        return {n: (v[:, : self.longest[n]] if n in self.longest else v).clone() for n, v in mine.items()}


@dataclass(frozen=True)
class _LocalRun:
    """What the phases of one local run share; ``params`` is changed in place."""

    net: Net
    split: Split
    phases: Sequence[Phase]
    params: Params
    received: Params
    data: Examples
    rows: np.ndarray
    valid: np.ndarray | None
    tables: list[LocalTable]
    draws: Stream
    device: str
    progress: float
    after_step: Callable[[int], None] | None
    watch: Watch | None

    def all(self, turns: str, result: LocalResult) -> None:
        """Run the phases and write into ``result``."""
        if turns == "batches":
            self._turns(result)
            return
        done = 0
        for number, phase in enumerate(self.phases):
            self._seed(number)
            with _Pass(self, number, result.states[number]) as one:
                stopper = self._stopper(phase, one)
                per_pass = steps_per_pass(len(usable(self.data, self.rows, phase, self.draws)), phase)
                steps = batches(self.data, self.rows, phase, self.draws, number)
                for position, loaded in enumerate(self.loaded(steps), 1):
                    one.step(loaded, result)
                    done += 1
                    self._look(done, [one], result)
                    if (
                        stopper is not None
                        and position % per_pass == 0
                        and stopper.done(position // per_pass)
                    ):
                        break
                one.finish(result)
            result.stopped.append(stopper.restore() if stopper is not None else 0)

    def _turns(self, result: LocalResult) -> None:
        self._seed(0)
        # What a row is late in would be hidden from the other phases, so tables are lazy only where that is nothing.
        lazy = all(p.optimizer.momentum == 0 and p.loss.pull == 0 for p in self.phases)
        with ExitStack() as held:
            passes = [
                held.enter_context(_Pass(self, number, result.states[number], lazy=lazy))
                for number in range(len(self.phases))
            ]
            steps = batches(self.data, self.rows, self.phases[0], self.draws, 0)
            for position, loaded in enumerate(self.loaded(steps), 1):
                for each in passes:
                    each.step(loaded, result)
                self._look(position, passes, result)
            for each in passes:
                each.finish(result)
                result.stopped.append(0)

    def _look(self, done: int, passes: Sequence[_Pass], result: LocalResult) -> None:
        if self.watch is None or done % self.watch.every:
            return
        buffers: Params = {}
        for each in passes:
            each.catch_up()
            buffers |= each.buffers
        self.watch.look(done, result.params | buffers)
        self.net.train()  # whoever looked may have switched to evaluation

    def _seed(self, number: int) -> None:
        seed = stream(self.draws.seed, f"noise/{number}", self.draws.client, self.draws.round)
        # Not torch.manual_seed, which notes a traceback for a GPU each time.
        torch.default_generator.manual_seed(seed)
        if self.device.startswith("cuda"):
            torch.cuda.manual_seed(seed)

    def _stopper(self, phase: Phase, one: _Pass) -> Stopper | None:
        if phase.early_stopping is None:
            return None
        if self.valid is None or not len(self.valid):
            raise MethodError(
                f"{self.draws}: a phase is to stop early by the validation loss, but there is no example in the split "
                f"'valid'. Hold some out (data.split), or set early_stopping=None."
            )
        return Stopper(phase.early_stopping, one.validation_loss, self.params)

    def batch(self, chosen: np.ndarray) -> Batch:
        """Return a mini-batch."""
        return load_batch(self.data, chosen, self.device, float_type(self.params), self.tables)

    def loaded(self, steps: Iterator[np.ndarray]) -> Iterator[_Loaded]:
        """Yield mini-batches, gathered several at a time: it is the calls that cost, not the rows."""
        ragged = {name: column for name, column in self.data.columns.items() if isinstance(column, Ragged)}
        at_once = 0
        while (first := next(steps, None)) is not None:
            at_once = at_once or max(1, WINDOW_BYTES // batch_bytes(self.data.columns, first))
            chosen = [first, *itertools.islice(steps, at_once - 1)]
            rows, ends = np.concatenate(chosen), np.cumsum([len(c) for c in chosen])
            starts = ends - [len(c) for c in chosen]
            columns = self.batch(rows)
            longest = {n: np.maximum.reduceat(c.lengths(rows), starts).clip(1) for n, c in ragged.items()}
            for k, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                yield _Loaded(columns, start, end, {n: int(each[k]) for n, each in longest.items()})

    def visible(self, names: Sequence[str], trainable: frozenset[str]) -> Params:
        """Return the parameters that a phase may see.

        Where there are opted-out examples, a phase that trains federated parameters must not depend on private ones
        that were trained on them: these are shown as NaN, so that any use of them shows in the loss.
        """
        hidden = hidden_from(names, self.data, self.phases, self.split, trainable)
        if not hidden:
            return self.params
        return {n: torch.full_like(v, torch.nan) if n in hidden else v for n, v in self.params.items()}


class _Pass:
    """The steps of one phase, a context that holds the parameters in the model; ``finish`` follows the last step."""

    def __init__(self, run: _LocalRun, number: int, state: OptimizerState, *, lazy: bool = True) -> None:
        trainable = run.net.trainable()
        self.run, self.phase, self.state = run, run.phases[number], state
        self.names = self.phase.trained_names(run.split, [n for n in run.params if n in trainable])
        self.scale = self.phase.optimizer.scale(run.progress)
        self.total: Tensor | float = 0.0
        self.steps = 0
        frozen = (
            {n: run.params[n] for n in run.received if n not in trainable and not run.split.is_private(n)}
            if self.phase.examples == "all"
            else {}
        )
        self.buffers = clone(frozen)
        self.seen = run.visible(self.names, trainable)
        self.lazy: LazyRows | None = None
        tables = lazy_tables(self.phase, run.tables) if lazy and self.seen is run.params else []
        if tables:
            self.lazy = LazyRows(
                tables, self.names, run.params, run.received, self.phase.optimizer, state, self.scale,
                self.phase.loss.pull or 0.0,
            )  # fmt: skip
            self.seen = dict(run.params)
        self.dense = [n for n in self.names if self.lazy is None or n not in self.lazy.of]
        self.leaves = {name: run.params[name] for name in self.dense}
        self.bound = run.net.bound(self.seen)

    def __enter__(self) -> Self:
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.bound.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bound.__exit__()
        for leaf in self.leaves.values():
            leaf.requires_grad_(False)

    def step(self, loaded: _Loaded, result: LocalResult) -> None:
        """Take the optimiser steps of one mini-batch."""
        for _ in range(self.phase.repeats if self.names else 0):
            self._step(loaded.batch())
            result.steps += 1
            if self.run.after_step is not None:
                self.run.after_step(result.steps)

    def _step(self, batch: Batch) -> None:
        received: Mapping[str, Tensor] = self.run.received
        rows = Params()
        if self.lazy is not None:
            rows, received = self.lazy.look_up(batch)
            self.bound.put(rows)
        loss = self.loss(batch, received)
        trained = [] if self.lazy is None else self.lazy.trained
        grads = gradients(loss, self.leaves | {n: rows[n] for n in trained})
        if self.phase.clip_norm is not None:
            clip_(grads, self.phase.clip_norm)
        if self.lazy is not None:
            self.lazy.update(rows, {n: grads.pop(n) for n in trained if n in grads})
        self.phase.optimizer.update(self.run.params, grads, self.state, self.scale)
        self.total = self.total + loss.detach() + (0.0 if self.lazy is None else self.lazy.penalty)
        self.steps += 1

    def loss(self, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the phase's loss on a batch."""
        try:
            return self.phase.loss(self.run.net, self.seen, batch, received)
        except MODEL_ERRORS as error:
            raise failed(str(self.run.draws), len(next(iter(batch.values()))), error) from error

    def validation_loss(self) -> float:
        """Return the phase's loss on the client's validation examples, in evaluation mode."""
        if self.lazy is not None:
            self.lazy.finish()
            self.bound.put({n: self.run.params[n] for n in self.lazy.of})
        rows = self.run.valid
        assert rows is not None
        total = torch.zeros((), dtype=torch.float64)
        self.run.net.train(False)
        with torch.no_grad():
            for start in range(0, len(rows), EVALUATION_BATCH):
                chosen = rows[start : start + EVALUATION_BATCH]
                total += len(chosen) * self.loss(self.run.batch(chosen), self.run.received).double().cpu()
        self.run.net.train()
        return float(total) / len(rows)

    def catch_up(self) -> None:
        """Bring every row of the tables to the present."""
        if self.lazy is not None:
            self.lazy.finish()

    def finish(self, result: LocalResult) -> None:
        """Bring everything to the present, and write the mean loss into ``result``."""
        self.catch_up()
        total = float(self.total)
        if self.seen is not self.run.params and self.lazy is None and np.isnan(total):
            raise MethodError(READS_HIDDEN)
        for name, value in self.buffers.items():
            self.run.params[name] = value
        if self.steps:
            result.loss = total / self.steps


class Stopper:
    """Early stopping: measures the validation loss after some passes and keeps the best values.

    Args:
        rule: when to measure and when to stop.
        measure: returns the loss.
        params: the values to keep, changed in place by training.
    """

    def __init__(self, rule: EarlyStopping, measure: Callable[[], float], params: Params) -> None:
        self.rule, self.measure, self.params = rule, measure, params
        self.best, self.epoch, self.waited = float("inf"), 0, 0
        self.kept: Params = {}

    def done(self, epoch: int) -> bool:
        """Tell, after a pass (counted from 1), whether training should stop."""
        if (epoch - 1) % self.rule.every:
            return False
        loss = self.measure()
        if not self.kept or loss < self.best - self.rule.min_improvement:
            self.best = loss if np.isfinite(loss) else float("inf")
            self.epoch, self.waited = epoch, 0
            self.kept = clone(self.params)
        else:
            self.waited += 1
        return self.waited >= self.rule.patience

    def restore(self) -> int:
        """Put the best values back; return the pass that they are from (0: none was measured)."""
        with torch.no_grad():
            for name, value in self.kept.items():
                self.params[name].copy_(value)
        return self.epoch


def hidden_from(
    names: Sequence[str], data: Examples, phases: Sequence[Phase], split: Split, trainable: frozenset[str]
) -> set[str]:
    """Return the private parameters that a phase which trains ``names`` must not see: see ``_LocalRun.visible``."""
    if "opted_in" not in data.columns or all(split.is_private(n) for n in names):
        return set()
    return tainted(phases, split, trainable)


def tainted(phases: Sequence[Phase], split: Split, trainable: frozenset[str]) -> set[str]:
    """Return the private parameters that a phase trains on all examples, opted-out ones included."""
    names = sorted(trainable)
    return {
        n for p in phases if p.examples == "all" for n in p.trained_names(split, names) if split.is_private(n)
    }


def batches(
    data: Examples, rows: np.ndarray, phase: Phase, draws: Stream, number: int
) -> Iterator[np.ndarray]:
    """Yield the row numbers of each mini-batch: shuffled passes over the examples that the phase may use."""
    rows = usable(data, rows, phase, draws)
    if not len(rows):
        return
    rng = numpy_generator(draws.seed, f"batches/{number}", draws.client, draws.round)
    owners = data.owners(rows) if phase.by_client and isinstance(data, Owned) else None
    left = phase.steps
    for _ in itertools.count() if left is not None else range(phase.epochs):
        for chosen in _one_pass(rows, owners, phase.batch_size, rng):
            if left is not None:
                left -= 1
                if left < 0:
                    return
            yield chosen


def _one_pass(
    rows: np.ndarray, owners: np.ndarray | None, size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the mini-batches of one pass; with ``owners``, one client's each, in mixed order."""
    if owners is None:
        order = rng.permutation(rows)
        return [order[start : start + size] for start in range(0, len(order), size)]
    each = [rng.permutation(rows[owners == owner]) for owner in np.unique(owners)]
    chunks = [mine[start : start + size] for mine in each for start in range(0, len(mine), size)]
    return [chunks[place] for place in rng.permutation(len(chunks))]


def steps_per_pass(examples: int, phase: Phase) -> int:
    """Return how many mini-batches one pass over this many examples makes."""
    return -(-examples // phase.batch_size)


def schedule(
    phases: Sequence[Phase], turns: str, data: Examples, rows: np.ndarray, draws: Stream
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the steps of a local run without early stopping: (number of the phase, rows of the mini-batch)."""
    if turns == "batches":
        for chosen in batches(data, rows, phases[0], draws, 0):
            for number, phase in enumerate(phases):
                yield from [(number, chosen)] * phase.repeats
        return
    for number, phase in enumerate(phases):
        for chosen in batches(data, rows, phase, draws, number):
            yield from [(number, chosen)] * phase.repeats


def usable(data: Examples, rows: np.ndarray, phase: Phase, draws: Stream) -> np.ndarray:
    """Return the rows that a phase may use and whose half it asks for."""
    rows = allowed(data, rows, phase.examples)
    if phase.part == "all":
        return rows
    order = numpy_generator(draws.seed, "halves", draws.client).permutation(rows)
    half = len(rows) // 2
    return order[:half] if phase.part == "support" else order[half:]


def batch_bytes(columns: Mapping[str, Column], rows: np.ndarray) -> int:
    """Return about how many bytes the rows of a mini-batch take, at least 1."""
    seen = [column for name, column in columns.items() if not name.startswith("_")]
    wide = sum(int(c.lengths(rows).max()) * 8 if isinstance(c, Ragged) else c[:1].nbytes for c in seen)
    return max(1, len(rows) * wide)


def load_batch(
    data: Examples, rows: np.ndarray, device: str, kind: torch.dtype, tables: Sequence[LocalTable] = ()
) -> Batch:
    """Return the examples' columns on the device; floats take the model's type, ids of local tables their positions."""
    batch = data.batch(rows)
    for column, table in {t.column: t for t in tables}.items():
        batch[column] = table.local(batch[column])
    if device != "cpu":
        batch = {name: value.to(device) for name, value in batch.items()}
    return {n: v.to(kind) if v.is_floating_point() and v.dtype != kind else v for n, v in batch.items()}


def float_type(params: Mapping[str, Tensor]) -> torch.dtype:
    """Return the floating type of the first parameter that has one."""
    return next((v.dtype for v in params.values() if v.is_floating_point()), torch.float32)


def gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> Params:
    """Return the loss's gradient by name; a leaf that the loss does not depend on has none."""
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}


@torch.no_grad()
def clip_(grads: Params, bound: float) -> None:
    """Scale gradients in place so that their joint L2 norm is at most ``bound``."""
    if grads:
        norms = torch._foreach_norm(list(grads.values()))
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        torch._foreach_mul_(list(grads.values()), (bound / (norm + 1e-6)).clamp(max=1.0))
