"""Writes run directories in the documented form, with numbers that look like a trained system's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from fedkeep.core.records import Extent, Record, best_round, from_line, to_line
from fedkeep.core.run_files import Commit, read_commit
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.report.wording import base, lower_is_better
from fedkeep.tasks.results import ExampleResults

LABELS = ["AskReddit", "CFB", "The_Donald", "nba", "politics"]
HOSTILE = "<script>alert('x')</script>"
SPLIT = [
    {"name": "chars.weight", "shape": [128, 32], "half": "federated", "bytes": 16384},
    {"name": "head.weight", "shape": [20, 64], "half": "federated", "bytes": 5120},
    {"name": "user", "shape": [32], "half": "private", "bytes": 128},
]


def curve(end: float, epochs: int, start: float = 0.05) -> list[float]:
    """A metric that rises from start towards end."""
    return [end - (end - start) * math.exp(-3 * i / max(epochs - 1, 1)) for i in range(epochs)]


def map_of(users: int, seed: int, names: list[str], continuous: bool = False) -> dict[str, Any]:
    """An embedding map with clusters by trait."""
    random = np.random.default_rng(seed)
    trait = random.integers(0, len(LABELS), users)
    panels = []
    for name in names:
        centre = random.normal(size=(len(LABELS), 2)) * 18
        place = centre[trait] + random.normal(size=(users, 2)) * 6
        points = [
            {
                "client": HOSTILE if i == 0 else f"user-{i}",
                "x": float(place[i, 0]),
                "y": float(place[i, 1]),
                "trait": float(trait[i]) / 10 + 0.05 if continuous else LABELS[trait[i]],
                "value": float(random.beta(6, 4)),
                "n": int(random.integers(1, 300)),
            }
            for i in range(users)
        ]
        numbers = {"knn_agreement": 0.712, "chance_agreement": 0.204, "silhouette": 0.31}
        panels.append(
            {"name": name, "points": points, "numbers": {"knn_r2": 0.43} if continuous else numbers}
        )
    return {
        "title": "User vectors",
        "note": "t-SNE, perplexity 30, PCA initialisation, seed 0",
        "trait_name": "click-through rate" if continuous else "most used label",
        "trait_kind": "continuous" if continuous else "categorical",
        "value_name": "accuracy",
        "linear_cka": 0.413,
        "panels": panels,
    }


def write_run_folder(
    path: Path,
    *,
    name: str = "Personalized FL",
    seed: int = 0,
    end: float = 0.62,
    epochs: int = 6,
    users: int = 40,
    centralised: bool = False,
    best: float | None = 0.63,
    status: str = "finished",
    metric: str = "accuracy",
    analyses: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **info: Any,
) -> Path:
    """Write run.json, records.jsonl, commit.json and, where given, analyses.json."""
    path.mkdir(parents=True)
    random = np.random.default_rng(seed + int(1000 * end))
    run = {
        "name": name,
        "created": "2026-01-05T10:20:30",
        "config": {k: v for k, v in config.items() if k}
        if config
        else {"model": {"kind": "document", "user": 32}, "optimizer": {"rate": 0.1}, "seed": seed},
        "seed": seed,
        "method": "furl",
        "split_table": SPLIT,
        "environment": {"python": "3.11.9", "torch": "2.13.0", "cores": 2, "commit": "0123abc"},
        "data": {
            "name": "generated-text",
            "clients": users,
            "counts": {"train": 11200, "valid": 1400, "test": 1400},
            "fingerprint": {"text": "ab" * 32, "label": "cd" * 32},
            "source": {"generator": "multiclass", "seed": 7},
        },
        "engine": "sequential",
        "centralised": centralised,
        "bytes_down": 21504,
        "bytes_up": 21504,
        "best": best,
        "status": status,
        **info,
    }
    run |= {"format": FORMAT, "run": path.name, "rounds": 4 * (epochs - 1)}
    write_info(path, run)
    records = []
    for i, value in enumerate(curve(end, epochs)):
        rounds, value = 4 * i, value + float(random.normal()) * 0.004
        records += [
            Record(rounds, float(i), "train", None, "loss", 3 * (1.05 - value), 11200),
            Record(rounds, float(i), "valid", None, metric, value, 1400),
            Record(rounds, float(i), "time", None, "seconds", 2.5, 1),
            Record(rounds, float(i), "time", None, "aggregate_seconds", 0.004, 10),
            Record(rounds, float(i), "time", None, "judge_seconds", 1.5, 10),
            Record(rounds, float(i), "traffic", None, "upload_bytes", 21504.0, 10),
            Record(rounds, float(i), "traffic", None, "download_bytes", 21504.0, 10),
        ]
    last = 4 * (epochs - 1)
    if status == "finished":
        records.append(Record(last, float(epochs - 1), "test", None, metric, end, 1400))
        records.append(
            Record(last, float(epochs - 1), "test", None, f"{metric}_user_mean", end - 0.012, users)
        )
        for i, value in enumerate(random.beta(12 * end + 0.5, 12 * (1 - end) + 0.5, users)):
            client = HOSTILE if i == 0 else f"user-{i}"
            records.append(
                Record(last, float(epochs - 1), "test", client, metric, 0.0 if i == 0 else float(value), 30)
            )
    write_records(path, "".join(map(to_line, records)))
    if analyses is not None:
        write_analyses(path, analyses)
    return path


def write_info(path: Path, info: dict[str, Any]) -> None:
    """Write a sealed run.json."""
    (path / "run.json").write_bytes(sealed_bytes(info))


def write_records(path: Path, records: str, timings: str = "") -> None:
    """Write records.jsonl and timings.jsonl, and a commit that knows them."""
    extents = {}
    for name, text in (("records", records), ("timings", timings)):
        content = text.encode()
        (path / f"{name}.jsonl").write_bytes(content)
        extents[name] = Extent(len(content), hashlib.sha256(content).hexdigest())
    info = json.loads((path / "run.json").read_text(encoding="utf-8"))
    last = Commit(
        run=info["run"],
        round=info["rounds"],
        server=f"server-{info['rounds']}.safetensors",
        extra={"best": chosen(records, info.get("metric"))},
        **extents,
    )
    (path / "commit.json").write_bytes(last.to_bytes())


def chosen(records: str, metric: str | None) -> dict[str, dict[str, int]]:
    """Return the rounds that a run would have chosen, by one metric of each task."""
    valid: dict[str, dict[int, float]] = {}
    for line in records.splitlines():
        with contextlib.suppress(ValueError):
            if (r := from_line(line)).split == "valid" and r.client is None:
                valid.setdefault(r.metric, {})[r.round] = r.value
    order = [metric, "auc", "accuracy", "rmse"]
    usual = sorted(valid, key=lambda m: order.index(base(m)) if base(m) in order else 4 + (base(m) == "loss"))
    by = {name.partition("/")[2]: name for name in reversed(usual)}
    best = {m: best_round(valid[m], lower_is_better=lower_is_better(m)) for m in by.values()}
    return {name: {"round": round} for name, round in best.items() if round is not None}


def add_records(path: Path, records: str) -> None:
    """Add lines to what was committed."""
    write_records(path, (path / "records.jsonl").read_text(encoding="utf-8") + records)


def write_analyses(path: Path, analyses: Any, **about: Any) -> None:
    """Write a sealed analyses.json of the run's last round, unless told otherwise."""
    info = json.loads((path / "run.json").read_text(encoding="utf-8"))
    of = {"run": info["run"], "round": info["rounds"], **about}
    (path / "analyses.json").write_bytes(sealed_bytes({**analyses, "about": of, "format": FORMAT}))


def all_analyses(users: int = 40) -> dict[str, Any]:
    """One of each kind of analysis."""
    return {
        "embedding_map": map_of(users, 1, ["Personalized Server", "Personalized FL"]),
        "cold_start": {
            "metric": "accuracy",
            "k": [0, 1, 2, 5, 10, 20, 50, "all"],
            "mean": [0.151, 0.22, 0.27, 0.36, 0.44, 0.51, 0.57, 0.6],
            "std": [0.02, 0.03, 0.03, 0.03, 0.02, 0.02, 0.02, 0.02],
            "users": 60,
        },
        "aggregation_time": {"cohort": [1, 10, 100, 1000], "seconds": [0.0009, 0.004, 0.036, 0.38]},
        "sweep": {
            "title": "Sweep of learning rates",
            "columns": ["configuration", "rate", "valid accuracy"],
            "rows": [["Global FL", 0.1, 0.111], ["Global FL", 0.3, 0.121]],
        },
    }


def write_examples(path: Path, examples: ExampleResults) -> None:
    """Write the results of test examples, and a commit that knows them."""
    content = save(examples.to_tensors())
    name = f"examples-{examples.round}.safetensors"
    (path / name).write_bytes(content)
    commit = read_commit(path, json.loads((path / "run.json").read_text(encoding="utf-8")))
    known = replace(commit, examples=name, examples_sha256=hashlib.sha256(content).hexdigest())
    (path / "commit.json").write_bytes(known.to_bytes())
