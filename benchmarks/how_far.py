"""How far fedkeep goes: one machine, a cluster, a fleet, and a paper plan for more, from what other benchmarks measured.

``python -m benchmarks.how_far`` writes ``results/how-far.md`` from ``users.json``, ``cluster.json``, ``server-memory.json`` and
``fleet-load.json``; it measures nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

MB, LOOK = 1e6, 3.0
"""Bytes; seconds between two looks of Flower's node."""
KINDS = {
    "mean": "a mean",
    "private": "a mean with clipping and noise",
    "secure": "masked vectors of secure sums",
    "median": "a median, which needs all uploads",
}
DEVICES, COHORT, MODEL = 1_000_000, 10_000, 1_000_000
"""Of the paper plan: devices, those of a round, and bytes of a model."""


def page(folder: Path) -> str:
    """Return the page."""
    users, cluster, memory, fleet = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("users", "cluster", "server-memory", "fleet-load")
    )
    parts = [
        "# How far it goes",
        "Written by `python -m benchmarks.how_far` from what the named commands measured on two cores.",
        "## One machine: `python -m benchmarks.users`",
        table(
            ("users", "seconds a round", "memory, MB"),
            ((n, users["seconds"][n], users["memory_mb"][n]) for n in users["seconds"]),
        ),
        "## A cluster: `python -m benchmarks.cluster`",
        table(
            ("runs by", "runs", "equal to one machine's", "processes killed", "seconds"),
            (
                (one["place"], one["runs"], one["equal"], one["killed"], one["seconds"])
                for one in cluster["places"]
                if "killed" in one
            ),
        ),
        *unhurt(cluster["places"]),
        *paced(cluster["places"]),
        "## Memory of the server: `python -m benchmarks.server_memory`",
        f"A model of {memory['model'] / MB:.0f} MB; memory beyond what the server app had before the round.",
        table(
            ("what is made of uploads", "cohort", "MB", "models"),
            (
                (KINDS[row["kind"]], row["cohort"], row["bytes"] / MB, row["models"])
                for row in sorted(
                    memory["rows"], key=lambda row: ([*KINDS].index(row["kind"]), row["cohort"])
                )
            ),
        ),
        "## A fleet: `python -m benchmarks.fleet_load`",
        "Link, server app and scripted nodes on one machine. A processor's time depends little on the machine's load; seconds do.",
        table(
            (
                "nodes",
                "joined",
                "model, MB",
                "looks every, s",
                "ended",
                "rounds",
                "a minute",
                "link, MB",
                "its database, MB",
                "server app, MB",
                "sent by nodes, MB",
                "link's ms a look",
                "calls that failed",
            ),
            (
                (
                    row["nodes"],
                    row["joined"],
                    row["model_bytes"] / MB,
                    row["look_seconds"],
                    row["ended"],
                    row["rounds"],
                    row["rounds_a_minute"],
                    row["link_peak_bytes"] / MB,
                    row["link_database_bytes"] / MB,
                    row.get("server_app_peak_bytes", 0) / MB or None,
                    row["nodes_sent_bytes"] / MB,
                    row["link_cpu_ms_a_look"],
                    sum(row["faults"].values()),
                )
                for row in fleet["rows"].values()
            ),
        ),
        *plan(fleet["rows"].values()),
    ]
    return "\n\n".join(parts) + "\n"


def unhurt(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a run takes where none is killed, by where it runs."""
    found, rows = told(places, "unhurt", ", seconds a run")
    said = f"{found.get('runs')} runs, two at a time, none killed; here each begins a process of its own:"
    return [said, table(("runs by", "seconds a run"), rows)] if rows else []


def paced(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a round of short clients takes, by who trains them."""
    ends = ", seconds a round"
    found, rows = told(places, "paced", ends)
    if not rows:
        return []
    clients, by_ray = found["clients a round"], found["ray by workers"]
    took = f"{1000 * found['sequential' + ends] / clients:.0f} ms each one after the other"
    said = f"A round of {clients} clients, {took}; by Ray {by_ray:.2f} times a round of workers:"
    return [said, table(("trained by", "seconds a round"), rows)]


def told(
    places: Iterable[Mapping[str, Any]], place: str, ends: str
) -> tuple[Mapping[str, Any], list[tuple[str, Any]]]:
    """Return a place's row, and those of its values whose names end so, with the rest of their names."""
    found = next((one for one in places if one["place"] == place), {})
    return found, [(name.removesuffix(ends), value) for name, value in found.items() if name.endswith(ends)]


def plan(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a link bears, and a tree for many devices, computed from the processor time of a call."""
    known = [row for row in rows if row["link_cpu_ms_a_look"] and row["answers"]]
    cost = (
        min(row["link_cpu_ms_a_look"] for row in known) / 1000
    )  # of few nodes it has the link's other work in it
    alike = [row for row in known if row["rounds"] and abs(row["model_bytes"] - MODEL) < MODEL / 10]
    an_answer = statistics.median(row["link_cpu_seconds"] / row["answers"] for row in alike)
    idle = int(LOOK / cost)
    width = idle // 2
    levels, top = 0, DEVICES
    counts = list[int]()
    while top > 1:
        top = -(-top // width)
        levels += 1
        counts.append(top)
    gateways = " + ".join(f"{count:,}" for count in counts)
    busiest = max(COHORT / counts[0], min(width, counts[0])) * an_answer
    return [
        "## On paper",
        table(
            ("computed", "value"),
            (
                ("nodes whose looks alone, one in 3 s, take a whole core of a link", f"{idle:,}"),
                (
                    "processor time of a link for a message of 1 MB and its answer, looks on the way included",
                    f"{an_answer:.2f} s",
                ),
                (
                    "1,000 nodes and a model of 20 MB: bytes of a round, each way",
                    f"{1000 * 20 / 1000:.0f} GB",
                ),
                (
                    "5,000 nodes and a model of 20 MB: bytes of a round, each way",
                    f"{5000 * 20 / 1000:.0f} GB",
                ),
                (f"links in a tree for {DEVICES:,} devices, {width} below each", gateways),
                (
                    f"processor time of the busiest link in a round of {COHORT:,} devices",
                    f"{busiest:.0f} s",
                ),
                (
                    f"bytes that reach the top of the tree, sums of a model of {MODEL / MB:.0f} MB in double precision",
                    f"{(counts[-2] if len(counts) > 1 else 1) * 2 * MODEL / MB:.0f} MB",
                ),
            ),
        ),
    ]


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([shown(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """Return a value as a cell shows it."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    (RESULTS / "how-far.md").write_text(page(RESULTS), encoding="utf-8")
