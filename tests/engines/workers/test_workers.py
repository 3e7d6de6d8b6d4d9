"""Clients in processes of their own: cohorts of all sizes, in which order they train, and what is refused."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.engines import ClientResult, ClientToTrain, Engine, Job, Sequential, Workers
from fedkeep.engines.first_values import first_global
from fedkeep.engines.workers import workers
from fedkeep.engines.workers.pool import Pool
from fedkeep.privacy import GaussianNoise
from fedkeep.privacy.draws import Entropy
from tests.engines.workers.rounds import DATA, FORK, FURL, check, processes, rounds
from tests.refusals import raises
from tests.tiny import Logits, Rounds, classes, job, results, same_bits


@FORK
@pytest.mark.parametrize("cohorts", [[[3]], [[0, 1], [2, 3, 4, 5], [5]], [[], [1]], [[5, 4, 3, 2, 1, 0]]])
def test_any_cohort_on_any_number_of_workers(cohorts: list[list[int]]) -> None:
    expected = rounds(Sequential(), cohorts)
    for count in (1, 4):
        engine = Workers(count)
        check(rounds(engine, cohorts), expected)
        assert len(processes(engine)) == min(count, max(map(len, cohorts)))  # none is idle all its life
        engine.close()


def test_clients_without_examples(engine: Workers) -> None:
    owner = ["a", "a", "empty", "c"]
    data = FederatedData.from_columns(
        owner,
        {"x": np.ones((4, 3)), "label": np.array([0, 1, 2, 1])},
        ["train", "test", "test", "train"],
        meta={"task": "multiclass", "classes": 3},
    )
    for cohorts in ([[0, 1, 2]], [[1]]):
        check(rounds(engine, cohorts, data=data), rounds(Sequential(), cohorts, data=data))


def test_the_largest_clients_are_trained_first_and_given_back_in_order(engine: Workers) -> None:
    work = job(Logits(), FURL, DATA)
    results(work, [0], engine)
    given, order = [], engine._pool.order
    engine._pool.order = lambda *a: (given.append(a[2].header["client"]), order(*a))[1]  # type: ignore[method-assign,func-returns-value]
    engine.count = 1
    found = results(work, [4, 2, 1, 0, 3], engine)
    assert given == [1, 3, 0, 4, 2]
    assert [result.client for result in found] == [4, 2, 1, 0, 3]


def test_the_cores_are_the_workers(engine: Workers) -> None:
    """While they train, torch computes with one thread here."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        work = job(Logits(), FURL, DATA)
        sent = first_global(work.method, work.net, work.data).params
        found = engine.train(work, [ClientToTrain(client, sent) for client in (0, 1)], 0, 0.0)
        next(found)
        assert torch.get_num_threads() == 1
        assert len(list(found)) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_uploads_that_wait_for_their_turn_are_few(engine: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit clients are trained in the order of the cohort, so that a large cohort fits into memory."""
    sizes = list(range(1, 31))  # largest first is the cohort's order backwards
    data = classes(counts=sizes, kind="f4", valid=0, test=0)
    expected = rounds(Sequential(), [list(range(30))], data=data)
    for limit, most in ((1 << 30, 29), (100, 2 * workers.WINDOW + 3)):
        monkeypatch.setattr(workers, "HELD_BYTES", limit)
        held, left = [], []
        turns = workers._Turns.__iter__

        def watched(
            self: Any, turns: Any = turns, held: list[int] = held, left: list[int] = left
        ) -> Iterator[Any]:
            for result in turns(self):
                held.append(len(self.done))
                left.append(self.held)
                yield result

        with monkeypatch.context() as patch:
            patch.setattr(workers._Turns, "__iter__", watched)
            check(rounds(engine, [list(range(30))], data=data), expected)
        assert max(held) <= most
        assert left[-1] == 0
        assert (max(held) > 15) == (limit > 1000)


def test_progress_is_told(engine: Workers) -> None:
    seen: list[float] = []
    rounds(engine, [[0, 1, 2, 3]], after_step=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]


class Counting:
    """Counts, whenever it is asked for another client, how many uploads of those before still exist."""

    name = "counting"

    def __init__(self, engine: Engine) -> None:
        self.engine, self.alive = engine, list[int]()

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        uploads = []
        for each in self.engine.train(job, work, round, progress):
            uploads.append(weakref.ref(each.upload))
            yield each
            del each
            self.alive.append(sum(upload() is not None for upload in uploads))

    def close(self) -> None:
        self.engine.close()


def test_uploads_are_forgotten_once_they_are_in_the_mean(engine: Workers) -> None:
    data = classes(counts=[4] * 40, kind="f4")
    for each in (engine, Sequential()):
        counting = Counting(each)
        rounds(counting, [list(range(40))], data=data)
        assert len(counting.alive) == 40
        # The round looks at the last one until the next comes; workers may have some that wait for their turn.
        assert max(counting.alive) <= 2


def test_one_engine_serves_one_job_after_another(engine: Workers) -> None:
    first, other = rounds(engine, [[0, 1]]), rounds(engine, [[0, 1]], data=classes(seed=5))
    check(first, rounds(Sequential(), [[0, 1]]))
    check(other, rounds(Sequential(), [[0, 1]], data=classes(seed=5)))
    work = job(Logits(), FURL, DATA)
    Rounds(work, engine)([0, 1])
    before = processes(engine)
    Rounds(work, engine)([2, 3])
    assert processes(engine) == before  # persistent within a job


PARENTS = {
    "store": "what clients keep comes with every order",
    "after_step": "the parent tells how far a round is",
}
"""What workers need not know of a job, and why."""


def test_workers_have_all_of_a_job_and_serve_no_other() -> None:
    options: dict[str, Any] = {"seed": 7, "entropy": "system", "device": "meta"}
    work = job(Logits(), FURL, DATA, **options)
    ours = [f for f in dataclasses.fields(Job) if f.name not in PARENTS]
    usual = [f.name for f in ours if getattr(work, f.name) == f.default]
    assert usual == [], "a value that differs from the default, so that a field that is left out is noticed"
    pool = Pool(work, "fork")
    found = pool.worker_job.job()
    assert {f.name: getattr(found, f.name) for f in ours} == {f.name: getattr(work, f.name) for f in ours}
    others: dict[str, Any] = {"seed": 8, "entropy": "run", "data": classes(seed=5), "net": Net(Logits())}
    others |= {"method": FURL.but(name="other"), "device": "cpu"}
    assert others.keys() == {f.name for f in ours}
    assert pool.serves(dataclasses.replace(work))
    for name, value in others.items():
        assert not pool.serves(dataclasses.replace(work, **{name: value})), name
    pool.close()


@pytest.mark.parametrize("entropy", ["run", "system"])
def test_noise_comes_from_where_the_job_says(engine: Workers, entropy: Entropy) -> None:
    """By the seed, which the server knows, it could be drawn again and taken off."""
    work = job(Logits(), FURL.but(upload=(GaussianNoise(0.1),)), DATA, entropy=entropy)
    first, second = (results(work, [0], engine)[0].upload for _ in range(2))
    assert same_bits(first.deltas, second.deltas) == (entropy == "run")


def bad_device() -> None:
    work = job(Logits(), FURL, DATA, device="cuda:9")
    results(work, [0], Workers(2), sent={})


def bad_parent() -> None:
    rounds(Workers(2), [[0]])


def simulated(**options: Any) -> Callable[[], None]:
    return lambda: (simulate(Logits(), FURL, DATA, rounds=1, **options), None)[1]


NO_CPU = (
    "engine='workers' spreads clients over processor cores or NVIDIA's GPUs; the device is {!r}. Use engine='vectorised' or "
    "engine='sequential' there, or device='cpu'."
)
DAEMON = (
    "This process is a daemon of multiprocessing, which may not have children, so it cannot start workers. "
    "Use engine='sequential' here, or start this process with daemon=False."
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (bad_device, "The device is 'cuda:9', and this process sees 0 GPUs."),
        (simulated(engine="workers", device="meta"), NO_CPU.format("meta")),
        (bad_parent, DAEMON),
        (simulated(engine="workers", workers=0), "workers must be at least 1; got 0."),
        (simulated(workers=-1), "workers must be at least 1; got -1."),
        (simulated(workers=0, cohort=1), "workers must be at least 1; got 0."),
        (
            simulated(centralised=True, workers=2),
            "Centralised training has no clients side by side: leave out engine='auto' and workers=2.",
        ),
    ],
)
def test_bad_calls(call: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if call is bad_parent:
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with raises(ConfigError, text=message):
        call()


class Noting(Logits):
    """Leaves a file that says which GPU the process sees that trains it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        (self.folder / str(os.getpid())).write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        found: Tensor = super().forward(x)
        return found


@FORK
@pytest.mark.parametrize(("asked", "wanted"), [(None, ["3", "5"]), (4, ["3", "3", "5", "5"]), (1, ["3"])])
def test_workers_are_spread_over_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, wanted: list[str]
) -> None:
    """A map of GPUs that are none: workers compute on the CPU, and see what they would compute on."""
    monkeypatch.setattr(workers, "gpus_of", lambda device: ("3", "5"))
    engine, cohorts = Workers(asked), [list(range(6)), list(range(6))]
    found = rounds(engine, cohorts, lambda: Noting(tmp_path))
    assert engine._pool is not None
    theirs = {str(w.process.pid): w.gpu for w in engine._pool.workers}
    assert sorted(theirs.values()) == wanted
    for path in tmp_path.iterdir():
        if path.name != str(os.getpid()):  # the round's rehearsal is here
            assert path.read_text() == theirs[path.name]
    first = engine._pool.workers[0]
    first.process.kill()
    first.process.join()
    engine._pool._replace(first)
    assert sorted(w.gpu for w in engine._pool.workers) == wanted
    engine.close()
    check(found, rounds(Sequential(), cohorts, lambda: Noting(tmp_path)))


def test_gpus_are_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(workers.gpus_of("cuda")) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert list(workers.gpus_of("cuda")) == ["4", "7"]
    assert list(workers.gpus_of("cuda:1")) == ["7"]
    assert not workers.gpus_of("cpu")
    with pytest.raises(ConfigError, match="mps"):
        workers.gpus_of("mps")
