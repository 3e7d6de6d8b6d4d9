"""What ``auto`` chooses, and that its choice changes no bit."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep import Phase, methods, simulate
from fedkeep.engines import Auto, Choice, Sequential, auto, client_step, run_round
from fedkeep.engines import round as round_room
from fedkeep.engines.auto import known_beforehand
from fedkeep.engines.workers.pool import start_method
from fedkeep.engines.workers.workers import one_thread
from fedkeep.experiments.simulate import make_engine
from fedkeep.methods import aggregate
from tests.engines.vectorised.cohorts import Judged
from tests.tiny import Logits, Rounds, bits, classes, everyone, job, same_bits, threads_noted

FURL = methods.furl("user", local=Phase(batch_size=4))
DATA = classes(kind="f4")
FORK = pytest.mark.skipif(start_method() != "fork", reason="workers are not forked here")


@pytest.mark.parametrize(
    ("device", "cohort", "workers", "expected"),
    [
        ("cpu", 10, 2, None),
        ("cpu", 1, 8, Choice("sequential", "a round has one client")),
        ("cpu", 10, 1, Choice("sequential", "there is one core to use")),
        ("cuda", 1, 1, Choice("vectorised", "the device is cuda")),
        ("mps:0", 10, 8, Choice("vectorised", "the device is mps")),
    ],
)
def test_what_is_known_beforehand(device: str, cohort: int, workers: int, expected: Choice | None) -> None:
    assert known_beforehand(device, cohort, workers) == expected


def test_where_processes_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's script without a guard of __main__ would be run again in each of them, so only on demand."""
    monkeypatch.setattr(auto, "start_method", lambda: "spawn")
    monkeypatch.setattr(auto, "available_cores", lambda: 4)
    assert known_beforehand("cpu", 10, None) == Choice(
        "sequential", "processes cannot be forked here; workers=N starts new ones"
    )
    assert known_beforehand("cpu", 10, 2) is None
    monkeypatch.setattr(auto, "available_cores", lambda: 1)
    assert known_beforehand("cpu", 10, None) == Choice("sequential", "there is one core to use")


def test_a_daemon_trains_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert known_beforehand("cpu", 10, 8) == Choice("sequential", "a daemon process may not start others")


def measured(first: float, others: list[float], workers: int = 4, cohort: int = 10) -> Auto:
    engine = Auto(cohort, 100, workers)
    for seconds in (first, *others):
        engine._took(seconds)
    return engine


@pytest.mark.parametrize(
    ("first", "others", "left", "pays"),
    [
        (0.5, [], 10_000, False),  # the first client may have paid for anything
        (9.0, [], 10, False),  # seconds, where the cores are busy
        (11.0, [], 10, True),  # … but not if it took so long
        (0.5, [0.1, 0.1], 1000, True),  # 100 s of work
        (0.5, [0.1, 0.1], 10, False),  # 1 s
        (0.5, [0.0002] * 5, 10_000_000, False),  # handing over takes longer than training
        (0.5, [0.1, 0.1], 0, False),
    ],
)
def test_when_workers_pay(first: float, others: list[float], left: int, pays: bool) -> None:
    engine = measured(first, others)
    assert engine._pays(left) == pays
    assert engine.name == ("workers" if pays else "sequential")


@pytest.mark.parametrize(("size", "pays"), [(1_000, True), (4_000_000, False)])
def test_what_a_client_gives_is_handed_over_too(size: int, pays: bool) -> None:
    """Two processes save 1 ms of a client's 2 ms; to take 4 MB back takes longer."""
    engine = measured(0.5, [0.002] * 5, workers=2)
    engine.largest = size
    assert engine._pays(100_000) == pays


def test_reasons() -> None:
    engine = measured(0.5, [0.1, 0.1])
    assert engine.choice.reason == "too little was trained to tell whether processes pay"
    engine._pays(1)
    assert engine.choice.reason == "a client takes 100 ms; processes would save too little"
    engine._pays(1000)
    assert engine.choice.reason == "4 clients side by side save about 75 s of 100 s"
    engine = measured(0.5, [60.0], workers=2)
    engine._pays(10)
    assert engine.choice.reason == "2 clients side by side save about 5 min of 10 min"
    engine._pays(1000)
    assert engine.choice.reason == "2 clients side by side save about 8 h of 17 h"


@FORK
@pytest.mark.parametrize("change", [1, 2, 4, 7, 100])
def test_the_result_does_not_depend_on_when_it_changes_over(
    change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a round, at its start, or never."""
    found = []
    for engine in (Sequential(), Auto(4, 3, 2)):
        monkeypatch.setattr(engine, "_pays", lambda left, e=engine: e.trained >= change, raising=False)
        work = job(Logits(), FURL, DATA)
        rounds = Rounds(work, engine)
        reports = [rounds([0, 3, 5, 2]) for _ in range(3)]
        found.append((rounds.server.params, everyone(work.store, 6), [r.loss for r in reports]))
        if isinstance(engine, Auto):
            assert engine.trained == min(change, 12)
            assert (engine.workers._pool is not None) == (change < 12)
        engine.close()
    assert same_bits(found[0][0], found[1][0])
    assert same_bits(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


@FORK
def test_a_run_says_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def about() -> tuple[str, str]:
        info = json.loads((tmp_path / "run" / "run.json").read_text())
        return info["engine"], info["engine_reason"]

    few = simulate(Logits(), FURL, DATA, rounds=1, cohort=3, workers=2)
    assert few.engine == "sequential"
    assert few.engine_reason.endswith("; processes would save too little")
    one = simulate(Logits(), FURL, DATA, rounds=1, cohort=1, workers=2)
    assert (one.engine, one.engine_reason) == ("sequential", "a round has one client")
    monkeypatch.setattr(auto, "WORTH", -100)
    many = simulate(Logits(), FURL, DATA, rounds=2, cohort=3, workers=2, out=tmp_path / "run")
    assert many.engine == "workers"
    assert many.engine_reason.startswith("2 clients side by side save about ")
    assert about() == (many.engine, many.engine_reason)
    assert multiprocessing.active_children() == []


@FORK
def test_neither_engine_nor_workers_are_part_of_what_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped with one, gone on with another: the same bits."""
    expected = simulate(Logits(), FURL, DATA, rounds=4, cohort=3, engine="sequential")

    def go_on(resume: bool, **options: Any) -> Any:
        return simulate(
            Logits(), FURL, DATA, rounds=4, cohort=3, out=tmp_path / "run", resume=resume, **options
        )

    def stopped(*arguments: Any) -> Any:
        if arguments[2].round == stop:
            raise KeyboardInterrupt
        return run_round(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fedkeep.experiments.drive.run_round", stopped)
        for stop, options in ((1, {"engine": "workers", "workers": 2}), (2, {"engine": "sequential"})):
            with pytest.raises(KeyboardInterrupt):
                go_on(stop > 1, **options)
    run = go_on(True, engine="workers", workers=3)
    assert same_bits(run.server, expected.server)
    assert same_bits(everyone(run.private, 6), everyone(expected.private, 6))
    assert [r.round for r in run.history if r.metric == "loss" and r.split == "train"] == [1, 2, 3, 4]


def test_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            with one_thread():
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="x"), one_thread():
            raise ValueError("x")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_training_takes_one_thread_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_noted(monkeypatch, client_step, "train_client")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = simulate(Logits(), FURL, DATA, rounds=1, cohort=3, workers=2)
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 1]
    assert bits(run.server["linear.weight"]) == bits(
        simulate(Logits(), FURL, DATA, rounds=1, cohort=3, engine="sequential").server["linear.weight"]
    )


@pytest.mark.parametrize(("large", "threads"), [(aggregate.LARGE, 1), (0, 2)])
def test_a_server_takes_one_thread_for_a_small_model(
    large: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregate, "LARGE", large)
    seen = threads_noted(monkeypatch, round_room, "updated")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = simulate(Logits(), FURL, DATA, rounds=2, cohort=3, engine="sequential")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert run.engine == "sequential"
    assert seen == [threads] * 2


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_is_vectorised_where_that_is_possible(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.simulate.make_engine", elsewhere(device))
    run = simulate(Logits(), FURL, DATA, rounds=2, cohort=3)
    assert (run.engine, run.engine_reason) == ("vectorised", f"the device is {device}")
    method = methods.furl("user", local=Phase(loss=Judged()))
    run = simulate(Logits(), method, DATA, rounds=2, cohort=3)
    assert run.engine == "sequential"
    assert run.engine_reason.startswith(
        "'vectorised' is no choice: its loss cannot be computed for several clients at once (vmap: "
    )
    assert same_bits(
        run.server, simulate(Logits(), method, DATA, rounds=2, cohort=3, engine="sequential").server
    )


def elsewhere(device: str) -> Any:
    """Return what makes the engine for a device that this machine may lack."""

    def make(name: str, workers: Any, _: str, *rest: Any) -> Any:
        found = make_engine(name, workers, device, *rest)
        assert name != "auto" or isinstance(found[0], Auto)
        return found

    return make
