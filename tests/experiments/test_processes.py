"""Processes side by side: what each begins with, and that none outlives the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedkeep.experiments.processes import processes

_KNOWN: list[str] = []


def remember(*names: str) -> None:
    _KNOWN.extend(names)


def report(_: int) -> tuple[int, list[str], int]:
    return torch.get_num_threads(), list(_KNOWN), os.getpid()


@pytest.mark.slow
def test_each_begins_with_its_threads_and_what_it_was_given() -> None:
    with processes(1, 1, begin=remember, given=("a", "b")) as pool:
        (first, second) = pool.map(report, range(2))
    assert first == second == (1, ["a", "b"], first[2])
    with processes(1, fresh=True) as pool:
        (one, other) = pool.map(report, range(2))
    assert one[:2] == (1, [])
    assert one[2] != other[2]


MAIN = """
import pathlib, signal, sys, time
from fedkeep.experiments.processes import processes
from tests.experiments.test_processes import wait

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with processes(2) as pool:
        print(*pool.map(wait, [sys.argv[1]] * 2))
"""


def wait(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(120)


@pytest.mark.skipif(sys.platform == "win32", reason="asks a POSIX system who is alive")
@pytest.mark.parametrize(
    "how",
    ["killed", *(pytest.param(h, marks=pytest.mark.slow) for h in ("interrupted", "interrupted with all"))],
)
def test_none_outlives_the_one_that_started_it(how: str, tmp_path: Path) -> None:
    script, seen = tmp_path / "main.py", tmp_path / "seen"
    script.write_text(MAIN)
    seen.mkdir()
    root = Path(__file__).parents[2]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    main = subprocess.Popen(
        [sys.executable, str(script), str(seen)], env=paths, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert _becomes(lambda: len(list(seen.iterdir())) == 2, 60)
        if how == "interrupted with all":  # as a terminal does
            os.killpg(main.pid, signal.SIGINT)
        else:
            main.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        said = main.communicate(timeout=30)[1].decode()
        assert said.count("Traceback") == (how != "killed")  # its own alone
        assert _becomes(lambda: not any(_alive(int(file.name)) for file in seen.iterdir()), 30)
    finally:
        main.kill()


def _becomes(true: object, seconds: float) -> bool:
    assert callable(true)
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{number}/stat")  # one that nobody has waited for is dead too
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
