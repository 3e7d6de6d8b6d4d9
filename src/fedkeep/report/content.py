"""From runs to the content of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedkeep.report import analyses, facts, measured, wording, worth_blocks
from fedkeep.report.blocks import Block, Content, Section
from fedkeep.report.groups import Configuration, Scene, scenes
from fedkeep.report.results import Row
from fedkeep.report.runs import RunFiles


def build(runs: Sequence[RunFiles], title: str, results: Sequence[Row] = ()) -> Content:
    """Return the content of a report on these runs, and on published results where given."""
    every = scenes(runs)
    groups = [g for scene in every for g in scene.groups]
    named = [(scene, scene.label if len(every) > 1 else "") for scene in every]
    sections = [
        Section("results", "Results", tuple(measured.results(every))),
        Section("runs", "Every run", (measured.runs_table(every),), folded=len(runs) > 4),
        Section(
            "worth",
            "What personalisation was worth",
            _joined(worth_blocks.blocks(scene.groups) for scene in every),
        ),
        Section("published", "Beside the published numbers", tuple(measured.published(results))),
        Section(
            "curves",
            "Learning curves",
            _joined(measured.curves(s.groups, s.metrics, label) for s, label in named),
        ),
        Section(
            "users",
            "Spread over users",
            _joined(measured.users(s.groups, s.metrics, label) for s, label in named),
        ),
        *analyses.sections(groups),
        Section("traffic", "Traffic and time", tuple(facts.traffic(groups))),
        Section("split", "What is federated, what is private", tuple(facts.split(groups))),
        Section("data", "Data", (*facts.partitions(groups), *facts.table_of(groups, "data"))),
        Section("configuration", "Configuration", tuple(facts.configuration(groups))),
        Section("environment", "Environment", tuple(facts.table_of(groups, "environment"))),
    ]
    cards = [card for scene in every for card in measured.cards(scene.groups, scene.metrics[0])]
    filled = tuple(s for s in sections if s.blocks)
    summary = tuple(_summary(g, scene) for scene in every for g in scene.groups)
    return Content(title, _lead(runs, groups), tuple(cards), filled, summary)


def _joined(parts: Iterable[Iterable[Block]]) -> tuple[Block, ...]:
    return tuple(block for part in parts for block in part)


def _lead(runs: Sequence[RunFiles], groups: Sequence[Configuration]) -> str:
    data = [run.info.get("data") or {} for run in runs]
    names = list(dict.fromkeys(wording.printable(run.data_name) for run in runs if run.data_name))
    clients = list(dict.fromkeys(d["clients"] for d in data if isinstance(d.get("clients"), int)))
    created = sorted(str(run.info["created"]) for run in runs if run.info.get("created"))
    words = [wording.count(len(groups), "configuration")]
    words += [wording.count(len(runs), "run")] if len(runs) != len(groups) else []
    words += [f"data {', '.join(names)}"] if names else []
    words += [" or ".join(wording.count(c, "user") for c in clients)] if clients else []
    words += [f"started {wording.printable(created[0][:16].replace('T', ' '))}"] if created else []
    return " · ".join(words)


def _summary(g: Configuration, scene: Scene) -> dict[str, Any]:
    metric = scene.metrics[0]
    value, std = g.selected(metric, metric)
    return {
        "configuration": g.label,
        "data": scene.label,
        "runs": [run.folder.resolve().name for run in g.runs],
        "seeds": [run.seed for run in g.runs],
        "finished": all(run.finished for run in g.runs),
        "centralised": g.centralised,
        "metric": metric,
        "test": None if math.isnan(value) else value,
        "std": std,
        "best_possible": g.best,
        "bytes_down": facts.bytes_each(g.runs[0], "down"),
        "bytes_up": facts.bytes_each(g.runs[0], "up"),
    }
