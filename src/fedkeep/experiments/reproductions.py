"""Reproductions of papers' tables and figures: what ``fedkeep reproduce`` runs, brought by installed packages.

A package offers one as an entry point of the group ``fedkeep.reproductions``. Each writes its results in the form
``NAME.json`` and ``NAME.md`` of ``fedkeep_papers.kit.results``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.experiments.places import Place
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

    data: Path | None
    out: Path
    scale: Scale = "quick"
    seeds: Sequence[int] | None = None
    jobs: int = 1
    progress: bool | None = None
    only: Sequence[str] = ()
    finished: bool = False
    changes: Mapping[str, str] = field(default_factory=dict)
    on: Place | None = None

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
                raise ConfigError(f"No run matches {pattern!r}. The runs are: {', '.join(runs)}.")


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
        raise ConfigError(f"There is no reproduction {name!r}: none is installed. {INSTALL_PAPERS}")
    if name not in known:
        names = ", ".join(known)
        raise ConfigError(f"There is no reproduction {name!r}; there are {names}.{did_you_mean(name, known)}")
    if request.only and not known[name].in_pieces:
        pieces = ", ".join(other for other in known if known[other].in_pieces)
        raise ConfigError(f"{name} cannot be run in pieces; these can: {pieces or 'none'}.")
    tables = known[name].changes
    for key in request.changes:
        if key.partition(".")[0] not in tables:
            which = f"settings of the tables {', '.join(tables)}" if tables else "no settings"
            raise ConfigError(f"{name} lets {which} be changed; got {key[:80]!r}.")
    return known[name].run(request)
