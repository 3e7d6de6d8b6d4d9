"""Progress of long work: a bar with rate, time left and current metrics on a terminal, nothing elsewhere.

A process that computes for another one tells it instead how far it has come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fedkeep.core.errors import visible


class Silent:
    """Shows nothing: the base of what shows how far a run has come."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, done: float, metrics: Mapping[str, float]) -> None:
        """Take note that ``done`` rounds are finished, and of the latest metrics."""


@dataclass(frozen=True)
class Stand:
    """How far something has come.

    Attributes:
        title: what runs.
        done, total: e.g. rounds.
    """

    title: str
    done: float
    total: int


class ProgressTold(Silent):
    """Tells another process how far a run has come, at most twice a second.

    Args:
        tell: tells it.
        stand: where the run begins.
    """

    def __init__(self, tell: Callable[[Stand], None], stand: Stand) -> None:
        self._tell, self._stand, self._last = tell, stand, time.monotonic()
        tell(stand)

    def update(self, done: float, metrics: Mapping[str, float]) -> None:
        """Tell it, unless that has just been done."""
        if time.monotonic() - self._last >= 0.5:
            self._last = time.monotonic()
            self._tell(Stand(self._stand.title, done, self._stand.total))


_ELSEWHERE: list[Callable[[Stand], None]] = []  # who is told, in a process that computes for another


def tell_elsewhere(tell: Callable[[Stand], None]) -> None:
    """Let this process show no bars of its own from now on, but tell how far it has come."""
    _ELSEWHERE[:] = [tell]


class ProgressBar(Silent):
    """A bar on standard error.

    Args:
        title: what runs.
        total: rounds in all.
        done: rounds finished before (a resumed run).
    """

    def __init__(self, title: str, total: int, done: float = 0) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        self._rich: Any = Rich(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=Console(stderr=True),
        )
        self._task = self._rich.add_task(
            escape(visible(title)), total=total, completed=int(done), rate="", metrics=""
        )
        self._began, self._start = time.perf_counter(), done

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def update(self, done: float, metrics: Mapping[str, float]) -> None:
        """Show that ``done`` rounds are finished, and the latest metrics."""
        seconds = time.perf_counter() - self._began
        rate = f"{(done - self._start) / seconds:.2f} rounds/s" if seconds > 0 else ""
        shown = "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        self._rich.update(self._task, completed=done, rate=rate, metrics=shown)


def make_progress(show: bool | None, title: str, total: int, done: float = 0) -> Silent:
    """Return a bar if ``show``, or if it is None and standard error is a terminal; else nothing is shown.

    A process that computes for another tells that one instead.
    """
    if _ELSEWHERE and show is not False:
        return ProgressTold(_ELSEWHERE[0], Stand(title, done, total))
    wanted = sys.stderr.isatty() if show is None else show
    return ProgressBar(title, total, done) if wanted else Silent()
