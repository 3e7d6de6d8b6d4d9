"""Places for long jobs: what they are asked, what becomes of jobs that are lost, and what is refused before it begins."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments import long_jobs, places, reproductions, sweeps
from fedkeep.experiments.comparing import Cell, Plan, plan, run, status
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.places import Futures, GoneError, OutOfTimeError, RayTasks, Slurm, place
from fedkeep.experiments.progress import Stand
from fedkeep.experiments.reproductions import Reproduction, Request, reproduce
from fedkeep.experiments.sweeps.space import Range, Space
from fedkeep.experiments.sweeps.trials import TrialJob
from fedkeep.report.runs import read_run
from tests.commands import call, succeeded
from tests.experiments.test_comparing import TOY
from tests.experiments.test_job_status import write_run
from tests.refusals import raises


def in_fresh_processes() -> Executor:
    """Processes that have imported what they need, and no threads of this one's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedkeep.experiments.places", __name__])
    return ProcessPoolExecutor(2, context)


@pytest.mark.parametrize("tune", [0, 1])
def test_a_comparison_in_processes_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    words = (
        "compare",
        "toy.toml",
        "--methods",
        "furl,fedavg",
        "--no-references",
        "--seeds",
        1,
        "--tune",
        tune,
    )
    found = succeeded(call(*words, "--out", "c", "--on", f"{__name__}:in_fresh_processes"))
    assert Path("c/report.html").exists()
    assert found.stdout.splitlines()[:-2] == call(*words, "--out", "here").stdout.splitlines()[:-2]


@dataclass(frozen=True)
class Errand(places.WrittenJob):
    """Leaves a file, or fails as it is told."""

    name: str
    folder: places.WrittenPath
    does: str = ""

    def __call__(self, *, alone: bool, progress: bool | None) -> None:
        if self.does == "fail":
            raise ConfigError(f"{self.name} has no data.")
        if self.does == "die" and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os._exit(9)
        (self.folder / self.name).write_text(f"{os.getpid()} {alone} {progress}")


@pytest.fixture(autouse=True)
def errands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(places.KINDS, "Errand", f"{__name__}:Errand")


def in_processes() -> Executor:
    return ProcessPoolExecutor(2)


def in_threads() -> Executor:
    return ThreadPoolExecutor(2)


def no_executor() -> str:
    return "none"


def elsewhere(on: Any, jobs: list[Any], **more: Any) -> None:
    run_long_jobs(jobs, 1, False, on=on, **more)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "POLL", 0.01)
    monkeypatch.setattr(places, "SURE", 0.05)


def test_an_executor_of_ones_own_computes_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    on = place(f"{__name__}:in_threads", tmp_path, most=1)
    elsewhere(on, [Errand(name, tmp_path) for name in "abc"], finished=lambda: seen.append(1))
    assert [(tmp_path / name).read_text() for name in "abc"] == [f"{os.getpid()} False False"] * 3
    assert len(seen) == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" finished")[0] for line in lines] == ["1 of 3", "2 of 3", "3 of 3"]


def test_a_job_whose_worker_dies_is_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere(Futures(in_processes, None), [Errand("a", tmp_path, "die"), Errand("b", tmp_path)])
    assert all((tmp_path / name).exists() for name in "ab")
    assert "a is lost, and is sent again." in capsys.readouterr().err


class Writing(ThreadPoolExecutor):
    """Notes what crosses, and lets it come from a fedkeep of another version, or from a folder that is not here."""

    crossed: ClassVar[list[Any]] = []
    version: str | None = None
    here: str | None = None

    def submit(self, fn: Callable[..., Any], /, name: str, here: str, text: bytes) -> Future[Any]:
        self.crossed.append([name, here, json.loads(text)])
        about = json.loads(text)
        about["installed"]["fedkeep"] = self.version or about["installed"]["fedkeep"]
        return super().submit(fn, name, self.here or here, json.dumps(about).encode())


def test_what_an_executor_is_given_is_text_and_is_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Errand("a", tmp_path)]
    elsewhere(Futures(Writing, None), jobs)
    ((name, here, about),) = Writing.crossed
    assert (name, here, about["kind"], about["job"]) == ("a", os.getcwd(), "Errand", jobs[0].to_plain())
    monkeypatch.setattr(Writing, "version", "0.0.1")
    with raises(RunError, name="a") as raised:
        elsewhere(Futures(Writing, None), jobs)
    assert "The job a is of fedkeep 0.0.1" in str(raised.value)
    monkeypatch.setattr(Writing, "version", None)
    monkeypatch.setattr(Writing, "here", str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match="does not see .*nowhere"):
        elsewhere(Futures(Writing, None), jobs)


def test_of_jobs_that_fail_the_first_is_told_after_the_others_are_done(tmp_path: Path) -> None:
    several = [Errand("bad", tmp_path, "fail"), Errand("worse", tmp_path, "fail"), Errand("good", tmp_path)]
    with pytest.raises(RunError, match=r"(?s)bad.*1 more failed"):
        elsewhere(Futures(in_threads, None), several)
    assert (tmp_path / "good").exists()


@dataclass
class Losing:
    """A place that loses every job but counts how often it was sent; each comes ``further`` before."""

    goes_on = True
    further: dict[str, int] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    error: GoneError = field(default_factory=lambda: GoneError("gone"))

    def send(self, jobs: Any) -> None:
        self.sent += [job.name for job in jobs]

    def ended(self) -> list[tuple[str, Any]]:
        name = self.sent[-1]
        return [(name, self.error if len(self.sent) < self.further.get(name, 99) else None)]

    def states(self) -> dict[str, Any]:
        return {self.sent[-1]: "running"}

    def news(self) -> list[str]:
        return []

    def leave(self, cancel: bool) -> str:
        self.left.append(cancel)
        return ""

    def close(self) -> None: ...


def test_a_job_that_is_lost_thrice_more_is_given_up(tmp_path: Path) -> None:
    on = Losing()
    with pytest.raises(RunError, match="a: gone"):
        elsewhere(on, [Errand("a", tmp_path)])
    assert on.sent == ["a"] * (1 + long_jobs.RETRIES)


def test_a_job_that_comes_further_each_time_is_sent_until_it_is_done(tmp_path: Path) -> None:
    on = Losing({"a": 8})
    elsewhere(on, [Errand("a", tmp_path)], stand=lambda job: Stand("rounds", len(on.sent), 8))
    assert on.sent == ["a"] * 8


def test_a_time_that_is_too_short_for_a_round_is_told_at_once(tmp_path: Path) -> None:
    on = Losing(error=OutOfTimeError("Time is over."))
    with raises(RunError, name="a", said="more time"):
        elsewhere(on, [Errand("a", tmp_path)], stand=lambda job: None)
    assert on.sent == ["a"]
    with raises(RunError, said="Time is over."):
        elsewhere(on, [Errand("b", tmp_path)])  # how far it came is not known
    assert on.sent == ["a"] + ["b"] * (1 + long_jobs.RETRIES)


def test_of_a_job_whose_time_is_over_it_is_told_how_many_more_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = Losing({"a": 4}, error=OutOfTimeError("Time is over."))
    elsewhere(on, [Errand("a", tmp_path)], stand=lambda job: Stand("rounds", 3 * len(on.sent), 10))
    lines = [line for line in capsys.readouterr().err.splitlines() if "sent again" in line]
    assert [line.partition("about ")[2] for line in lines] == ["3 more jobs.", "2 more jobs.", "1 more job."]


def test_an_interruption_leaves_jobs_and_an_error_cancels_them(tmp_path: Path) -> None:
    class Stops(Losing):
        stop: BaseException = KeyboardInterrupt()

        def ended(self) -> list[tuple[str, Any]]:
            raise self.stop

    on = Stops()
    with pytest.raises(KeyboardInterrupt):
        elsewhere(on, [Errand("a", tmp_path)])  # nobody can be asked here
    on.stop = OSError("the disk is full")
    with pytest.raises(OSError, match="full"):
        elsewhere(on, [Errand("a", tmp_path)])
    assert on.left == [False, True]


class Interrupted(Losing):
    """A place at which Ctrl-C is pressed."""

    def ended(self) -> list[tuple[str, Any]]:
        raise KeyboardInterrupt


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_on_a_terminal_an_interruption_asks_what_becomes_of_jobs_that_can_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bars: bool, answer: str, goes_on: bool
) -> None:
    there, here = pytest.importorskip("pty").openpty()
    with os.fdopen(here, "r") as stdin, os.fdopen(os.dup(here), "w") as stderr:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stderr", stderr)
        os.write(there, f"{answer}\n".encode())
        on = Interrupted()
        on.goes_on = goes_on
        with pytest.raises(KeyboardInterrupt):
            run_long_jobs([Errand("a", tmp_path)], 1, bars, on=on)
        assert on.left == [goes_on and answer == "y"]
        shown = b""
        while b"over" not in shown:
            stderr.write("over")
            stderr.flush()
            shown += os.read(there, 1 << 16)
        assert (b"Cancel the jobs" in shown) == goes_on
    os.close(there)


@pytest.mark.parametrize("named", ["cluster", "ray//x", f"{__name__}:missing", f"{__name__}:no_executor"])
def test_a_place_that_is_none_is_refused(tmp_path: Path, named: str) -> None:
    with pytest.raises(ConfigError, match="--on"):
        place(named, tmp_path)


def test_options_of_slurm_are_for_slurm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--slurm"):
        place("ray", tmp_path, options="--time=1")


SBATCH = """#!{python}
import json, os, re, subprocess, sys
from pathlib import Path
home, script = Path(r"{home}"), sys.stdin.read()
given = dict(a.partition("=")[::2] for a in sys.argv[1:])
if given.get("--partition") == "none":
    sys.exit("sbatch: error: invalid partition specified: none")
number = len(list(home.glob("call-*"))) + 1
(home / f"call-{{number}}").write_text(json.dumps(sys.argv[1:]))
first, last = re.match(r"(\\d+)-(\\d+)", given["--array"]).groups()
names = (Path(given["--output"]).parent / re.search(r"array-\\d+", script).group()).read_text().split("\\n")
for task in range(int(first), int(last) + 1):
    name, told = names[task], json.loads((home / "does").read_text())
    does = told.get(name, ["0"])
    (home / "does").write_text(json.dumps(told | {{name: does[1:] or does}}))
    if does[0] == "run":
        out = Path(given["--output"].replace("%A", str(number)).replace("%a", str(task))).open("w")
        subprocess.Popen(["bash", "-c", script], env=os.environ | {{"SLURM_ARRAY_TASK_ID": str(task)}},
                         stdout=out, stderr=out, start_new_session=True)
    elif does[0].isdigit():
        Path(given["--output"]).parent.joinpath(f"{{name}}.ended").write_text(does[0])
        Path(given["--output"]).parent.joinpath(f"{{number}}_{{task}}.out").write_text("Error: no data")
    elif does[0] == "full":
        Path(given["--output"]).parent.joinpath(f"{{name}}.part").touch()
    elif does[0] == "time":
        Path(given["--output"]).parent.joinpath(f"{{number}}_{{task}}.out").write_text("CANCELLED DUE TO TIME LIMIT ***")
    if does[0].startswith(("run", "stay", "held")):
        with (home / "queue").open("a") as file:
            how = "PENDING " + does[0][5:] if does[0].startswith("held") else "RUNNING None"
            file.write(f"{{number}}_{{task}} {{how}}\\n")
print(number)
"""


@dataclass
class Cluster:
    """A double of Slurm's commands: each job of a name ends with a status, vanishes, stays, or is run."""

    home: Path

    def does(self, **jobs: list[str]) -> None:
        (self.home / "does").write_text(json.dumps(jobs))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(path.read_text()) for path in sorted(self.home.glob("call-*"))]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    home = tmp_path / "cluster"
    home.mkdir()
    (home / "queue").touch()
    scripts = {
        "sbatch": SBATCH.format(python=sys.executable, home=home),
        "squeue": f"#!/bin/bash\ncat {home}/queue\n",
        "scancel": f'#!/bin/bash\necho "$@" > {home}/cancelled\n',
    }
    for name, text in scripts.items():
        (home / name).write_text(text)
        (home / name).chmod(0o700 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    found = Cluster(home)
    found.does()
    return found


def test_slurm_takes_all_jobs_as_one_array(tmp_path: Path, cluster: Cluster) -> None:
    on = place("slurm", tmp_path, most=2, options="--time=10 --partition=gpu")
    elsewhere(on, [Errand(name, tmp_path) for name in ("a", "among/b", "c")])
    (call,) = cluster.calls
    assert {"--array=0-2%2", "--time=10", "--partition=gpu", "--requeue"} <= {*call}
    written = json.loads((tmp_path / "slurm" / "among,b.json").read_text())
    assert (written["kind"], written["job"]["name"]) == ("Errand", "among/b")


def test_a_job_that_vanishes_is_sent_again_and_one_that_fails_is_not(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.does(a=["vanish", "0"], b=["1"])
    with pytest.raises(RunError, match="(?s)b: .*no data"):
        elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path), Errand("b", tmp_path)])
    assert len(cluster.calls) == 2
    assert "a is lost, and is sent again." in capsys.readouterr().err


def test_jobs_of_an_earlier_call_are_followed_and_not_sent_again(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["stay"], b=["stay"])
    jobs = [Errand("a", tmp_path), Errand("b", tmp_path)]
    first = Slurm(tmp_path / "slurm", [], None)
    first.send(jobs)
    assert first.leave(False) == "2 jobs of Slurm go on. To end them: scancel 1"
    later = Slurm(tmp_path / "slurm", [], None)
    assert later.states() == {"a": "running", "b": "running"}
    later.send(jobs)
    assert len(cluster.calls) == 1
    (tmp_path / "slurm" / "a.ended").write_text("0")
    assert later.ended() == [("a", None)]
    assert later.leave(True) == "1 job of Slurm is cancelled."
    assert (cluster.home / "cancelled").read_text().split() == ["1_1"]


def test_a_job_with_other_settings_is_sent_though_one_of_its_name_runs(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.does(a=["stay"])
    on = Slurm(tmp_path / "slurm", [], None)
    on.send([Errand("a", tmp_path)])
    (tmp_path / "slurm" / "a.json").write_text("{}")
    on.send([Errand("a", tmp_path)])
    assert len(cluster.calls) == 2


def test_what_slurm_refuses_is_told_before_anything_is_sent(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="invalid partition"):
        elsewhere(place("slurm", tmp_path, options="--partition=none"), [Errand("a", tmp_path)])
    assert not cluster.calls


def test_slurm_wants_its_commands_and_jobs_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    @dataclass(frozen=True)
    class Unwritten:
        name: str = "u"

        def __call__(self, *, alone: bool, progress: bool | None) -> None: ...

    with pytest.raises(ConfigError, match="cannot be written"):
        elsewhere(place("slurm", tmp_path), [Unwritten()])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch"):
        place("slurm", tmp_path)


def toy(out: Path, **more: Any) -> Plan:
    return plan([parse_config(TOY)], ["furl"], [0, 1], out, **more)


@pytest.mark.parametrize("change", [{"kind": "Other"}, {"job": {}}, None])
def test_a_job_that_is_damaged_is_named_in_one_line(tmp_path: Path, change: dict[str, Any] | None) -> None:
    path, job = tmp_path / "job.json", json.loads(places._written(Errand("a", tmp_path)))
    path.write_text(json.dumps(job)[:-1] if change is None else json.dumps(job | change))
    with raises(ConfigError, said="job.json is damaged") as caught:
        places.main(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_cell_is_read_as_it_was_written(tmp_path: Path) -> None:
    for cell in toy(tmp_path).cells:
        assert Cell.from_plain(json.loads(json.dumps(cell.to_plain()))).to_plain() == cell.to_plain()


@pytest.mark.parametrize("what", places.SAME)
def test_a_job_of_another_fedkeep_or_python_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "job.json"
    about = {"installed": {**places.installed(), what: "0.0.1"}, "kind": "Cell", "job": {}}
    path.write_text(json.dumps(about))
    with raises(ConfigError, said="job.json", there=f"{what} 0.0.1"):
        places.main(path)


def test_a_place_without_ray_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray"):
        place("ray", tmp_path)


def test_where_the_folder_is_not_seen_the_first_job_says_so_for_all(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["vanish"], b=["stay"])
    with raises(RunError, id="1_0", folder=tmp_path / "slurm"):
        elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path), Errand("b", tmp_path)])
    assert len(cluster.calls) == 1
    assert (cluster.home / "cancelled").read_text().split() == ["1_1"]


def test_a_job_that_finds_no_space_is_not_sent_again(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["full", "0"])
    with raises(RunError, name="a") as raised:
        elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path)])
    assert raised.value.facts["why"].facts["folder"] == tmp_path / "slurm"
    elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path)])
    assert not (tmp_path / "slurm" / "a.part").exists()


def test_a_job_of_slurm_whose_time_is_over_is_told_from_others(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["time"])
    with raises(RunError, name="a") as raised:
        elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path)])
    assert isinstance(raised.value.facts["why"], OutOfTimeError)


def test_a_job_that_a_signal_ended_is_sent_again_at_once(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SURE", 60.0)
    cluster.does(a=["137", "0"])
    elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path)])
    assert len(cluster.calls) == 2


@pytest.mark.parametrize("why", ["PartitionTimeLimit", "PartitionConfig", "QOSMaxCpuPerUserLimit"])
def test_why_jobs_wait_for_ever_is_told_once(tmp_path: Path, cluster: Cluster, why: str) -> None:
    cluster.does(a=[f"held {why}"], b=[f"held {why}"], c=["stay"])
    on = Slurm(tmp_path / "slurm", [], None)
    on.send([Errand(name, tmp_path) for name in "abc"])
    assert on.states() == {"a": "waiting", "b": "waiting", "c": "running"}
    (line,) = on.news()
    assert why in line
    assert not on.news()


def test_the_status_says_which_jobs_failed(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["1"], b=["0"], c=["137"], d=["stay"])
    first = Slurm(tmp_path / "slurm", [], None)
    first.send([Errand(name, tmp_path) for name in "abcd"])
    assert Slurm(tmp_path / "slurm", [], None).states() == {"a": "failed", "d": "running"}


def test_whoever_looks_sees_what_another_call_sends_meanwhile(tmp_path: Path, cluster: Cluster) -> None:
    cluster.does(a=["stay", "stay"], b=["stay"])
    looks, sends = Slurm(tmp_path / "slurm", [], None), Slurm(tmp_path / "slurm", [], None)
    sends.send([Errand("a", tmp_path)])
    assert looks.states() == {"a": "running"}
    sends.send([Errand("a", tmp_path, "fail"), Errand("b", tmp_path)])
    assert looks.states() == {"a": "running", "b": "running"}
    assert looks.leave(False) == "2 jobs of Slurm go on. To end them: scancel 2"


def test_a_folder_that_shows_files_late_loses_no_job(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, which lets a machine believe for a while that a file of another one is not there."""
    asked, real = dict[Path, float](), Path.read_text

    def late(path: Path, **more: Any) -> str:
        text = real(path, **more)
        if path.suffix == ".ended" and time.monotonic() - asked.setdefault(path, time.monotonic()) <= 0.2:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", late)
    monkeypatch.setattr(places, "SURE", 5.0)
    elsewhere(place("slurm", tmp_path), [Errand("a", tmp_path)])
    assert len(cluster.calls) == 1
    assert len(asked) == 1


def test_a_disk_that_is_full_keeps_jobs_from_being_sent(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise RunError("{path} cannot be written.", path=path)

    on = place("slurm", tmp_path)
    monkeypatch.setattr(places, "write_whole", full)
    with raises(RunError, path=tmp_path / "slurm" / "a.json"):
        elsewhere(on, [Errand("a", tmp_path)])
    assert not cluster.calls


def test_a_cell_that_was_written_gives_the_same_run(tmp_path: Path) -> None:
    here, there = toy(tmp_path / "here"), toy(tmp_path / "there")
    (*_, one), (*_, other) = here.cells, there.cells
    one(alone=False, progress=False)
    Cell.from_plain(other.to_plain())(alone=False, progress=False)
    records = [[r for r in read_run(c.folder).records if r.split != "time"] for c in (one, other)]
    assert records[0] == records[1]
    other.check()
    assert other.stand == Stand("rounds", 2, 2)


def test_the_status_of_each_run(tmp_path: Path) -> None:
    made = toy(tmp_path, references=True)
    first, second, *_ = made.cells
    first(alone=False, progress=False)
    jobs = status([made], {second.name: "waiting"})
    assert [(job.name, job.state, job.done, job.total) for job in jobs[:2]] == [
        (first.name, "finished", 2, 2),
        (second.name, "waiting", 0, 0),
    ]
    assert jobs[0].seconds > 0
    assert jobs[1].least == made.ahead[second.label] > 0
    assert {job.state for job in jobs[2:]} == {"not begun"}


def test_what_is_left_is_without_finished_rounds_and_by_runs_side_by_side(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    words = ("compare", "toy.toml", "--methods", "furl,fedavg", "--no-references", "--seeds", 1, "--out", "c")
    assert call(*words, "--on", "slurm", "--slurm", "--partition=none").exit_code == 2
    made = plan([parse_config(TOY)], ["furl", "fedavg"], [0], tmp_path / "c", references=False)
    one, other = made.cells
    cluster.does(**{one.name: ["stay"], other.name: ["stay"]})
    Slurm(tmp_path / "c" / "slurm", [], None).send([one, other])
    shown = succeeded(call(*words, "--on", "slurm", "--status")).stdout
    assert "0 done, 2 running, 0 failed, 0 waiting." in shown
    whole = made.seconds
    write_run(one.folder, 1, 2, 9.0)
    assert made.seconds == pytest.approx(whole - made.ahead[one.label] / 2)


@pytest.mark.usefixtures("cluster")
def test_asking_for_the_status_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    succeeded(call("compare", "toy.toml", "--on", "slurm", "--status"))
    assert not Path("comparisons").exists()


@pytest.mark.parametrize("on", ["ray", "ray://nowhere.invalid:10001", "nowhere:made"])
@pytest.mark.parametrize("verb", [("compare",), ("sweep", "--range", "method.batch_size={choices=[4,8]}")])
def test_the_status_wants_no_cluster_that_knows_only_of_what_a_process_of_its_own_sent(
    verb: tuple[str, ...], on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    Path("toy.toml").write_text(TOY)
    words = (verb[0], "toy.toml", *verb[1:], "--on", on)
    assert "0 done, 0 running, 0 failed" in succeeded(call(*words, "--status")).stdout
    assert call(*words, "--yes").exit_code == 2
    refused = call(verb[0], "toy.toml", *verb[1:], "--on", "nowhere", "--status")
    assert "'nowhere'" in refused.stderr


@pytest.mark.slow
def test_a_comparison_by_slurm_is_the_one_here(tmp_path: Path, cluster: Cluster) -> None:
    here, there = toy(tmp_path / "here"), toy(tmp_path / "there")
    cluster.does(**{cell.name: ["run"] for cell in there.cells})
    run(here, 1, False)
    run(there, 1, False, place("slurm", there.out))
    for one, other in zip(here.cells, there.cells, strict=True):
        first, second = ([r for r in read_run(c.folder).records if r.split != "time"] for c in (one, other))
        assert first == second


def test_a_future_that_is_broken_says_which_worker(tmp_path: Path) -> None:
    class Broken(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            found: Future[Any] = Future()
            found.set_exception(BrokenExecutor("node 7 is down"))
            return found

    on = Futures(Broken, None)
    on.send([Errand("a", tmp_path)])
    ((name, error),) = on.ended()
    assert name == "a"
    assert isinstance(error, GoneError)
    assert "node 7" in str(error)


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    ranges = {
        "method.optimizer.learning_rate": Range(low=0.01, high=1.0, log=True),
        "method.batch_size": Range(choices=(8, 16)),
    }
    spaces = {"furl": Space(ranges=ranges, fixed={"run.cohort": "3"})}
    made = sweeps.plan(parse_config(TOY), spaces, tmp_path, trials=2)
    job = TrialJob(made, "furl", 1, None)
    again = TrialJob.from_plain(json.loads(json.dumps(job.to_plain())))
    assert again.to_plain() == job.to_plain()
    assert again.sweep.about() == made.about()
    assert again.sweep.spaces == spaces
    assert again.name == job.name


def test_a_whole_run_is_one_job(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    words = ("run", "toy.toml", "--out", "slurm", "--on", "slurm")
    cluster.does(slurm=["run", "run"])
    found = call(*words)
    assert found.exit_code == 0, found.output
    assert "Accuracy" in found.stdout
    assert call(*words).exit_code == 2  # there is one
    assert call(*words, "--continue-from", "slurm").exit_code == 2
    assert len(cluster.calls) == 1
    assert call("run", "toy.toml", "--out", "here").stdout.splitlines()[:6] == found.stdout.splitlines()[:6]


def test_a_run_that_was_a_job_has_what_clients_adapt_to(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY.replace('"furl"', '"fine_tuned"').replace(", rates = { user = 0.5 }", ""))
    cluster.does(there=["run"])
    for out, more in {"here": (), "there": ("--on", "slurm")}.items():
        found = call("run", "toy.toml", "--out", out, *more)
        assert found.exit_code == 0, found.output
    here, there = load_run("here"), load_run("there")
    assert here.fitted.keys() == there.fitted.keys()
    assert here.fitted


def two_waves(request: Request) -> Path:
    """Computes what is missing of a wave, then of another, and writes a table."""
    for wave in ("ab", "c"):
        jobs = [Errand(name, request.out) for name in wave if not (request.out / name).exists()]
        run_long_jobs(jobs, request.jobs, request.progress, on=request.on)
    (request.out / "table.md").write_text("a, b, c")
    return request.out / "table.md"


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"mine": Reproduction(about="a table", run=two_waves, changes=("data",))}
    monkeypatch.setattr(reproductions, "reproductions", lambda: known)


@pytest.mark.usefixtures("mine")
def test_a_job_of_a_reproduction_computes_its_run_alone(tmp_path: Path, cluster: Cluster) -> None:
    out = tmp_path / "results"
    out.mkdir()
    request = Request(None, out, "medium", [1, 2], on=place("slurm", out), changes={"data.kind": "1"})
    reproduce("mine", request)  # the double says that all are done
    (out / "table.md").unlink()
    made = [json.loads((out / "slurm" / f"{name}.json").read_text()) for name in "abc"]
    assert [(m["kind"], m["job"]["name"]) for m in made] == [("Piece", name) for name in "abc"]
    assert len(cluster.calls) == 2
    places.main(out / "slurm" / "b.json")
    assert [(out / name).exists() for name in ("a", "b", "c", "table.md")] == [False, True, False, False]
    places.main(out / "slurm" / "b.json")  # it is finished, and nothing else is computed in its place
    assert not (out / "a").exists()
    places.main(out / "slurm" / "a.json")
    places.main(out / "slurm" / "c.json")  # of the second wave, as nothing of the first is missing
    assert (out / "c").exists()
    assert not (out / "table.md").exists()


@pytest.mark.usefixtures("cluster")
def test_a_reproduction_elsewhere_has_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Request]()

    def one(request: Request) -> Path:
        asked.append(request)
        return request.out

    known = {"one": Reproduction(about="a table", run=one)}
    monkeypatch.setattr(reproductions, "reproductions", lambda: known)
    monkeypatch.chdir(tmp_path)
    for on in ("local", "slurm", f"{__name__}:in_threads"):
        succeeded(call("reproduce", "one", "--out", "o", "--data", "d", "--on", on))
    whole = (tmp_path / "o", tmp_path / "d")
    assert [(r.out, r.data) for r in asked] == [(Path("o"), Path("d")), whole, whole]


@pytest.mark.usefixtures("mine")
def test_a_piece_of_a_reproduction_is_read_as_it_was_written(tmp_path: Path) -> None:
    request = Request(Path("data"), tmp_path, "full", [3], 2, only=("a*",), changes={"run.rounds": "3"})
    piece = reproductions.Piece("mine", request, "a")
    again = reproductions.Piece.from_plain(json.loads(json.dumps(piece.to_plain())))
    assert json.dumps(again.to_plain()) == json.dumps(piece.to_plain())
    assert (again.request.data, again.request.out) == (Path("data").absolute(), tmp_path)
    assert again.request.wants("ab")
    assert not again.request.wants("b")


class Task:
    """A function as a task of Ray's double, which takes none once its cluster was left."""

    def __init__(self, cluster: ARay, function: Any) -> None:
        self.cluster, self.function = cluster, function

    def remote(self, *args: Any) -> Any:
        if self.cluster.shut:
            raise RuntimeError("Ray is not initialized.")
        return SimpleNamespace(future=lambda: ThreadPoolExecutor(1).submit(self.function, *args))


class ARay:
    """A double of Ray's module: of a cluster of eight cores and some GPUs."""

    def __init__(self, gpus: int) -> None:
        self.there, self.asked = {"CPU": 8.0} | ({"GPU": float(gpus)} if gpus else {}), dict[str, Any]()
        self.shut, self.begun = False, True

    def is_initialized(self) -> bool:
        return self.begun

    def init(self, address: str | None, **_: Any) -> None:
        raise ConnectionError(f"nothing at {address}")

    def cluster_resources(self) -> dict[str, float]:
        return self.there

    def remote(self, **options: Any) -> Any:
        self.asked = options
        assert options["max_calls"] == 0  # a process keeps data and model, on GPUs too
        return lambda function: Task(self, function)

    def shutdown(self) -> None:
        self.shut = True


@pytest.fixture
def a_ray(monkeypatch: pytest.MonkeyPatch) -> ARay:
    """Ray's double, in place of the module."""
    double, errors = ARay(0), ModuleType("ray.exceptions")
    errors.__dict__.update(
        RayError=type("RayError", (Exception,), {}), RayTaskError=type("E", (Exception,), {})
    )
    monkeypatch.setitem(sys.modules, "ray", double)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    return double


def test_a_comparison_leaves_the_place_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_ray: ARay
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.toml").write_text(TOY)
    succeeded(call("compare", "toy.toml", "--seeds", 1, "--tune", 1, "--out", "c", "--on", "ray"))
    assert a_ray.shut
    assert len([*Path("c/runs").iterdir()]) == len([*Path("c/trials").iterdir()]) == 3


@pytest.mark.usefixtures("mine")
def test_a_reproduction_leaves_the_place_after_its_last_wave(tmp_path: Path, a_ray: ARay) -> None:
    (tmp_path / "out").mkdir()
    succeeded(call("reproduce", "mine", "--out", tmp_path / "out", "--on", "ray"))
    assert a_ray.shut
    assert (tmp_path / "out" / "c").exists()


@pytest.mark.parametrize(
    ("gpus", "count", "slots", "share"), [(2, None, 2, 1.0), (2, 5, 6, 1 / 3), (4, 2, 4, 1.0), (0, 3, 8, 0)]
)
def test_a_task_of_ray_has_a_gpu_or_a_share_of_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, count: int | None, slots: int, share: float
) -> None:
    double = ARay(gpus)
    monkeypatch.setitem(sys.modules, "ray", double)
    assert RayTasks("ray", gpus > 0, count).slots == slots
    assert double.asked["num_gpus"] == share


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address at which nothing listens; this machine knows of no head."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(places, "HEAD", tmp_path / "head")
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("by_name", [False, True])
def test_no_cluster_of_ray_is_told_and_none_is_begun(a_ray: ARay, by_name: bool, port: int) -> None:
    a_ray.begun = False
    named = f"ray://127.0.0.1:{port}" if by_name else "ray"
    with raises(ConfigError, named=named, why=f"nothing at {named if by_name else 'auto'}") as raised:
        RayTasks(named)
    assert "ray start --head" in str(raised.value)
    assert "RAY_AUTH_MODE=token" in str(raised.value)


def test_a_head_that_is_gone_is_told_before_ray_waits_for_it(
    a_ray: ARay, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_ray.begun = False
    with raises(ConfigError, named=f"ray://{nobody}", address=f"ray://{nobody}"):
        RayTasks(f"ray://{nobody}")
    places.HEAD.write_text(nobody)  # as of a head that was killed
    with raises(ConfigError, named="ray", address=nobody):
        RayTasks("ray")
    places.HEAD.unlink()
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    with raises(ConfigError, named="ray", address=nobody):
        RayTasks("ray")


def test_a_cluster_of_ray_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ARay(0))
    with pytest.raises(ConfigError, match="no machine of this cluster has a GPU"):
        RayTasks("ray", True)
