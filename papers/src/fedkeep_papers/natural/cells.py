"""Runs of ``natural-users``, what is kept of each, and the worth report of each method."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.build import run_config
from fedkeep.experiments.run_directory import read_info
from fedkeep.experiments.worth import counting_side
from fedkeep.report.groups import Configuration
from fedkeep.report.pairing import Side, kept, own_side
from fedkeep.report.runs import read_run
from fedkeep.report.worth_page import Comparison, comparisons, sentences
from fedkeep.tasks.ranking import discounted
from fedkeep.tasks.results import Results
from fedkeep_papers.kit.cells import Measured, Slot, digest, settings_of
from fedkeep_papers.natural.scenes import COUNTING, Cell, Scene

REFERENCES = {
    "Local": "local training alone",
    "FedAvg + fine-tuning": "FedAvg with fine-tuning",
    "FedAvg": "FedAvg",
}
"""The methods that others are compared with, and how the report calls them; counting and the shared part join them."""


@dataclass(frozen=True)
class Found:
    """A run's result on the test examples, at its round that is best on the validation examples.

    Attributes:
        metrics: by name.
        round: that round; 0 of counting.
        seconds: how long the run took, in the call that finished it.
        environment: where it was computed, as the run knows it.
    """

    metrics: dict[str, Measured]
    round: int
    seconds: float
    environment: dict[str, Any]


@dataclass(frozen=True)
class Gain:
    """A method against a reference, as the worth report finds it; gains in fractions, nats or squared error.

    Attributes:
        against: the reference.
        unit: ``points``, ``nats`` or ``in squared error``.
        users: how many.
        gain: mean, low and high end of the 95 % interval for users like these; None where there is none.
        at_least_better, at_least_worse: users, with 95 % confidence.
        better, worse: users named.
        sentences: in plain words.
    """

    against: str
    unit: str
    users: int
    gain: tuple[float, float, float] | None
    at_least_better: int
    at_least_worse: int
    better: int
    worse: int
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, c: Comparison) -> Gain:
        """Return what is kept of a comparison."""
        w, i = c.found, c.found.headline
        return cls(
            c.theirs,
            c.unit,
            len(w.clients),
            None if i is None else (i.mean, i.low, i.high),
            w.at_least_better,
            w.at_least_worse,
            w.count("better"),
            w.count("worse"),
            sentences(c),
        )


@dataclass(frozen=True)
class Gains:
    """A method against every reference, over some seeds."""

    gains: tuple[Gain, ...]


@dataclass(frozen=True)
class Run:
    """Computes a cell, or goes on with it; a task of `experiments.long_jobs`.

    Attributes:
        cell: the cell.
        data: the folder of real data.
        runs: the folder of runs.
        slot: where the result is kept.
    """

    cell: Cell
    data: Path | None
    runs: Path
    slot: Slot[Found]

    @property
    def name(self) -> str:
        """The cell's."""
        return self.cell.name

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Compute the cell and leave its file; see ``places.LongJob``."""
        folder, began = self.runs / self.slot.run, time.perf_counter()
        run_config(
            self.cell.config(),
            folder=self.data,
            out=folder,
            resume=(folder / "run.json").exists(),
            progress=progress,
            workers=None if alone else 1,
        )
        seconds = time.perf_counter() - began
        side = side_of([folder])
        environment = read_info(folder).get("environment") or {}
        self.slot.write(found_of(side, seconds, environment))


def found_of(side: Side, seconds: float, environment: Mapping[str, Any]) -> Found:
    """Return the result of one run's model."""
    examples = kept(side.runs[0])
    return Found(measured(examples(side.model)), examples.round, round(seconds, 1), dict(environment))


def measured(results: Results) -> dict[str, float]:
    """Return the metrics of a model's results of test examples, by name.

    A regression has RMSE and MAE, a ranking HR@10 and NDCG@10. Classes have the accuracy, and the perplexity e^(mean
    cross-entropy).
    """
    loss = float(results.loss.mean())
    if results.kind.right is None:
        return {"rmse": loss**0.5, "mae": float(np.abs(results.score).mean())}
    if results.kind.right_name == "hr10":
        return {"hr10": float(results.right.mean()), "ndcg10": float(discounted(results.score).mean())}
    return {"accuracy": float(results.right.mean()), "perplexity": float(np.exp(loss))}


def slot_of(cell: Cell, folder: Path, source: Mapping[str, str]) -> Slot[Found]:
    """Return where a run's result is kept, given the sha256 of its files of data."""
    settings = settings_of(cell.config())
    file = folder / f"{cell.name}-{digest(settings, source)}.json"
    return Slot(kind=Found, file=file, settings=settings, source=source, rounded=True)


def counting_slot(scene: Scene, folder: Path, source: Mapping[str, str], scale: str) -> Slot[Found]:
    """Return where counting's result is kept; it depends on the data alone."""
    data = settings_of(Cell(scene, "FedAvg", 0, scale).config())["data"]
    settings = {"method": COUNTING, "data": data}
    file = folder / f"{scene.name}-counting-{digest(settings, source)}.json"
    return Slot(kind=Found, file=file, settings=settings, source=source, rounded=True)


def gains_slot(cells: Sequence[Cell], folder: Path, source: Mapping[str, str]) -> Slot[Gains]:
    """Return where a method's worth report is kept: of the cells of its seeds, against every reference's.

    Counting, another reference, depends on the data alone, and the shared part on the method's own settings.
    """
    first = cells[0]
    others = {
        name: settings_of(replace(first, method=name).config()) for name in REFERENCES if name != first.method
    }
    settings = settings_of(first.config()) | {
        "seeds": [cell.seed for cell in cells],
        "worth": first.method,
        "against": others,
    }
    name = first.name.rpartition("-")[0]
    return Slot(
        kind=Gains,
        file=folder / f"{name}-worth-{digest(settings, source)}.json",
        settings=settings,
        source=source,
        rounded=True,
    )


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a finished run."""
    try:
        return bool(read_info(folder).get("status") == "finished")
    except FedkeepError:
        return False


def side_of(folders: Sequence[Path], label: str = "") -> Side:
    """Return the model of runs that differ in their seed only."""
    runs = tuple(read_run(folder) for folder in folders)
    return own_side(Configuration(label or runs[0].name, runs, "0"))


def counting_found(folder: Path, data: Path | None) -> Found:
    """Return counting's result on the test examples of a run."""
    began = time.perf_counter()
    side = counting_side(side_of([folder]), data)
    return found_of(side, time.perf_counter() - began, read_info(folder).get("environment") or {})


def gains_of(method: str, folders: Mapping[str, Sequence[Path]], data: Path | None) -> Gains:
    """Compare a method with the references.

    Args:
        method: its name.
        folders: of finished runs by method, each with the same seeds in the same order.
        data: the folder of real data, for counting.
    """
    own = side_of(folders[method], method)
    others = [side_of(folders[name], label) for name, label in REFERENCES.items() if name != method]
    found, faults = comparisons(own, [*others, counting_side(own, data)])
    if faults:
        raise FedkeepError(faults[0])
    return Gains(tuple(Gain.of(c) for c in found))
