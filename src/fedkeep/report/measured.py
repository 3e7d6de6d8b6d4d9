"""What was measured: results, learning curves, the spread over users."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from fedkeep.core.records import by_key
from fedkeep.metrics import CLASS_METRICS, ClientSummary, per_client
from fedkeep.report import wording
from fedkeep.report.blocks import Block, Card, Figure, Text
from fedkeep.report.charts import MOST_PLACES, Curve, Legend, Lines, Spread, Strip, mark_of
from fedkeep.report.groups import Configuration, Scene, user_metric
from fedkeep.report.text_tables import TextTable, mean_std


def cards(groups: Sequence[Configuration], metric: str) -> Iterator[Card]:
    """Yield the headline number of each configuration: on test, or while there is none the best on valid."""
    name = wording.metric_inline(metric)
    for g in groups:
        value, std = g.selected(metric, metric)
        note = f"test {name}"
        if g.best is not None:
            note += f" · best possible {wording.number(g.best, metric)}"
        if math.isnan(value):
            value, std = mean_std(r.value for r in g.best_valid(metric))
            note = "nothing measured yet" if math.isnan(value) else f"valid {name} so far"
        if std is not None:
            note += f" · {wording.count(len(g.runs), 'seed')}"
        spread = wording.spread(value, std, metric).partition(" ± ")[2].removesuffix(" %")
        yield Card(g.label, wording.number(value, metric), f"± {spread}" if spread else "", note, g.slot)


def results(scenes: Sequence[Scene]) -> Iterator[Block]:
    """Yield what a reader must know of the runs, and the results of each scene and metric."""
    for g in (g for scene in scenes for g in scene.groups):
        for run in g.runs:
            label = f"{g.label}, seed {run.seed}" if len(g.runs) > 1 else g.label
            for note in run.notes:
                yield Text(f"{label}: {note}", warning=True)
    for scene in scenes:
        if scene.differing:
            name = wording.printable(scene.groups[0].runs[0].data_name)
            yield Text(
                f"These runs are on data called {name} that differ in "
                f"{', '.join(map(wording.printable, scene.differing))}. Their numbers do not compare as those "
                f"on the same data do.",
                warning=True,
            )
        for metric in scene.metrics:
            titles = [scene.label] if len(scenes) > 1 else []
            titles += [wording.metric_name(metric)] if len(scene.metrics) > 1 else []
            yield results_table(scene.groups, metric, title=": ".join(titles))
            yield from class_table(scene.groups, metric, scene.label if len(scenes) > 1 else "")


def results_table(groups: Sequence[Configuration], metric: str, title: str = "") -> TextTable:
    """Return the test metric of each configuration beside the best possible one.

    Where the metric is defined for none of them, as AUC with one class alone, it is ``user_metric`` on test.
    """
    runs = [run for g in groups for run in g.runs]
    shown = metric
    if all(math.isnan(g.selected(metric, metric)[0]) for g in groups):
        shown = user_metric(runs, metric)
    user_mean = wording.user_mean(user_metric(runs, metric))
    known = [
        any(not math.isnan(g.selected(user_mean, metric)[0]) for g in groups),
        shown == metric and any(g.best is not None for g in groups),
    ]
    rows = []
    for g in groups:
        value, std = g.selected(shown, metric)
        valid = mean_std(r.value for r in g.best_valid(metric))
        gap = value - g.best if g.best is not None else None
        cells = [g.label, wording.spread(value, std, shown)]
        cells += [wording.spread(*g.selected(user_mean, metric), user_mean)] if known[0] else []
        cells += [wording.number(g.best, metric), wording.difference(gap, metric)] if known[1] else []
        rows.append((*cells, wording.spread(*valid, metric)))
    name = wording.metric_inline(metric)
    columns = ["configuration", f"test {wording.metric_inline(shown)}"]
    columns += [wording.metric_inline(user_mean)] if known[0] else []
    columns += ["best possible", "distance to it"] if known[1] else []
    note = (
        f"Test numbers are taken at the round with the best valid {name} where the test set was measured there, "
        "else at the last round measured. "
    )
    remote = any(run.info.get("engine") == "remote" for g in groups for run in g.runs)
    note += "Devices keep the last round's models." if remote else "Evaluate and export take that round too."
    if any(g.best is not None and g.best == g.best_global for g in groups):
        note += " Best possible: for a model without private parameters, without knowing the user."
    return TextTable((*columns, f"best valid {name}"), tuple(rows), title, note + _deviation(groups))


def _deviation(groups: Sequence[Configuration]) -> str:
    """Say what ± is; empty where no configuration has several seeds."""
    several = any(len(g.runs) > 1 for g in groups)
    return f" ± is the sample standard deviation over {_seeds(groups)}." if several else ""


def _seeds(groups: Sequence[Configuration]) -> str:
    """Say over how many seeds each configuration's numbers are taken."""
    numbers = {len(g.runs) for g in groups}
    if len(numbers) == 1:
        return wording.count(numbers.pop(), "seed")
    return f"seeds ({', '.join(f'{g.label} {len(g.runs)}' for g in groups)})"


def class_table(groups: Sequence[Configuration], metric: str, title: str) -> Iterator[TextTable]:
    """Yield what ``run.metrics`` asked for, of a metric's task, on test at the round that is best by the metric."""
    _, slash, task = metric.partition("/")
    names = [f"{name}{slash}{task}" for name in CLASS_METRICS]
    names = [each for name in names for each in (name, wording.user_mean(name))]
    found = [n for n in names if any(not math.isnan(g.selected(n, metric)[0]) for g in groups)]
    if found:
        rows = [(g.label, *(wording.spread(*g.selected(n, metric), n) for n in found)) for g in groups]
        columns = ("configuration", *(f"test {wording.metric_inline(n)}" for n in found))
        title = ": ".join(t for t in (title, "Each class counted alike") if t)
        note = f"At the rounds of {wording.metric_inline(metric)}.{_deviation(groups)}"
        yield TextTable(columns, tuple(rows), title, note)


def runs_table(scenes: Sequence[Scene]) -> TextTable:
    """Return a line for each run: its seed, test metric, length and status."""
    rows = []
    for g, metric in ((g, scene.metrics[0]) for scene in scenes for g in scene.groups):
        for run in g.runs:
            best, test, name = run.best_valid(metric), run.selected(metric, metric), metric
            if test is None:
                name = user_metric([run], metric)
                test = run.selected(name, metric)
            rows.append(
                (
                    g.label,
                    wording.MISSING if run.seed is None else str(run.seed),
                    wording.metric_inline(name),
                    wording.number(test.value if test else None, name),
                    wording.plain(round(best.epoch, 2)) if best else wording.MISSING,
                    wording.plain(round(max((r.epoch for r in run.records), default=0.0), 2)),
                    f"{run.rounds:,}",
                    run.status,
                )
            )
    columns = ("run", "seed", "metric", "on test", "best valid at epoch", "epochs", "rounds", "status")
    return TextTable(columns, tuple(rows))


AS_MINIMISED = "The loss on train is as it was minimised, of standardised amounts in deviations; on valid that of a single amount is in its own unit."


def curves(groups: Sequence[Configuration], metrics: Sequence[str], scene: str = "") -> Iterator[Block]:
    """Yield the learning curves: each main metric on valid, then the loss on train and valid as panels.

    Titles name the scene where one is given.
    """
    tail = f" · {scene}" if scene else ""
    for number, metric in enumerate(metrics):
        references = _references(groups, metric) if number == 0 else ()
        series, word = _series(groups, metric, "valid")
        if any(len(s.x) > 1 for s in series):
            title = f"{wording.metric_name(metric)} on valid{tail}"
            yield _curves_figure(title, [_lines(series, metric, "valid", word, references)], _seeds(groups))
    panels = []
    for split in ("train", "valid"):
        series, word = _series(groups, "loss", split)
        if any(len(s.x) > 1 for s in series) and not (split == "valid" and "loss" in metrics):
            panels.append(_lines(series, "loss", split, word, ()))
    if panels:
        title = f"{panels[0].y_label}{tail}" if len(panels) == 1 else f"Loss{tail}"
        amounts = len(panels) > 1 and "rmse" in metrics
        yield _curves_figure(title, panels, _seeds(groups), [AS_MINIMISED] * amounts)


def _lines(
    series: Sequence[Curve], metric: str, split: str, word: str, references: tuple[tuple[float, str], ...]
) -> Lines:
    unit = " (%)" if wording.is_fraction(metric) else ""
    return Lines(
        series=tuple(s for s in series if s.x),
        x_label="rounds" if word == "round" else "epochs (passes over the training data)",
        y_label=f"{wording.metric_name(metric)} on {split}{unit}",
        metric=metric,
        hover_x=word,
        references=references,
    )


def _curves_figure(title: str, charts: Sequence[Lines], seeds: str, said: Sequence[str] = ()) -> Figure:
    rows, data = [], []
    for chart in charts:
        name = title if len(charts) == 1 else chart.y_label
        for s in chart.series:
            first, last = (wording.plain(round(x, 2)) for x in (s.x[0], s.x[-1]))
            label = f"{s.label}, {wording.inline(name)}" if len(charts) > 1 else s.label
            rows.append((label, first, chart.y_text(s.y[0]), last, chart.y_text(s.y[-1])))
            data.append({"chart": name, "name": s.label, "x": s.x, "y": s.y, "low": s.low, "high": s.high})
    everything = [s for chart in charts for s in chart.series]
    word, many = charts[0].hover_x, any(chart.many for chart in charts)
    table = TextTable(("curve", f"first {word}", "value", f"last {word}", "value there"), tuple(rows))
    notes = [*said]
    if any(s.low for s in everything):
        bands = "" if many else ", bands reach from the lowest to the highest seed"
        notes.append(f"Lines are means over {seeds}{bands}.")
    if any(len(s.x) > MOST_PLACES for s in everything):
        notes.append(
            f"Of curves with more than {MOST_PLACES} places the means of {MOST_PLACES} equal parts are shown."
        )
    if len({s.dashed for s in everything}) > 1:
        notes.append("Dashed: trained centrally.")
    labels = {
        s.label: Legend(s.label, s.slot, "line", s.dashed, mark_of(s.slot) if many else "")
        for s in everything
    }
    legend = tuple(labels.values())
    return Figure(title, tuple(charts), " ".join(notes), legend, None, table, data, columns=len(charts))


def _references(groups: Sequence[Configuration], metric: str) -> tuple[tuple[float, str], ...]:
    """Return the best possible values as lines of a chart, where all configurations agree on them."""
    out = []
    for values, name in (
        ({g.best_personal for g in groups}, "best possible"),
        ({g.best_global for g in groups}, "best possible without knowing the user"),
    ):
        if len(values) == 1 and (value := values.pop()) is not None:
            out.append((value, f"{name} {wording.number(value, metric)}"))
    return tuple(out)


def _series(groups: Sequence[Configuration], metric: str, split: str) -> tuple[list[Curve], str]:
    """Return a curve each, the mean over seeds at places that all seeds have; x is epochs, or rounds without any."""
    measured = [[s for run in g.runs if (s := run.series(metric, split))] for g in groups]
    by_round = not any(r.epoch for runs in measured for records in runs for r in records)
    out = []
    for g, runs in zip(groups, measured, strict=True):
        lines = [{(float(r.round) if by_round else r.epoch): r.value for r in records} for records in runs]
        xs = tuple(sorted(set(lines[0]).intersection(*lines[1:]))) if lines else ()
        values = [[line[x] for line in lines] for x in xs]
        y = tuple(math.fsum(v) / len(v) for v in values)
        low = tuple(map(min, values)) if len(lines) > 1 else ()
        high = tuple(map(max, values)) if len(lines) > 1 else ()
        out.append(Curve(g.label, xs, y, g.slot, g.centralised, low, high))
    return out, "round" if by_round else "epoch"


def users(groups: Sequence[Configuration], metrics: Sequence[str], scene: str = "") -> Iterator[Block]:
    """Yield how each metric is spread over users: histograms and a table; titles name the scene if given."""
    runs = [run for g in groups for run in g.runs]
    for metric in dict.fromkeys(user_metric(runs, m) for m in metrics):
        found = [(g, values) for g in groups if (values := _user_values(g, metric))]
        if not found:
            continue
        higher = not wording.lower_is_better(metric)
        summaries = [(g.label, per_client(values, higher_is_better=higher)) for g, values in found]
        strips = [
            Strip(g.label, g.slot, tuple(v for v in own.values() if not math.isnan(v))) for g, own in found
        ]
        strips = [s for s in strips if s.values]
        table = _users_table(summaries, metric)
        if not strips:
            yield table
            continue
        title = f"{wording.metric_name(metric)} of each user on test" + (f" · {scene}" if scene else "")
        caption = "Each user counts once, whatever the number of examples. The triangle marks the mean."
        if len(runs) > len(groups):
            caption += f" A user's value is the mean over {_seeds(groups)}."
        if len(metrics) > 1:
            caption += f" {wording.BY_FIRST_TASK}"
        data = [{"name": label, **asdict(summary)} for label, summary in summaries]
        yield Figure(title, (Spread(tuple(strips), metric),), caption, table=table, data=data)


def _user_values(group: Configuration, metric: str) -> dict[str, float]:
    """Return each user's value, the mean over seeds; NaN where it is not defined in one of them."""
    records = (one for run in group.runs for one in run.clients(metric).items())
    collected = by_key((client, record.value) for client, record in records)
    return {client: math.fsum(values) / len(values) for client, values in collected.items()}


def _users_table(summaries: Sequence[tuple[str, ClientSummary]], metric: str) -> TextTable:
    text = partial(wording.number, metric=metric)
    rows = []
    for label, s in summaries:
        worst = wording.MISSING if s.worst is None else wording.printable(s.worst)
        numbers = (s.mean, s.std, s.min, s.deciles[0], s.median, s.deciles[8], s.max)
        rows.append((label, f"{s.clients:,}", *map(text, numbers), f"{s.undefined:,}", worst))
    columns = (
        "configuration",
        "users",
        "mean",
        "std",
        "lowest",
        "1st decile",
        "median",
        "9th decile",
        "highest",
        "not defined",
        "worst user",
    )
    return TextTable(columns, tuple(rows))
