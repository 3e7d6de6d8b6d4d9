"""Tasks one after another and side by side: what they are told, what is seen of them, and what goes wrong."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments import long_jobs, progress
from fedkeep.experiments.forecast import Forecast
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.progress import Stand, make_progress


@dataclass(frozen=True)
class Errand:
    """Leaves a file that says how it was called."""

    name: str
    folder: Path
    does: str = ""
    waits_for: str = ""

    def __call__(self, *, alone: bool, progress: bool | None) -> None:
        (self.folder / f"{self.name}-begun").touch()
        with make_progress(progress, "rounds", 7) as bar:
            bar.update(1, {})
            time.sleep(0.6 if self.does == "rounds" else 0)
            bar.update(5, {"accuracy": 0.5})
        until = time.monotonic() + 60
        while self.waits_for and not (self.folder / self.waits_for).exists() and time.monotonic() < until:
            time.sleep(0.01)
        if self.does == "fail":
            raise ConfigError(f"{self.name} has no data.")
        if self.does == "die":
            os._exit(9)
        (self.folder / self.name).write_text(f"{os.getpid()} {torch.get_num_threads()} {alone} {progress}")


def test_one_after_another_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    several = [Errand("b", tmp_path), Errand("a", tmp_path, waits_for="b")]
    run_long_jobs(several, 1, False, lambda: seen.append(len([*tmp_path.iterdir()])))
    assert seen == [2, 4]
    assert (tmp_path / "a").read_text() == f"{os.getpid()} {torch.get_num_threads()} True False"
    assert capsys.readouterr().err == "1 of 2: b\n2 of 2: a\n"
    run_long_jobs([Errand("c", tmp_path)], 2, None)  # one alone needs no other process
    assert (tmp_path / "c").read_text() == f"{os.getpid()} {torch.get_num_threads()} True None"
    run_long_jobs([], 2)


@pytest.mark.slow
def test_side_by_side_each_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_jobs, "EVERY", 0.0)
    seen: list[int] = []
    x, y = Errand("x", tmp_path, "rounds", waits_for="z"), Errand("y", tmp_path, waits_for="x-begun")
    several = [x, y, Errand("z", tmp_path)]
    run_long_jobs(several, 2, None, lambda: seen.append(1))
    found = [(tmp_path / name).read_text().split() for name in "xyz"]
    assert len({pid for pid, *_ in found} | {str(os.getpid())}) == 4
    assert all(rest == ["1", "False", "None"] for _, *rest in found)
    assert seen == [1, 1, 1]
    lines = capsys.readouterr().err.splitlines()
    over = [line for line in lines if " finished after " in line]
    assert [re.sub(r"after .*: ", "", line)[:-1] for line in over] == [
        f"{n} of 3 finished " for n in (1, 2, 3)
    ]
    assert sorted(line[-1] for line in over) == ["x", "y", "z"]
    stands = [line for line in lines if line.startswith("after ")]
    assert any("x: rounds, 0 of 7" in line for line in stands)
    assert any("x: rounds, 5 of 7" in line for line in stands)  # its second update comes half a second later
    assert not any(re.search(r"[xyz]: rounds, 1 of 7", line) for line in stands)  # too soon after the first


def test_lines_about_what_runs_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    board = long_jobs._JobLines(2, Forecast(["", ""], 2), {"a": "", "b": ""})
    for done in range(3):
        board.told("a", Stand("rounds", done, 7))
    assert capsys.readouterr().err == ""
    board.last -= long_jobs.EVERY
    board.told("b", Stand("clients", 1, 5))
    board.told("a", Stand("rounds", 3, 7))
    # The line comes with b's first message, and the next one is not due yet.
    wanted = r"after \S+ \S+: a: rounds, 2 of 7; b: clients, 1 of 5\n"
    assert re.fullmatch(wanted, capsys.readouterr().err)
    board.finished("a")
    board.told("a", Stand("rounds", 7, 7))
    assert list(board.running) == ["b"]


def test_bars_of_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    board = long_jobs._JobBars(2, Forecast(["", ""], 2), {"a": "", "b": ""})
    try:
        board.told("a", Stand("rounds", 3, 7))
        board.told("b", Stand("rounds", 1, 7))
        board.told("a", Stand("[clients]", 1, 5))  # the next part of the same task
        shown = [(t.description, t.completed, t.total) for t in board.rich.tasks]
        assert shown == [("all", 0, 2), ("b: rounds", 1, 7), ("a: [clients]", 1, 5)]
        board.finished("b")
        board.failed("a")
        assert [(t.description, t.completed) for t in board.rich.tasks] == [("all", 1)]
    finally:
        board.close()
    assert re.search(r"1 of 2 finished after .*: b\na failed\.\n", capsys.readouterr().err)


@pytest.mark.slow
def test_one_that_fails_says_so_and_leaves_the_others_what_they_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [Errand("bad", tmp_path, "fail", waits_for="good-begun"), Errand("good", tmp_path, "rounds")]
    later = [Errand(f"later{n}", tmp_path) for n in range(6)]
    with pytest.raises(ConfigError, match=r"^bad has no data\.$"):
        run_long_jobs([*several, *later], 2)
    assert (tmp_path / "good").exists()
    assert not all((tmp_path / f"{task.name}-begun").exists() for task in later)
    assert "bad failed. Still running: good.\n" in capsys.readouterr().err


def test_one_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"ended without an answer: it"):
        run_long_jobs([Errand("a", tmp_path, "die"), Errand("b", tmp_path)], 2)


def test_a_process_that_computes_for_another_shows_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Stand] = []
    monkeypatch.setattr(progress, "_ELSEWHERE", [])
    progress.tell_elsewhere(told.append)
    with make_progress(True, "run", 9, 2) as bar:
        bar.update(3, {})
    assert told == [Stand("run", 2, 9)]
    assert isinstance(make_progress(False, "run", 9), progress.Silent)
    assert len(told) == 1
