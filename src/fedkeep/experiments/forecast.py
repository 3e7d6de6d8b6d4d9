"""How jobs stand, and how long they will take, from those that are alike and finished, and from how far the others have come.

Jobs of one kind, as one method with several seeds, take about as long; kinds do not: a method may cost a hundred times
what another does. So nothing is said of a kind before one of it has come some way, but that it takes at least as long as the
quickest that is known. Time is wall clock: what judging, adapting and starting took is in it.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedkeep.core.errors import RunError
from fedkeep.core.records import Extent, read_records
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.report.wording import duration

SOON = 10.0
"""Seconds; a shorter time left is not worth saying."""
ENOUGH = 0.2
"""The share of a running job that tells how long all of it takes; before, it has paid for what is loaded but once."""


@dataclass
class _RunningJob:
    kind: str
    since: float
    share: float = 0.0
    part: str = ""


@dataclass
class Forecast:
    """What is left of jobs.

    Attributes:
        kinds: of the jobs that have not begun, those that come later too.
        workers: how many run at a time.
        clock: seconds.
    """

    kinds: Iterable[str]
    workers: int = 1
    clock: Callable[[], float] = time.monotonic
    running: dict[str, _RunningJob] = field(default_factory=dict, init=False)
    took: dict[str, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.waiting = list(self.kinds)

    def begun(self, name: str, kind: str, before: float = 0.0) -> None:
        """Take note that a job begins, at once or after others of its kind; ``before``: seconds that it ran already."""
        self.waiting.remove(kind)
        self.running[name] = _RunningJob(kind, self.clock() - before)

    def came(self, name: str, share: float, part: str = "") -> None:
        """Take note of how much of a running job's first part is done, from 0 to 1; how long others take is not known."""
        if (job := self.running.get(name)) is not None:
            job.part = job.part or part
            job.share = share if part == job.part else 0.0

    def over(self, name: str, finished: bool = True) -> None:
        """Take note that a job is over; how long one took that failed says nothing of others."""
        job = self.running.pop(name, None)
        if job is not None and finished:
            self.took.setdefault(job.kind, []).append(self.clock() - job.since)

    def left(self) -> tuple[float, bool]:
        """Return the seconds that are left, and whether of every kind that is left it is known how long it takes.

        Where it is not, the seconds are the least that it will take.
        """
        now = self.clock()
        known = {kind: sum(took) / len(took) for kind, took in self.took.items()}
        for job in self.running.values():
            if job.kind not in known and job.share >= ENOUGH:
                known[job.kind] = (now - job.since) / job.share
        least = min(known.values(), default=0.0)
        parts = [known.get(kind, least) for kind in self.waiting]
        for job in self.running.values():
            gone = now - job.since
            whole = gone / job.share if job.share >= ENOUGH else known.get(job.kind, least)
            parts.append(max(whole - gone, 0.0))
        seconds = max([sum(parts) / max(self.workers, 1), *parts]) if parts else 0.0
        return seconds, all(
            kind in known for kind in (*self.waiting, *(j.kind for j in self.running.values()))
        )

    def words(self) -> str:
        """Return ``", about 12 min 30 s left"``, or ``", more than …"``; empty where nothing is known, or it is soon over."""
        seconds, known = self.left()
        if seconds < SOON:
            return ""
        return f", {'about' if known else 'more than'} {duration(seconds)} left"


GROUPS = {
    "done": ("finished", "ended early"),
    "running": ("running",),
    "failed": ("failed", "diverged"),
    "waiting": ("waiting", "not begun", "stopped", "unreadable"),
}
"""The states that count as each."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """How a run, or a trial, stands.

    Attributes:
        name: its own.
        kind: those of one kind take about as long.
        state: one of those in ``GROUPS``.
        done, total: of its rounds; 0 in all: it has not begun.
        seconds: that the finished rounds took.
        least: seconds that all of it takes at least, by estimate.
        why: its folder cannot be read; empty: it can.
    """

    name: str
    kind: str
    state: str = "not begun"
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    least: float = 0.0
    why: str = ""

    @property
    def group(self) -> str:
        """What its state counts as."""
        return next(group for group, states in GROUPS.items() if self.state in states)

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.group in ("done", "failed")

    @property
    def share(self) -> float:
        """The share of its rounds that is finished."""
        return self.done / max(1, self.total)

    @property
    def left(self) -> float:
        """Seconds that it takes from now on at least, by estimate."""
        return 0.0 if self.over else self.least * (1 - self.share)


def read_status(job: JobStatus, state: Callable[[], str], folders: Sequence[Path]) -> JobStatus:
    """Return how a job stands as the folders of its runs tell, which are equally long; not all need to be there.

    ``state`` returns its state, or raises RunError. Of time that of finished rounds counts, so that a stop does not.
    """
    try:
        for folder in (folder for folder in folders if (folder / "run.json").exists()):
            info = read_info(folder)
            commit = read_commit(folder, info)
            took = _seconds(folder / "timings.jsonl", commit.timings)
            done, total = job.done + commit.round, info["rounds"] * len(folders)
            job = replace(job, done=done, total=total, seconds=job.seconds + took)
        return replace(job, state=state())
    except RunError as error:  # moved or removed meanwhile, so that the next look sees it, or damaged
        return replace(job, state="unreadable", why=str(error))


@functools.cache
def _seconds(path: Path, extent: Extent) -> float:
    return math.fsum(r.value for r in read_records(path, extent) if r.metric in ("seconds", "judge_seconds"))


def summary(jobs: Sequence[JobStatus], workers: int | None, now: float) -> list[str]:
    """Return in lines how many jobs stand how, when all are likely to have ended, and which cannot be read.

    Args:
        jobs: all.
        workers: how many run at a time; None: as many as now.
        now: seconds since the epoch.
    """
    number = Counter(job.group for job in jobs)
    lines = [", ".join(f"{number[group]} {group}" for group in GROUPS) + "."]
    workers = workers or max(1, number["running"])
    forecast = Forecast([job.kind for job in jobs], workers, clock=lambda: 0.0)
    for job in jobs:
        forecast.begun(job.name, job.kind, job.seconds)
        forecast.came(job.name, job.share)
        if job.over:
            forecast.over(job.name, finished=job.group == "done")
    seconds, known = forecast.left()
    if not known:
        seconds = max(seconds, sum(job.left for job in jobs) / workers)
    if seconds:
        end = time.strftime("%H:%M on %d %B", time.localtime(now + seconds))
        how = f"{workers} runs side by side" if workers > 1 else "run after run"
        lines.append(
            f"Expected end: {'about' if known else 'not before'} {end}, in {duration(seconds)}, {how}"
            f"{'' if number['running'] else ', if they went on now'}."
        )
    return lines + [f"{job.name}: {job.why}" for job in jobs if job.why]
