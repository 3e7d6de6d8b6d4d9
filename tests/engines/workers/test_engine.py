"""Clients in processes of their own: sizes of cohorts, errors, deaths, and what is left behind (nothing)."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, NonFiniteError, WorkerError
from fedkeep.engines import ClientResult, Engine, Job, Sequential, Work, Workers
from fedkeep.engines.workers import engine as workers
from fedkeep.engines.workers import pool
from fedkeep.engines.workers.dataset import SentData
from fedkeep.engines.workers.pool import Pool, start_method
from fedkeep.engines.workers.process import told
from tests.engines.test_round import BROKEN, METHOD, Fragile
from tests.tiny import Logits, Rounds, classes, everyone, job, results, same_bits, texts

FURL = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.2, momentum=0.5)))
DATA = classes(counts=(5, 9, 3, 7, 4, 6), kind="f4")
FORK = pytest.mark.skipif(start_method() != "fork", reason="the test's own classes go to the workers by fork")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts processes by /proc")


@pytest.fixture
def engine() -> Iterator[Workers]:
    """Two workers, ended after the test whatever happens."""
    if start_method() != "fork":
        pytest.skip("the test's own classes go to the workers by fork")
    before = multiprocessing.active_children()
    with_two = Workers(2)
    yield with_two
    with_two.close()
    assert multiprocessing.active_children() == before


def rounds(
    engine: Any, cohorts: list[list[int]], model: Callable[[], nn.Module] = Logits, **options: Any
) -> Any:
    """Return the server's parameters, everybody's private values and the reports after these cohorts."""
    work = job(model(), options.pop("method", FURL), options.pop("data", DATA), **options)
    run = Rounds(work, engine)
    reports = [run(cohort) for cohort in cohorts]
    about = [repr(dataclasses.replace(r, seconds=0, aggregate_seconds=0)) for r in reports]
    return run.server.params, everyone(work.store, len(work.data)), about


def check(found: Any, expected: Any) -> None:
    assert same_bits(found[0], expected[0])
    assert same_bits(found[1], expected[1])
    assert found[2] == expected[2]


def processes(engine: Workers) -> list[int]:
    assert engine._pool is not None
    return [w.process.pid for w in engine._pool.workers if w.process.pid is not None]


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Tell whether processes that are no children of this one have ended within some seconds."""
    until = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < until:
        left = [
            p
            for p in left
            if Path(f"/proc/{p}").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text()
        ]
        time.sleep(0.005)
    return not left


class Scripted(nn.Module):
    """A linear model that does something else on an example that begins with 13, in a worker process."""

    per_example = ("user",)

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.user = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 13).any()) and multiprocessing.parent_process() is not None:
            self.act()
        return self.w * x[:, 0] + self.user


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
        owner, {"x": np.ones((4, 3)), "label": np.array([0, 1, 2, 1])}, ["train", "test", "test", "train"],
        meta={"task": "multiclass", "classes": 3},
    )  # fmt: skip
    for cohorts in ([[0, 1, 2]], [[1]]):
        check(rounds(engine, cohorts, data=data), rounds(Sequential(), cohorts, data=data))


def test_the_largest_clients_are_trained_first_and_given_back_in_order(engine: Workers) -> None:
    work = job(Logits(), FURL, DATA)
    results(work, [0], engine)
    assert engine._pool is not None
    given, order = [], engine._pool.order
    engine._pool.order = lambda *a: (given.append(a[2]["client"]), order(*a))[1]  # type: ignore[method-assign,func-returns-value]
    engine.count = 1
    found = results(work, [4, 2, 1, 0, 3], engine)
    assert given == [1, 3, 0, 4, 2]
    assert [result.client for result in found] == [4, 2, 1, 0, 3]


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

    def train(self, job: Job, work: Sequence[Work], round: int, progress: float) -> Iterator[ClientResult]:
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


def scripted(act: Callable[[], None]) -> dict[str, Any]:
    """Return options of ``rounds``: client ``bad`` is the third of the cohort, and the largest."""
    from tests.tiny import pairs

    many = [(1.0, 2.0)] * 3
    data = pairs({"a": [(1, 1)], "b": [(2, 1)], "bad": [(13.0, 1.0), *many], "d": [(2, 2), (1, 0)]})
    return {"model": lambda: Scripted(act), "method": METHOD, "data": data}


class OwnError(Exception):
    """An error of the user's own, with more than a message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Difficult(Exception):
    """An error that can't be made from its message."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__(f"{one} and {two}")


def throw(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    "error",
    [OwnError(3, "text"), KeyError("column"), MethodError("A message."), ZeroDivisionError(), SystemExit(4)],
    ids=lambda e: type(e).__name__,
)
def test_an_error_in_a_worker_is_raised_here(engine: Workers, error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        rounds(engine, [[0, 1, 2, 3]], **scripted(throw(error)))
    assert (str(found.value), found.value.args) == (str(error), error.args)
    assert "In the worker process:" in found.value.__notes__[0]
    assert "self.act()" in found.value.__notes__[0]
    check(rounds(engine, [[0, 1]]), rounds(Sequential(), [[0, 1]]))  # the engine goes on


@pytest.mark.parametrize(
    ("error", "text"),
    [(Difficult(1, 2), "Difficult: 1 and 2"), (KeyError(Path("a")), f"KeyError: {Path('a')!r}")],
    ids=["difficult", "not plain"],
)
def test_an_error_that_cannot_be_made_again_is_told(engine: Workers, error: Exception, text: str) -> None:
    with pytest.raises(WorkerError) as found:
        rounds(engine, [[0, 2]], **scripted(throw(error)))
    assert str(found.value) == text


def test_what_the_model_raises_is_a_method_error_as_ever(engine: Workers) -> None:
    found = []
    for each in (engine, Sequential()):
        with pytest.raises(MethodError) as error:
            rounds(each, [[0, 1]], model=lambda: Logits(features=4))
        found.append(str(error.value))
    assert found[0] == found[1]
    assert found[0].startswith("Client 'user-0', round 0: the model failed on a batch of 4 examples: ")


def test_of_two_errors_the_first_in_the_cohort_is_raised(engine: Workers) -> None:
    """Whichever happens first: ``bad`` is the largest client, so it is trained first, but its turn comes later."""
    data = dict(scripted(throw(KeyError("bad"))))
    data["data"].columns["x"][0] = 13.0
    with pytest.raises(KeyError):
        rounds(engine, [[2, 1, 0]], **data)
    with pytest.raises(NonFiniteError) as error:
        rounds(engine, [[0, 1, 2]], model=Fragile, method=METHOD, data=BROKEN)
    assert str(error.value).startswith("Client 'bad', round 0: the training loss became NaN")


def test_a_round_that_failed_changed_nothing(engine: Workers) -> None:
    options = scripted(throw(ValueError("stop")))
    work = job(options["model"](), options["method"], options["data"])
    run = Rounds(work, engine)
    before = {n: v.clone() for n, v in run.server.params.items()}
    with pytest.raises(MethodError):
        run([0, 1, 2, 3])
    assert same_bits(run.server.params, before)
    assert run.server.round == 0
    assert work.store.seen(range(4)) == [False] * 4


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
    assert str(error.value) == (
        "Client 'bad', round 0: the process that trained it was killed by signal 9 (SIGKILL), and so did one before. "
        "A system that runs out of memory kills processes: use fewer workers, or a smaller batch_size. Nothing was "
        "lost: the last finished round is kept."
    )
    assert time.monotonic() - began < 10
    with pytest.raises(
        WorkerError, match="the process that trained it ended with code 3, and so did one before"
    ):
        rounds(engine, [[2]], **scripted(lambda: os._exit(3)))


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
    for pid in processes(engine):
        os.kill(pid, signal.SIGKILL)
    assert gone(processes(engine))
    run([2, 3])
    assert same_bits(run.server.params, rounds(Sequential(), [[0, 1], [2, 3]])[0])


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


@FORK
def test_simulate_leaves_no_process_behind() -> None:
    run = simulate(Logits(), FURL, DATA, rounds=1, engine="workers", workers=2)
    assert (run.engine, run.engine_reason) == ("workers", "")
    with pytest.raises(NonFiniteError):
        simulate(Fragile(), METHOD, BROKEN, rounds=1, engine="workers", workers=2)
    assert multiprocessing.active_children() == []


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
    assert told(theirs, b"ready")
    ours.close()
    assert not told(theirs, b"ready")


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


@LINUX
def test_workers_hold_none_of_the_parents_files(engine: Workers, tmp_path: Path) -> None:
    """A lock that the parent holds is free as soon as the parent is gone."""
    with open(tmp_path / "lock", "w") as held:
        rounds(engine, [[0, 1]])
        for pid in processes(engine):
            files = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
            assert held.name not in files
            assert (
                sum("memfd:fedkeep" in f for f in files) == 2
            )  # what it shares, but nothing of the other worker's
            assert sum("socket:" in f for f in files if f not in files[:3]) <= 2


@LINUX
def test_the_data_are_not_copied(engine: Workers) -> None:
    """40 MB of examples; a worker that has trained on all of them has less than half of that for itself."""
    features = 1000
    data = classes(counts=(5000, 5000), features=features, kind="f4", valid=0, test=0)
    method = methods.furl("user", local=Phase(batch_size=100))
    rounds(engine, [[0, 1], [0, 1]], model=lambda: Logits(features=features), method=method, data=data)
    for pid in processes(engine):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        assert own < 20_000


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

    per_example = ("user",)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.table = nn.Embedding(300, 3)
            self.user = nn.Parameter(torch.zeros(3))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        return self.table(text).sum(1) / text_length.unsqueeze(1) + self.user


@pytest.mark.parametrize("mapped", [False, True])
def test_data_on_their_way_to_another_process(tmp_path: Path, mapped: bool) -> None:
    data = texts(counts=(4, 9, 3, 5), vocabulary=300)
    if mapped:
        data.save(tmp_path / "data")
        data = FederatedData.load(tmp_path / "data")
    sent = SentData(data)
    assert bool(sent.mapped) == mapped
    found: FederatedData = pickle.loads(pickle.dumps(sent)).data  # noqa: S301 - as multiprocessing does
    assert found.fingerprint() == data.fingerprint()
    assert found.meta == data.meta
    rows = np.arange(5, 12)
    assert same_bits(found.batch(rows), data.batch(rows))
    for column in ("text", "label"):
        assert len(pickle.dumps(sent)) < 20_000 or column not in found.columns
    sent.arena.close()


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
    with pytest.raises(WorkerError) as error:
        rounds(engine, [[0]])
    assert str(error.value) == (
        "A worker process could not start: it ended with code 7. Use engine='sequential' to train in this process."
    )
    engine.close()


def bad_device() -> None:
    work = job(Logits(), FURL, DATA, device="cuda:0")
    results(work, [0], Workers(2), sent={})


def bad_parent() -> None:
    rounds(Workers(2), [[0]])


def simulated(**options: Any) -> Callable[[], None]:
    return lambda: (simulate(Logits(), FURL, DATA, rounds=1, **options), None)[1]


NO_CPU = (
    "engine='workers' spreads clients over processor cores; the device is {!r}. Use engine='vectorised' or "
    "engine='sequential' there, or device='cpu'."
)
DAEMON = (
    "This process is a daemon of multiprocessing, which may not have children, so it cannot start workers. "
    "Use engine='sequential' here, or start this process with daemon=False."
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (bad_device, NO_CPU.format("cuda:0")),
        (simulated(engine="workers", device="meta"), NO_CPU.format("meta")),
        (bad_parent, DAEMON),
        (simulated(engine="workers", workers=0), "workers must be at least 1; got 0."),
        (simulated(workers=-1), "workers must be at least 1; got -1."),
        (simulated(workers=0, cohort=1), "workers must be at least 1; got 0."),
        (
            simulated(engine="pooled", workers=2),
            "workers=2 is for engine='workers' or 'auto'; the engine is 'pooled'.",
        ),
    ],
)
def test_bad_calls(call: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if call is bad_parent:
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value) == message
