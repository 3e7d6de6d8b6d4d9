"""Trackers on their way: who they are, what each was told, and what becomes of one that fails."""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError, check_choice, first_line
from fedkeep.core.files import write_of_run
from fedkeep.core.records import Record, read_records
from fedkeep.experiments.run_directory import RunDirectory, new_run_id
from fedkeep.experiments.trackers.contract import End, EndRun, Facts, Tracker
from fedkeep.experiments.trackers.stores import STORES

FILE = "tracked.json"
TOLD = ("records", "timings")
"""Of the files of a run's folder, what trackers are told of."""
Tell = Callable[[Sequence[Record], Sequence[Record]], None]
"""Receives the records that a round added: the run's, and each client's."""


def named_tracker(given: str | Tracker) -> Tracker:
    """Return the tracker of a name: ``tensorboard``, ``mlflow``, ``wandb``, or ``package.module:Class``.

    Raises:
        ConfigError: there is none, its package is not installed, or something else was given.
    """
    if not isinstance(given, str):
        if not isinstance(given, Tracker) or isinstance(given, type):
            raise ConfigError(
                f"trackers: wanted a name, or an object with started, recorded and finished; got {given!r}."
            )
        return given
    module, colon, kind = given.partition(":")
    if colon:
        try:
            return named_tracker(getattr(importlib.import_module(module), kind)())
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"run.trackers: {given!r} cannot be made: {first_line(error)}.") from error
    check_choice("run.trackers wants package.module:Class,", given, STORES)
    if importlib.util.find_spec(given) is None:
        raise ConfigError(
            f"The tracker {given!r} needs a package that is not installed: pip install 'fedkeep[{given}]'."
        )
    return STORES[given]()


def named_trackers(given: Sequence[str | Tracker]) -> dict[str, Tracker]:
    """Return trackers by their names, which tell a resumed run who was told what.

    Raises:
        ConfigError: as for ``named_tracker``, or two have the same name.
    """
    found: dict[str, Tracker] = {}
    for one in map(named_tracker, given):
        name = str(getattr(one, "name", type(one).__qualname__))
        if name in found:
            raise ConfigError(
                f"Two trackers have the name {name!r}. Give each an attribute `name` of its own."
            )
        found[name] = one
    return found


@contextmanager
def tracked(
    trackers: Mapping[str, Tracker],
    directory: RunDirectory | None,
    history: Sequence[Record],
    name: str,
    settings: Mapping[str, Any],
) -> Iterator[Tell]:
    """Yield what tells all trackers of a round's records and seconds; ``EndRun`` ends the block and no more.

    The first call, whose lists may be empty, tells them of the run before.

    Args:
        trackers: by name.
        directory: of the run, at its last commit; None: it has none.
        history: the records so far.
        name, settings: as for ``Facts``.
    """
    if not trackers:
        yield lambda records, timings: None
        return
    facts = Facts(run=new_run_id(), name=name, settings=settings)
    if directory is not None:
        facts = replace(
            facts, run=directory.id, folder=directory.folder, round=directory.round, history=tuple(history)
        )
    telling = _Telling(trackers, facts, directory)
    how: End = "failed"
    try:
        yield telling
        how = "finished"
    except EndRun:
        how = "stopped"
    except KeyboardInterrupt:
        how = "stopped"
        raise
    finally:
        telling.finish(how)


class _Telling:
    """Trackers on their way, and how many lines of ``records.jsonl`` and ``timings.jsonl`` each was told."""

    def __init__(self, trackers: Mapping[str, Tracker], facts: Facts, directory: RunDirectory | None) -> None:
        self.trackers, self.facts, self.directory = dict(trackers), facts, directory
        self.told = _read(directory.folder / FILE) if directory is not None else {}
        self.past: dict[str, list[Record]] | None = None
        self.began: set[str] = set()

    def __call__(self, records: Sequence[Record], timings: Sequence[Record]) -> None:
        """Tell each of a round."""
        if self.past is None:
            self.past = self._past()
            self.lines = {name: len(self.past[name]) for name in TOLD}
            self._each(self._begin)
        if records:
            new = (records, timings)
            self.lines = {n: self.lines[n] + len(lines) for n, lines in zip(TOLD, new, strict=True)}
            self._each(lambda name, tracker: tracker.recorded([*records, *timings]))

    def finish(self, how: End) -> None:
        """Tell each of the end."""
        self.trackers = {name: one for name, one in self.trackers.items() if name in self.began}
        self._each(lambda name, tracker: tracker.finished(how))

    def _past(self) -> dict[str, list[Record]]:
        """Return what a run that goes on has measured, by file."""
        if self.directory is None:
            return {name: [] for name in TOLD}
        folder, last = self.directory.folder, self.directory.last
        return {n: list(read_records(folder / f"{n}.jsonl", getattr(last, n))) for n in TOLD}

    def _begin(self, name: str, tracker: Tracker) -> None:
        """Tell one of the run, and what it was not told of it."""
        past, known = self.past or {}, self.told.get(name, {})
        missed = [r.round for n, lines in past.items() for r in lines[known.get(n, 0) :]]
        since = min(missed, default=self.facts.round + 1)
        self.began.add(name)
        tracker.started(replace(self.facts, since=since))
        rest = [r for lines in past.values() for r in lines if r.round >= since]
        if rest:
            tracker.recorded(sorted(rest, key=lambda r: r.round))

    def _each(self, call: Callable[[str, Tracker], None]) -> None:
        """Call every tracker; one that fails is told nothing more. ``EndRun`` waits for the others."""
        end: EndRun | None = None
        try:
            for name, tracker in list(self.trackers.items()):
                try:
                    call(name, tracker)
                except EndRun as asked:
                    end = asked
                except ConfigError:  # said before the first round
                    self.began.discard(name)
                    raise
                except Exception as error:  # noqa: BLE001 - a stranger's code must not cost the training
                    del self.trackers[name]
                    self._warn(name, error)
        finally:
            self._mark()
        if end is not None:
            raise end

    def _warn(self, name: str, error: Exception) -> None:
        resumed = "" if self.directory is None else " A resumed run tells it what it missed."
        warnings.warn(
            f"The tracker {name!r} failed and is told nothing more: {type(error).__name__}: {first_line(error)}. The "
            f"run goes on and keeps all its records.{resumed}",
            stacklevel=3,
        )

    def _mark(self) -> None:
        """Keep who was told how much."""
        if self.directory is not None:
            self.told |= {name: self.lines for name in self.trackers if name in self.began}
            write_of_run(self.directory.folder / FILE, (json.dumps(self.told) + "\n").encode())


def _read(path: Path) -> dict[str, dict[str, int]]:
    """Return who was told how much; where that is lost, all is told again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(n): {k: int(lines[k]) for k in TOLD} for n, lines in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
