"""Reproductions of papers' tables and figures: what ``fedkeep reproduce`` runs, brought by installed packages.

A package offers one as an entry point of the group ``fedkeep.reproductions``. Each writes its results in the form
``NAME.json`` and ``NAME.md`` of ``fedkeep_papers.kit.results``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf

from fedkeep.core.errors import ConfigError, FedkeepError, instead_of
from fedkeep.experiments.places import LongJob, Place, State, WrittenJob, WrittenPath
from fedkeep.experiments.plugins import INSTALL_PAPERS, Offered

GROUP = "fedkeep.reproductions"
Scale = Literal["quick", "medium", "full"]


@dataclass(frozen=True)
class Request:
    """What to reproduce with.

    Attributes:
        data: the folder of real data; None where the reproduction needs none.
        out: the folder of results.
        scale: ``quick`` (minutes), ``medium`` (about an hour) or ``full`` (as long as in the paper).
        seeds: the seeds to run; None for the reproduction's own.
        jobs: how many runs at a time, each in a process of its own.
        progress: True or False to force or forbid progress; None: on a terminal.
        only: patterns (as of file names: ``*``, ``?``, ``[]``) of runs; those that match none are left for another
            call. Empty: all runs.
        finished: run nothing, and write the results from the runs that are finished.
        changes: dotted keys and TOML values that replace settings of every run, e.g. other data of the same form.
        on: where runs are computed; None: here.
    """

    data: WrittenPath | None
    out: WrittenPath
    scale: Scale = "quick"
    seeds: Sequence[int] | None = None
    jobs: int = 1
    progress: bool | None = None
    only: Sequence[str] = ()
    finished: bool = False
    changes: Mapping[str, str] = field(default_factory=dict)
    on: Annotated[InstanceOf[Place] | None, Field(exclude=True)] = None

    def wants(self, run: str) -> bool:
        """Tell whether a run of this name is to be computed, unless it is finished."""
        if self.finished:
            return False
        return not self.only or any(fnmatchcase(run, pattern) for pattern in self.only)

    def check(self, runs: Sequence[str]) -> None:
        """Check the patterns against the names of all runs.

        Raises:
            ConfigError: a pattern matches none of them.
        """
        for pattern in self.only:
            if not any(fnmatchcase(run, pattern) for run in runs):
                raise ConfigError(
                    "No run matches {pattern!r}. The runs are: {runs}.", pattern=pattern, runs=", ".join(runs)
                )


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure of a paper.

    Attributes:
        about: what it is, for ``fedkeep list``.
        run: runs what is not yet run and writes the results; returns the Markdown's path.
        in_pieces: whether some of its runs can be left out (``Request.only``): its results may have gaps.
        changes: the tables of settings that ``Request.changes`` may be of, e.g. ``("data",)``.
    """

    about: str
    run: Callable[[Request], Path]
    in_pieces: bool = False
    changes: tuple[str, ...] = ()


def reproductions() -> Offered[Reproduction]:
    """Return what can be reproduced, by name.

    Raises:
        ConfigError: two packages bring reproductions of one name.
    """
    return Offered(GROUP, Reproduction, {})


def reproduce(name: str, request: Request) -> Path:
    """Run one of ``reproductions()``, and return the path of the Markdown file with the results.

    Interrupted, it goes on where it stopped when called again.

    Raises:
        ConfigError: an unknown name, nothing is installed that reproduces anything, runs were chosen of one that
            cannot be run in pieces, or settings were changed that it does not let be changed.
    """
    known = reproductions()
    if not known:
        raise ConfigError(
            "There is no reproduction {name!r}: none is installed. {install_papers}",
            name=name,
            install_papers=INSTALL_PAPERS,
        )
    if name not in known:
        raise ConfigError(
            "There is no reproduction {name!r}.{near} They run one at a time, e.g. fedkeep "
            "reproduce {known}.",
            name=name,
            near=instead_of(name, known),
            known=next(iter(known)),
        )
    if request.only and not known[name].in_pieces:
        pieces = ", ".join(other for other in known if known[other].in_pieces)
        raise ConfigError(
            "{name} cannot be run in pieces; these can: {pieces}.", name=name, pieces=pieces or "none"
        )
    tables = known[name].changes
    for key in request.changes:
        if key.partition(".")[0] not in tables:
            which = f"settings of the tables {', '.join(tables)}" if tables else "no settings"
            raise ConfigError("{name} lets {which} be changed; got {key!r}.", name=name, which=which, key=key)
    if request.on is not None:
        request = replace(request, on=_Pieces(request.on, name, request))
    return known[name].run(request)


@dataclass(frozen=True)
class Piece(WrittenJob):
    """A run of a reproduction, as another process finds it: it plans the same again, and computes this run alone.

    Attributes:
        reproduction: its name.
        request: what was asked for; ``on`` does not travel.
        name: the run's.
    """

    reproduction: str
    request: Request
    name: str

    def __call__(self, *, alone: bool, progress: bool | None) -> None:
        """Compute the run, unless it is finished; see ``places.LongJob``."""
        request = replace(self.request, progress=progress, on=_One(self.name, alone))
        with contextlib.suppress(_ComputedError):
            reproductions()[self.reproduction].run(request)


class _Pieces:
    """Hands runs to a place as pieces of a reproduction, as what they are made of need not be writable."""

    def __init__(self, place: Place, reproduction: str, request: Request) -> None:
        self.place, self.reproduction, self.request = place, reproduction, request

    def __getattr__(self, name: str) -> Any:
        return getattr(self.place, name)

    def send(self, jobs: Sequence[LongJob]) -> None:
        self.place.send([Piece(self.reproduction, self.request, job.name) for job in jobs])


class _ComputedError(Exception):
    """The one run that was wanted is computed; what a reproduction does with it is for the process that planned first."""


@dataclass
class _One:
    """A place that computes one run of those that it is sent, in this process, and none of the others."""

    name: str
    alone: bool
    goes_on = False

    def send(self, jobs: Sequence[LongJob]) -> None:
        for job in jobs:
            if job.name == self.name:
                job(alone=self.alone, progress=False)
        if jobs:  # where the one is not among those that are missing, it is finished
            raise _ComputedError

    def ended(self) -> list[tuple[str, FedkeepError | None]]:
        return []

    def states(self) -> Mapping[str, State]:
        return {}

    def news(self) -> list[str]:
        return []

    def leave(self, cancel: bool) -> str:
        return ""

    def close(self) -> None: ...
