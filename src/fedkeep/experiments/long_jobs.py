"""Long jobs, one after another or side by side, and what is seen of them meanwhile.

Side by side, each has a process of its own with one thread, and its progress is shown here: a bar for each on a
terminal, else a line for each that finishes and one now and then for those that run. Lines forecast the time left.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

from fedkeep.core.errors import FedkeepError, RunError
from fedkeep.experiments.forecast import Forecast
from fedkeep.experiments.places import RETRIES, GoneError, LongJob, OutOfTimeError, Place
from fedkeep.experiments.processes import processes
from fedkeep.experiments.progress import Stand, tell_elsewhere

TOO_SHORT = (
    "{why} It did not finish one more round, so no other job of this length will. Give jobs more time, e.g. --slurm "
    "--time=4:00:00."
)
EVERY = 300.0  # seconds between two lines about what runs


Job = TypeVar("Job", bound=LongJob)


def run_long_jobs(
    jobs: Sequence[Job],
    workers: int = 1,
    progress: bool | None = None,
    finished: Callable[[], object] | None = None,
    *,
    kind: Callable[[Job], str] = lambda job: "",
    later: Iterable[str] = (),
    on: Place | None = None,
    stand: Callable[[Job], Stand | None] | None = None,
) -> None:
    """Compute jobs, ``workers`` at a time.

    Args:
        jobs: in the order in which they begin.
        workers: how many at a time; with 1, they run in this process.
        progress: whether bars are shown; None: if standard error is a terminal.
        finished: called after every job.
        kind: of a job; those of one kind take about as long.
        later: the kinds of jobs that come after these, whose time is told too.
        on: where they run, which stays open for more; None: here.
        stand: how far a job has come that runs elsewhere, as its folder tells; None: it is not known.

    Raises:
        FedkeepError: of the first that failed, after those that ran beside it; those that wait are not begun.
        RunError: a process was killed; elsewhere, one job so often that it was given up.
    """
    if on is not None:
        _run_elsewhere(on, jobs, workers, progress, finished, kind, later, stand)
        return
    if workers <= 1 or len(jobs) <= 1:
        forecast = Forecast([*map(kind, jobs), *later])
        for number, job in enumerate(jobs, 1):
            _say(f"{number} of {len(jobs)}{forecast.words()}: {job.name}")
            forecast.begun(job.name, kind(job))
            job(alone=True, progress=progress)
            forecast.over(job.name)
            if finished is not None:
                finished()
        return
    queue: SimpleQueue[Any] = multiprocessing.get_context("spawn").SimpleQueue()
    board = _board(jobs, workers, progress, kind, later)
    listener = threading.Thread(target=_listen, args=(queue, board), name="progress of jobs", daemon=True)
    listener.start()
    try:
        with processes(workers, begin=_know, given=(queue,), fresh=True) as pool:
            running = {pool.submit(_work, job): job.name for job in jobs}
            for done in as_completed(running):
                if isinstance(done.exception(), FedkeepError):
                    board.failed(running[done])
                done.result()
                board.finished(running[done])
                if finished is not None:
                    finished()
    finally:
        queue.put(None)
        listener.join()
        board.close()


def _run_elsewhere(
    on: Place,
    jobs: Sequence[Job],
    workers: int,
    progress: bool | None,
    finished: Callable[[], object] | None,
    kind: Callable[[Job], str],
    later: Iterable[str],
    stand: Callable[[Job], Stand | None] | None,
) -> None:
    """Let a place compute jobs; one that is lost is sent again, thrice without any progress of its own."""
    left, tries, faults = {job.name: job for job in jobs}, dict[str, int](), dict[str, FedkeepError]()
    stands: Callable[[Job], Stand | None] = stand or (lambda job: None)
    before = {name: _done(stands(job)) for name, job in left.items()}
    board = _board(jobs, max(workers, 1), progress, kind, later)
    try:
        on.send(jobs)
        while left:
            for name, state in on.states().items():
                if state == "running" and name in left:
                    board.comes(name, stands(left[name]))
            for line in on.news():
                board.say(line)
            for name, error in on.ended():
                if name not in left:  # an earlier call's, that this one does not want
                    continue
                if isinstance(error, GoneError):
                    now = stands(left[name])
                    came = _done(now) - before[name]
                    before[name] = _done(now)
                    tries[name] = 1 if came > 0 else tries.get(name, 0) + 1
                    if isinstance(error, OutOfTimeError) and stand is not None and came <= 0:
                        error = RunError(TOO_SHORT, why=error)
                    elif tries[name] <= RETRIES:
                        more = _more(now, came) if isinstance(error, OutOfTimeError) else ""
                        board.say(f"{name} is lost, and is sent again. {error}{more}")
                        on.send([left[name]])
                        continue
                del left[name]
                board.comes(name, None)  # it may be over before it was seen to run
                if error is not None:
                    faults[name] = error
                    board.failed(name)
                    continue
                board.finished(name)
                if finished is not None:
                    finished()
    except BaseException as stop:
        board.close()  # bars stand in the way of a question
        cancel = not isinstance(stop, KeyboardInterrupt) or (on.goes_on and _asked_to_cancel())
        if said := on.leave(cancel):
            _say(said)
        raise
    board.close()
    for name, error in faults.items():
        raise RunError(
            "{name}: {why}{more}",
            name=name,
            why=error,
            more=f" {len(faults) - 1} more failed." if faults.keys() - {name} else "",
        )


def _more(now: Stand | None, came: float) -> str:
    """Return how many more jobs it will be, where each comes as far as the last."""
    if now is None or came <= 0:
        return ""
    count = math.ceil((now.total - now.done) / came)
    return f" It came {came:g} {now.title} further; at this pace about {count} more {'job' if count == 1 else 'jobs'}."


def _done(stand: Stand | None) -> float:
    return 0.0 if stand is None else stand.done


def _asked_to_cancel() -> bool:
    """Ask whether jobs elsewhere are to end too, where somebody can be asked; else they go on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    _say("Cancel the jobs that run elsewhere, too? [y/N] ")
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False


def _board(
    jobs: Sequence[Job],
    workers: int,
    progress: bool | None,
    kind: Callable[[Job], str],
    later: Iterable[str],
) -> _JobLines:
    shows = _JobBars if (sys.stderr.isatty() if progress is None else progress) else _JobLines
    kinds = {job.name: kind(job) for job in jobs}
    return shows(len(jobs), Forecast([*kinds.values(), *later], workers), kinds)


_QUEUE: list[SimpleQueue[Any]] = []  # of a worker process


def _know(queue: SimpleQueue[Any]) -> None:
    _QUEUE[:] = [queue]


def _work(job: LongJob) -> None:
    (queue,) = _QUEUE
    queue.put((job.name, None))
    tell_elsewhere(lambda stand: queue.put((job.name, stand)))
    job(alone=False, progress=None)


def _listen(queue: SimpleQueue[Any], board: _JobLines) -> None:
    while (message := queue.get()) is not None:
        board.told(*message)


class _JobLines:
    """Shows how far jobs have come, in lines of text; safe to call from several threads."""

    def __init__(self, count: int, forecast: Forecast, kinds: Mapping[str, str]) -> None:
        self.count, self.number, self.began = count, 0, time.monotonic()
        self.forecast, self.kinds = forecast, kinds
        self.last = self.began
        self.running: dict[str, Stand] = {}
        self.begun: set[str] = set()
        self.over: set[str] = set()
        self.lock = threading.Lock()

    def told(self, name: str, stand: Stand | None) -> None:
        """Take note of how far a job has come, None: it begins; what comes late is not shown."""
        with self.lock:
            if stand is None:
                self.forecast.begun(name, self.kinds[name])
            elif name not in self.over:
                self.running[name] = stand
                self.forecast.came(name, stand.done / stand.total if stand.total else 0.0, stand.title)
                self.show(name)

    def comes(self, name: str, stand: Stand | None) -> None:
        """Take note of how far a job has come that runs elsewhere, from the first time it is seen to run."""
        if name not in self.running and name not in self.begun:
            self.begun.add(name)
            self.told(name, None)
        if stand is not None:
            self.told(name, stand)

    def finished(self, name: str) -> None:
        """Say that a job is finished."""
        with self.lock:
            self.number += 1
            self.leave(name)
            self.forecast.over(name)
            self.say(
                f"{self.number} of {self.count} finished after {self.after()}{self.forecast.words()}: {name}"
            )

    def failed(self, name: str) -> None:
        """Say that a job failed, as others may run on for long before its error is shown."""
        with self.lock:
            self.leave(name)
            self.forecast.over(name, finished=False)
            others = ", ".join(self.running)
            self.say(f"{name} failed." + (f" Still running: {others}." if others else ""))

    def after(self) -> str:
        """Return the time since the first job began."""
        from fedkeep.report.wording import duration

        return duration(time.monotonic() - self.began)

    def leave(self, name: str) -> None:
        """Forget a job."""
        self.over.add(name)
        self.running.pop(name, None)

    def show(self, name: str) -> None:
        """Show a running job's progress, or now and then that of all."""
        if time.monotonic() - self.last < EVERY:
            return
        self.last = time.monotonic()
        where = (f"{job}: {s.title}, {s.done:g} of {s.total}" for job, s in self.running.items())
        self.say(f"after {self.after()}{self.forecast.words()}: {'; '.join(where)}")

    def say(self, text: str) -> None:
        """Write a line."""
        _say(text)

    def close(self) -> None:
        """Stop showing; lines stay as they are."""


class _JobBars(_JobLines):
    """A bar for every running job and one for all."""

    def __init__(self, count: int, forecast: Forecast, kinds: Mapping[str, str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(count, forecast, kinds)
        self.rich = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bars: dict[tuple[str, str], Any] = {}
        self.all = self.rich.add_task("all", total=count)
        self.rich.start()

    def show(self, name: str) -> None:
        stand = self.running[name]
        key = (name, stand.title)
        if key not in self.bars:
            self._drop(name)
            self.bars[key] = self.rich.add_task(f"{name}: {stand.title}", total=stand.total)
        self.rich.update(self.bars[key], completed=int(stand.done))

    def leave(self, name: str) -> None:
        super().leave(name)
        self._drop(name)
        self.rich.update(self.all, completed=self.number)

    def _drop(self, name: str) -> None:
        for key in [key for key in self.bars if key[0] == name]:
            self.rich.remove_task(self.bars.pop(key))

    def say(self, text: str) -> None:
        self.rich.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.rich.stop()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
