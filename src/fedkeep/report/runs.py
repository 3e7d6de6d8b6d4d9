"""Reads a run directory: run.json, records.jsonl, timings.jsonl, personalization.jsonl, analyses.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError, raising
from fedkeep.core.records import Record, read_records, read_sealed_records
from fedkeep.core.run_files import Commit, numerics_of, read_commit, read_info
from fedkeep.core.sealed import read_sealed
from fedkeep.tasks.results import ExampleResults, read_examples

FINISHED, FAILED = "finished", "failed"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a report needs of one run.

    Attributes:
        folder: the run directory.
        info: the content of run.json.
        records: all measured numbers in the order written, then the timings and the curves of fine-tuning.
        analyses: the content of analyses.json, checked; empty where there is none.
        finished: whether run.json's status says so.
        notes: what a reader must know: unfinished, lines of no finished round, analyses of an earlier round.
        examples: every test example's result at the round chosen on validation; None where the folder has none.
        best: the round that the run chose on validation, by the metric that it chose by, one for each task.
    """

    folder: Path
    info: dict[str, Any]
    records: tuple[Record, ...]
    analyses: dict[str, dict[str, Any]]
    finished: bool
    notes: tuple[str, ...]
    examples: ExampleResults | None = None
    best: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``finished``, ``failed`` or ``not finished``."""
        failed = self.info.get("status") == FAILED
        return FINISHED if self.finished else FAILED if failed else "not finished"

    @property
    def name(self) -> str:
        """The run's name, or its folder's."""
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        """The method's name; empty where run.json has none."""
        method = self.info.get("method")
        return str((method.get("name") if isinstance(method, dict) else method) or "")

    @property
    def data_name(self) -> str:
        """The data set's name; empty where run.json has none."""
        return str((self.info.get("data") or {}).get("name") or "")

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        seed = self.info.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides the run's numbers but its seed, and what follows from that, as plain data.

        Which values a model begins with, frozen ones too, depends on the seed in general, so they are left out: see
        ``begins_with``. So are the data's own hashes where ``run.json`` says that they were made or divided by the
        run's seed.
        """
        config = {k: v for k, v in (self.info.get("config") or {}).items() if k not in ("seed", "out")}
        identity = {k: v for k, v in (self.info.get("identity") or {}).items() if k not in ("seed", "data")}
        model = identity.get("model")
        if isinstance(model, dict):
            seeds_own = ("initial_sha256", "frozen_sha256")
            identity["model"] = {k: v for k, v in model.items() if k not in seeds_own}
        data = self.info.get("data") or {}
        seeded, source = bool(data.get("follows_seed")), data.get("source")
        if seeded and isinstance(source, dict):
            source = {k: v for k, v in source.items() if k != "seed"}
        return {
            "name": self.name,
            "method": self.method,
            "centralised": bool(self.info.get("centralised")),
            "config": config,
            "run": identity,
            "data": {"source": source, "hashes": None if seeded else data.get("fingerprint")},
            "numerics": numerics_of(self.info),
        }

    @property
    def begins_with(self) -> dict[str, str]:
        """A hash of each initial value by name, trained or frozen; empty where it is not known."""
        return {**self._initial("trained"), **self.frozen}

    @property
    def frozen(self) -> dict[str, str]:
        """A hash of each frozen value by name; empty where it is not known."""
        return self._initial("frozen")

    def _initial(self, kind: str) -> dict[str, str]:
        found = (self.info.get("initial") or {}).get(kind)
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    @property
    def rounds(self) -> int:
        """Rounds finished at the last record."""
        return max((r.round for r in self.records), default=0)

    def series(self, metric: str, split: str) -> list[Record]:
        """Return the aggregate records of a metric and split with a finite value, by round, the last of equals."""
        chosen = {}
        for r in self.records:
            if r.client is None and r.metric == metric and r.split == split and math.isfinite(r.value):
                chosen[r.round] = r
        return [chosen[number] for number in sorted(chosen)]

    def clients(self, metric: str, split: str = "test") -> dict[str, Record]:
        """Return the last record of every client for a metric and split."""
        own = (r for r in self.records if r.client is not None and r.metric == metric and r.split == split)
        return {r.client: r for r in own if r.client is not None}

    def selected(self, metric: str, chosen_by: str) -> Record | None:
        """Return the test record of ``metric`` at the round chosen by ``chosen_by``, else the last one."""
        tests = {r.round: r for r in self.series(metric, "test")}
        best = self.best_valid(chosen_by)
        if best is not None and best.round in tests:
            return tests[best.round]
        return tests[max(tests)] if tests else None

    def best_valid(self, metric: str) -> Record | None:
        """Return the valid record at the round that the run chose by this metric; None where it is not finite."""
        return next((r for r in self.series(metric, "valid") if r.round == self.best.get(metric)), None)


def read_run(folder: Path) -> RunFiles:
    """Read a run directory's files: run.json, commit.json, records.jsonl, and where they exist the others.

    A run that is not finished may lack records or have lines of a round that was never committed; both are noted.

    Raises:
        RunError: there is no run.json, or a file is damaged, missing or of another run; names the file.
    """
    info = read_info(folder)
    commit = read_commit(folder, info)
    finished = info.get("status") == FINISHED
    notes = []
    if not finished:
        status = info.get("status") or "not known"
        failed = f" It ended in an error: {info['error']}" if "error" in info else ""
        notes.append(f"This run is not finished (status: {status}); its numbers may still change.{failed}")
    if isinstance(older := info.get("continues"), dict):
        notes.append(f"It continues another run after round {older['round']}: {older['told']}.")
    records: list[Record] = []
    for name, extent in (("records.jsonl", commit.records), ("timings.jsonl", commit.timings)):
        path = folder / name
        records += read_records(path, extent)
        if path.exists() and path.stat().st_size > extent.size:
            notes.append(
                f"What {name} holds after round {commit.round} is of no finished round and is left out."
            )
    if (path := folder / "personalization.jsonl").exists():
        lines, about = read_sealed_records(path)
        if _is_of(path, about, commit, notes):
            records += lines
    elif finished and (info.get("config") or {}).get("personalization"):
        notes.append(
            f"{path.name} is missing, so the curve of fine-tuning is not shown; resume the run to make it."
        )
    analyses, about = read_sealed_analyses(path := folder / "analyses.json")
    if analyses and not _is_of(path, about, commit, notes):
        analyses = {}
    if missing := sorted(set(info.get("analyses") or []) - set(analyses)):
        notes.append(f"analyses.json lacks {', '.join(missing)}, which run.json lists.")
    if not records:
        notes.append("It has no records.")
    examples = None
    if commit.examples and not (folder / commit.examples).exists():
        notes.append(f"{commit.examples} is missing, so what personalisation was worth cannot be said.")
    else:
        examples = read_examples(folder, commit)
    return RunFiles(folder, info, tuple(records), analyses, finished, tuple(notes), examples, _best(commit))


def _best(commit: Commit) -> dict[str, int]:
    """Return the rounds that a run chose, by metric."""
    with raising(
        RunError,
        "{run}: commit.json does not say which rounds were best.",
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        run=commit.run,
    ):
        return {metric: int(found["round"]) for metric, found in commit.extra.get("best", {}).items()}


def _is_of(path: Path, about: dict[str, Any], commit: Commit, notes: list[str]) -> bool:
    """Tell whether a file is of the round that the run's answer is of; note it where it is not."""
    if about.get("run") != commit.run:
        raise RunError(
            "{file} is of another run than run.json beside it. Delete it, or restore the run's own.",
            file=path,
        )
    if about.get("round") != commit.chosen:
        notes.append(
            f"{path.name} was made after round {about.get('round')}, the run stands at {commit.chosen}: it is left out."
        )
        return False
    return True


def read_sealed_analyses(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the analyses, and of which run and round they are; both empty where the file doesn't exist.

    Raises:
        RunError: the file is damaged; names the file.
    """
    if not path.exists():
        return {}, {}
    content = read_sealed(path)
    about = content.pop("about", {})
    del content["format"]
    return content, dict(about)
