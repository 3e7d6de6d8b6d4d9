"""How long jobs will take, from those that are alike and finished, and from how far the others have come.

Jobs of one kind, as one method with several seeds, take about as long; kinds do not: a method may cost a hundred times
what another does. So nothing is said of a kind before one of it has come some way, but that it takes at least as long as the
quickest that is known. Time is wall clock: what judging, adapting and starting took is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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

    def begun(self, name: str, kind: str) -> None:
        """Take note that a job begins, at once or after others of its kind."""
        self.waiting.remove(kind)
        self.running[name] = _RunningJob(kind, self.clock())

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
        from fedkeep.report.wording import duration

        seconds, known = self.left()
        if seconds < SOON:
            return ""
        return f", {'about' if known else 'more than'} {duration(seconds)} left"
