"""Where long jobs run: as jobs of Slurm, as tasks of Ray, or in whatever a ``concurrent.futures.Executor`` stands for.

A place is named by a text: ``slurm``; ``ray``, or ``ray://HOST:PORT``; or ``package.module:function``, a function without
arguments that returns an executor. In processes of this machine jobs run without any, see ``long_jobs``.

A job crosses as JSON, read by ``compute`` where the same versions are installed: for Slurm a file in a folder
that all nodes share, for Ray and executors a text. These hand Python objects over by pickling, among processes that
trust each other. Of Slurm nothing but ``sbatch``, ``squeue`` and ``scancel`` is used; its tasks are
``python -m fedkeep.experiments.places FILE``, whose exit status is 0 where the job is finished.

The shared folder must be one where a file that is renamed is there whole, and under its new name alone, for whoever
looks next on any node, and where one process at a time gets a lock on a file (NFS 4 does both).
"""

from __future__ import annotations

import functools
import getpass
import json
import math
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

import torch
from pydantic import PlainSerializer, TypeAdapter

from fedkeep.core.errors import ConfigError, FedkeepError, RunError, first_line, needing, raising
from fedkeep.core.files import write_whole
from fedkeep.experiments.plugins import imported
from fedkeep.version import NUMERICS, __version__

State = Literal["waiting", "running", "failed", "over"]
SAME = ("fedkeep", "numerics", "python", "torch")
"""What must be the same on all machines, see ``installed``."""
KINDS = {
    "Cell": "fedkeep.experiments.comparing:Cell",
    "Piece": "fedkeep.experiments.reproductions:Piece",
    "TrialJob": "fedkeep.experiments.sweeps.trials:TrialJob",
}
"""Jobs that can be written down, by name, as these modules import this one; what another process writes names no other."""
POLL = 5.0
"""Seconds between two looks at what runs."""
RETRIES = 3
"""How often what is lost is sent again, a job that has not come further meanwhile."""
SURE = 60.0
"""Seconds that a job must be gone, as a shared folder may show its last file so late."""
LAST_LINES = 15
HEAD, ANSWERS = Path("/tmp/ray/ray_current_cluster"), 5.0
"""Where ``ray start`` notes the address of this machine's head; seconds in which a head answers."""


class GoneError(RunError):
    """A job is gone without a word: it was killed, or the machine that it ran on is down."""


class OutOfTimeError(GoneError):
    """A job is gone as its time was over; sent again it goes on, if it comes far enough in that time to be saved."""


class LongJob(Protocol):
    """Something that takes long and keeps what it makes by itself; it can travel to another process."""

    @property
    def name(self) -> str:
        """For messages."""

    def __call__(self, *, alone: bool, progress: bool | None) -> object:
        """Compute; ``alone``: all cores may be used, else one; ``progress``: as for ``simulate``."""


WrittenPath = Annotated[Path, PlainSerializer(lambda path: str(path.absolute()))]
"""A path in a job that is written down: another process has another folder of its own."""


class WrittenJob:
    """A long job that another process can read again, see ``compute``: a dataclass of plain values."""

    def to_plain(self) -> Any:
        """Return all that it is, as JSON holds it."""
        return TypeAdapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_plain(cls, plain: Any) -> Self:
        """Return the job that ``to_plain`` wrote.

        Raises:
            ConfigError: its configuration is none.
        """
        return TypeAdapter(cls).validate_python(plain)


@runtime_checkable
class Place(Protocol):
    """Takes jobs, and says of each how it ended; whoever made it closes it."""

    @property
    def goes_on(self) -> bool:
        """Whether jobs may go on without the process that sent them."""

    def send(self, jobs: Sequence[LongJob]) -> None:
        """Let jobs run; of those that run there already, none is sent again.

        Raises:
            ConfigError: the place is not to be had as it is.
        """

    def ended(self) -> list[tuple[str, FedkeepError | None]]:
        """Wait for a while, and return which jobs have ended, each with its error.

        A ``GoneError`` says that it can be sent again.
        """

    def states(self) -> Mapping[str, State]:
        """Return how those stand that were sent and have not ended, and which failed."""

    def news(self) -> list[str]:
        """Return what is to be said of the jobs as they were last looked at, each sentence once."""

    def leave(self, cancel: bool) -> str:
        """Wait for nothing any more, and return what to say of jobs that go on; ``cancel``: none does."""

    def close(self) -> None:
        """Take no more jobs."""


def place(named: str, folder: Path, *, most: int | None = None, options: str = "") -> Place:
    """Return a place by its name.

    Args:
        named: see the module.
        folder: shared by all machines; Slurm's jobs and what they print lie in its folder ``slurm``.
        most: how many jobs run at a time; None: as many as the place lets.
        options: of ``sbatch``, e.g. ``--partition=gpu --time=2:00:00``; for Slurm alone.

    Raises:
        ConfigError: there is none of this name, or it cannot be reached from here.
    """
    if named == "slurm":
        return Slurm(folder.absolute() / "slurm", _split(options), most)
    if options:
        raise ConfigError("--slurm has options of sbatch: say --on slurm, or leave it out.")
    return Futures(executors(named), most)


def executors(named: str, gpus: bool = False, count: int | None = None) -> Callable[[], Executor]:
    """Return what makes the executor that a place's name stands for.

    Args:
        named: as for ``place``.
        gpus, count: as for ``RayTasks``.

    Raises:
        ConfigError: there is none of this name; called, it cannot be reached from here.
    """
    if named == "ray" or named.startswith("ray://"):
        return lambda: RayTasks(named, gpus, count)
    if ":" not in named:
        raise ConfigError(
            "--on wants local, slurm, ray, ray://HOST:PORT, or a function that returns an executor, as "
            "package.module:function; got {got!r}.",
            got=named,
        )
    return lambda: _executor(named)


def installed() -> dict[str, str]:
    """Return the versions of ``SAME`` on this machine; of Python and torch without what says how they were built."""
    python, torch = ".".join(platform.python_version_tuple()[:2]), version("torch").partition("+")[0]
    return dict(zip(SAME, (__version__, str(NUMERICS), python, torch), strict=True))


def check_installed(theirs: Mapping[str, str], what: str) -> None:
    """Check that a job was made by what this machine has.

    Raises:
        ConfigError: it has other versions.
    """
    ours = installed()
    if other := [name for name in SAME if ours[name] != theirs.get(name)]:
        raise ConfigError(
            "{what} is of {there}, and {machine} has {ours}. Install the same on all machines.",
            what=what,
            there=", ".join(f"{name} {theirs.get(name)}" for name in other),
            machine=platform.node(),
            ours=", ".join(f"{name} {ours[name]}" for name in other),
        )


def _split(options: str) -> list[str]:
    with raising(
        ConfigError,
        "--slurm wants options as sbatch takes them; got {got!r}: {why}.",
        ValueError,
        got=options,
    ):
        return shlex.split(options)


def _executor(named: str) -> Executor:
    made = imported("--on", named)()
    if not isinstance(made, Executor):
        raise ConfigError(
            "--on: {named} returned a {got}, and a concurrent.futures.Executor is wanted.",
            named=named,
            got=type(made).__name__,
        )
    return made


def compute(text: bytes, what: str) -> None:
    """Compute a job that another process wrote down.

    Args:
        text: JSON, as for ``KINDS``.
        what: for messages.

    Raises:
        ConfigError: it was written with another fedkeep, Python or torch, or is damaged.
        FedkeepError: the job's own.
    """
    with raising(
        ConfigError,
        "{what} is damaged: {why}. Call again, and it is written anew.",
        KeyError,
        TypeError,
        ValueError,
        what=what,
    ):
        about = json.loads(text)
        check_installed(about["installed"], what)
        job = imported(what, KINDS[about["kind"]]).from_plain(about["job"])
    job(alone=False, progress=False)


def main(file: Path) -> None:
    """Compute the job of a file, as ``compute`` does, with as many threads as Slurm gives it."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    compute(file.read_bytes(), f"The job {file.name}")


def _compute(job: LongJob) -> None:
    job(alone=False, progress=False)


def _compute_written(name: str, here: str, text: bytes) -> None:
    if not Path(here).is_dir():
        raise RunError(
            "{machine} does not see {folder}. Call from a folder that all machines share.",
            machine=platform.node(),
            folder=here,
        )
    os.chdir(here)  # names in a configuration hold from there
    compute(text, f"The job {name}")


class Futures:
    """The workers of an executor.

    Args:
        make: returns the executor; called again where one is broken.
        most: as for ``place``.
    """

    goes_on = False

    def __init__(self, make: Callable[[], Executor], most: int | None) -> None:
        self._make, self._most = make, most
        self._executor = make()
        self._waiting: list[LongJob] = []
        self._sent: dict[Future[None], str] = {}

    def send(self, jobs: Sequence[LongJob]) -> None:
        """Let jobs run, at most so many at a time."""
        self._waiting += jobs
        while self._waiting and (self._most is None or len(self._sent) < self._most):
            try:
                future = self._submitted(self._waiting[0])
            except BrokenExecutor:
                self._executor = self._make()
                continue
            self._sent[future] = self._waiting.pop(0).name

    def _submitted(self, job: LongJob) -> Future[None]:
        if not isinstance(job, WrittenJob):
            return self._executor.submit(_compute, job)
        return self._executor.submit(_compute_written, job.name, os.getcwd(), _written(job))

    def ended(self) -> list[tuple[str, FedkeepError | None]]:
        """Return which jobs have ended; one whose worker died is lost."""
        over, _ = wait(self._sent, POLL, FIRST_COMPLETED)
        found = [(self._sent.pop(one), _error(one)) for one in sorted(over, key=lambda f: self._sent[f])]
        self.send(())
        return found

    def states(self) -> dict[str, State]:
        """Return how those stand that have not ended."""
        return {name: "running" if one.running() else "waiting" for one, name in self._sent.items()} | {
            job.name: "waiting" for job in self._waiting
        }

    def news(self) -> list[str]:
        """Return nothing."""
        return []

    def leave(self, cancel: bool) -> str:
        """Begin none of those that wait; what runs ends with the process that made the executor."""
        self._waiting.clear()
        for one in self._sent:
            one.cancel()
        return ""

    def close(self) -> None:
        """Let the executor end."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _error(future: Future[None]) -> FedkeepError | None:
    try:
        future.result()
    except FedkeepError as error:
        return error
    except (BrokenExecutor, CancelledError) as error:
        return GoneError("Its worker is gone: {why}.", why=error or type(error).__name__)
    return None


class RayTasks(Executor):
    """Ray's tasks as an executor; a task is tried once, and a core is its own.

    Args:
        named: ``ray``, or the address of a cluster, ``ray://HOST:PORT``.
        gpus: whether a task computes on a GPU, which is its own unless more tasks than GPUs are asked for.
        count: how many tasks are to run at a time; None: as many as there is room for.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or it has no GPU.
    """

    def __init__(self, named: str, gpus: bool = False, count: int | None = None) -> None:
        with needing(f"--on {named}", "Ray", "ray"):
            import ray
        self._ray = ray
        if not ray.is_initialized():
            from ray.exceptions import RayError

            _check_answers(named)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Tip: ", FutureWarning)  # of Ray, to its developers
                    ray.init(
                        address="auto" if named == "ray" else named,  # else Ray begins one of its own
                        log_to_driver=False,
                        logging_level="error",
                    )
            except (ConnectionError, RuntimeError, ValueError, TimeoutError, RayError) as error:
                raise ConfigError(
                    "--on {named}: no Ray cluster was found: {why}. Begin one: ray start --head; or name one: --on "
                    "ray://HOST:PORT. If it asks for a token, set RAY_AUTH_MODE=token, and put the token into "
                    "~/.ray/auth_token.",
                    named=named,
                    why=first_line(error).rstrip(". "),
                ) from error
        there = ray.cluster_resources()
        found, a_gpu = int(there.get("GPU", 0)), 1
        if gpus and not found:
            raise ConfigError(
                "--on {named}: no machine of this cluster has a GPU. Say device = 'cpu'.", named=named
            )
        if gpus:
            a_gpu = math.ceil((count or found) / found)
        self.slots = found * a_gpu if gpus else max(1, int(there.get("CPU", 1)))
        """How many tasks run at a time."""
        share = 1 / a_gpu if gpus else 0
        # By default Ray ends a process after one task on a GPU, and with it data and model.
        self._remote = functools.cache(ray.remote(max_retries=0, max_calls=0, num_gpus=share))

    def hold(self, value: bytes) -> Any:
        """Return what stands for bytes in arguments, so that they go to each machine once."""
        return self._ray.put(value)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a task; the future's error is the task's own, or BrokenExecutor where its worker died."""
        from ray.exceptions import RayError, RayTaskError

        found: Future[Any] = Future()

        def over(one: Future[Any]) -> None:
            error = one.exception()
            if error is None:
                found.set_result(one.result())
            elif isinstance(error, RayTaskError):
                found.set_exception(error.cause)
            else:
                found.set_exception(BrokenExecutor(str(error)) if isinstance(error, RayError) else error)

        found.set_running_or_notify_cancel()
        self._remote(fn).remote(*args, **kwargs).future().add_done_callback(over)
        return found

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; what this process began there ends."""
        self._ray.shutdown()


def _check_answers(named: str) -> None:
    """Check that something listens where a Ray's head is said to be: Ray itself waits minutes for one that is gone.

    Raises:
        ConfigError: nothing does.
    """
    said = named if named != "ray" else os.environ.get("RAY_ADDRESS", "")
    if not said and HEAD.exists():
        said = HEAD.read_text(encoding="utf-8").strip()
    host, _, port = said.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    with raising(
        ConfigError,
        "--on {named}: nothing answers at {address}: {why}. Begin a head there: ray start --head; or name one that runs: "
        "--on ray://HOST:PORT.",
        OSError,
        named=named,
        address=said,
    ):
        socket.create_connection((host.strip("[]"), int(port)), ANSWERS).close()


SCRIPT = """#!/bin/bash
cd {folder} || exit 1
name=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {names})
cd {here} || exit 1
{python} -m fedkeep.experiments.places {folder}/"$name".json
status=$?
echo $status > {folder}/"$name".part && mv {folder}/"$name".part {folder}/"$name".ended
"""
"""A task of an array. What is killed with this script leaves no status."""
LARGEST = 1000
"""Tasks of an array; Slurm takes 1,001 by default."""
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
ACTIVE = {"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"}
HELD = (
    "AccountNotAllowed",
    "Assoc",
    "BadConstraints",
    "Dependency",
    "Invalid",
    "JobHeld",
    "MaxMemPerLimit",
    "Partition",
    "QOS",
    "ReqNodeNotAvail",
    "launch",
)
"""How reasons begin for which jobs may wait for ever, unlike Priority or Resources."""
FULL = "No space left on device"
"""What a system says of a full disk."""
TIME_OVER = "DUE TO TIME LIMIT"
"""What Slurm writes into the output of a job whose time is over."""


@dataclass
class _SlurmJob:
    """A job of Slurm's.

    Attributes:
        id: Slurm's, e.g. ``12_3``.
        state: when it was last looked at.
        gone: since when it is not found.
        why: Slurm's reason why it waits.
    """

    id: str
    state: State = "waiting"
    gone: float = math.inf
    why: str = ""


class Slurm:
    """Jobs of Slurm, sent as arrays.

    A job leaves a file ``NAME.ended`` with its exit status; without it, or ended by a signal, and gone from ``squeue``, it
    is lost: killed, out of time, or its node is down. What was sent is written down, so a later call finds the jobs that still run.

    Args:
        folder: of jobs and what they print, shared by all nodes.
        options: of ``sbatch``.
        most: jobs at a time; None: no limit.

    Raises:
        ConfigError: Slurm's commands are not here.
    """

    goes_on = True

    def __init__(self, folder: Path, options: Sequence[str], most: int | None) -> None:
        if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
            raise ConfigError(
                "--on slurm: there is no {missing} here. Call it where Slurm's commands are, on a login node.",
                missing=missing[0],
            )
        self.folder, self.options, self.most = folder, options, most
        self._sent: dict[str, _SlurmJob] = {}
        self._told, self._numbers = set[str](), set[str]()
        self._read_book()

    def send(self, jobs: Sequence[LongJob]) -> None:
        """Submit jobs, but for those that an earlier call sent and that still run.

        Raises:
            ConfigError: Slurm refuses them, or one cannot be written as a file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._look()
        new = []
        for job in jobs:
            name, content = _file(job.name), _written(job)
            path, one = self.folder / f"{name}.json", self._sent.get(name)
            if one is None or one.state == "over" or not path.exists() or path.read_bytes() != content:
                write_whole(path, content)
                for left in (f"{name}.ended", f"{name}.part"):
                    (self.folder / left).unlink(missing_ok=True)
                new.append(name)
        for start in range(0, len(new), LARGEST):
            some = new[start : start + LARGEST]
            number = self._submitted(some)
            self._sent |= {name: _SlurmJob(f"{number}_{place}") for place, name in enumerate(some)}
        self._note()

    def ended(self) -> list[tuple[str, FedkeepError | None]]:
        """Return which jobs have ended.

        Raises:
            RunError: no job has written anything, and one is gone: its node does not see the folder.
        """
        time.sleep(POLL)
        self._look()
        over = [name for name, one in self._sent.items() if one.state == "over"]
        found = [(_job(name), self._error(name, self._sent.pop(name))) for name in over]
        if found:
            self._note()
        return found

    def states(self) -> dict[str, State]:
        """Return how those stand that were sent, by another call too, and have not ended, and which failed."""
        self._read_book()
        self._look()
        found: dict[str, State] = {
            _job(path.stem): "failed"
            for path in self.folder.glob("*.ended")
            if 0 < (_status(path) or 0) < 128
        }
        return found | {_job(name): one.state for name, one in self._sent.items() if one.state != "over"}

    def news(self) -> list[str]:
        """Return for what reasons jobs wait, if it may be for ever."""
        reasons = {
            one.why for one in self._sent.values() if one.state == "waiting" and one.why.startswith(HELD)
        }
        new, self._told = sorted(reasons - self._told), self._told | reasons
        return [
            f"Slurm lets jobs wait, maybe for ever: {why}. If so, end them by scancel, and send them with other options "
            "(--slurm)."
            for why in new
        ]

    def leave(self, cancel: bool) -> str:
        """Wait for nothing any more, and return what to say of the jobs that are there."""
        ids = [one.id for one in self._sent.values() if one.state != "over"]
        if not ids:
            return ""
        one = len(ids) == 1
        count = "1 job of Slurm" if one else f"{len(ids)} jobs of Slurm"
        if cancel:
            _called(["scancel", *ids])
            return f"{count} {'is' if one else 'are'} cancelled."
        numbers = sorted({id.partition("_")[0] for id in ids})
        return f"{count} {'goes' if one else 'go'} on. To end {'it' if one else 'them'}: scancel {' '.join(numbers)}"

    def close(self) -> None:
        """Do nothing: jobs go on."""

    @property
    def _book(self) -> Path:
        return self.folder / "sent.json"

    def _read_book(self) -> None:
        """Take up what was sent, by another call too."""
        if self._book.exists():
            known: dict[str, str] = json.loads(self._book.read_text(encoding="utf-8"))
            new = {n: i for n, i in known.items() if n not in self._sent or self._sent[n].id != i}
            self._sent |= {name: _SlurmJob(id) for name, id in new.items()}

    def _note(self) -> None:
        write_whole(self._book, json.dumps({n: one.id for n, one in self._sent.items()}).encode())

    def _submitted(self, names: Sequence[str]) -> str:
        """Submit an array, and return its number."""
        listed = f"array-{time.time_ns()}"
        write_whole(self.folder / listed, "".join(f"{name}\n" for name in names).encode())
        script = SCRIPT.format(
            folder=shlex.quote(str(self.folder)),
            names=shlex.quote(listed),
            here=shlex.quote(os.getcwd()),
            python=shlex.quote(sys.executable),
        )
        most = "" if self.most is None else f"%{self.most}"
        given = ["--job-name=fedkeep", "--requeue", "--open-mode=append", f"--output={self.folder}/%A_%a.out"]
        given += [f"--array=0-{len(names) - 1}{most}", *self.options]
        done = _called(["sbatch", "--parsable", *given], script)
        if done.returncode:
            raise ConfigError(
                "Slurm does not take these jobs: {why}. Its options are given with --slurm.",
                why=first_line(RuntimeError(done.stderr.strip() or done.stdout.strip()), 300).rstrip("."),
            )
        number = done.stdout.strip().partition(";")[0]
        self._numbers.add(number)
        return number

    def _look(self) -> None:
        """See how the jobs stand; what cannot be asked now stays as it was."""
        asked = _called(
            ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i %T %r"]
        )
        lines = [line.split(maxsplit=2) for line in asked.stdout.splitlines() if line.strip()]
        found, why = {line[0]: line[1] for line in lines}, {line[0]: line[-1] for line in lines}
        for name, one in self._sent.items():
            status = _status(self.folder / f"{name}.ended")
            if status is not None and status < 128:
                one.state = "over"
            elif asked.returncode:
                continue
            elif found.get(one.id, "COMPLETED") in OVER:
                one.gone = min(one.gone, time.monotonic())
                if status is not None or time.monotonic() - one.gone >= SURE:
                    one.state = "over"
            else:
                one.gone, one.state = math.inf, "running" if found[one.id] in ACTIVE else "waiting"
                one.why = why[one.id]

    def _error(self, name: str, one: _SlurmJob) -> FedkeepError | None:
        status, log = _status(self.folder / f"{name}.ended"), self.folder / f"{one.id}.out"
        if status == 0:
            return None
        said = ""
        if log.exists():
            said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        if status is not None and status < 128:
            return RunError("Its job of Slurm, {id}, failed:\n{said}", id=one.id, said=said)
        part = self.folder / f"{name}.part"
        if FULL in said or (part.exists() and not part.stat().st_size):
            return RunError(
                "Its job of Slurm, {id}, found no space on a disk: of its node, or of {folder}. Free some and call again, "
                "and it goes on.\n{said}",
                id=one.id,
                folder=self.folder,
                said=said,
            )
        if not log.exists() and one.id.partition("_")[0] in self._numbers and not self._written:
            raise RunError(
                "The first job that ended, {id}, has written nothing into {folder}: its node does not see it, or may "
                "not write there. Call from a folder, and with --out in one, that all machines share.",
                id=one.id,
                folder=self.folder,
            )
        if TIME_OVER in said:
            return OutOfTimeError("Its job of Slurm, {id}, was out of time.", id=one.id)
        return GoneError(
            "Its job of Slurm, {id}, ended without a word: killed, or out of memory.\n{said}",
            id=one.id,
            said=said,
        )

    @property
    def _written(self) -> bool:
        """Whether any job that this call sent has written anything."""
        return any(next(self.folder.glob(f"{number}_*.out"), None) for number in self._numbers)


def _status(ended: Path) -> int | None:
    """Return the exit status of a job, None: it has not ended; from 128 on a signal ended it, so it can be sent again."""
    try:
        return int(ended.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _called(command: Sequence[str], script: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)


def _file(name: str) -> str:
    """Return a job's name as that of a file."""
    return name.replace("/", ",")


def _job(file: str) -> str:
    return file.replace(",", "/")


def _written(job: LongJob) -> bytes:
    if not isinstance(job, WrittenJob):
        raise ConfigError(
            "--on slurm: {name} cannot be written down for another machine. Take ray, or an executor.",
            name=job.name,
        )
    about = {"installed": installed(), "kind": type(job).__name__, "job": job.to_plain()}
    return (json.dumps(about, indent=1) + "\n").encode()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except FedkeepError as error:
        sys.exit(f"Error: {error}")
