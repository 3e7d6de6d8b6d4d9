"""How runs stand, by made-up folders and a given time: counts, the expected end, and what cannot be read just now."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import _NamedTextIOWrapper
from filelock import FileLock

from fedkeep.core.records import Extent, Record, to_line
from fedkeep.core.run_files import Commit
from fedkeep.core.sealed import sealed_bytes
from fedkeep.experiments import comparing, places, sweeps
from fedkeep.experiments.comparing import Plan, plan, status
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.forecast import JobStatus, read_status, summary
from fedkeep.experiments.run_directory import in_use, locked
from fedkeep.experiments.sweeps.space import Range, Space
from tests.commands import call, succeeded
from tests.experiments.test_comparing import TOY
from tests.tiny import files

NOON = 1_750_000_000 // 86400 * 86400 + 12 * 3600.0


@pytest.fixture(autouse=True)
def london(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def made(tmp_path: Path) -> Plan:
    return plan([parse_config(TOY)], ["furl", "fedavg"], [0, 1, 2], tmp_path / "c", references=False)


def write_run(folder: Path, done: int, total: int, seconds: float, state: str = "running") -> None:
    """Write what a run's folder tells of its rounds, each of which trained for ``seconds`` and was judged for one."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(
        sealed_bytes({"format": 4, "run": "r", "rounds": total, "status": state})
    )
    if done:
        measured = {"seconds": seconds, "aggregate_seconds": 0.5, "judge_seconds": 1.0}
        lines = "".join(
            to_line(Record(round, 0.0, "time", None, metric, value, 3))
            for round in range(1, done + 1)
            for metric, value in measured.items()
        ).encode()
        (folder / "timings.jsonl").write_bytes(lines + b'{"round": 9')  # the next round's are being written
        timings = Extent(len(lines), hashlib.sha256(lines).hexdigest())
        commit = Commit(run="r", round=done, server=f"server-{done}.safetensors", timings=timings)
        (folder / "commit.json").write_bytes(commit.to_bytes())


def test_counts_and_the_expected_end_from_folders(made: Plan) -> None:
    """Rounds of furl take 10 s, and of fedavg 100 s; two of each method's runs have ended, run, or wait."""
    furl, fedavg = ([c for c in made.cells if c.label == label] for label in ("furl", "fedavg"))
    write_run(furl[0].folder, 20, 20, 9.0, "finished")
    write_run(furl[1].folder, 5, 20, 9.0)
    write_run(fedavg[0].folder, 10, 20, 99.0)
    write_run(fedavg[1].folder, 3, 20, 99.0)
    (fedavg[1].folder / comparing.FAULT).write_text("The loss became NaN.\n")
    states: dict[str, places.State] = {furl[1].name: "running", fedavg[0].name: "running"}
    jobs = status([made], states)
    assert {job.name: (job.state, job.done, job.total) for job in jobs} == {
        furl[0].name: ("finished", 20, 20),
        furl[1].name: ("running", 5, 20),
        furl[2].name: ("not begun", 0, 0),
        fedavg[0].name: ("running", 10, 20),
        fedavg[1].name: ("diverged", 3, 20),
        fedavg[2].name: ("not begun", 0, 0),
    }
    # furl: 150 s of the one that runs, and 200 s; fedavg: 1,000 s, and 2,000 s
    assert summary(jobs, None, NOON) == [
        "1 done, 2 running, 1 failed, 2 waiting.",
        "Expected end: about 12:33 on 15 June, in 33 min 20 s, 2 runs side by side.",
    ]
    assert summary(jobs, 1, NOON)[1] == "Expected end: about 12:55 on 15 June, in 55 min 50 s, run after run."


def job(name: str, state: str, done: int = 0, seconds: float = 0.0, least: float = 0.0) -> JobStatus:
    """Return a job of ten rounds."""
    return JobStatus(name=name, kind=name[0], state=state, done=done, total=10, seconds=seconds, least=least)


def test_what_is_not_known_yet_takes_at_least_its_estimate() -> None:
    waiting = job("b-0", "waiting", least=60.0)
    begun, half = (job("a-0", "running", *so_far, least=100.0) for so_far in ((1, 50.0), (5, 500.0)))
    assert summary([begun, waiting], None, NOON)[1].startswith(
        "Expected end: not before 12:02 on 15 June, in 2 min 30 s"
    )
    # Half of a, and b takes as long as all of a at least
    assert "not before 12:25 on 15 June, in 25 min 00 s" in summary([half, waiting], None, NOON)[1]
    assert len(summary([job("a-0", "running")], None, NOON)) == 1


def test_runs_that_are_stopped_or_wait_have_no_end_but_a_time_to_go() -> None:
    jobs = [job("a-0", "finished", 10, 100.0), job("a-1", "stopped", 5, 50.0), job("a-2", "waiting")]
    assert summary(jobs, None, NOON) == [
        "1 done, 0 running, 0 failed, 2 waiting.",
        "Expected end: about 12:02 on 15 June, in 2 min 30 s, run after run, if they went on now.",
    ]


def test_no_end_is_expected_of_what_is_over() -> None:
    over = [job("a-0", "finished", 10, 100.0), job("a-1", "ended early"), job("b-0", "diverged", least=9.0)]
    assert summary(over, None, NOON) == ["2 done, 0 running, 1 failed, 0 waiting."]


def test_folders_that_are_half_made_moved_or_damaged_hinder_no_look(made: Plan) -> None:
    empty, begun, torn, moved, *_ = made.cells
    empty.folder.mkdir(parents=True)
    write_run(begun.folder, 0, 20, 9.0)
    write_run(torn.folder, 3, 20, 9.0)
    (torn.folder / "run.json").write_text('{"format": 4, "run"')
    write_run(moved.folder, 3, 20, 9.0)
    (moved.folder / "timings.jsonl").unlink()
    jobs = status([made], {begun.name: "running"})
    states = {job.name: job.state for job in jobs}
    assert [states[c.name] for c in (empty, begun)] == ["not begun", "running"]
    assert [states[c.name] for c in (torn, moved)] == ["unreadable"] * 2
    lines = summary(jobs, None, NOON)
    assert lines[0] == "0 done, 1 running, 0 failed, 5 waiting."
    assert f"{torn.name}: {torn.folder / 'run.json'} is damaged" in lines[-2]
    assert str(moved.folder / "timings.jsonl") in lines[-1]


def test_runs_of_one_trial_are_one_job(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0", 20, 20, 9.0, "finished")
    write_run(tmp_path / "seed-1", 4, 20, 9.0)
    folders = [tmp_path / f"seed-{seed}" for seed in range(3)]
    found = read_status(JobStatus(name="a-0", kind="a"), lambda: "running", folders)
    assert (found.state, found.done, found.total, found.seconds) == ("running", 24, 60, 240.0)


def test_whoever_looks_keeps_no_run_from_its_lock(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"):
        assert in_use(tmp_path)
    look = FileLock(tmp_path / "lock", thread_local=False)
    look.acquire()
    threading.Timer(0.1, look.release).start()
    locked(tmp_path).release()
    assert not in_use(tmp_path)


def test_a_job_of_slurm_is_asked_for_no_lock(made: Plan) -> None:
    cell = made.cells[0]
    write_run(cell.folder, 3, 20, 9.0)
    status([made], {cell.name: "waiting"})
    assert not (cell.folder / "lock").exists()
    status([made], {})
    assert (cell.folder / "lock").exists()


class Looks:
    """Counts looks at a comparison that goes on, until the given one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int, stop: int = 0) -> None:
        self.count, self.last, self.stop = 0, last, stop
        monkeypatch.setattr(places, "POLL", 0.01)
        monkeypatch.setattr(comparing, "status", self)

    def __call__(self, plans: list[Plan], states: object) -> list[JobStatus]:
        self.count += 1
        assert self.count <= self.last
        if self.count == self.stop:
            raise KeyboardInterrupt
        state = "finished" if self.count >= self.last else "running"
        return [job("a-0", "diverged"), job("a-1", state, 5, 60.0)]


WORDS = ("compare", "toy.toml", "--no-references", "--methods", "furl,fedavg", "--status")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("toy", "terminal")
def test_on_a_terminal_it_is_drawn_until_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, last=3)
    shown = succeeded(call(*WORDS)).stdout
    assert looks.count == 3
    assert shown.count("0 done, 1 running, 1 failed, 0 waiting.") == 2
    assert shown.rindex("1 done, 0 running, 1 failed, 0 waiting.") > shown.rindex("Expected end: about")


@pytest.mark.usefixtures("toy")
def test_elsewhere_it_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, last=9)
    shown = succeeded(call(*WORDS)).stdout
    assert looks.count == 1
    assert "0 done, 1 running, 1 failed, 0 waiting." in shown.splitlines()
    assert "Expected end: about" in shown


@pytest.mark.usefixtures("toy", "terminal")
def test_ctrl_c_ends_the_look_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, last=9, stop=2)
    assert (call(*WORDS).exit_code, looks.count) == (130, 2)


def test_a_look_at_a_sweep_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    ranges = {"method.batch_size": Range(choices=(4, 8))}
    spaces = {kind: Space(ranges=ranges, fixed={}) for kind in ("furl", "fedavg")}
    made = sweeps.plan(parse_config(TOY), spaces, tmp_path / "s", trials=3)
    made.out.mkdir()
    trial = made.study("furl").ask()
    made.study("fedavg")
    folder = made.out / "trials" / f"furl-{trial.number}" / f"seed-{made.seeds[0]}"
    write_run(folder, 10, 20, 9.0)
    with FileLock(made.out / "lock"):
        before = files(made.out)
        jobs = sweeps.status(made, {"furl, trial 2 of 3": "waiting"})
        assert files(made.out) == before
    assert [(job.name, job.state, job.done, job.total) for job in jobs[:3]] == [
        ("furl-0", "running", 10, 20),
        ("furl, trial 2 of 3", "waiting", 0, 0),
        ("furl-2", "not begun", 0, 0),
    ]
    assert summary(jobs, 1, NOON)[0] == "0 done, 1 running, 0 failed, 5 waiting."
    assert sweeps.status(made, {})[0].state == "stopped"
