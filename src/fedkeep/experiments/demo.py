"""The demonstration: three configurations on generated text whose best possible accuracy is known.

The text tells the topic; the label depends on topic and user. So a model of the text alone stays near
``meta["best_global"]``, and one with a private vector per user can come near ``meta["best"]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import RunError
from fedkeep.experiments.analyses import aggregation_time, embedding_map, write_analyses
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import builtin_config
from fedkeep.experiments.learned import summarize
from fedkeep.experiments.run import Run

DEFAULT_FOLDER = Path("runs") / "demo"
SHOWN = ("global-fl", "personalized-server", "personalized-fl")


@dataclass(frozen=True)
class DemoRow:
    """One configuration's result.

    Attributes:
        method: the configuration's name.
        accuracy: on ``test``, at the epoch that is best on ``valid``.
        best: the best possible for a model with the same inputs: text and user, or the text alone.
        seconds: training time.
        folder: the run's folder.
    """

    method: str
    accuracy: float
    best: float
    seconds: float
    folder: Path


@dataclass(frozen=True)
class Demo:
    """What the demonstration found: rows by built-in configuration, e.g. ``demo/personalized-fl``."""

    rows: Mapping[str, DemoRow]

    @property
    def gain(self) -> float:
        """Personalized FL's accuracy minus Global FL's, a fraction."""
        return self.rows["demo/personalized-fl"].accuracy - self.rows["demo/global-fl"].accuracy

    @property
    def lacking(self) -> float:
        """The best possible accuracy minus Personalized FL's, a fraction."""
        row = self.rows["demo/personalized-fl"]
        return row.best - row.accuracy


def demo_folder(given: Path | None) -> Path:
    """Return an unused folder: the one given, or ``runs/demo``, ``runs/demo-2``, …

    Raises:
        RunError: the given folder holds something already.
    """
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise RunError(
                "{given} already exists and is not empty. Name another folder, or leave --out away.",
                given=given,
            )
        return given
    folder, number = DEFAULT_FOLDER, 1
    while folder.exists():
        number += 1
        folder = DEFAULT_FOLDER.with_name(f"{DEFAULT_FOLDER.name}-{number}")
    return folder


def run_demo(
    out: Path,
    *,
    overrides: Mapping[str, str] | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Demo:
    """Train the configurations ``demo/*``, each in a folder of its own under ``out``, and map the user vectors.

    Args:
        out: a new or empty folder.
        overrides: replace settings of every configuration, e.g. ``{"run.epochs": "1"}`` in a test.
        progress: as for ``simulate``.
        say: called with a line of text before each step.
    """
    configs = {f"demo/{key}": builtin_config(f"demo/{key}", overrides) for key in SHOWN}
    rows: dict[str, DemoRow] = {}
    runs: dict[str, Run] = {}
    data = build_data(next(iter(configs.values())))
    for key, config in configs.items():
        say(f"Training {config.name} ...")
        folder = out / key.removeprefix("demo/")
        began = time.perf_counter()
        run = runs[key] = run_config(config, data=data, out=folder, progress=progress)
        seconds = time.perf_counter() - began
        found = summarize(run.history, "accuracy")
        personal = bool(run.method.split.private)
        best = float(data.meta["best" if personal else "best_global"])
        rows[key] = DemoRow(config.name, found.value if found else float("nan"), best, seconds, folder)
    say("Mapping the user vectors ...")
    personal_runs = {rows[key].method: run for key, run in runs.items() if run.method.split.private}
    last = runs["demo/personalized-fl"]
    analyses = {
        "embedding_map": embedding_map(personal_runs),
        "aggregation_time": aggregation_time(last.server),
    }
    write_analyses(rows["demo/personalized-fl"].folder, analyses)
    return Demo(rows)
