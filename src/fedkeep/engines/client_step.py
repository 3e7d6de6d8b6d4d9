"""One client's whole part in a round: start, train, finish, keep, upload; and ``Sequential``, one client after the other.

Every engine comes through ``begin`` and ``finish``, so a method's hooks have one home and a client is trained the same
way wherever it runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from fedkeep.core.errors import FedkeepError, MethodError, NonFiniteError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.params import (
    CLIENT,
    SERVER,
    Batch,
    Params,
    is_state,
    misfit,
    nbytes,
    nonfinite,
    prefixed,
    row,
    to,
    under,
)
from fedkeep.core.seeds import generator
from fedkeep.data import FederatedData
from fedkeep.engines.batches import Stream, load_batch, usable
from fedkeep.engines.first_values import declared, defaults
from fedkeep.engines.lanes import (
    MODEL_ERRORS,
    Group,
    LocalResult,
    Moves,
    columns_of,
    group_of,
    local_run,
    model_error,
)
from fedkeep.engines.rehearsal import rehearse
from fedkeep.engines.tables.local_rows import LocalTable, allowed, rows_of, widen
from fedkeep.methods import Client, Finish, Finished, Kept, Method, Phase, Sent, Start, Started
from fedkeep.methods.hook_checks import UPLOAD, called, check_hook, check_tensors
from fedkeep.privacy.draws import Entropy
from fedkeep.privacy.draws import draws as link_draws
from fedkeep.split import Upload
from fedkeep.store import PrivateStore

HOOK_BATCH = 512
"""Examples that a hook sees at once."""
SMALL = 1 << 20
"""Bytes of a model whose changes may take memory of their own."""


@dataclass(frozen=True)
class Job:
    """What all clients of a device have in common.

    Attributes:
        method: the method.
        net: the model as a function.
        data: the data set; local training uses its examples ``train``.
        store: what clients keep.
        seed: the run's seed.
        device: where models compute, e.g. ``cpu`` or ``cuda``; all that is sent, kept and aggregated is on the CPU.
        after_step: called now and then inside a round with the finished part of it in (0, 1].
        entropy: where noise on uploads comes from: ``"run"``, the seed (simulations), or ``"system"`` (devices).
    """

    method: Method
    net: Net
    data: FederatedData
    store: PrivateStore
    seed: int
    device: str = "cpu"
    after_step: Callable[[float], None] | None = None
    entropy: Entropy = "run"

    def rows(self, client: int, split: str = "train") -> np.ndarray:
        """Return the row numbers of a client's examples of a split."""
        rows = self.data.rows(client, split)
        return np.arange(rows.start, rows.stop)

    def kept(self, clients: Sequence[int]) -> Params:
        """Return what clients start a round from, stacked: the values of their last round, or the default.

        Where private values start from scratch in every round, the method's state goes on.
        """
        stored = self.store.read(clients)
        if not self.method.client.keep.every_round:
            return stored
        state = {name: value for name, value in stored.items() if is_state(name)}
        return {**defaults(self.store, clients), **state}

    @cached_property
    def leaving(self) -> list[Phase]:
        """The phases that train something that leaves a client."""
        return self.method.leaving(sorted(self.net.trainable()))

    @cached_property
    def frozen(self) -> Params:
        """The frozen half, as the module holds it."""
        names = set(self.method.split.halves(self.net.module).frozen_names)
        return {n: v for n, v in self.net.module.state_dict(keep_vars=True).items() if n in names}

    @cached_property
    def declared(self) -> Params:
        """Zeros of what clients send along, under ``server/NAME``."""
        return to(declared(self.method, self.net), "cpu")


@dataclass(frozen=True)
class ClientToTrain:
    """A client to train.

    Attributes:
        client: its index in the data.
        sent: what the server sent it, state under ``server/NAME``; often one object for all clients.
    """

    client: int
    sent: Params


@dataclass
class ClientResult:
    """What a client's training gives on its device.

    Attributes:
        client: its index.
        upload: what leaves it, encoded by the method's upload chain; None: its training broke down.
        kept: what it will keep, state under ``client/NAME``.
        loss: its mean training loss.
        fault: why there is no upload.
        note: what the device's owner should know; it does not leave the device.
        moves: which groups had gradients; it does not leave the device.
        clients: in centralised training, all whose values ``kept`` holds, stacked; else none.
    """

    client: int
    upload: Upload | None = None
    kept: Params | None = None
    loss: float = float("nan")
    fault: NonFiniteError | UploadError | None = None
    note: str = ""
    moves: Moves = field(default_factory=dict)
    clients: tuple[int, ...] = ()


class FirstMoves:
    """Finds groups that are trained and stay where they are, in a run's first rounds.

    A group is judged by the first round in which each of its clients that took steps took two or more: a head or an
    adapter that begins at zero may not move in one. Where phases train one group and after it the other, and that one
    moves for the first time, the first group has not had its two steps yet.

    What it is told of clients it keeps to itself: it stands where they train.
    """

    def __init__(self) -> None:
        self.open: set[Group] = set()
        """The groups of which it is not known yet whether they move; a run that goes on has been judged before."""

    def judge(self, job: Job, round: int, clients: Sequence[Moves]) -> None:
        """Take note of a round.

        Raises:
            MethodError: the gradients of a group were exactly zero at every client.
        """
        if round == 0:
            self.open = {"private", "federated"}
        moved = {group for moves in clients for group, moves_it in moves.items() if moves_it}
        new, split, trainable = self.open & moved, job.method.split, sorted(job.net.trainable())
        trained = [phase.trained_names(split, trainable) for phase in job.method.client.phases]
        for group in sorted(self.open - moved):
            known = [moves[group] for moves in clients if group in moves]
            last = max(
                (k for k, each in enumerate(trained) if any(group_of(split, n) == group for n in each)),
                default=0,
            )
            later = {group_of(split, n) for each in trained[last + 1 :] for n in each}
            if known and None not in known and (job.method.client.take_turns or not later & new):
                names = sorted({n for each in trained for n in each if group_of(split, n) == group})
                raise MethodError(
                    "Round {round}: every gradient of the {group} {names}, which are trained, was exactly zero at all "
                    "{count} clients: they would stay as they are. Does what follows them multiply by zero, or "
                    "detach? Mend that, or leave them out of what is trained (Phase.trains, or requires_grad_(False)).",
                    round=round,
                    group=group,
                    names=names,
                    count=len(known),
                )
        self.open -= moved


class Engine(Protocol):
    """Trains clients. Every engine gives the same result; but ``centralised`` training, the control, is another one."""

    @property
    def name(self) -> str:
        """What the engine is called."""

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients from what they were sent and kept; yield what each gives, in the order of ``work``."""

    def close(self) -> None:
        """Give back what the engine holds beyond memory, e.g. processes; the next round takes it again."""
        return


def train_client(
    job: Job, sent: Params, kept: Params, client: int, round: int, progress: float
) -> ClientResult:
    """Train one client from what it was sent and what it kept.

    Returns:
        Its result; a breakdown to NaN is a result with ``fault``, any other error is raised.
    """
    method, name = job.method, job.data.ids[client]
    rows, draws = job.rows(client), Stream(job.seed, name, round)
    try:
        params = begin(job, sent, kept, client, rows, round)
        local = local_run(
            job.net,
            method.split,
            method.client,
            params,
            sent,
            job.data,
            rows,
            draws,
            valid=job.rows(client, "valid"),
            device=job.device,
            progress=progress,
        )
    except NonFiniteError as error:
        return ClientResult(client, fault=error)
    return finish(job, sent, kept, params, local, client, rows, draws, progress)


def begin(job: Job, sent: Params, kept: Params, client: int, rows: np.ndarray, round: int) -> Params:
    """Return the values that a client trains from on its rows, its state under ``client/NAME``: what was sent and kept, or
    what the method's ``start`` makes of these.

    Raises:
        MethodError: ``start`` gives unknown names or other shapes.
        NonFiniteError: it gives a NaN or an infinity, or a phase of its own does.
    """
    method, params = job.method, before_start(job, sent, kept)
    rehearse(job.net, params, job.data, rows, job.device)
    if method.client.start is None:
        return params
    draws = Stream(job.seed, job.data.ids[client], round)
    rows = allowed(job.data, rows, "opted_in")
    given_here, params, sent = params, to(params, job.device), to(sent, job.device)
    module = {n: v for n, v in params.items() if not is_state(n)}
    hook, calls = method.client.start, itertools.count()
    given = Start(
        net=job.net,
        sent=Sent.of(own(sent)),
        kept=Kept.of(own({n: params[n] for n in kept})),
        params=module,
        loss=lambda changed: mean_loss(job, rows, sent, {**params, **changed}),
        train=lambda phase, changed: trained(
            job, phase, sent, {**params, **changed}, rows, draws, next(calls)
        ),
        outputs=partial(outputs, job, params, rows),
        generator=partial(generator, job.seed, "hook/start", draws.client, round),
    )
    who = f"start of {method.name!r}"
    with job.net.still():
        watched = (sent, params, job.frozen)
        started = called(who, lambda: hook(given), *watched, device=job.device, kind=Started)
    check_tensors(who, {**started.params, **started.state})
    changed = {**started.params, **prefixed(CLIENT, started.state)}
    check_hook(who, params, changed)
    if (name := nonfinite(changed)) is not None:
        name = name.removeprefix(CLIENT)
        raise NonFiniteError(
            "{who}: what {hook} gives as {name!r} is NaN or infinite.", who=str(draws), hook=who, name=name
        )
    return {**given_here, **to({n: v.detach() for n, v in changed.items()}, "cpu")}


def before_start(job: Job, sent: Params, kept: Params) -> Params:
    """Return what was sent and kept, together."""
    return job.method.split.merge({n: v for n, v in sent.items() if not is_state(n)}, kept)


def own(flat: Params) -> Params:
    """Return what is the method's own, without the states of the upload chain."""
    return {n: v for n, v in flat.items() if not n.startswith((CLIENT + UPLOAD, SERVER + UPLOAD))}


def mean_loss(job: Job, rows: np.ndarray, sent: Params, params: Params) -> float:
    """Return the first phase's mean loss over examples, dropout off."""
    loss, total = job.method.client.phases[0].loss, 0.0
    with torch.no_grad(), job.net.judging(params) as values:
        for chosen, batch in hook_batches(job, rows, params):
            with told(job, rows, batch):
                total += len(chosen) * float(loss(job.net, values, batch, sent))
    return total / max(len(rows), 1)


def trained(
    job: Job, phase: Phase, sent: Params, params: Params, rows: np.ndarray, draws: Stream, call: int
) -> Params:
    """Return all parameters after a phase of a hook's own; each call has streams that nothing else has."""
    own = Stream(draws.seed, f"start/{call}/{draws.client}", draws.round, str(draws))
    client = Client(phases=(phase,), tables="whole")
    result = local_run(
        job.net, job.method.split, client, params, sent, job.data, rows, own, device=job.device
    )
    return {n: v for n, v in result.params.items() if not is_state(n)}


def outputs(
    job: Job, params: Params, rows: np.ndarray, function: Callable[[Net, Params, Batch], Any]
) -> Iterator[tuple[Any, Batch]]:
    """Yield what a function makes of a client's examples, batch by batch, with the batches."""
    for _, batch in hook_batches(job, rows, params):
        with torch.no_grad(), job.net.judging(params) as values, told(job, rows, batch):
            found = function(job.net, values, batch)
        yield found, batch


@contextmanager
def told(job: Job, rows: np.ndarray, batch: Batch) -> Iterator[None]:
    """Say whose examples they were where the model fails on a batch for a hook."""
    try:
        yield
    except FedkeepError:
        raise
    except MODEL_ERRORS as error:
        client = f"Client {job.data.ids[int(job.data.clients_of(rows)[0])]!r}"
        size = len(next(iter(batch.values())))
        raise model_error(client, size, error, columns=columns_of(batch)) from error


def hook_batches(job: Job, rows: np.ndarray, params: Params) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yield a client's examples, some at a time, with their row numbers."""
    for place in range(0, len(rows), HOOK_BATCH):
        chosen = rows[place : place + HOOK_BATCH]
        yield chosen, load_batch(job.data, chosen, job.device, job.net.float_type)


def finish(
    job: Job,
    sent: Params,
    kept: Params,
    started: Params,
    local: LocalResult,
    client: int,
    rows: np.ndarray,
    draws: Stream,
    progress: float,
) -> ClientResult:
    """Return what a client gives after its local run on these rows: its upload, and what it will keep."""
    method = job.method
    done = finished(job, sent, started, local, client, progress, draws.round)
    local.trained = to(local.trained, "cpu")
    if method.client.finish is not None and (what := _nonfinite(done)):
        fault = NonFiniteError(
            "{who}: what finish of {method!r} {what} is NaN or infinite.",
            who=str(draws),
            method=method.name,
            what=what,
        )
        return ClientResult(client, fault=fault)
    weight = method.server.reduce.weight(examples_of(job, rows, draws))
    upload, links = encode(job, sent, kept, local, done, weight, draws.client, draws.round)
    keep = widen(method.split.personal(local.trained), started, local.tables)
    state = prefixed(CLIENT, {**done.state, **prefixed(UPLOAD, links)})
    return ClientResult(client, upload, {**keep, **state}, local.loss, note=local.dropped, moves=local.moves)


def _nonfinite(done: Finished) -> str:
    """Return what a method's finish does with a value that is not finite, and its name; empty: all are."""
    for values, what in ((done.params, "uploads"), (done.sends, "sends"), (done.state, "keeps")):
        if (name := nonfinite(values)) is not None:
            return f"{what} as {name!r}"
    return ""


def finished(
    job: Job, sent: Params, started: Params, local: LocalResult, client: int, progress: float, round: int
) -> Finished:
    """Return what the method's ``finish`` says leaves and is kept, checked.

    Raises:
        MethodError: it gives unknown names, other shapes, or not what ``sends`` declares.
    """
    method = job.method
    if method.client.finish is None:
        return Finished()
    sent = to(sent, job.device)
    rows = allowed(job.data, job.rows(client), "opted_in")
    optimizer = method.client.phases[0].optimizer
    scale, started = optimizer.scale(progress), to(started, job.device)
    hook, who = method.client.finish, f"finish of {method.name!r}"
    given = Finish(
        net=job.net,
        sent=Sent.of(own(sent)),
        kept=Kept.of(own(method.split.personal(started))),
        started={n: v for n, v in started.items() if not is_state(n)},
        trained={n: v for n, v in local.trained.items() if not is_state(n)},
        steps=local.steps,
        rate=lambda name: optimizer.rate(name) * scale,
        outputs=partial(outputs, job, local.params, rows),
        rows={t.parameter: t.rows for t in local.tables},
        generator=partial(generator, job.seed, "hook/finish", job.data.ids[client], round),
    )
    values = (sent, started, local.trained, job.frozen)
    with job.net.still():
        done = called(who, lambda: hook(given), *values, device=job.device, kind=Finished)
    state = {n: v for n, v in started.items() if is_state(n)}
    check_hook(f"{who}, state", state, prefixed(CLIENT, done.state))
    check_hook(f"{who}, params", method.split.federated(local.trained), done.params)
    declared = job.declared
    along = prefixed(SERVER, done.sends)
    check_hook(f"{who}, sends", declared, along)
    if fault := misfit(declared, along):
        raise MethodError(
            "What {hook} sends along is not what Client.sends declares: {fault}.",
            hook=who,
            fault=fault.replace(SERVER, ""),
        )
    return Finished(params=to(done.params, "cpu"), sends=to(done.sends, "cpu"), state=to(done.state, "cpu"))


def encode(
    job: Job,
    sent: Params,
    kept: Params,
    local: LocalResult,
    done: Finished,
    weight: float,
    client: str,
    round: int,
) -> tuple[Upload, Params]:
    """Return a client's upload, tables cut to the rows that opted-in examples use, as the upload chain encodes it; and
    the chain's new states.
    """
    split = job.method.split
    cut = [t for t in local.tables if len(t.leaving) < len(sent.get(t.parameter, ()))]
    tables = [t for t in cut if not split.is_private(t.parameter)]
    rows = {t.parameter: t.rows[t.leaving] for t in tables}
    start = {n: rows_of(v, rows[n]) if n in rows else v for n, v in sent.items() if not is_state(n)}
    start |= job.declared
    values = {**local.trained, **done.params, **prefixed(SERVER, done.sends)}
    spare = set[str]()
    if nbytes(local.trained) > SMALL:  # else it is not worth looking
        spare |= nowhere_else(local.trained, sent, kept, done.params, done.state, done.sends)
    upload = split.upload(start, leaving_rows(values, tables), weight, rows, spare - done.params.keys())
    if not job.method.upload:
        return upload, {}
    made, links = job.method.chain().encode(
        upload.deltas,
        start,
        link_draws(job.entropy, job.seed, client, round),
        under(CLIENT + UPLOAD, kept),
        under(SERVER + UPLOAD, sent),
        rows,
    )
    return upload.but(made), links


def nowhere_else(trained: Params, *others: Params) -> set[str]:
    """Return the names of trained tensors whose memory no other tensor needs: neither another of them, nor others."""
    every = itertools.chain(*(tree.values() for tree in (trained, *others)))
    places = [value.untyped_storage().data_ptr() for value in every]  # those of trained first
    users = Counter(places)
    return {
        n for n, place in zip(trained, places, strict=False) if users[place] == 1 and trained[n]._base is None
    }


def leaving_rows(trained: Params, tables: Sequence[LocalTable]) -> Params:
    """Return the parameters, tables cut to the rows that may leave."""
    cut = {
        t.parameter: rows_of(trained[t.parameter], t.leaving) for t in tables if len(t.leaving) < len(t.rows)
    }
    return {**trained, **cut}


def examples_of(job: Job, rows: np.ndarray, draws: Stream) -> float:
    """Return c_k: how many of a client's examples train what leaves it."""
    counts = [len(usable(job.data, rows, phase, draws)) for phase in job.leaving]
    return float(max(counts, default=len(allowed(job.data, rows, "opted_in"))))


class Sequential(Engine):
    """Trains clients one by one in this process."""

    name = "sequential"

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients, and yield what each gives."""
        stored = job.kept([each.client for each in work])
        for place, each in enumerate(work):
            yield train_client(job, each.sent, row(stored, place), each.client, round, progress)
