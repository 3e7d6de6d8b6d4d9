"""Local training: the one loop over phases and mini-batches that every engine runs, and ``local_run`` for one client.

A *lane* is one client's training. ``Lane`` holds the tensors of one client; ``vectorised.stacked_lanes`` those of many
side by side, with a client axis. These differ in how a mini-batch is made, how its gradient is computed and clipped, and
how the optimiser's step is written back. All else is the same for both (``Lanes``, ``Pass``): phases and their turns,
early stopping, watching, buffers that stay, losses, the search for NaN, and what opted-out examples may touch.

Opted-out examples touch nothing that a client uploads: not by values, not by a breakdown, not by a loss. A private phase
may train on all of a client's examples (``Phase.examples = "all"``). Where some of them are opted out, federated phases
must not see what such a phase made, and whether it broke down must not decide if the client uploads. What the model writes
in attributes in such a phase is taken back after it (``core.buffers.Veil``). A private phase on
opted-in examples whose loss reads what such a phase made passes it on: what it trains is hidden too.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.buffers import Veil, frozen_changed
from fedkeep.core.errors import DataError, MethodError, NonFiniteError, SplitError, warn
from fedkeep.core.net import Net
from fedkeep.core.optim import OptimizerState
from fedkeep.core.params import Batch, Params, clone, gradients, is_state, nonfinite, to
from fedkeep.core.seeds import Undisturbed, forked, seed_all, stream, without_draws
from fedkeep.engines.batches import (
    LoadedBatch,
    Stream,
    batches,
    gathered,
    load_batch,
    planned_steps,
    steps_per_pass,
    usable,
)
from fedkeep.engines.dropout import InOrder
from fedkeep.engines.rehearsal import rehearse
from fedkeep.engines.tables.lazy_rows import LazyRows, lazy_tables
from fedkeep.engines.tables.local_rows import (
    ExampleRows,
    LocalTable,
    Owned,
    allowed,
    local_tables,
    narrow,
    narrow_alike,
    widen,
)
from fedkeep.methods import Client, EarlyStopping, Phase
from fedkeep.split import Split
from fedkeep.split.halves import Frozen

MODEL_ERRORS = (ValueError, LookupError, RuntimeError, AssertionError, DataError)
"""What a model raises that does not fit its data."""


def nonfinite_error(who: str, fault: str, steps: int) -> NonFiniteError:
    """Return the error of a client whose training broke down."""
    return NonFiniteError(
        "{who}: {what} became NaN or infinite after {steps} steps. Lower the learning rate, set clip_norm, or look "
        "for NaN in this client's data.",
        who=who,
        what=fault,
        steps=steps,
    )


def no_gradient(names: Sequence[str]) -> MethodError:
    """Return the error of a loss that depends on nothing that is to be trained."""
    some = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return MethodError(
        "The loss depends on none of what is trained ({some}), so there is no gradient. Does the model's forward "
        "detach its outputs, or compute them under torch.no_grad()? Take that out there.",
        some=some,
    )


def unreached(who: str, whose: str, names: Sequence[str]) -> MethodError:
    """Return the error of private, or federated, parameters that are trained and no loss depended on."""
    return MethodError(
        "{who}: no loss depended on the {whose} {names}, which are trained: they would stay as they are. Let "
        "forward use them, or leave them out of what is trained (Phase.trains, or requires_grad_(False)).",
        who=who,
        whose=whose,
        names=list(names),
    )


Group = Literal["private", "federated"]
Moves = Mapping[Group, bool | None]
"""Of each group that a client has trained with a rate above 0: whether a gradient was not zero; None: all were, and
there were fewer than two steps, in which what begins at zero (a head, one half of an adapter) may not move.
"""


def group_of(split: Split, name: str) -> Group:
    """Return which group a trained parameter belongs to."""
    return "private" if split.is_private(name) else "federated"


def columns_of(batch: Batch, axes: int = 1) -> str:
    """Return the columns of an example, each with its shape and type: ``x (4,) float32, label () int64``.

    Args:
        batch: columns by name; those of fedkeep's own (``weight``, ``client``, a leading ``_``) are left out.
        axes: how many of the first axes are not an example's.
    """
    own = {n: v for n, v in batch.items() if not n.startswith("_") and n not in ("weight", "client")}
    return ", ".join(
        f"{name} {tuple(one.shape[axes:])} {str(one.dtype).removeprefix('torch.')}"
        for name, one in own.items()
    )


def model_error(who: str, examples: int, error: Exception, more: str = "", columns: str = "") -> MethodError:
    """Return the error of a model that failed on a batch, with what usually helps.

    Args:
        who: whose batch.
        examples: how many it has.
        error: what was raised.
        more: a sentence to end with.
        columns: what an example of it is, as of :func:`columns_of`.
    """
    advice = "Check its forward and the data's columns"
    if isinstance(error, torch.OutOfMemoryError):
        advice = "Use a smaller batch_size, or another device"
    elif isinstance(error, torch.AcceleratorError):
        advice = (
            "An id or a label may be beyond what the model was made for: on device='cpu' the error says which"
        )
    elif found := re.fullmatch(r"Target (\d+) is out of bounds\.?", str(error)):
        least = int(found[1]) + 1
        advice = (
            f"It gives no score for the class {found[1]}: let its last layer have at least {least} outputs, one for each "
            "class, or number labels from 0"
        )
    elif "dtype" in str(error):
        advice = (
            f"An example has {columns}: give the columns that layers multiply as float32, .astype('float32')"
        )
    elif isinstance(error, IndexError):
        advice += ": an id or a label may be beyond what it was made for"
    elif examples == 1:
        advice += (
            "; batch normalisation needs more than one example: merge_single = True lets a last one join the "
            "mini-batch before it, as with torch's own layers. Where it is all that a client has, take its rows out of the "
            "table, or, in Python, keep the others by data.select([n for n in range(len(data)) if data.count(n, 'train') "
            "> 1]); or take GroupNorm in its place"
        )
    elif columns:
        advice += f": an example has {columns}"
    batch = f"a batch of {examples} example{'s' * (examples != 1)}"
    return MethodError(
        "{who}: the model failed on {batch}: {why}. {advice}.{more}",
        who=who,
        batch=batch,
        examples=examples,
        why=f"there is no {error}" if isinstance(error, KeyError) else str(error).strip().rstrip("."),
        advice=advice,
        more=more,
    )


def watched(
    data: ExampleRows, valid: np.ndarray | None, phase: Phase, draws: Stream, *, trains: bool
) -> np.ndarray:
    """Return the validation examples that may stop a phase.

    A stop picks values that a federated phase may read. So opted-out examples stop phases on all examples alone: what
    these train no federated phase may read.

    Args:
        data: the data set.
        valid: the client's validation examples in it.
        phase: the phase.
        draws: names the client, for messages.
        trains: whether the phase has examples to train on; without any it is never measured.

    Returns:
        The examples; none, where the phase's rule requires none.

    Raises:
        MethodError: there are none, and the rule requires them.
    """
    rows = np.zeros(0, np.int64) if valid is None else allowed(data, valid, phase.examples)
    if phase.early_stopping is not None and not phase.early_stopping.required:
        return rows
    if valid is None or not len(valid):
        raise MethodError(
            "{who}: a phase is to stop early by the validation loss, but there is no example in the split 'valid'. "
            "Hold some out (data.split), or set early_stopping=None.",
            who=str(draws),
        )
    if trains and not len(rows):
        raise MethodError(
            "{who}: a phase on opted-in examples is to stop early by the validation loss, but no example in the split "
            "'valid' is opted in. Leave the client out, set early_stopping=None, or train what no federated phase "
            "reads with examples='all'.",
            who=str(draws),
            examples=phase.examples,
        )
    return rows


class Stopper:
    """Early stopping: measures the validation loss after some passes and keeps the best values.

    Args:
        rule: when to measure and when to stop.
        measure: returns the loss; None: nothing can be measured, and nothing stops.
        params: the values to keep, changed in place by training.
    """

    def __init__(self, rule: EarlyStopping, measure: Callable[[], float] | None, params: Params) -> None:
        self.rule, self.measure, self.params = rule, measure, params
        self.best, self.epoch, self.waited = float("inf"), 0, 0
        self.kept: Params = {}

    def done(self, epoch: int) -> bool:
        """Tell, after a pass (counted from 1), whether training should stop."""
        if self.measure is None or (epoch - 1) % self.rule.every:
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


READS_HIDDEN = (
    "A phase that trains federated parameters reads private ones that another phase trains on opted-out "
    "examples too, so these would influence what leaves the client. Train that phase with "
    "examples='opted_in', or leave those parameters out of the federated phase's loss."
)
READS_EARLIER = (
    "{what} private {names}, which an earlier run that this one goes on with trained on opted-out examples too, so these would "
    "influence what leaves the client. Begin with new private values, or train that run with examples='opted_in'."
)
READS_NAN = (
    "A phase that trains federated parameters gets NaN in the place of what opted-out examples made, and reads it "
    "(`weight > 0` is False of NaN): its loss is another one then. Train the private part with examples='opted_in', or "
    "leave it out of the federated phase's loss."
)


def reads_hidden(net: Net) -> MethodError:
    """Return the error of a federated phase that reads what opted-out examples made, in this run or before it."""
    if not net.opted_out:
        return MethodError(READS_HIDDEN)
    what = "A phase that trains federated parameters may not read"
    return MethodError(READS_EARLIER, what=what, names=sorted(net.opted_out))


@dataclass(frozen=True)
class Hidden:
    """What opted-out examples make in a local run.

    Attributes:
        names: the private parameters and buffers that they train or move.
        phases: the numbers of the phases that look at them, or at what is hidden.
    """

    names: frozenset[str] = frozenset()
    phases: frozenset[int] = frozenset()


def hidden(lanes: Lanes) -> Hidden:
    """Return what opted-out examples make: by phases on all examples, and by those that read what these made.

    Which phases read it is found by their losses on a mini-batch with NaN in its place, until nothing is added.

    Raises:
        MethodError: an earlier run made something of opted-out examples, and hooks see private values.
    """
    earlier = lanes.net.opted_out & lanes.params.keys()
    if earlier and (lanes.client.start or lanes.client.finish):
        raise MethodError(READS_EARLIER, what="Hooks (start, finish) see", names=sorted(earlier))
    if "opted_in" not in lanes.data.columns and not earlier:
        return Hidden()
    split, trainable = lanes.split, sorted(lanes.trainable)
    trained = [p.trained_names(split, trainable) for p in lanes.client.phases]
    phases = {k for k, p in enumerate(lanes.client.phases) if p.examples == "all"}
    if not phases and not earlier:
        return Hidden()
    names = set(earlier) | {
        n
        for n, v in lanes.params.items()
        if phases
        and n not in lanes.trainable
        and not is_state(n)
        and split.is_private(n)
        and v.is_floating_point()
    }
    names |= {n for k in phases for n in trained[k] if split.is_private(n)}
    left = [k for k in range(len(trained)) if k not in phases and not trains_federated(trained[k], split)]
    while names and (found := [k for k in left if _reads(lanes, k, names)]):
        phases |= {*found}
        names |= {n for k in found for n in trained[k]}
        left = [k for k in left if k not in phases]
    for number in range(len(trained)) if names else ():
        if trains_federated(trained[number], split):
            _warn_of_reading(lanes, number, names)
    return Hidden(frozenset(names), frozenset(phases))


def made_of_all(phases: Sequence[Phase], split: Split, net: Net, data: ExampleRows) -> frozenset[str]:
    """Return the names of the private values that opted-out examples may train or move in these phases.

    What a federated phase trains too is none of them: it would be refused.
    """
    column = data.columns.get("opted_in")
    nobody = column is None or bool(np.asarray(column, bool).all())
    if nobody or all(phase.examples != "all" for phase in phases):
        return frozenset()
    trained = [p.trained_names(split, sorted(net.trainable())) for p in phases]
    alone = {n for names in trained if not trains_federated(names, split) for n in names}
    return frozenset(alone | {n for n in net.buffers() if split.is_private(n)})


def _reads(lanes: Lanes, number: int, names: AbstractSet[str]) -> bool:
    """Tell whether a phase's loss is NaN where some values are, and else is not."""
    as_is, shown = _losses(lanes, number, names)
    return math.isnan(shown) and not math.isnan(as_is)


def _warn_of_reading(lanes: Lanes, number: int, names: AbstractSet[str]) -> None:
    """Warn if a phase's loss is another one where some values are NaN, and no NaN, as of ``weight > 0``.

    That may be so of later values alone, as of a weight that begins at 0: others, of either sign, are tried too.
    """
    as_is, shown, *others = _losses(lanes, number, names, signs=(1, -1))
    if math.isnan(as_is) or math.isnan(shown):
        return
    if any(one != shown and not math.isnan(one) for one in (as_is, *others)):
        warn(READS_NAN)


def _losses(lanes: Lanes, number: int, names: AbstractSet[str], signs: Sequence[int] = ()) -> list[float]:
    """Return a phase's loss as it is, with NaN in some values, and with other values there, for each sign one minus what
    they are; of the first lane with examples. Of none, NaN.
    """
    phase, net, device = lanes.client.phases[number], lanes.net, lanes.device
    every = zip(lanes.rows, lanes.draws, strict=True)
    each = [usable(lanes.data, rows, phase, draws)[: phase.batch_size] for rows, draws in every]
    lane = next((k for k, rows in enumerate(each) if len(rows)), None)
    if lane is None:
        return [math.nan, math.nan]
    as_is, losses = lanes.lane(lane), list[float]()
    others = [
        {**as_is, **{n: sign - as_is[n] for n in names & lanes.trainable & as_is.keys()}} for sign in signs
    ]
    for values in (as_is, veiled(as_is, names, net.initial(), lanes.trainable), *others):
        batch = load_batch(lanes.data, each[lane], device, net.float_type, lanes.tables[lane])
        params = {n: v.requires_grad_(n in lanes.trainable) for n, v in clone(values).items()}
        with forked(device), net.still():
            losses.append(float(phase.loss(net, params, batch, clone(lanes.sent_to(lane))).detach()))
    return losses


def veiled(
    params: Params, hidden: AbstractSet[str], initial: Mapping[str, Tensor], trainable: frozenset[str]
) -> Params:
    """Return parameters with hidden ones shown as NaN, so that any use of them shows in the loss.

    A buffer is hidden where it has been moved from its initial value; what was never moved tells nothing.
    """
    out = dict(params)
    for name in hidden & params.keys():
        if name in trainable:
            out[name] = torch.full_like(params[name], torch.nan)
        else:
            start = initial[name].to(params[name].device)
            moved = params[name] != start
            if bool(moved.any()):
                out[name] = torch.where(moved, torch.nan, params[name])
    return out


def trains_federated(names: Sequence[str], split: Split) -> bool:
    """Tell whether a phase that trains ``names`` trains something that leaves the client."""
    return len(split.private_names(names)) < len(names)


EVALUATION_BATCH = 512


@dataclass(frozen=True)
class LocalRunWatch:
    """Looks at a local run while it goes on.

    Attributes:
        every: mini-batches between two looks, counted over all phases.
        look: called with the number of mini-batches so far and all parameters as they are then, tables whole.
    """

    every: int
    look: Callable[[int, Params], None]


class GradientTap(Protocol):
    """Looks at the gradients of every step, as ``fedkeep prove`` does."""

    def gradients(self, step: Pass, grads: Params, *, clipped: bool) -> Params:
        """Return what goes on in place of the gradients, by name; ``clipped``: their norm has been bounded."""


TAP: ContextVar[GradientTap | None] = ContextVar("tap", default=None)


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
        moves: which groups had gradients.
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
    moves: Moves = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """All parameters after training, tables whole."""
        return widen(self.trained, self.start, self.tables)


class LaneStep(Protocol):
    """A mini-batch of some lanes."""

    @property
    def lanes(self) -> Sequence[int]:
        """Whose it is: the lanes' positions."""

    def batch(self) -> Batch:
        """Return it; its own each time, as a model may change what it is given."""


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
        pass_of: makes the pass of a phase, by its number.
        params: all parameters; changed by training.
        received: what the server sent, for terms that compare with it.
        starts: each lane's parameters before training, whole.
        tables: each lane's tables that are trained by local rows.
        through: which lanes have stopped the present phase early.
        losses, looked_at, steps, dropped: of each lane, as in ``LocalResult``.
        stopped: by phase, then by lane, as in ``LocalResult``.
        trained, reached: what phases have trained one after the other, and what of it their losses depended on.
        moved: the groups of which a gradient was not zero, of any lane.
        tries: of each lane, how many steps trained a group with a rate above 0.
        after_step: called with the number of steps taken, e.g. to show progress.
        watch: looks at the parameters now and then; what it computes must not change them.
    """

    pass_of: ClassVar[type[Any]]
    params: Params
    received: Params
    starts: Sequence[Params]
    tables: Sequence[Sequence[LocalTable]]

    def __init__(
        self,
        net: Net,
        split: Split,
        client: Client,
        data: ExampleRows,
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
        self.watch: LocalRunWatch | None = None
        self.taken, self.hidden = 0, Hidden()
        self.trained, self.reached = set[str](), set[str]()
        self.moved, self.tries = set[Group](), [Counter[Group]() for _ in range(count)]

    @abstractmethod
    def seed(self, number: int) -> None:
        """Begin each lane's stream of dropout's draws for a phase."""

    @abstractmethod
    def mini_batches(self, number: int) -> Iterator[LaneStep]:
        """Yield the mini-batches of a phase; none of lanes that are ``through``."""

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
        own = self.net.parameters
        frozen = Frozen({n: own[n] for n in sorted(own.keys() - self.params.keys())})
        self.check_written()
        with self.net.still(self.draws[0], self.params.keys()), InOrder():
            self.hidden = hidden(self)
            for numbers in [every] if self.client.take_turns else [range(n, n + 1) for n in every]:
                self.seed(numbers[0])
                self.through[:] = [False] * len(self.through)
                apart = len({n in self.hidden.phases for n in numbers}) > 1
                with self._veil(not apart and numbers[0] in self.hidden.phases), ExitStack() as held:
                    passes: list[Pass] = [
                        held.enter_context(self.pass_of(self, number)) for number in numbers
                    ]
                    for step in self.mini_batches(numbers[0]):
                        for each in passes:
                            with self._veil(apart and each.number in self.hidden.phases):
                                each.take(step)
                        done += 1
                        if self.watch is not None and done % self.watch.every == 0:
                            self._show(self.watch, done, passes)
                    for each in passes:
                        each.finish()
        frozen.check(str(self.draws[0]))
        for private, whose in ((True, "private"), (False, "federated")) * bool(self.trained - self.reached):
            group = sorted(n for n in self.trained if self.split.is_private(n) is private)
            if group and not self.reached & set(group):  # no loss of any phase depended on it
                raise unreached(str(self.draws[0]), whose, group)
        self._drop_what_opted_out_examples_broke()

    def check_written(self) -> None:
        """Raise SplitError if training writes into what is frozen, as a rehearsal found."""
        if unseen := sorted(n for n in self.net.trains_into if n not in self.params):
            raise SplitError("{client}: {why}", client=self.draws[0], why=frozen_changed(unseen[0]))

    def _veil(self, looks: bool) -> AbstractContextManager[object]:
        """Keep what the model's functions write in attributes from phases that opted-out examples may not reach."""
        return Veil(self.net.module, self.params.keys()) if looks else nullcontext()

    def _show(self, watch: LocalRunWatch, done: int, passes: Sequence[Pass]) -> None:
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
            who, steps = self.draws[position], self.steps[position]
            found.append(None if bad is None else nonfinite_error(str(who), bad, steps))
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
            moves={g: g in self.moved or (None if n < 2 else False) for g, n in self.tries[position].items()},
        )


class Pass(ABC):
    """The steps of one phase: a context around them, closed by ``finish``.

    Attributes:
        names: what it trains.
        scale: the schedule's factor on the rates.
        seen: the parameters that its loss may see: a federated phase nothing that opted-out examples made.
        looks: whether opted-out examples, or what these made, influence it; then its loss does not leave.
        before: buffers that leave the client and that this phase must not move, as they were.
        still: by group, what it trains with a rate above 0; without groups that had gradients, and without any where
            opted-out examples influence the phase.
    """

    def __init__(self, lanes: Lanes, number: int) -> None:
        self.lanes, self.number, self.phase = lanes, number, lanes.client.phases[number]
        params, split, trainable = lanes.params, lanes.split, lanes.trainable
        self.names = self.phase.trained_names(split, [n for n in params if n in trainable])
        self.scale = self.phase.optimizer.scale(lanes.progress)
        self.repeats = lanes.client.steps(number) if self.names else 0
        opted_out, federated = lanes.hidden, trains_federated(self.names, split)
        self.looks, self.hides = number in opted_out.phases, bool(federated and opted_out.names)
        self.still: dict[Group, list[str]] = {}
        rate, private = self.phase.optimizer.rate, split.private_names(self.names)
        for name in self.names if not self.looks else ():  # an error may leave
            if rate(name) * self.scale > 0:
                self.still.setdefault("private" if name in private else "federated", []).append(name)
        self.groups = tuple(self.still)
        self.seen = veiled(params, opted_out.names, lanes.net.initial(), trainable) if self.hides else params
        leaving = lanes.received.keys() & params.keys() if self.looks or self.phase.examples == "all" else ()
        self.before = {
            n: params[n].clone() for n in leaving if n not in trainable and not split.is_private(n)
        }
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
        return [
            Stopper(rule, loss if len(self.watched[k]) else None, lanes.lane(k))
            for k, loss in enumerate(each)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:  # noqa: B027
        """Nothing is held."""

    @abstractmethod
    def gradients(self, step: LaneStep) -> Params:
        """Return the gradients of the loss by name, and add the loss to ``totals``."""

    @abstractmethod
    def totals(self) -> list[float]:
        """Return the sum of each lane's losses so far."""

    @abstractmethod
    def clip(self, grads: Params, bound: float) -> Params:
        """Return gradients whose joint L2 norm is at most ``bound`` in each lane."""

    @abstractmethod
    def move(self, step: LaneStep, grads: Params) -> None:
        """Take the optimiser's step."""

    @abstractmethod
    def lane(self, position: int) -> tuple[Params, Mapping[str, Tensor]]:
        """Return what one lane's loss may see, and what the lane received; tables at present."""

    def catch_up(self) -> None:
        """Bring every row of the tables to the present."""
        return

    def take(self, step: LaneStep) -> None:
        """Take the optimiser steps of one mini-batch of some lanes."""
        tap = TAP.get()
        for _ in range(self.repeats):
            grads = self.gradients(step)
            if self.still:
                self._note_moves(grads)
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

    def _note_moves(self, grads: Params) -> None:
        """Note which groups have a gradient that is not zero, of any lane."""
        for group, names in list(self.still.items()):
            slopes = sorted((grads[n] for n in names if n in grads), key=Tensor.numel)
            if any(slope.any() for slope in slopes):
                del self.still[group]
                self.lanes.moved.add(group)

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
                str(self.lanes.draws[position]),
                len(next(iter(batch.values()))),
                error,
                columns=columns_of(batch),
            ) from error

    @torch.no_grad()
    def validation_loss(self, position: int) -> float:
        """Return the phase's loss on the validation examples that stop one lane, in evaluation mode."""
        lanes, rows = self.lanes, self.watched[position]
        self.catch_up()
        params, received = self.lane(position)
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        with lanes.net.judging(dict(params)) as values:
            for start in range(0, len(rows), EVALUATION_BATCH):
                chosen = rows[start : start + EVALUATION_BATCH]
                kind, tables = lanes.net.float_type, lanes.tables[position]
                batch = load_batch(lanes.data, chosen, lanes.device, kind, tables)
                loss = self.loss(position, values, batch, received)
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
            lanes.tries[lane].update(dict.fromkeys(self.groups, steps) if steps else {})
            if steps and not self.looks:  # its loss does not leave else
                lanes.losses[lane], lanes.looked_at[lane] = totals[lane] / steps, True


def slopes(loss: Tensor, leaves: Mapping[str, Tensor]) -> Params:
    """Return the loss's gradient by name; a leaf that the loss does not depend on has none. All leaves: MethodError."""
    if not loss.requires_grad:
        raise no_gradient(list(leaves))
    return gradients(loss, leaves)


def local_run(
    net: Net,
    split: Split,
    client: Client,
    params: Mapping[str, Tensor],
    received: Params,
    data: ExampleRows,
    rows: np.ndarray,
    draws: Stream,
    *,
    valid: np.ndarray | None = None,
    device: str = "cpu",
    progress: float = 0.0,
    states: Sequence[OptimizerState] | None = None,
    after_step: Callable[[int], None] | None = None,
    watch: LocalRunWatch | None = None,
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


class LanePass(Pass):
    """The steps of one phase on plain tensors, which the model holds as long as they last."""

    def __init__(self, lane: Lane, number: int) -> None:
        super().__init__(lane, number)
        self.state, self.undisturbed = lane.states[number], lane.undisturbed
        self.total = torch.zeros(
            (), dtype=torch.float32, device=lane.device
        )  # losses of fewer bits are summed in these
        self.planned = 0
        if lane.falls:
            examples = len(usable(lane.data, lane.rows[0], self.phase, lane.draws[0]))
            self.planned = self.repeats * planned_steps(self.phase, [examples])
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
        self.bound = lane.net.bound(self.seen, self.names)
        # Phases in turn see other values and train other ones: each of their steps holds its own.
        held: list[AbstractContextManager[object]] = [nullcontext(), self.bound]
        self.one_step, self.all_steps = held[::-1] if lane.client.take_turns else held
        self.rows, self.leaves = Params(), Params()
        self.unreached = set(self.names)

    def __enter__(self) -> Self:
        self.all_steps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.all_steps.__exit__(None, None, None)

    def gradients(self, step: LaneStep) -> Params:
        """Return the gradients of the loss on a mini-batch, of tables those of the rows that it looks up."""
        with self.one_step:
            batch = step.batch()
            return self.undisturbed.step(lambda: self._gradients(batch))

    def _gradients(self, batch: Batch) -> Params:
        received: Mapping[str, Tensor] = self.lanes.received
        if self.lazy is not None:
            self.rows, received = self.lazy.look_up(batch)
            self.bound.put(self.rows)
        loss = self.loss(0, self.seen, batch, received)
        self.total = self.total + loss.detach()
        if self.lazy is not None:
            self.total = self.total + self.lazy.penalty
        try:
            if self.lanes.client.take_turns or not self.leaves:
                self.leaves = {n: self.seen[n] for n in self.names}
            found = slopes(loss, self.leaves)
        except (
            *MODEL_ERRORS,
            TypeError,
            AttributeError,
        ) as error:  # of a hook or a function of the user's that is called on the way back
            who, examples = str(self.lanes.draws[0]), len(next(iter(batch.values())))
            raise model_error(who, examples, error) from error
        if self.unreached:
            self.unreached -= found.keys()
        self.lanes.net.settle()
        return found

    def totals(self) -> list[float]:
        """Return the sum of the losses so far."""
        return [float(self.total)]

    def finish(self) -> None:
        """Finish as every pass does, and note what had gradients."""
        super().finish()
        if self.steps[0]:
            self.lanes.trained |= set(self.names)
            self.lanes.reached |= set(self.names) - self.unreached

    def clip(self, grads: Params, bound: float) -> Params:
        """Scale the gradients in place."""
        clip_(grads, bound)
        return grads

    def move(self, step: LaneStep, grads: Params) -> None:
        """Take the optimiser's step."""
        if self.lazy is not None:
            self.lazy.update(self.rows, {n: grads.pop(n) for n in self.lazy.trained if n in grads})
        left = 1 - self.steps[0] / self.planned if self.planned else 1.0
        scale, own = self.scale * left, self.lanes.params
        self.phase.optimizer.update(own, grads, self.state, scale, autograds=TAP.get() is None)

    def lane(self, position: int) -> tuple[Params, Mapping[str, Tensor]]:
        """Return all that the loss may see, tables whole."""
        if self.lazy is not None:
            self.bound.put({n: self.lanes.params[n] for n in self.lazy.of})
        return self.seen, self.lanes.received

    def catch_up(self) -> None:
        """Bring every row of the tables to the present."""
        if self.lazy is not None:
            self.lazy.finish()


class Lane(Lanes):
    """The only lane; its parameters have no client axis."""

    pass_of = LanePass
    falls = False

    def hold(self, params: Params, received: Params, states: Sequence[OptimizerState] | None) -> None:
        """Take the values to train from: copies of them, tables cut to local rows."""
        rows, valid, client = self.rows[0], self.valid[0], self.client
        self.undisturbed = Undisturbed(self.draws[0], self.device)
        rehearse(self.net, params, self.data, rows, self.device)
        cut = local_tables(self.net, client.phases, params, self.data, rows, valid, client.tables)
        mine = narrow(params, cut)
        with torch.no_grad():
            self.params = to(mine, self.device)
            if here := [n for n, v in self.params.items() if v is mine[n]]:
                self.params.update(zip(here, torch._foreach_clone([mine[n] for n in here]), strict=True))
        self.received = to(narrow_alike(received, params, mine, cut), self.device)
        self.starts, self.tables = [params], [cut]
        # All clients share what was sent. A term may run the model at it, also at state that is a model's, and that
        # writes into all but plain parameters.
        plain = self.trainable - self.net.written.keys()
        moved = [n for n in self.received.keys() - plain if n.rpartition("/")[2] not in plain]
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
        self.undisturbed.seeded()

    def mini_batches(self, number: int) -> Iterator[LoadedBatch]:
        """Yield the mini-batches of a phase, gathered several at a time."""
        pooled = self.client.pools == "clients" and isinstance(self.data, Owned)
        owners = self.data.owners if pooled and isinstance(self.data, Owned) else None
        plan = batches(self.data, self.rows[0], self.client.phases[number], self.draws[0], number, owners)
        for loaded in gathered(self.data, plan, self.device, self.net.float_type, self.tables[0]):
            yield loaded
            if self.through[0]:
                return

    def lane(self, position: int) -> Params:
        """Return all parameters."""
        return self.params

    def sent_to(self, position: int) -> Params:
        """Return what the client received."""
        return self.received

    def nonfinite(self, names: Sequence[str]) -> list[str | None]:
        """Return the first of some parameters with a NaN or an infinity."""
        return [nonfinite(dict(zip(names, map(self.params.__getitem__, names), strict=True)))]


@torch.no_grad()
def clip_(grads: Params, bound: float) -> None:
    """Put scaled gradients in the dict, so that their joint L2 norm is at most ``bound``."""
    if grads:
        norms = torch._foreach_norm(list(grads.values()))
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        # Not in place: a gradient may be one number, expanded.
        scaled = torch._foreach_mul(list(grads.values()), (bound / (norm + 1e-6)).clamp(max=1.0))
        grads.update(zip(list(grads), scaled, strict=True))
