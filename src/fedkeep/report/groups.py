"""Configurations: runs that differ in their seed only, and the metric that a report is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.core.describe import differences
from fedkeep.core.records import Record, by_key
from fedkeep.report import wording
from fedkeep.report.charts import LOOKS
from fedkeep.report.runs import RunFiles
from fedkeep.report.text_tables import mean_std


@dataclass(frozen=True, slots=True)
class Configuration:
    """Runs that differ in their seed only, with a label for people and a colour slot."""

    label: str
    runs: tuple[RunFiles, ...]
    slot: str

    @property
    def centralised(self) -> bool:
        """Whether this is centralised training."""
        return bool(self.runs[0].info.get("centralised"))

    @property
    def best(self) -> float | None:
        """The best possible value that the data set's generator knows.

        For a model without private parameters, that of a model that doesn't know the user, where it is known.
        """
        table = self.runs[0].info.get("split_table") or []
        no_user = bool(table) and not any(row["half"] == "private" for row in table)
        return self.best_global if no_user and self.best_global is not None else self.best_personal

    @property
    def best_personal(self) -> float | None:
        """The best possible value of a model that knows the user."""
        best: float | None = self.runs[0].info.get("best")
        return best

    @property
    def best_global(self) -> float | None:
        """The best possible value of a model that doesn't know the user."""
        best: float | None = self.runs[0].info.get("best_global")
        return best

    def selected(self, metric: str, chosen_by: str) -> tuple[float, float | None]:
        """Return mean and deviation over seeds of the test metric at each run's best valid round; NaN for none."""
        found = [r for run in self.runs if (r := run.selected(metric, chosen_by)) is not None]
        return mean_std(r.value for r in found)

    def best_valid(self, metric: str) -> list[Record]:
        """Return each run's best valid record."""
        return [r for run in self.runs if (r := run.best_valid(metric)) is not None]


@dataclass(frozen=True, slots=True)
class Scene:
    """Configurations that were run on data of the same name and are judged by the same metrics."""

    label: str
    groups: tuple[Configuration, ...]
    metrics: tuple[str, ...]

    @property
    def differing(self) -> tuple[str, ...]:
        """What of the data's hashes differs between runs, as far as both know it; data of the seed do not count."""
        data = [run.info.get("data") or {} for g in self.groups for run in g.runs]
        known = [
            d["fingerprint"]
            for d in data
            if isinstance(d.get("fingerprint"), dict) and not d.get("follows_seed")
        ]
        found: set[str] = set()
        for one in known[1:]:
            common = known[0].keys() & one.keys()
            lines = differences({k: known[0][k] for k in common}, {k: one[k] for k in common})
            found |= {line.partition(": ")[0] for line in lines}
        return tuple(sorted(found))


def scenes(runs: Sequence[RunFiles]) -> list[Scene]:
    """Sort runs into scenes by data and metric, and within one into configurations; labels are told apart."""
    shown = by_key(((run.data_name, tuple(main_metrics([run]))), run) for run in runs)
    names = [name for name, _ in shown]
    out = []
    for (name, metrics), own in shown.items():
        label = name if names.count(name) == 1 else f"{name}, {wording.metric_inline(metrics[0])}"
        suffix = f", {label}" if len(shown) > 1 else ""
        out.append(Scene(wording.printable(label), tuple(configurations(own, suffix)), metrics))
    return out


def configurations(runs: Sequence[RunFiles], suffix: str = "") -> list[Configuration]:
    """Group runs that differ in their seed only; those of one name that differ otherwise get their folder's name."""
    by_settings = by_key((json.dumps(run.settings, sort_keys=True), run) for run in runs)
    groups = [own for alike in by_settings.values() for own in _apart(alike)]
    names = [own[0].name for own in groups]
    out = []
    for i, own in enumerate(groups):
        name = own[0].name
        label = name if names.count(name) == 1 else f"{name} ({own[0].folder.resolve().name})"
        out.append(Configuration(wording.printable(label + suffix), tuple(own), str(i % LOOKS)))
    return out


def _apart(alike: Sequence[RunFiles]) -> list[list[RunFiles]]:
    """Tell apart runs of the same settings: those that begin with other values than their seeds explain, and doubles.

    Initial values, frozen ones too, follow the seed (every seed has its own) or do not (all have the same, as zeros
    and read vectors are). Where some seeds share values and others don't, something else than the seed differs.
    """
    seeds = {run.seed for run in alike}
    first = {run.seed: run for run in reversed(alike)}  # of each seed
    names = sorted({name for run in alike for name in run.begins_with})
    telling = [
        name for name in names if 1 < len({run.begins_with.get(name) for run in first.values()}) < len(seeds)
    ]
    groups: dict[tuple[str | None, ...], list[RunFiles]] = {}
    for run in alike:
        key = tuple(run.begins_with.get(name) for name in telling)
        if any(run.seed == other.seed for other in groups.get(key, [])):
            key += (str(run.folder),)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def main_metrics(runs: Sequence[RunFiles]) -> list[str]:
    """Return the metric that the report is about, one for each task; those that run.json names come first.

    Of a task it is the one that its round was chosen by, else that run.json names, else AUC, else accuracy, else RMSE, else another, else the loss, of
    those measured on valid or test. Where nothing was measured it is the one that run.json names, else accuracy.
    """
    found = sorted(
        {r.metric for run in runs for r in run.records if r.client is None and r.split in ("valid", "test")}
    )
    named = [m for run in runs if isinstance(m := run.info.get("metric"), str)]
    others = sorted(found, key=lambda m: (wording.lower_is_better(m), wording.base(m) == "loss"))
    best = {metric.partition("/")[2]: metric for run in runs for metric in run.best}
    found = [m for m in found if best.get(m.partition("/")[2], m) == m]
    chosen: dict[str, str] = {}
    for wanted in dict.fromkeys(map(wording.base, (*named, "auc", "accuracy", "rmse", *others))):
        for metric in (m for m in found if wording.base(m) == wanted):
            chosen.setdefault(metric.partition("/")[2], metric)
    return list(chosen.values()) or [*named, "accuracy"][:1]


def user_metric(runs: Sequence[RunFiles], metric: str) -> str:
    """Return the metric measured for each user: the given one, else accuracy, of the same task."""
    found = {r.metric for run in runs for r in run.records if r.client is not None and r.split == "test"}
    _, slash, task = metric.partition("/")
    choices = [m for m in (metric, f"accuracy{slash}{task}") if m in found]
    return choices[0] if choices else metric
