"""Facts about runs: traffic and time, what is federated and private, data, configuration, environment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from fedkeep.core.records import by_key
from fedkeep.report import wording
from fedkeep.report.blocks import Block, Figure
from fedkeep.report.charts import Grid
from fedkeep.report.groups import Configuration
from fedkeep.report.runs import RunFiles
from fedkeep.report.text_tables import TextTable, mean_std

INITIAL = "initial values"
NAMED = 5
"""How many clients a sentence names."""


def traffic(groups: Sequence[Configuration]) -> Iterator[Block]:
    """Yield bytes per client and round, bytes that stay, totals and times."""
    rows = []
    for g in groups:
        run = g.runs[0]
        aggregate = [r.value for r in run.records if r.client is None and r.metric == "aggregate_seconds"]
        down, up = (bytes_each(run, way) for way in ("down", "up"))
        rows.append(
            (
                g.label,
                "centralised" if g.centralised else wording.size(down),
                "centralised" if g.centralised else wording.size(up),
                wording.size(_half_bytes(run, "private")),
                wording.size(_total(run, "download_bytes", each=True)),
                wording.size(_total(run, "upload_bytes", each=True)),
                wording.duration(mean_std(aggregate)[0]),
                wording.duration(_wall(run)),
            )
        )
    columns = (
        "configuration",
        "down per client and round",
        "up per client and round",
        "private, stays with each user",
        "down, whole run",
        "up, whole run",
        "aggregation per round",
        "time, whole run",
    )
    note = (
        "1 kB = 1000 bytes. Totals add up what was recorded: bytes of one client times the clients of a round; "
        "refused ones have downloaded too. Bytes per client and round are their mean. Time is wall clock, of rounds and of "
        "judging after them."
    )
    if any(len(g.runs) > 1 for g in groups):
        note += " Of several seeds the first is shown."
    yield TextTable(columns, tuple(rows), note=note)


def never_drawn(groups: Sequence[Configuration]) -> Iterator[str]:
    """Say of each seed which clients no round drew: their models are what a new client has."""
    told = dict[tuple[str, str], list[str]]()
    for g in groups:
        for run in g.runs:
            found = run.info.get("never_drawn")
            if isinstance(found, dict) and found.get("count"):
                named = [str(c) for c in found.get("ids") or ()][:NAMED]
                more = f" and {found['count'] - len(named)} more" if found["count"] > len(named) else ""
                who = f"{wording.count(found['count'], 'client')} never drawn ({', '.join(named)}{more})"
                told.setdefault((f"seed {run.seed}", wording.printable(who)), []).append(g.label)
    for (seed, who), labels in told.items():
        yield f"{', '.join(labels)}, {seed}: {who}. Their models are what a new client has."


def attendance(groups: Sequence[Configuration]) -> Iterator[str]:
    """Say of each run across machines which clients missed rounds that asked for them, and what judging has lost."""
    for g in groups:
        for run in g.runs:
            lines = run.info.get("attendance")
            for line in lines if isinstance(lines, list) else ():
                yield f"{g.label}, seed {run.seed}: {wording.printable(str(line))}"


def unequal_work(groups: Sequence[Configuration]) -> str:
    """Say what clients compute in a round, method by method; empty where it is the same, or not known."""
    told = {g.label: work for g in groups if not g.centralised and (work := _work(g.runs[0]))}
    if len(set(told.values())) < 2:
        return ""
    each = "; ".join(f"{label}: {work}" for label, work in told.items())
    return f"Methods take unequal local steps in a round: {each}."


def _work(run: RunFiles) -> str:
    """Return how often a client of a run goes over its examples in a round, or how many steps it takes."""
    method = (run.info.get("identity") or {}).get("method")
    client = method.get("client") if isinstance(method, dict) else None
    phases = client.get("phases") if isinstance(client, dict) else None
    if not isinstance(client, dict) or not isinstance(phases, list):
        return ""
    turns = client.get("turns")
    times = turns if isinstance(turns, list) else [1] * len(phases)
    passes: dict[tuple[str, Any], int] = {}
    for phase, often in zip(phases, times, strict=False):
        if not isinstance(phase, dict) or "batch_size" not in phase:
            return ""
        kind, number = (
            ("pass", phase.get("epochs")) if phase.get("steps") is None else ("step", phase["steps"])
        )
        key = kind, phase["batch_size"]
        passes[key] = passes.get(key, 0) + int(number or 0) * int(often)
    plural = {"pass": "passes", "step": "steps"}
    return " and ".join(
        f"{n} {kind if n == 1 else plural[kind]} in mini-batches of {size}"
        for (kind, size), n in passes.items()
        if n
    )


def bytes_each(run: RunFiles, way: Literal["down", "up"]) -> float | None:
    """Return what was recorded of one client and round, the mean; before the first round the federated parameters.

    The record counts what travels: also a method's state, after encoding, and of tables the rows that are sent alone.
    """
    metric = f"{way}load_bytes"
    clients = sum(
        r.n for r in run.records if r.client is None and r.metric == metric and math.isfinite(r.value)
    )
    total = _total(run, metric, each=True)
    known: float | None = run.info.get(f"bytes_{way}")
    return known if total is None or not clients else total / clients


def _wall(run: RunFiles) -> float | None:
    """Return the seconds of all rounds, and of judging after them; None where nothing was recorded."""
    rounds, judging = _total(run, "seconds"), _total(run, "judge_seconds")
    return rounds if rounds is None else rounds + (judging or 0.0)


def _half_bytes(run: RunFiles, half: str) -> int | None:
    table = run.info.get("split_table")
    return sum(int(row.get("bytes", 0)) for row in table if row["half"] == half) if table else None


def _total(run: RunFiles, metric: str, each: bool = False) -> float | None:
    """Return the sum over rounds of a metric; with ``each`` it was measured per client, n clients a round."""
    own = [r for r in run.records if r.client is None and r.metric == metric and math.isfinite(r.value)]
    return math.fsum(r.value * (r.n if each else 1) for r in own) if own else None


def split(groups: Sequence[Configuration]) -> Iterator[Block]:
    """Yield the table of parameters and buffers, once for configurations that share it."""
    for entries, labels in distinct(groups, "split_table"):
        rows = []
        for e in entries:
            shape = " × ".join(str(n) for n in e.get("shape") or []) or "scalar"
            rows.append(
                (
                    wording.printable(e["name"]),
                    wording.printable(e["half"]),
                    shape,
                    wording.size(e.get("bytes")),
                )
            )
        halves = dict.fromkeys(("federated", "private", *(str(e["half"]) for e in entries)))
        sums = [
            f"{wording.printable(h)} {wording.size(sum(int(e.get('bytes', 0)) for e in entries if e['half'] == h))}"
            for h in halves
        ]
        yield TextTable(
            ("name", "half", "shape", "size"), tuple(rows), labels, f"Together: {', '.join(sums)}.", left=2
        )


def table_of(groups: Sequence[Configuration], key: str) -> Iterator[Block]:
    """Yield the facts under a key of run.json, once for configurations that share them."""
    for facts, labels in distinct(groups, key):
        yield TextTable(("what", "value"), tuple(flat(facts)), labels, left=2)


def configuration(groups: Sequence[Configuration]) -> Iterator[Block]:
    """Yield the settings that differ between configurations, then those that all have in common.

    Settings are the configuration's, or those that a run was called with. What else tells two configurations apart,
    the data's hashes or initial values, is named where it differs.
    """
    settings = [_settings(g) for g in groups]
    keys = list(dict.fromkeys(k for own in settings for k in own))
    differing = [k for k in keys if len({own.get(k) for own in settings}) > 1]
    same = tuple((k, settings[0][k]) for k in keys if k not in differing)
    more = [dict(_more(g)) for g in groups]
    for key in dict.fromkeys(k for own in more for k in own):
        apart = len({own.get(key) for own in more}) > 1
        if apart and (key != INITIAL or not set(differing) - {"seed"}):
            differing.append(key)
    settings = [{**other, **own} for own, other in zip(settings, more, strict=True)]
    if differing:
        columns = ("setting", *(g.label for g in groups))
        rows = tuple((k, *(own.get(k, wording.MISSING) for own in settings)) for k in differing)
        yield TextTable(columns, rows, "What differs", left=len(columns))
    if same:
        yield TextTable(("setting", "value"), same, "The same everywhere" if len(groups) > 1 else "", left=2)


def _settings(group: Configuration) -> dict[str, str]:
    run = group.runs[0]
    seeds = ", ".join(str(each.seed) for each in group.runs)
    config = run.info.get("config")
    if config:
        own = dict(flat(config))
        return {**own, "seed": seeds} if len(group.runs) > 1 and "seed" in own else own
    own = dict(flat(run.settings["run"]))
    return {"seed": seeds, **own} if own else {}


def _more(group: Configuration) -> Iterator[tuple[str, str]]:
    run = group.runs[0]
    yield from flat(run.settings["run"], "run") if run.info.get("config") else ()
    yield from flat(run.settings["data"], "data")
    everywhere = {n: h for n, h in run.frozen.items() if all(each.frozen.get(n) == h for each in group.runs)}
    yield from flat(everywhere, "frozen")
    yield "numerics of the code", str(run.settings["numerics"])
    text = json.dumps([each.begins_with for each in group.runs], sort_keys=True)
    yield INITIAL, hashlib.sha256(text.encode()).hexdigest()[:16]


def partitions(groups: Sequence[Configuration]) -> Iterator[Figure]:
    """Yield the grid of each different dealing of images: clients × classes."""
    for entry, labels in distinct(groups, "partition_counts"):
        counts = entry["counts"]
        if not counts or not entry["classes"]:
            continue
        opted_out = entry["opted_out"]
        chart = dealing(counts, entry["clients"], entry["classes"], opted_out)
        rows = [
            (name, *map(wording.plain, row), wording.plain(sum(row)))
            for name, row in zip(chart.rows, counts, strict=True)
        ]
        out = f" {wording.count(len(opted_out), 'client')} opted out." if opted_out else ""
        yield Figure(
            "Training examples of each class" + (f" · {labels}" if labels else ""),
            (chart,),
            f"A row a client, a column a class; an empty cell: none.{out}",
            ramp=("examples", "1", wording.plain(max(map(max, counts)))),
            table=TextTable(("client", *chart.columns, "together"), tuple(rows)),
            data=entry,
        )


def dealing(
    counts: Sequence[Sequence[int]],
    clients: Sequence[Any],
    classes: Sequence[Any],
    opted_out: Collection[int],
    heading: str = "",
) -> Grid:
    """Return how many examples of each class each client has, (clients, classes); who opted out is marked."""
    names = [f"{wording.printable(c)}{' (out)' * (i in opted_out)}" for i, c in enumerate(clients)]
    return Grid(
        values=tuple(map(tuple, counts)),
        rows=tuple(names),
        columns=tuple(map(wording.printable, classes)),
        heading=heading,
        tell=partial(wording.count, noun="example"),
    )


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of every leaf of nested objects and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{wording.printable(key)}" if name else wording.printable(key))
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        for i, inner in enumerate(value):
            yield from flat(inner, f"{name}.{i}")
    else:
        yield name, _leaf(value, counted=not name.endswith("seed"))


def _leaf(value: Any, counted: bool) -> str:
    if isinstance(value, list):
        return ", ".join(_leaf(v, counted) for v in value) or "none"
    if value is None:
        return wording.MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if counted else str(value)
    if isinstance(value, float):
        return f"{value:g}"
    text = wording.printable(value) or "(empty)"
    is_hash = len(text) >= 40 and set(text) <= set("0123456789abcdef")
    return text[:16] + "…" if is_hash else text


def distinct(groups: Sequence[Configuration], key: str) -> Iterator[tuple[Any, str]]:
    """Yield each different content under a key of run.json, with the labels of its configurations if not all."""
    told = ((g.label, g.runs[0].info.get(key)) for g in groups)
    seen = by_key((json.dumps(content), label) for label, content in told if content)
    for text, labels in seen.items():
        yield json.loads(text), ", ".join(labels) if len(seen) > 1 else ""
