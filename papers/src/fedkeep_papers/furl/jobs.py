"""Runs many configurations, each in its own run folder, so that an interrupted table goes on where it stopped.

What a table takes from a finished run is kept as a cell (`fedkeep_papers.kit.cells`), and such a run is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedkeep.core.errors import FedkeepError, NonFiniteError, RoundError, RunError
from fedkeep.core.files import write_whole
from fedkeep.core.records import read_records
from fedkeep.core.seeds import stream
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.places import Place
from fedkeep.experiments.plugins import builtin_text
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import read_info
from fedkeep_papers.kit.cells import Measured, Slot, digest, settings_of


@dataclass(frozen=True)
class JobSpec:
    """One run of a table.

    Attributes:
        config: the name of a built-in configuration.
        overrides: dotted keys and TOML values that replace its own.
        runs: the folder of runs.
        name: for people, and of its own in the table.
        data: the folder of real data.
        source: sha256 of its files there, or what data are generated from.
    """

    config: str
    overrides: tuple[tuple[str, str], ...]
    runs: Path
    name: str
    data: Path | None
    source: Mapping[str, Any]

    @cached_property
    def file(self) -> str:
        """The name with a digest of settings and data: with others it is another run."""
        return f"{self.name}-{digest(settings_of(self.resolved()), self.source)}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.runs / self.file

    def resolved(self) -> Config:
        """Return the configuration, overrides applied."""
        return parse_config(builtin_text(self.config), self.config, dict(self.overrides))

    def slot(self, folder: Path) -> Slot[Kept]:
        """Return where the run's outcome is kept."""
        file, settings = folder / f"{self.file}.json", settings_of(self.resolved())
        return Slot(kind=Kept, file=file, settings=settings, source=self.source, rounded=True)

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> Run | None:
        """Run it, or go on with it; None if it diverged or lost its clients.

        Args:
            alone: it may use all cores.
            progress: as for ``simulate``.
        """
        config = self.resolved()
        resume = (self.folder / "run.json").exists()
        try:
            return run_config(
                config,
                folder=self.data,
                out=self.folder,
                resume=resume,
                progress=progress,
                workers=None if alone or config.run.centralised else 1,
            )
        except (NonFiniteError, RoundError) as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "fault.txt", f"{error}\n".encode())
            return None


@dataclass(frozen=True)
class Outcome:
    """The result of a run at its best epoch on ``valid``.

    Attributes:
        metric: the metric's name.
        valid, test: its values there, fractions.
        epoch: that epoch.
        epochs: how many were run.
        curve: (epoch, valid) pairs.
        fault: what went wrong (a run that diverged), else empty.
        clients: each client's test accuracy there; empty where single clients were not judged.
    """

    metric: str
    valid: Measured
    test: Measured
    epoch: Measured
    epochs: Measured
    curve: tuple[tuple[float, float], ...] = ()
    fault: str = ""
    clients: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """What is kept of a run.

    Attributes:
        settings: that it was run with.
        source: sha256 of its files of data, or what they were generated from.
        environment: where it was computed, as the run knows it.
        outcome: the result.
    """

    settings: dict[str, Any]
    source: dict[str, Any]
    environment: dict[str, Any]
    outcome: Outcome


def run_jobs(
    jobs: Sequence[JobSpec],
    workers: int = 1,
    progress: bool | None = None,
    finished: Callable[[], object] | None = None,
    on: Place | None = None,
) -> None:
    """Run the jobs that are not finished, ``workers`` at a time; one that breaks down leaves ``fault.txt``.

    Args:
        jobs: what to run.
        workers: how many at a time.
        progress: as for ``simulate``.
        finished: called after every job.
        on: where they run; None: here.

    Raises:
        FedkeepError: a job failed for another reason than a loss that became NaN, or a round without enough clients.
    """
    run_long_jobs([job for job in jobs if not is_finished(job.folder)], workers, progress, finished, on=on)


def keep(job: JobSpec, slot: Slot[Kept]) -> None:
    """Keep the outcome of a finished job, with what it depends on and where it was computed."""
    where = read_info(job.folder).get("environment") or {}
    slot.write(Kept(dict(slot.settings), dict(slot.source), where, outcome(job.folder)))


def load_job(job: JobSpec) -> Run:
    """Return the finished run of a job, with its states."""
    config = job.resolved()
    return run_config(config, data=build_data(config, job.data), out=job.folder, resume=True, progress=False)


def is_finished(folder: Path) -> bool:
    """Tell whether the folder holds a run that finished or diverged."""
    if (folder / "fault.txt").exists():
        return True
    try:
        return bool(read_info(folder).get("status") == "finished")
    except FedkeepError:
        return False


def outcome(folder: Path) -> Outcome:
    """Return a run's result at the epoch that is best on ``valid``.

    Raises:
        RunError: the folder holds no run, or one without evaluations.
    """
    info = read_info(folder)
    metric = str(info["metric"])
    records = list(read_records(folder / "records.jsonl")) if (folder / "records.jsonl").exists() else []
    aggregates = [r for r in records if r.client is None and r.metric == metric]
    valid = [r for r in aggregates if r.split == "valid" and not math.isnan(r.value)]
    if (fault := folder / "fault.txt").exists():
        curve = tuple((r.epoch, r.value) for r in valid)
        return Outcome(
            metric, math.nan, math.nan, math.nan, math.nan, curve, fault.read_text(encoding="utf-8").strip()
        )
    if not valid:
        raise RunError(
            "{folder} holds no evaluation on 'valid'; run it with evaluate_every above 0.", folder=folder
        )
    best = max(valid, key=lambda r: (r.value, -r.round))
    test = next(r.value for r in aggregates if r.split == "test" and r.round == best.round)
    curve = tuple((r.epoch, r.value) for r in valid)
    own = [r for r in records if r.split == "test" and r.metric == "accuracy"]
    clients = {r.client: r.value for r in own if r.client is not None}  # the last ones are the best epoch's
    return Outcome(metric, best.value, test, best.epoch, valid[-1].epoch, curve, clients=clients)


def folder_name(*parts: str) -> str:
    """Return a folder's name from words; anything but letters, digits, ``-`` and ``.`` becomes ``-``."""
    text = "-".join(parts)
    safe = "".join(c if c.isalnum() or c in "-." else "-" for c in text)
    return safe if safe == text else f"{safe}-{stream(0, 'folder', text) % 0x10000:04x}"
