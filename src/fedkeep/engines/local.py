"""THE local run: the only place where fedkeep takes gradients to train (the split checker's probes aside).

A client of a federation, a cohort's member in another process, a new user who personalises, and centralised training
over pooled examples all come through ``local_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import DataError, MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, clone, nonfinite
from fedkeep.core.seeds import stream
from fedkeep.engines.batches import (
    Loaded,
    Stream,
    batches,
    float_type,
    gathered,
    load_batch,
    steps_per_pass,
    usable,
)
from fedkeep.engines.opt_out import READS_HIDDEN, tainted, trains_federated, veiled
from fedkeep.engines.stopping import Stopper
from fedkeep.engines.tables.lazy import LazyRows, lazy_tables
from fedkeep.engines.tables.local_rows import (
    Examples,
    LocalTable,
    Owned,
    local_tables,
    narrow,
    widen,
)
from fedkeep.methods import Client, Phase
from fedkeep.split import Split

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
        states: the optimisers' states after each phase.
        stopped: for a phase with early stopping, the pass (from 1) with the lowest validation loss; else 0.
    """

    trained: Params
    start: Mapping[str, Tensor]
    tables: list[LocalTable]
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

    Raises:
        NonFiniteError: the loss or a parameter became NaN or infinite; names the client.
        MethodError: a phase that trains federated parameters reads private ones that were trained on opted-out
            examples, or a phase is to stop early and there are no validation examples.
    """
    phases = client.phases
    cut = local_tables(net, phases, params, data, rows, valid, client.tables)
    current = {
        name: value.detach().to(device, copy=True) for name, value in narrow(dict(params), cut).items()
    }
    run = _LocalRun(
        net, split, client, current, narrow(received, cut), data, rows, valid, cut, draws, device, progress,
        after_step, watch,
    )  # fmt: skip
    net.train()
    result = LocalResult(current, params, cut, states=list(states or (p.optimizer.init() for p in phases)))
    with torch.random.fork_rng(devices=[device] if device.startswith("cuda") else []):
        run.all(result)
    run.drop_what_opted_out_examples_broke(result)
    fault = "the training loss" if result.looked_at and not np.isfinite(result.loss) else nonfinite(current)
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
class _LocalRun:
    """What the phases of one local run share; ``params`` is changed in place."""

    net: Net
    split: Split
    client: Client
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

    @property
    def phases(self) -> Sequence[Phase]:
        """The passes, in order."""
        return self.client.phases

    def plan(self, number: int) -> Iterator[np.ndarray]:
        """Yield the row numbers of a phase's mini-batches."""
        pooled = self.client.pools == "clients" and isinstance(self.data, Owned)
        owners = self.data.owners if pooled and isinstance(self.data, Owned) else None
        return batches(self.data, self.rows, self.phases[number], self.draws, number, owners)

    def all(self, result: LocalResult) -> None:
        """Run the phases and write into ``result``."""
        if self.client.take_turns:
            self._turns(result)
            return
        done = 0
        for number, phase in enumerate(self.phases):
            self._seed(number)
            with _Pass(self, number, result.states[number]) as one:
                stopper = self._stopper(phase, one)
                per_pass = steps_per_pass(len(usable(self.data, self.rows, phase, self.draws)), phase)
                steps = self.plan(number)
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
            steps = self.plan(0)
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

    def loaded(self, steps: Iterator[np.ndarray]) -> Iterator[Loaded]:
        """Yield mini-batches, gathered several at a time."""
        return gathered(self.data, steps, self.device, float_type(self.params), self.tables)

    def tainted(self) -> set[str]:
        """Return what opted-out examples train or move."""
        return tainted(self.data, self.phases, self.split, self.params, self.net.trainable())

    def visible(self, names: Sequence[str], trainable: frozenset[str]) -> Params:
        """Return the parameters that a phase may see: a federated one nothing that opted-out examples made."""
        hidden = self.tainted() if trains_federated(names, self.split) else set()
        return veiled(self.params, hidden, self.net.initial(), trainable) if hidden else self.params

    def drop_what_opted_out_examples_broke(self, result: LocalResult) -> None:
        """Put private values back as they were before if opted-out examples made one NaN."""
        hidden = self.tainted()
        bad = nonfinite({n: self.params[n] for n in hidden})
        if bad is None:
            return
        start = narrow(
            {n: result.start[n] for n in hidden}, [t for t in self.tables if t.parameter in hidden]
        )
        self.params.update({n: v.detach().to(self.device, copy=True) for n, v in start.items()})
        result.dropped = (
            f"{self.draws}: the private {bad!r} became NaN or infinite; the client keeps what it had."
        )


class _Pass:
    """The steps of one phase, a context that holds the parameters in the model; ``finish`` follows the last step."""

    def __init__(self, run: _LocalRun, number: int, state: OptimizerState, *, lazy: bool = True) -> None:
        trainable = run.net.trainable()
        self.run, self.phase, self.state = run, run.phases[number], state
        self.repeats = run.client.steps(number)
        self.names = self.phase.trained_names(run.split, [n for n in run.params if n in trainable])
        self.scale = self.phase.optimizer.scale(run.progress)
        self.total: Tensor | float = 0.0
        self.steps = 0
        frozen = (
            {
                n: run.params[n]
                for n in run.received
                if n in run.params and n not in trainable and not run.split.is_private(n)
            }
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

    def step(self, loaded: Loaded, result: LocalResult) -> None:
        """Take the optimiser steps of one mini-batch."""
        for _ in range(self.repeats if self.names else 0):
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
        opted_out = self.phase.examples == "all" and "opted_in" in self.run.data.columns
        if self.steps and not (opted_out and any(p.examples != "all" for p in self.run.phases)):
            result.loss, result.looked_at = total / self.steps, True


def gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> Params:
    """Return the loss's gradient by name; a leaf that the loss does not depend on has none."""
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    # Tables with sparse gradients (nn.Embedding(sparse=True)) are trained like others.
    dense = [s.to_dense() if s is not None and s.is_sparse else s for s in found]
    return {name: slope for name, slope in zip(leaves, dense, strict=True) if slope is not None}


@torch.no_grad()
def clip_(grads: Params, bound: float) -> None:
    """Scale gradients in place so that their joint L2 norm is at most ``bound``."""
    if grads:
        norms = torch._foreach_norm(list(grads.values()))
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        torch._foreach_mul_(list(grads.values()), (bound / (norm + 1e-6)).clamp(max=1.0))
