"""Cells of KTEPS's tables: one training run with its personalisation curves, kept as a small file of numbers.

Test reviews that also stand in training are counted, and accuracy is measured without them too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, NonFiniteError
from fedkeep.core.records import read_records
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines import Judged
from fedkeep.experiments.build import build_data, build_method, build_model, run_config
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.drive import SHARED
from fedkeep.experiments.environment import check_device, environment
from fedkeep.experiments.personalize import personalization_curve
from fedkeep.experiments.plugins import builtin_text
from fedkeep.experiments.run import Run
from fedkeep.methods.base import Predict
from fedkeep.tasks.results import Model
from fedkeep_papers.kit.cells import LATER, Finished, Slot, digest, settings_of
from fedkeep_papers.kteps.neighbours import word_neighbours

Overrides = tuple[tuple[str, str], ...]
"""Dotted keys and TOML values that replace a configuration's own."""


@dataclass(frozen=True)
class Cell:
    """One training run of a table, and what is measured on it.

    Attributes:
        name: for its file; letters, digits, ``-`` and ``.``.
        config: the name of a built-in configuration; its table ``personalization`` gives steps and interval.
        overrides: dotted keys and TOML values that replace its own, the seed among them.
        ratios: of the learning rate, a personalisation curve each.
        inferences: further values of the option ``method.predict``, tested on the curve at the configuration's own
            ratio.
        words: words whose neighbours are compared in one further round (Figure 5).
        split: the examples that curves are measured on.
    """

    name: str
    config: str
    overrides: Overrides = ()
    ratios: tuple[float, ...] = ()
    inferences: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    split: str = "test"

    def resolved(self, *further: tuple[str, str]) -> Config:
        """Return the configuration, overrides applied."""
        return parse_config(builtin_text(self.config), self.config, dict((*self.overrides, *further)))

    def settings(self) -> dict[str, Any]:
        """Return what the numbers depend on, but for data and code; what has its default value is left out."""
        return {
            "config": settings_of(self.resolved()),
            "ratios": list(self.ratios),
            "inferences": list(self.inferences),
            "words": list(self.words),
            **({} if self.split == "test" else {"split": self.split}),
        }

    def slot(self, folder: Path, source: Mapping[str, str]) -> Slot[Numbers]:
        """Return where the cell's numbers stand, given the sha256 of its files of data."""
        settings = self.settings()
        file = folder / f"{self.name}-{digest(settings, source)}.json"
        return Slot(kind=Numbers, file=file, settings=settings, source=source, rounded=True)


@dataclass(frozen=True)
class Numbers:
    """What a finished cell leaves.

    Attributes:
        cell: its name.
        settings: everything that the numbers depend on, but for data and code.
        source: sha256 of the files of data.
        environment: where it was computed.
        rounds: how many were run.
        seconds: of training, evaluations included.
        test: each client's accuracy with its own model after the last round.
        shared: each client's accuracy with the shared part alone; empty where that cannot predict.
        shared_curve: its mean over clients after each evaluation: (round, accuracy).
        test_curve: the mean over clients with their own models: (round, accuracy).
        repeats: by client, how many of its test reviews also stand in training (``repeats.py``).
        again, rest: by model (``own``, ``shared``) and client, the accuracy on these and on the others.
        loss: training loss of each round.
        upload_bytes, download_bytes, private_bytes: per client and round; the private ones stay there.
        steps: mini-batches before each test of a personalisation curve.
        curves: by ratio, prediction (``own`` is the method's) and client.
        neighbours: what ``word_neighbours`` returns.
        fault: why there are no numbers: the training broke down.
    """

    cell: str
    settings: dict[str, Any]
    source: dict[str, str]
    environment: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    test: dict[str, float] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)
    shared_curve: list[list[float]] = field(default_factory=list)
    test_curve: list[list[float]] = field(default_factory=list)
    repeats: dict[str, int] = field(default_factory=dict, metadata=LATER)
    again: dict[str, dict[str, float]] = field(default_factory=dict, metadata=LATER)
    rest: dict[str, dict[str, float]] = field(default_factory=dict, metadata=LATER)
    loss: list[float | None] = field(default_factory=list)
    upload_bytes: float | None = None
    download_bytes: float | None = None
    private_bytes: int = 0
    steps: list[int] = field(default_factory=list)
    curves: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    neighbours: dict[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class CellJob:
    """A cell to compute: where its data are, where its numbers go, and where it may keep its run meanwhile."""

    cell: Cell
    data: Path | None
    source: dict[str, str]
    slot: Slot[Numbers]
    scratch: Path

    @property
    def name(self) -> str:
        """The cell's name, with the digest of its settings."""
        return self.slot.file.stem

    def check(self) -> None:
        """Check what needs no data: that the method knows its options, and the curve's steps.

        Raises:
            ConfigError: it names the cell and its method.
        """
        config = self.cell.resolved()
        check_device(config.run.device)
        try:
            build_method(config.method)
        except ConfigError as error:
            raise ConfigError(
                "{cell} runs {config}, which cannot have its settings. {why} --set changes all "
                "runs of a table: leave the setting out, or this run with --only.",
                cell=self.cell.name,
                config=self.cell.config,
                why=error,
            ) from error

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Train the cell, measure it, and leave its file; one whose training breaks down leaves its fault.

        It goes on with a run that was interrupted.

        Args:
            alone: it may use all cores, otherwise one.
            progress: as for ``simulate``.
        """
        cell = self.cell
        config = cell.resolved().model_copy(update={"personalization": None})  # the curves are measured below
        data = build_data(config, self.data)
        about: dict[str, Any] = {
            "cell": cell.name,
            "settings": cell.settings(),
            "source": self.source,
            "environment": environment(config.run.device),
            "private_bytes": _private_bytes(config, data, self.data),
        }
        scratch = self.scratch / self.name
        began = time.perf_counter()
        try:
            run = run_config(
                config if alone else _for_one_core(config),
                data=data,
                folder=self.data,
                out=scratch,
                resume=(scratch / "run.json").exists(),
                progress=progress,
            ).last  # as the paper has it
            seconds = _seconds(run, time.perf_counter() - began)
            self.slot.write(
                Numbers(**about, seconds=seconds, **_measured(run), **_curves(run, cell, progress))
            )
        except NonFiniteError as error:
            self.slot.write(Numbers(**about, fault=str(error)))
        if scratch.exists():
            shutil.rmtree(scratch)


def missing(tasks: Sequence[CellJob]) -> list[CellJob]:
    """Return the tasks whose numbers are not there yet, each once."""
    return list({task.name: task for task in tasks if task.slot.read() is None}.values())


def note_on_gpus(known: Mapping[str, Finished[Numbers] | None]) -> str:
    """Return Markdown about the cells, by name, that were trained on a GPU; empty: none."""
    gpus = {name: f.result.environment.get("gpu") for name, f in known.items() if f is not None}
    on = {gpu: [name for name, its in gpus.items() if its == gpu] for gpu in gpus.values() if gpu}
    told = "; ".join(f"on one {gpu} {', '.join(names)}" for gpu, names in on.items())
    return f"**On a GPU.** Trained {told}. All others were trained on CPUs." if told else ""


def _for_one_core(config: Config) -> Config:
    if config.run.centralised or config.run.device != "cpu":
        return config
    return config.model_copy(update={"run": replace(config.run, engine="sequential")})


def _private_bytes(config: Config, data: FederatedData, folder: Path | None) -> int:
    method = build_method(config.method)
    model = build_model(config, data, folder)
    module = method.extend(model) if method.extend else model
    own = method.split.personal(dict(module.state_dict()))
    return sum(value.numel() * value.element_size() for value in own.values())


def _seconds(run: Run, wall: float) -> float:
    """Return the seconds of all rounds; a run that was interrupted has them in its folder."""
    if run.folder is None:
        return wall
    timings = run.folder / "timings.jsonl"
    known = [r.value for r in read_records(timings) if r.metric == "seconds"] if timings.exists() else []
    return max(sum(known), wall)


def _measured(run: Run) -> dict[str, Any]:
    def curve(split: str) -> list[list[float]]:
        metric = "accuracy_user_mean"
        return [[r.round, r.value] for r in run.history if r.split == split and r.metric == metric]

    def traffic(metric: str) -> float | None:
        return next((r.value for r in reversed(run.history) if r.metric == metric), None)

    models: tuple[Model, ...] = ("own", "shared") if curve(SHARED) else ("own",)
    judged = run.judge(models)[0]
    clients = {m: {c: value for c, (value, _) in judged.per_client(m).items()} for m in models}
    return {
        "rounds": run.round,
        "test": clients["own"],
        "shared": clients.get("shared", {}),
        "test_curve": curve("test"),
        "shared_curve": curve(SHARED),
        "loss": [r.value for r in run.history if r.split == "train" and r.metric == "loss"],
        **by_repeats(run.data, judged),
        "upload_bytes": traffic("upload_bytes"),
        "download_bytes": traffic("download_bytes"),
    }


def _curves(run: Run, cell: Cell, progress: bool | None) -> dict[str, Any]:
    config = cell.resolved()
    usual = config.personalization
    predicts: dict[str, Predict] = {
        how: build_method(cell.resolved(("method.predict", json.dumps(how))).method).predict
        for how in cell.inferences
    }
    steps: list[int] = []
    curves: dict[str, dict[str, dict[str, list[float]]]] = {}
    for ratio in cell.ratios if usual is not None else ():
        assert usual is not None
        found = personalization_curve(
            run,
            replace(usual, ratio=ratio),
            predicts=predicts if ratio == usual.ratio else {},
            split=cell.split,
            progress=progress,
        )
        steps = list(found.steps)
        curves[str(ratio)] = {
            predict: {client: list(values) for client, values in own.items()}
            for predict, own in found.accuracy.items()
        }
    neighbours = word_neighbours(run, cell.words) if cell.words else {}
    return {"steps": steps, "curves": curves, "neighbours": neighbours}


def repeated(data: FederatedData) -> np.ndarray:
    """Return whether each row is a test review with the words of some client's training review, (rows,) bool.

    Of a long review the words that are read count, the first 200.
    """
    texts = data.columns["text"]
    assert isinstance(texts, Ragged)

    def rows(part: str) -> Iterable[int]:
        return (row for client in range(len(data)) for row in data.rows(client, part))

    def words(row: int) -> bytes:
        return texts.values[texts.offsets[row] : texts.offsets[row + 1]].tobytes()

    known = {words(row) for row in rows("train")}
    found = np.zeros(len(texts), bool)
    found[[row for row in rows("test") if words(row) in known]] = True
    return found


def by_repeats(data: FederatedData, judged: Judged) -> dict[str, Any]:
    """Return how many test examples repeat a training one, by client, and accuracy on these and on the others.

    A client that has none of them has no accuracy there.
    """
    repeats = repeated(data)[judged.examples[0].row]

    def mean(values: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
        clients = judged.examples[0].client[chosen]
        number = np.bincount(clients, minlength=len(data))
        sums = np.bincount(clients, values[chosen], len(data))
        return {data.ids[c]: float(sums[c] / number[c]) for c in np.flatnonzero(number).tolist()}

    right = {model: judged.of(model).right() for model in judged.models}
    counts = np.bincount(judged.examples[0].client[repeats], minlength=len(data))
    return {
        "repeats": {data.ids[c]: int(counts[c]) for c in np.flatnonzero(counts).tolist()},
        "again": {model: mean(values, repeats) for model, values in right.items()},
        "rest": {model: mean(values, ~repeats) for model, values in right.items()},
    }
