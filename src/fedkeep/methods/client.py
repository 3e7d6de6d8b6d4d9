"""``Client``: what a method does on the device, and what its hooks are given and give back.

A round on the device: what is kept (or its default) and what was sent meet in ``start``; the phases train; ``finish``
says what leaves and what is kept; ``accept`` makes it valid once the server has taken the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, MethodError, check_choice
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, SERVER, Batch, Params, State, is_state, prefixed, under
from fedkeep.methods.hook_checks import called, check_all, check_numbers
from fedkeep.methods.phase import Changeable, Phase

Tables = Literal["exact", "local", "whole"]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Parameters and a method's state; ``Sent`` or ``Kept``.

    Attributes:
        params: parameters and buffers, by name.
        state: the method's own, by name.
    """

    params: Params
    state: State = field(default_factory=dict)

    prefix: ClassVar[str]

    @property
    def flat(self) -> Params:
        """Both in one dictionary, state with its prefix."""
        return {**self.params, **prefixed(self.prefix, self.state)} if self.state else self.params

    @classmethod
    def of(cls, flat: Mapping[str, Tensor]) -> Self:
        """Return what a dictionary like ``flat`` came from."""
        return cls(params={n: v for n, v in flat.items() if not is_state(n)}, state=under(cls.prefix, flat))


class Sent(Values):
    """What the server sends a client, federated values; ``flat`` is what terms get as received."""

    prefix = SERVER


class Kept(Values):
    """What a client keeps, private values; it never leaves. ``flat``, with ``client/NAME``, is a row of the store."""

    prefix = CLIENT


@dataclass(frozen=True, kw_only=True)
class Init:
    """A new client's private parameters.

    Attributes:
        value: a number (FURL: zeros), ``("normal", std)`` drawn from a stream of the client's own, or ``"model"``, the
            module's initial values.
        every_round: every round starts from these, not from what the client kept (federated reconstruction); the last
            values are stored for evaluation only. The method's state goes on.
    """

    value: float | tuple[Literal["normal"], float] | Literal["model"] = "model"
    every_round: bool = False

    def __post_init__(self) -> None:
        value: Any = tuple(self.value) if isinstance(self.value, list) else self.value
        object.__setattr__(self, "value", value)
        number = value[1] if isinstance(value, tuple) and len(value) == 2 and value[0] == "normal" else value
        if value != "model" and not (isinstance(number, int | float) and math.isfinite(number)):
            raise ConfigError(
                "private_init must be a number, ('normal', std) or 'model'; got {value!r}.", value=value
            )


Outputs = Callable[[Callable[[Net, Params, Batch], Any]], Iterator[tuple[Any, Batch]]]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What ``Client.start`` is given.

    Attributes:
        net: the model as a function.
        sent: what the server sent.
        kept: what the client has kept.
        params: the values that training would start from: sent and kept together.
        loss: returns the first phase's mean loss over the client's opted-in examples, dropout off, given parameters
            by name; those that are absent are as in ``params``.
        train: trains with a phase of its own, by the local run, from parameters by name likewise; returns all
            parameters after it. Every call draws its own mini-batches. Nothing of it is kept or uploaded but what
            ``start`` returns.
        outputs: applies a function (net, params, batch) to the client's opted-in examples, batch by batch, dropout off
            and without gradients, and yields its results with their batches.
        generator: returns a generator on the CPU, at the start of a stream that follows from the run's seed, the client
            and the round: the same in every engine, and when a run goes on. It is no secret from the server.
    """

    net: Net
    sent: Sent
    kept: Kept
    params: Params
    loss: Callable[[Params], float]
    train: Callable[[Phase, Params], Params]
    outputs: Outputs
    generator: Callable[[], torch.Generator]


@dataclass(frozen=True, kw_only=True)
class Started:
    """What ``Client.start`` returns.

    Attributes:
        params: values to train from instead of those sent or kept, by name.
        state: kept state to train with, by name; it is kept as it is unless ``finish`` changes it.
    """

    params: Params = field(default_factory=dict)
    state: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What ``Client.finish`` is given.

    Attributes:
        net: the model as a function.
        sent: what the server sent.
        kept: what the client had kept, with the state that ``start`` gave.
        started: all parameters before the first phase, by name.
        trained: all parameters after the last, by name; of a table that is trained by local rows these rows.
        rows: by name, the numbers of the rows that ``trained`` holds of such a table, ascending.
        steps: optimiser steps that were taken.
        rate: returns the first phase's learning rate of a parameter, its schedule counted in.
        outputs: as in ``Start``, with ``trained``.
        generator: as in ``Start``; the stream is another one.
    """

    net: Net
    sent: Sent
    kept: Kept
    started: Params
    trained: Params
    steps: int
    rate: Callable[[str], float]
    outputs: Outputs
    generator: Callable[[], torch.Generator]
    rows: Params = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What ``Client.finish`` returns.

    Attributes:
        params: what leaves in place of what was trained, by federated name: the client uploads its change from what
            was sent. Kept values are not affected.
        sends: what leaves beside the changes, with the names, shapes and types that ``Client.sends`` declares.
        state: what is kept of the method's state, by name; names that are absent stay as they were.
    """

    params: Params = field(default_factory=dict)
    sends: State = field(default_factory=dict)
    state: State = field(default_factory=dict)


def nothing(net: Net) -> State:
    """Return no state."""
    return {}


def newest(before: Kept, after: Kept, share: float) -> Kept:
    """Keep what was trained (FURL eq. 7, z = 1)."""
    return after


def by_share(before: Kept, after: Kept, share: float) -> Kept:
    """Move private parameters by the client's share z = c_k / Σ c of their change (FURL eq. 6); counters are kept."""
    moved = {
        n: before.params[n] + share * (v - before.params[n]) if v.is_floating_point() else v
        for n, v in after.params.items()
    }
    return Kept(params=moved, state=after.state)


def accepted(
    rule: Callable[[Kept, Kept, float], Kept], before: Params, after: Params, share: float, whose: str
) -> Params:
    """Return what a client keeps by a rule (``Client.accept``), all of it by name as in a store.

    Args:
        rule: the rule.
        before, after, share: what it is given.
        whose: the client and the round, for messages: "'user-1' in round 3".

    Raises:
        MethodError: the rule draws, writes into what it is given, or gives other names, shapes or types.
        NonFiniteError: it gives a NaN or an infinity. In a simulation this ends the run, with ``on_nonfinite="skip"``
            too: by then the server has the client's upload.
    """
    who = f"accept of client {whose}"
    kept = called(who, lambda: rule(Kept.of(before), Kept.of(after), share), before, after, kind=Kept).flat
    check_all(who, after, kept)
    check_numbers(who, kept, after)
    return kept


@dataclass(frozen=True, kw_only=True)
class Client(Changeable):
    """What a method does on the device; the defaults are FedAvg's.

    Attributes:
        phases: the passes of one round of local training, in order.
        turns: ``"phases"``: one after the other; ``"batches"``: they take turns on every mini-batch of the first one's
            passes; a tuple: likewise, with so many steps of each phase on a mini-batch, e.g. ``(5, 1)``.
        keep: a new client's private parameters.
        state: what a new client keeps beside them, by name, given the model. Terms find it as
            ``params["client/NAME"]``.
        sends: zeros of what ``finish`` sends along, by name: the names, shapes and types that are allowed to leave.
        start: what happens before the first phase. One with a method ``recall`` is asked before a client adapts that
            has kept no state, see ``Recalls``.
        finish: what happens after the last. What it sends along or uploads in place of what was trained is the one
            door through which numbers made of private values may leave.
        accept: what is kept once the server has taken the round, given what was kept before, what was trained, and
            z = c_k / Σ c.
        tables: embedding tables that the module declares (``lookup``) are trained and sent by the rows that the client's
            examples use: ``"exact"``, where that equals training the whole table; ``"local"``, always (KTEPS §4.2,
            Remark 3: other rows stay as received); ``"whole"``, never.
        pools: how centralised training puts clients' examples together: ``"examples"``: mini-batches of all clients'
            examples; ``"clients"``: a mini-batch holds one client's, computed with its own private values.
    """

    phases: tuple[Phase, ...] = (Phase(),)
    turns: Literal["phases", "batches"] | tuple[int, ...] = "phases"
    keep: Init = Init()
    state: Callable[[Net], State] = nothing
    sends: Callable[[Net], State] = nothing
    start: Callable[[Start], Started] | None = None
    finish: Callable[[Finish], Finished] | None = None
    accept: Callable[[Kept, Kept, float], Kept] = newest
    tables: Tables = "exact"
    pools: Literal["examples", "clients"] = "examples"

    def __post_init__(self) -> None:
        if not self.phases:
            raise MethodError("A client needs at least one phase: without one a round would train nothing.")
        check_choice("tables must be", self.tables, get_args(Tables), MethodError)
        check_choice("pools must be", self.pools, ("examples", "clients"), MethodError)
        turns = self.turns
        if isinstance(turns, list):
            object.__setattr__(self, "turns", turns := tuple(turns))
        counts = isinstance(turns, tuple) and len(turns) == len(self.phases) and min(turns) >= 1
        if turns not in ("phases", "batches") and not counts:
            raise MethodError(
                "turns must be 'phases', 'batches', or a number of steps of at least 1 for each of the "
                "{count} phases; got {turns!r}.",
                count=len(self.phases),
                turns=turns,
            )
        if self.take_turns and len({p.schedule for p in self.phases}) > 1:
            raise MethodError(
                "Phases that take turns on every mini-batch must agree in epochs, steps, batch_size and examples."
            )
        if self.take_turns and any(p.early_stopping for p in self.phases):
            raise MethodError("Phases that take turns on every mini-batch cannot stop early.")
        if self.finish is None and self.sends is not nothing:
            raise MethodError("What sends declares is given by finish, and this client has none.")
        if self.keep.every_round and self.accept is not newest:
            raise MethodError(
                "Private parameters that start from scratch in every round are kept as trained: leave out accept."
            )

    @property
    def take_turns(self) -> bool:
        """Whether phases take turns on every mini-batch."""
        return self.turns != "phases"

    def steps(self, number: int) -> int:
        """Return how many steps a phase takes on each mini-batch."""
        return self.turns[number] if isinstance(self.turns, tuple) else 1


def zeros_like_trainable(net: Net) -> State:
    """Return zeros shaped like the model's trainable parameters, by name."""
    initial = net.initial()
    return {n: torch.zeros_like(initial[n]) for n in sorted(net.trainable()) if n in initial}
