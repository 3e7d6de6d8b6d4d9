"""How workers start and end: by fork or spawned, by Ctrl-C, with a parent that is killed; nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, declare, methods, simulate
from fedkeep.core.errors import NonFiniteError, WorkerError
from fedkeep.engines import Sequential, Workers
from fedkeep.engines.workers import pool, worker_process
from fedkeep.engines.workers.pool import Pool, start_method
from fedkeep.engines.workers.worker_process import send_reply
from tests.engines.test_round import BROKEN, METHOD, Fragile
from tests.engines.workers.rounds import DATA, FORK, FURL, LINUX, check, gone, processes, rounds, scripted
from tests.refusals import raises
from tests.tiny import Logits, Rounds, job, texts


def test_ctrl_c_ends_the_round_and_its_workers(engine: Workers) -> None:
    def stop(part: float) -> None:
        raise KeyboardInterrupt

    slow = scripted(lambda: time.sleep(60))
    work = job(slow["model"](), slow["method"], slow["data"], after_step=stop)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as held:  # the traceback lives on
        Rounds(work, engine)([0, 2])
    assert time.monotonic() - began < 10
    assert len(processes(engine)) < 2  # the one that trains is ended at once
    assert held.type is KeyboardInterrupt


@FORK
def test_ctrl_c_in_a_worker_is_the_parents_to_answer() -> None:
    engine = Workers(1)
    options = scripted(lambda: os.kill(os.getpid(), signal.SIGINT))
    check(rounds(engine, [[2]], **options), rounds(Sequential(), [[2]], **options))
    engine.close()


def test_a_worker_that_is_to_end_does_not_do_what_its_parent_would(engine: Workers) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with raises(WorkerError, how="was killed by signal 15 (SIGTERM)"):
            rounds(engine, [[2]], **scripted(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)


@FORK
def test_simulate_leaves_no_process_behind() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=1, engine="workers", workers=2)
    assert (run.engine, run.engine_reason) == ("workers", "")
    with pytest.raises(NonFiniteError):
        simulate(Fragile(), METHOD, BROKEN, rounds=1, engine="workers", workers=2)
    assert multiprocessing.active_children() == []


@FORK
def test_a_process_that_outlives_its_kill_is_told_of_and_all_else_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Workers(2)
    rounds(engine, [[0, 2]])
    made = engine._pool
    assert made is not None
    workers, held = list(made.workers), [made.worker_job.sent]
    stuck = workers[-1].process
    monkeypatch.setattr(pool, "PATIENCE", 0.1)
    monkeypatch.setattr(stuck, "kill", lambda: None)  # the kernel does not end it now
    assert stuck.pid is not None
    later = threading.Timer(5, os.kill, (stuck.pid, signal.SIGKILL))  # in place of waiting for ever
    later.start()
    with pytest.warns(UserWarning, match=f"{stuck.pid}.*has not ended"):
        engine.close()
    assert multiprocessing.active_children() == [stuck]
    assert all(worker.connection.closed for worker in workers)
    for arena in [*held, *(arena for worker in workers for arena in worker.memory)]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(arena.file)
    later.cancel()
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join()


@FORK
def test_an_engine_that_is_forgotten_ends_its_workers() -> None:
    engine = Workers(1)
    rounds(engine, [[0]])
    assert len(multiprocessing.active_children()) == 1
    del engine
    assert multiprocessing.active_children() == []


def train_for_ever(pipe: Any) -> None:
    """A parent whose workers train a client that takes a minute; it tells who they are."""
    engine = Workers(2)
    pool = Pool.order

    def told(self: Pool, *arguments: Any) -> bool:
        sent = pool(self, *arguments)
        pipe.send([w.process.pid for w in self.workers])
        return sent

    Pool.order = told  # type: ignore[method-assign]
    rounds(engine, [[2, 0]], **scripted(lambda: time.sleep(60)))


@FORK
def test_a_worker_is_known_before_ctrl_c_can_break_its_start_off(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def disturbed() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    found = Pool(job(Logits(), METHOD, DATA))
    monkeypatch.setattr(pool, "_undisturbed", disturbed)
    with pytest.raises(KeyboardInterrupt):
        found.grow(1)
    (worker,) = found.workers
    pid = worker.process.pid
    found.close()
    assert gone([pid])


def test_a_worker_ends_where_nobody_listens() -> None:
    ours, theirs = multiprocessing.Pipe()
    assert send_reply(theirs, b"ready")
    ours.close()
    assert not send_reply(theirs, b"ready")


@FORK
@LINUX
def test_no_process_and_no_memory_survives_a_parent_that_is_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=train_for_ever, args=(theirs,))
    parent.start()
    pids = ours.recv()
    assert len(pids) == 2
    time.sleep(0.05)
    parent.kill()
    parent.join()
    assert gone(pids)
    assert {n for n in set(os.listdir("/dev/shm")) - before if "fedkeep" in n or "torch" in n} == set()


def files_of(pid: int) -> list[str]:
    """Return what a process holds open; a file that it closes meanwhile is none of them."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


@LINUX
def test_workers_hold_none_of_the_parents_files(engine: Workers, tmp_path: Path) -> None:
    """A lock that the parent holds is free as soon as the parent is gone."""
    with open(tmp_path / "lock", "w") as held:
        rounds(engine, [[0, 1]])
        for pid in processes(engine):
            until = (
                time.monotonic() + 30
            )  # the other worker may have computed alone: this one may be beginning
            while held.name in (files := files_of(pid)) and time.monotonic() < until:
                time.sleep(0.05)
            assert held.name not in files
            # What all are sent and its own two; nothing of the other worker's.
            assert sum("memfd:fedkeep" in f for f in files) == 3
            assert sum("socket:" in f for f in files if f not in files[:3]) <= 2


@FORK
def test_after_many_threads_have_computed_here() -> None:
    """Fork after multi-threaded operations and backward passes: a worker must not wait for threads left behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(2):
            value = torch.randn(1000, 1000, requires_grad=True)
            (value @ value).exp().tanh().sum().backward()
            conv = nn.Conv2d(8, 8, 3)
            conv(torch.randn(16, 8, 48, 48)).sum().backward()
            engine = Workers(2)
            found = rounds(engine, [[0, 1, 2]], model=Logits)
            engine.close()
    finally:
        torch.set_num_threads(before)
    check(found, rounds(Sequential(), [[0, 1, 2]]))


@FORK
def test_while_a_thread_draws_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork copies the lock of torch's generator, which the thread holds most of the time, and not the thread."""
    monkeypatch.setattr(pool, "SILENCE", 30.0)
    monkeypatch.setattr(worker_process, "LOCKED", 0.2)
    model, ended = Logits(), threading.Event()
    expected = rounds(Sequential(), [[0, 1, 2]], model=lambda: copy.deepcopy(model))

    def draw() -> None:
        while not ended.is_set():
            torch.rand(1_000_000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            engine = Workers(2)
            found = rounds(engine, [[0, 1, 2]], model=lambda: copy.deepcopy(model))
            engine.close()
    finally:
        ended.set()
        thread.join()
    check(found, expected)


def test_spawned_workers_do_the_same(tmp_path: Path) -> None:
    """As on systems without fork: nothing is inherited, data in memory are shared, data on disk are mapped."""
    data = texts(counts=(4, 9, 3, 5), vocabulary=300)
    data.save(tmp_path / "data")
    mapped = FederatedData.load(tmp_path / "data")
    model, method, engine = Spoken, methods.furl("user", local=Phase(batch_size=3)), Workers(1, start="spawn")
    try:
        found = rounds(engine, [[0, 1, 2]], model=model, method=method, data=mapped)
    finally:
        engine.close()
    check(found, rounds(Sequential(), [[0, 1, 2]], model=model, method=method, data=data))


class Spoken(nn.Module):
    """A text model that another process can import."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.table = nn.Embedding(300, 3)
            self.user = nn.Parameter(torch.zeros(3))
        declare(self, per_example=("user",))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        return self.table(text).sum(1) / text_length.unsqueeze(1) + self.user


def test_how_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert start_method() == "fork"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert start_method() == "spawn"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_method() == "spawn"


@FORK
def test_a_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedkeep.engines.workers.pool as room

    engine = Workers(1)
    monkeypatch.setattr(room, "serve", lambda *_: os._exit(7))
    with raises(WorkerError, said="A worker process could not start: it ended"):
        rounds(engine, [[0]])
    engine.close()


@FORK
def test_a_worker_that_begins_with_a_lock_held_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve = pool.serve

    def locked(*given: Any) -> None:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) < 3:
            signal.signal(worker_process.LOCKED_SIGNAL, signal.SIG_DFL)
            os.kill(os.getpid(), worker_process.LOCKED_SIGNAL)
        serve(*given)

    monkeypatch.setattr(pool, "serve", locked)
    monkeypatch.setattr(pool, "SILENCE", 30.0)
    engine = Workers(1)
    found = rounds(engine, [[0, 1]])
    engine.close()
    check(found, rounds(Sequential(), [[0, 1]]))
    assert len(list(tmp_path.iterdir())) == 3
