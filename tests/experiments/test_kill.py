"""Killed with SIGKILL at any instant and resumed, a run ends with the same bits as one that was never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from tests.experiments import killed
from tests.refusals import raises
from tests.tiny import files, lasting

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a fork server and SIGKILL")
ROUNDS = 5
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def process() -> Any:
    """Return a function that starts a process; they are forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.experiments.killed"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join(p for p in sys.path if p)
        )  # the server's own path, to preload
        forkserver.ensure_running()

    def begin(target: Any, *arguments: Any) -> Any:
        child = context.Process(target=target, args=arguments)  # no daemon: it may have workers of its own
        child.start()
        return child

    begin.context = context  # type: ignore[attr-defined]
    return begin


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory where the system has one: hundreds of flushes to a real disk take a minute."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    out = {}
    for engine in killed.ENGINES:
        folder = tmp_path_factory.mktemp(engine) / "run"
        killed.run(engine, folder, ROUNDS)
        out[engine] = lasting(folder)
        assert {"records.jsonl", "private/store.db", f"server-{ROUNDS}.safetensors"} <= out[engine].keys()
    return out


def check(folder: Path, expected: dict[str, bytes]) -> None:
    found = lasting(folder)
    assert found.keys() == expected.keys()
    assert [n for n in expected if found[n] != expected[n]] == []


def test_two_runs_have_the_same_bits(tmp_path: Path, never_stopped: Any) -> None:
    killed.run("sequential", tmp_path / "run", ROUNDS)
    check(tmp_path / "run", never_stopped["sequential"])


def test_workers_leave_the_same_bits(never_stopped: Any) -> None:
    assert never_stopped["workers"] == never_stopped["sequential"]


@pytest.mark.parametrize(
    ("engine", "step"),
    [("sequential", 4), ("centralised", 5), pytest.param("sequential", 1, marks=pytest.mark.slow)],
)
def test_killed_at_every_touch_of_the_files(quick_path: Path, engine: str, step: int, process: Start) -> None:
    """Two rounds, killed at the first open, flush or rename, at the second (or every fourth), and so on to the last."""
    rounds = 2
    killed.run(engine, quick_path / "reference", rounds)
    expected = lasting(quick_path / "reference")
    instants = range(min(step, 2), 200, step)
    ends = []
    for instant in instants:
        folder = quick_path / "run"
        child = process(killed.kill_at, engine, str(folder), rounds, instant)
        child.join(60)
        ends.append(child.exitcode)
        if child.exitcode == 0:
            break
        killed.go_on(engine, folder, rounds)
        check(folder, expected)
        shutil.rmtree(folder)
    assert ends[-1] == 0
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert len(ends) > 24 // step


@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=() if e == "sequential" else pytest.mark.slow) for e in killed.ENGINES]
)
def test_killed_again_and_again_at_random_instants(
    tmp_path: Path, engine: str, process: Start, never_stopped: Any
) -> None:
    draw = random.Random(engine)  # noqa: S311
    folder = tmp_path / "run"
    kills = 0
    while kills < 6:
        child = process(killed.start, engine, str(folder), ROUNDS)
        until = time.monotonic() + 30
        target = draw.randrange(ROUNDS)  # kill somewhere after this many rounds were committed
        while child.is_alive() and time.monotonic() < until:
            commit = folder / "commit.json"
            if not target or (commit.exists() and json.loads(commit.read_text())["round"] >= target):
                break
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.03))
        child.kill()
        child.join(60)
        kills += 1
        if child.exitcode == 0:
            check(folder, never_stopped[engine])
            shutil.rmtree(folder)
    killed.go_on(engine, folder, ROUNDS)
    check(folder, never_stopped[engine])


def test_a_folder_in_use_by_another_process(tmp_path: Path, process: Any) -> None:
    folder = tmp_path / "run"
    killed.run("sequential", folder, 1)
    ready, done = process.context.Event(), process.context.Event()
    child = process(killed.hold, str(folder), ready, done)
    try:
        assert ready.wait(60)
        before = files(folder)
        with raises(RunError, said=f"{folder} is in use by another process."):
            killed.run("sequential", folder, 1, resume=True)
        assert files(folder) == before
    finally:
        done.set()
        child.join(60)
    killed.run("sequential", folder, 1, resume=True)
