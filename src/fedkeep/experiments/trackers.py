"""Trackers: they receive a run's records while it goes on.

A tracker is told every record of a run once its round is committed, and of a resumed run what it was not told before.
It changes no result. One that fails is told nothing more; the run goes on, and its folder has all records.
Packages of TensorBoard, MLflow and Weights & Biases are imported when a run begins. There a record is the scalar
``SPLIT/METRIC`` at the step of its round, that of a client ``clients/ID/SPLIT/METRIC``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import quote

from fedkeep.core.errors import ConfigError, check_choice, first_line, installing, raising, warn
from fedkeep.core.files import expanded, write_of_run
from fedkeep.core.records import Record, read_records
from fedkeep.experiments.run_directory import RunDirectory, new_run_id
from fedkeep.experiments.toml import to_toml

End = Literal["finished", "stopped", "failed"]
"""How a run ended: all rounds done, ended early or by Ctrl-C, or by an error."""


class EndRun(Exception):  # noqa: N818 - it is none
    """Raised by a tracker in ``recorded``: the run ends after this round, which is kept."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a tracker gets of a run before the first record.

    Attributes:
        run: the run's id, the same when it is resumed.
        name: for people.
        folder: the run's folder; None: it has none.
        settings: the run's settings as nested plain data.
        round: rounds finished before; 0 in a new run.
        history: the records of these rounds, whether the tracker has had them or not.
        since: records of this round and later ones are told from now on. A tracker that was stopped in the middle of a
            round may have some of them already, and drops or skips those.
    """

    run: str
    name: str
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    history: Sequence[Record] = ()
    since: int = 1


@runtime_checkable
class Tracker(Protocol):
    """Receives the records of a run. A class of your own needs these three methods, and may have a ``name``."""

    def started(self, facts: Facts) -> None:
        """Take note of a run that begins or goes on."""

    def recorded(self, records: Sequence[Record]) -> None:
        """Take note of what was measured in a round that is committed, its seconds included.

        Raises:
            EndRun: the run is to end here.
        """

    def finished(self, how: End) -> None:
        """Take note of the end: ``finished``, ``stopped`` before its last round, or ``failed`` with an error."""


MOST = 1000  # metrics in one of MLflow's batches
LONGEST = 6000  # characters of one of MLflow's parameters


def label(record: Record) -> str:
    """Return a record's name; ids of clients may hold what trackers don't take, so that is written as ``:41``."""
    own = f"{record.split}/{record.metric}"
    if record.client is None:
        return own
    return f"clients/{quote(record.client, safe='').replace('~', '%7E').replace('%', ':')}/{own}"


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys; None and empty tables are left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{key}.")
        elif value is not None:
            found[f"{above}{key}"] = list(value) if isinstance(value, tuple) else value
    return found


class TensorBoard:
    """Event files of TensorBoard.

    Args:
        folder: where; by default ``tensorboard`` in the run's folder.
    """

    name = "tensorboard"

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else expanded(folder)
        self._writer: Any = None

    def started(self, facts: Facts) -> None:
        """Begin a file; what older ones hold of rounds that are told again is then not shown."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder or (facts.folder and facts.folder / self.name)
        if folder is None:
            raise ConfigError(
                "A run without a folder wants TensorBoard(folder=...), or give it a folder (out=...)."
            )
        self._writer = SummaryWriter(str(folder), purge_step=facts.since if facts.round else None)
        if not facts.round:
            toml = to_toml(facts.settings).replace("\n", "\n    ")
            self._writer.add_text("configuration", f"    {toml}", 0)

    def recorded(self, records: Sequence[Record]) -> None:
        """Write scalars, and flush them."""
        for record in records:
            self._writer.add_scalar(label(record), record.value, record.round)
        self._writer.flush()

    def finished(self, how: End) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run in an MLflow store.

    Args:
        uri: the store; by default ``MLFLOW_TRACKING_URI``, else the SQLite file ``mlflow.db`` beside the run's folder.
        experiment: its name there.
    """

    name = "mlflow"

    def __init__(self, uri: str | None = None, experiment: str = "fedkeep") -> None:
        self.uri, self.experiment = uri, experiment
        self._client: Any = None
        self._run, self._known = "", dict[str, set[int]]()

    def started(self, facts: Facts) -> None:
        """Begin a run in the store, or go on with the one that has this run's id."""
        from mlflow.tracking import MlflowClient

        beside = (Path.cwd() if facts.folder is None else facts.folder.resolve().parent) / "mlflow.db"
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside.as_posix()}"
        client = self._client = MlflowClient(uri)
        found = client.get_experiment_by_name(self.experiment)
        place = client.create_experiment(self.experiment) if found is None else found.experiment_id
        tag = "fedkeep.run"
        runs = client.search_runs([place], f"tags.`{tag}` = '{facts.run}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._known = {key: set() for key in runs[0].data.metrics}
            for key, steps in self._known.items():
                steps |= {m.step for m in client.get_metric_history(self._run, key)}
            client.update_run(self._run, status="RUNNING")
            return
        self._run = client.create_run(place, run_name=facts.name, tags={tag: facts.run}).info.run_id
        for key, value in flat(facts.settings).items():
            text = quote(key, safe=" ").replace("~", "%7E").replace("%", ":")
            client.log_param(self._run, text, str(value)[:LONGEST])

    def recorded(self, records: Sequence[Record]) -> None:
        """Log metrics, but for those that the store has."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        new = [
            Metric(label(r), r.value, now, r.round)
            for r in records
            if r.round not in self._known.get(label(r), ())
        ]
        for first in range(0, len(new), MOST):
            self._client.log_batch(self._run, metrics=new[first : first + MOST])

    def finished(self, how: End) -> None:
        """Say how the run ended."""
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[how]
        self._client.set_terminated(self._run, status=status)


class WandB:
    """A run of Weights & Biases, kept on this machine until ``wandb sync`` unless ``WANDB_MODE`` says otherwise.

    Args:
        project: its name there; by default ``WANDB_PROJECT``, else ``fedkeep``.
        folder: where it is kept; by default the run's folder.
    """

    name = "wandb"

    def __init__(self, project: str | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        self.project, self.folder = project, folder
        self._run: Any = None

    def started(self, facts: Facts) -> None:
        """Begin a run, or a further part of the one with this run's id."""
        import wandb

        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT", "fedkeep"),
            dir=self.folder or facts.folder or Path.cwd(),
            mode=os.environ.get("WANDB_MODE", "offline"),
            id=facts.run,
            name=facts.name,
            resume="allow",
            reinit="create_new",
            config=flat(facts.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="round")

    def recorded(self, records: Sequence[Record]) -> None:
        """Log the records of each round together."""
        for round in sorted({r.round for r in records}):
            own = {label(r): r.value for r in records if r.round == round}
            self._run.log({**own, "round": round})

    def finished(self, how: End) -> None:
        """End the run."""
        self._run.finish(exit_code=int(how == "failed"))


STORES: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


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
                "trackers: wanted a name, or an object with started, recorded and finished; got {given!r}.",
                given=given,
            )
        return given
    module, colon, kind = given.partition(":")
    if colon:
        with raising(
            ConfigError,
            "run.trackers: {given!r} cannot be made: {why}.",
            ImportError,
            AttributeError,
            TypeError,
            ValueError,
            given=given,
        ):
            return named_tracker(getattr(importlib.import_module(module), kind)())
    check_choice("run.trackers wants package.module:Class,", given, STORES)
    if importlib.util.find_spec(given) is None:
        raise ConfigError(
            "The tracker {given!r} needs a package that is not installed: {install}.",
            given=given,
            install=installing(given),
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
                "Two trackers have the name {name!r}. Give each an attribute `name` of its own.",
                name=name,
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
    telling = _TrackerLines(trackers, facts, directory)
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


class _TrackerLines:
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
        warn(
            f"The tracker {name!r} failed and is told nothing more: {type(error).__name__}: {first_line(error)}. The "
            f"run goes on and keeps all its records.{resumed}"
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
