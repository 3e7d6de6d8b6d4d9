"""What a server holds in a round of a large model, counted in allocations, and that pieces and files change no bit."""

from __future__ import annotations

import errno
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedkeep import Method, Phase, Split, WeightedMean, adam, averaging, methods, sgd
from fedkeep.core.errors import RunError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Params
from fedkeep.engines import Answer, Order, first_global, run_round
from fedkeep.kernels import values
from fedkeep.methods import ClippedMean, Global, SecureSums, aggregate, differentially_private
from fedkeep.methods.secure import Vectors
from fedkeep.methods.server import MeanByGroup, Reduction
from fedkeep.privacy import Adaptive, DifferentialPrivacy
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_server import SecureServer
from fedkeep.split import Upload
from tests.methods.table import ROWS
from tests.tiny import Rounds, classes, job, same_bits

WIDTH = 1500
"""A layer of so many by so many, 9 MB."""
MODEL = 4 * (WIDTH * WIDTH + WIDTH)
PIECES = 4 << 20
"""What pieces take is the same for every model."""
PRIVACY = DifferentialPrivacy(noise=1.0, clip=1.0, heaviest=3.0)


def peak(act: Callable[[], object]) -> int:
    """Return the most bytes that something holds at a time: of torch, kernels' own copies too, and of numpy and Python."""
    act()  # loads what it needs, and begins what an optimiser keeps
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        tracemalloc.start()
        try:
            act()
            others = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    changes = [e for e in noted.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())]
    return int(np.cumsum([0, *sizes]).max()) + others


class Clients:
    """Make an upload when it is its turn."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        for order in orders:
            yield self.answer(order.client)

    def answer(self, client: str) -> Answer:
        number = int(client) + 1
        shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
        deltas = {name: torch.full(shape, number * 1e-4) for name, shape in shapes.items()}
        return Answer(client=client, upload=self.split.arrived(deltas, 1.0 + number % 3, {}), loss=1.0)

    def accept(self, shares: Mapping[str, float]) -> None:
        assert shares


def round_of(method: Method, cohort: int) -> Callable[[], tuple[Global, object]]:
    """Return what runs a round of a large layer over scripted clients."""
    net, ids = Net(nn.Linear(WIDTH, WIDTH)), [f"{number:02}" for number in range(cohort)]
    fitted: Any = method.resolved(net.module)
    server = first_global(fitted, net, ids, cohort)
    device: Any = Clients(fitted.split)
    return lambda: run_round(fitted, device, server, ids, {})


def fedavg(optimizer: Optimizer | None = None) -> Method:
    local = Phase(optimizer=sgd(0.1), batch_size=4)
    return methods.fedavg(local=local, server=averaging(optimizer or sgd(1.0)))


KINDS: dict[str, tuple[Callable[[], Method], int]] = {
    "plain": (fedavg, 2),
    "private": (lambda: differentially_private(fedavg(), PRIVACY, 10), 2),
    "momentum": (lambda: fedavg(sgd(0.5, momentum=0.9)), 3),
    "adam": (lambda: fedavg(adam(0.01)), 3),
}
"""With how many models a server holds at most."""


@pytest.mark.parametrize("cohort", [5, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_holds_three_models_at_most_whatever_the_cohort(
    kind: str, cohort: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a round an upload, and then the change and what comes of it; what is made in passing is small.

    What an optimiser keeps from its first step on was there before.
    """
    monkeypatch.setattr(aggregate, "LARGE", 1 << 20)
    make, models = KINDS[kind]
    with aggregate.sums_in_files():
        assert peak(round_of(make(), cohort)) < models * MODEL + PIECES


def test_a_secure_sum_takes_no_more() -> None:
    """The sum, and a vector or the mean; here one of five clients drops out, so that its masks are made again."""
    ids, start = list("abcde"), {"weight": torch.zeros(WIDTH, WIDTH), "bias": torch.zeros(WIDTH)}
    vectors = Vectors(SecureSums(clip=1.0), start, len(ids))
    zeros = np.zeros(vectors.size, vectors.ring.dtype)
    zeros[-1] = 7

    def summed() -> None:
        clients = {name: SecureClient(name, "r", vectors.threshold) for name in ids}
        server = SecureServer("r", vectors.threshold, vectors.size, vectors.ring.dtype)
        for name, client in clients.items():
            server.add_keys(name, client.keys())
        keys = server.keys()
        for name, client in clients.items():
            server.add_shares(name, client.shares(keys))
        for name in ids[:-1]:
            server.add_masked(name, clients[name].masked(server.shares_for(name), zeros))
        survivors = server.survivors()
        for name in survivors:
            server.add_revealed(name, clients[name].revealed(survivors))
        made = vectors.reduced(server.total(), len(survivors))
        assert made.weight > 0
        assert not made.changes["weight"].any()

    assert peak(summed) < 3 * MODEL + PIECES


def clipped_uploads(count: int) -> dict[str, Upload]:
    """Return uploads, some beyond a norm of 1; of the table every other client holds some rows, or all of it."""
    draw, found = torch.Generator().manual_seed(count), {}
    for k in range(count):
        rows = torch.randperm(50, generator=draw)[:20].sort().values
        held = torch.arange(50) if k % 3 else rows
        deltas = {
            "w": torch.randn(23, 11, generator=draw) * (0.01 if k % 2 else 1.0),
            "turned": torch.randn(11, 23, generator=draw).T,
            "table": torch.randn(len(held), 3, generator=draw),
            "half": torch.randn(64, generator=draw).half(),
            "count": torch.tensor(k),
            "server/group": torch.tensor(k % 3),
        }
        cut = {} if k % 3 else {"table": rows}
        found[f"client-{k:02}"] = Split().arrived(deltas, (1.0, 5.0, 0.3, 0.0)[k % 4], cut)
    return found


START: Params = {
    "w": torch.zeros(23, 11),
    "turned": torch.zeros(11, 23).T,
    "table": torch.zeros(50, 3),
    "half": torch.zeros(64).half(),
    "count": torch.tensor(0),
    "server/group": torch.tensor(0),
}


def private(**options: Any) -> Reduction:
    privacy = DifferentialPrivacy(noise=0.7, heaviest=4.0, noise_seed=2, **options)
    return differentially_private(fedavg(), privacy, 9.0).server.reduce


REDUCTIONS: dict[str, Callable[[], Reduction]] = {
    "the mean": WeightedMean,
    "over owners": lambda: WeightedMean(missing_rows="owners_only"),
    "by group": lambda: MeanByGroup(group="group", groups=3),
    "robust": lambda: ClippedMean(bound=1.0),
    "private": lambda: private(clip=1.0),
    "private by pattern": lambda: private(clip={"w": 0.5, "*": 2.0}),
    "private, adaptive": lambda: private(clip=1.0, adaptive=Adaptive(noise=2.0)),
}


def reduced(rule: Reduction, uploads: Mapping[str, Upload], skip: int | None = None) -> Params:
    server = Global(params=START, state={"clip_bound": torch.tensor(1.2).double()}, round=3)
    found = rule.begin(server, START, list(uploads))
    for number, (client, upload) in enumerate(uploads.items()):
        if number == skip:
            found.skip(client)
        else:
            found.add(client, upload)
    made = found.value()
    parts = {"": made.changes, "state of ": made.state, "rows of ": made.rows}
    whole = {before + name: value for before, part in parts.items() for name, value in part.items()}
    return whole | {"weight": torch.tensor(made.weight).double(), "uploads": torch.tensor(made.count)}


def large(patch: pytest.MonkeyPatch, piece: int = 16) -> None:
    """Let every model count as large, and pieces be few numbers."""
    patch.setattr(aggregate, "LARGE", 0)
    patch.setattr(aggregate, "IN_FILES", ContextVar("always", default=True))
    for room in (aggregate, values):
        patch.setattr(room, "PIECE", piece)


@pytest.mark.parametrize("clients", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_files_and_pieces_change_no_bit(name: str, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = clipped_uploads(clients)
    if name.startswith("private"):  # tables come whole
        uploads = {client: one for client, one in uploads.items() if not one.rows}
        uploads = uploads or {"client-00": clipped_uploads(2)["client-01"]}
    for skip in (None, 2 if clients > 2 else None):
        expected = reduced(REDUCTIONS[name](), uploads, skip)
        with monkeypatch.context() as patch:
            large(patch)
            assert same_bits(reduced(REDUCTIONS[name](), uploads, skip), expected)


@pytest.mark.parametrize("name", ROWS)
def test_every_methods_rounds_have_the_bits_of_sums_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, method = ROWS[name]
    found = []
    monkeypatch.setattr(aggregate, "BLOCK", 2)
    for piece in (None, 4):
        with monkeypatch.context() as patch:
            if piece:
                large(patch, piece)
            rounds = Rounds(job(method.made_for(build()).double(), method, classes()))
            for _ in range(2):
                rounds(range(6))
        found.append({**rounds.server.params, **rounds.server.state})
    assert same_bits(*found)


class FullDisk:
    """A temporary file on a disk with room for so many bytes."""

    make = staticmethod(tempfile.TemporaryFile)

    def __init__(self, room: int) -> None:
        self.room, self.file = room, self.make(buffering=0)

    def write(self, content: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self.file.write(content[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 50])
def test_a_full_disk_ends_the_round_with_an_error_and_loses_nothing(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds() -> Rounds:
        return Rounds(job(ROWS["fedavg"][0]().double(), ROWS["fedavg"][1], classes()))

    monkeypatch.setattr(aggregate, "BLOCK", 2)
    expected, found = rounds(), rounds()
    for one in (expected, found):
        one(range(6))
    large(monkeypatch)
    before = dict(found.server.params)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk(room))
        with pytest.raises(RunError) as raised:
            found(range(6))
    assert all(said in str(raised.value) for said in ("No space left", "TMPDIR", "Nothing was lost"))
    assert (found.server.round, same_bits(found.server.params, before)) == (1, True)
    for one in (expected, found):
        one(range(6))
    assert same_bits(found.server.params, expected.server.params)


def test_a_file_that_was_cut_short_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    uploads = clipped_uploads(17)
    found = WeightedMean().begin(Global(params=START), START, list(uploads))
    files: list[Any] = []
    make = tempfile.TemporaryFile

    def noted(**options: Any) -> Any:
        files.append(make(**options))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", noted)
    for client, upload in uploads.items():
        found.add(client, upload)
    files[0].truncate(100)
    with pytest.raises(RunError, match="cut short"):
        found.value()


@pytest.mark.parametrize("limit", [0, aggregate.LARGE])
def test_sums_go_to_files_on_a_server_alone_and_of_large_models_alone(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[object](), tempfile.TemporaryFile
    monkeypatch.setattr(aggregate, "LARGE", limit)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **given: made.append(1) or make(**given))
    here = reduced(WeightedMean(), clipped_uploads(40))
    assert not made
    with aggregate.sums_in_files():
        there = reduced(WeightedMean(), clipped_uploads(40))
    assert bool(made) == (limit == 0)
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_uploads_of_a_large_model_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of a block too is gone once it was added."""
    large(monkeypatch)
    sums = aggregate.RunningMean(START, ["a", "b"])
    sums.add("a", clipped_uploads(2)["client-01"])

    def tensors(one: Any) -> list[Tensor]:
        return [v for v in one.values() if isinstance(v, Tensor)]

    block = sums._blocks[0]
    assert not block._early
    assert not block.sums._first
    assert not any(v.is_floating_point() for v in tensors(block.sums._sums))
    assert {filed.form.dtype for filed in block.sums._filed.values()} == {torch.float64}
