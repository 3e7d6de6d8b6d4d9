"""Runs many configurations, each in its own run folder, so that an interrupted table goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import FedkeepError, NonFiniteError, RunError
from fedkeep.core.records import Record, read_records
from fedkeep.core.seeds import stream
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.builtin import builtin_text
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.run_directory import read_info
from fedkeep.experiments.simulate import Run
from fedkeep.experiments.tasks import run_tasks


@dataclass(frozen=True)
class JobSpec:
    """One run of a table.

    Attributes:
        config: the name of a built-in configuration.
        overrides: dotted keys and TOML values that replace its own.
        folder: the run's folder.
        data: the folder of real data.
    """

    config: str
    overrides: tuple[tuple[str, str], ...]
    folder: Path
    data: Path | None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> Run | None:
        """Run it, or go on with it; None if it diverged.

        Args:
            alone: it may use all cores.
            progress: as for ``simulate``.
        """
        config = parse_config(builtin_text(self.config), self.config, dict(self.overrides))
        resume = (self.folder / "run.json").exists()
        try:
            return run_config(
                config, folder=self.data, out=self.folder, resume=resume, progress=progress,
                workers=None if alone or config.run.engine == "pooled" else 1,
            )  # fmt: skip
        except NonFiniteError as error:
            (self.folder / "fault.txt").write_text(f"{error}\n", encoding="utf-8")
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
    """

    metric: str
    valid: float
    test: float
    epoch: float
    epochs: float
    curve: tuple[tuple[float, float], ...] = ()
    fault: str = ""


def run_jobs(jobs: Sequence[JobSpec], workers: int = 1, progress: bool | None = None) -> None:
    """Run the jobs that are not finished, ``workers`` at a time; a run that diverges leaves a file ``fault.txt``.

    Raises:
        FedkeepError: a job failed for another reason than a loss that became NaN.
    """
    run_tasks([job for job in jobs if not is_finished(job.folder)], workers, progress)


def load_job(job: JobSpec) -> Run:
    """Return the finished run of a job, with its states."""
    config = parse_config(builtin_text(job.config), job.config, dict(job.overrides))
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
        raise RunError(f"{folder} holds no evaluation on 'valid'; run it with evaluate_every above 0.")
    best = max(valid, key=lambda r: (r.value, -r.round))
    test = next(r.value for r in aggregates if r.split == "test" and r.round == best.round)
    curve = tuple((r.epoch, r.value) for r in valid)
    return Outcome(metric, best.value, test, best.epoch, valid[-1].epoch, curve)


def folder_name(*parts: str) -> str:
    """Return a folder's name from words; anything but letters, digits, ``-`` and ``.`` becomes ``-``."""
    text = "-".join(parts)
    safe = "".join(c if c.isalnum() or c in "-." else "-" for c in text)
    return safe if safe == text else f"{safe}-{stream(0, 'folder', text) % 0x10000:04x}"


def per_client(folder: Path, metric: str = "accuracy") -> Mapping[str, float]:
    """Return each client's test metric at the best epoch."""
    found: dict[str, Record] = {}
    for record in read_records(folder / "records.jsonl"):
        if record.client is not None and record.split == "test" and record.metric == metric:
            found[record.client] = record
    return {client: r.value for client, r in found.items()}
