"""Workers that are killed are replaced, and a client over which two die is named."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep import simulate
from fedkeep.core.errors import WorkerError
from fedkeep.engines import Sequential, Workers
from fedkeep.engines.workers import pool, workers
from tests import refusals
from tests.engines.test_round import METHOD
from tests.engines.workers.rounds import DATA, FORK, FURL, check, gone, processes, rounds, scripted
from tests.tiny import Logits, Rounds, everyone, job, pairs, same_bits


def kill_once(flag: Path) -> Callable[[], None]:
    def act() -> None:
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return act


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_worker_that_is_killed_once_is_replaced(engine: Workers, tmp_path: Path) -> None:
    options = scripted(kill_once(tmp_path / "killed"))
    check(
        rounds(engine, [[0, 1, 2, 3], [2, 0]], **options),
        rounds(Sequential(), [[0, 1, 2, 3], [2, 0]], **options),
    )
    assert (tmp_path / "killed").exists()
    assert len(processes(engine)) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_client_over_which_two_workers_die_is_named(engine: Workers) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as error:
        rounds(engine, [[0, 1, 2, 3]], **scripted(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert error.value.facts == {"client": "bad", "round": 0, "how": "was killed by signal 9 (SIGKILL)"}
    assert time.monotonic() - began < 10
    with refusals.raises(WorkerError, client="bad", round=0, how="ended with code 0"):
        rounds(engine, [[2]], **scripted(lambda: os._exit(0)))


CROWD = pairs({c: [(13.0 if c == "g" else 1.0, 2.0)] * (20 - k) for k, c in enumerate("abcdefghijkl")})
"""Clients of whom the seventh begins after others have answered, so that its worker has the next one's order, too."""


def held(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is told, at each order, how many clients its worker then has."""
    given, order = list[int](), pool.Pool.order

    def ordered(self: pool.Pool, worker: pool.Worker, *about: Any) -> bool:
        taken = order(self, worker, *about)
        given.append(len(worker.places))
        return taken

    patch.setattr(pool.Pool, "order", ordered)
    return given


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_who_waits_at_a_worker_that_is_killed_is_trained_by_another(engine: Workers, tmp_path: Path) -> None:
    options = {**scripted(kill_once(tmp_path / "killed")), "data": CROWD}
    with pytest.MonkeyPatch.context() as patch:
        given = held(patch)
        found = rounds(engine, [list(range(12))] * 2, **options)
    assert max(given) == 2
    assert (tmp_path / "killed").exists()
    check(found, rounds(Sequential(), [list(range(12))] * 2, **options))
    with refusals.raises(WorkerError, client="g", round=0):
        rounds(engine, [list(range(12))], **{**scripted(lambda: os._exit(3)), "data": CROWD})


def test_the_last_clients_and_large_ones_wait_at_no_worker(
    engine: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = held(monkeypatch)
    options = {**scripted(lambda: None), "data": CROWD}
    rounds(engine, [list(range(12))], **options)
    assert given[-2:] == [1, 1]
    given.clear()
    monkeypatch.setattr(workers, "AHEAD_BYTES", 1)
    rounds(engine, [list(range(12))], **options)
    assert set(given) == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a real-time signal")
def test_a_signal_without_a_name_is_said_by_its_number(engine: Workers) -> None:
    with pytest.raises(WorkerError, match=r"trained it was killed by signal 40, and so did one before\."):
        rounds(engine, [[2]], **scripted(lambda: os.kill(os.getpid(), 40)))


def test_workers_that_are_silent_for_long_are_spoken_of(
    engine: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SILENCE", 0.2)
    options = scripted(lambda: time.sleep(1.0))
    with pytest.warns(
        UserWarning, match=r"^No worker has answered for 0\.2 s\. If no client takes that long, "
    ):
        found = rounds(engine, [[2]], **options)
    check(found, rounds(Sequential(), [[2]], **options))


@FORK
def test_a_run_whose_worker_was_killed_goes_on(tmp_path: Path) -> None:
    """Killed twice in its second round: the first one is kept, and the run ends as if nothing had been."""
    flag = tmp_path / "well"
    options = scripted(lambda: None if flag.exists() else os.kill(os.getpid(), signal.SIGKILL))

    def run(**more: Any) -> Any:
        return simulate(
            options["model"](),
            METHOD,
            options["data"],
            rounds=4,
            cohort=2,
            seed=2,
            engine="workers",
            workers=2,
            **more,
        )

    with pytest.raises(WorkerError, match="Client 'bad', round 1: "):
        run(out=tmp_path / "run")
    flag.touch()
    found, expected = run(out=tmp_path / "run", resume=True), run()
    assert same_bits(found.server, expected.server)
    assert same_bits(everyone(found.private, 4), everyone(expected.private, 4))
    assert found.history == expected.history


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_worker_that_is_killed_while_it_waits_is_replaced(engine: Workers) -> None:
    work = job(Logits(), FURL, DATA)
    run = Rounds(work, engine)
    run([0, 1])
    assert engine._pool is not None
    while not all(worker.ready for worker in engine._pool.workers):  # one may not have been needed yet
        list(engine._pool.answering(block=True))
    for pid in processes(engine):
        os.kill(pid, signal.SIGKILL)
    assert gone(processes(engine))
    run([2, 3])
    assert same_bits(run.server.params, rounds(Sequential(), [[0, 1], [2, 3]])[0])
