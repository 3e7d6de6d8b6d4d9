"""Analyses of finished runs: maps of user vectors, cold start, aggregation time. Written as plain data.

Source: FURL, §5 (Figures 4 and 5, the cost of aggregation) and §6 (users without a vector).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import write_whole
from fedkeep.core.params import Params
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.experiments.personalize.cold_start import ColdStart, labels_of
from fedkeep.experiments.recommending import Popular, Ranking, full_ranking
from fedkeep.experiments.run import Run
from fedkeep.experiments.run_directory import locked
from fedkeep.methods.aggregate import RunningMean
from fedkeep.metrics import chance_agreement, knn_agreement, knn_r2, linear_cka, silhouette, user_map
from fedkeep.metrics.worth.gains import FEW
from fedkeep.report import wording
from fedkeep.report.runs import read_sealed_analyses
from fedkeep.split import Split
from fedkeep.tasks import tasks_in

LABELS_SHOWN = 5
AT_ONCE = 10


@dataclass(frozen=True)
class UserTrait:
    """What a user is known by: the most-used label, or the rate of positive labels.

    Attributes:
        name: for captions.
        kind: ``categorical`` or ``continuous``.
        values: one for each client, taken from training examples; None (NaN where continuous) for one without any.
    """

    name: str
    kind: str
    values: list[Any]


def user_trait(data: FederatedData) -> UserTrait:
    """Return each client's trait, as ``Kind.trait`` of the task makes it of training labels.

    Of several tasks it is the first's; examples without its label do not count.
    """
    task = tasks_in(data.meta)[0]
    known, names = task.kind.trait, data.meta.get("label_names")
    values: list[Any] = []
    for client in range(len(data)):
        own = labels_of(data, task, np.asarray(data.rows(client, "train"), np.int64))
        found = known.of(own) if len(own) else None
        if known.continuous:
            values.append(float("nan") if found is None else found)
        else:
            values.append(None if found is None else names[int(found)] if names else str(found))
    return UserTrait(known.name, "continuous" if known.continuous else "categorical", values)


def user_vectors(run: Run, clients: Iterable[str | int]) -> np.ndarray:
    """Return the private vectors of clients, given by their ids, float32 (clients, entries).

    That is the private parameter ``user``, or where there is none all private values side by side.
    """
    values = run.private.read(run.members(clients).positions.tolist())
    values = {"user": values["user"]} if "user" in values else values
    parts = [v.unsqueeze(-1).flatten(1) for v in values.values() if v.is_floating_point()]
    if not parts:
        raise ConfigError(
            "The run of {method!r} has no private parameters, so there is nothing to map.",
            method=run.method.name,
        )
    return torch.cat(parts, 1).numpy()


def embedding_map(runs: Mapping[str, Run], *, perplexity: float = 30.0, seed: int = 0) -> dict[str, Any]:
    """Return maps of the runs' user vectors side by side, with numbers that say what an eye would.

    Categorical traits: as in FURL's Figure 5, the map shows users whose most-used label is one of the five most
    frequent such labels; the numbers are taken over these users too. Continuous traits (Figure 4): all users. Users
    without a training label are left out.

    Args:
        runs: by name, e.g. ``{"Personalized Server": ..., "Personalized FL": ...}``, over the same data.
        perplexity, seed: of t-SNE; without scikit-learn the maps are principal components.

    Returns:
        The analysis ``embedding_map`` in the form that reports read.
    """
    first = next(iter(runs.values()))
    trait = user_trait(first.data)
    chosen = _shown(trait, first.clients)
    traits = [trait.values[c] for c in chosen.positions]
    tables = {name: user_vectors(run, chosen) for name, run in runs.items()}
    panels = []
    note = ""
    for name, run in runs.items():
        placed = user_map(tables[name], perplexity=perplexity, seed=seed)
        note = placed.note
        own = run.judge(("own",), "test", chosen)[0].of("own").per_client()
        panels.append(
            {
                "name": name,
                "numbers": _numbers(tables[name], traits, trait.kind),
                "points": [
                    {
                        "client": name,
                        "x": float(x),
                        "y": float(y),
                        "trait": t,
                        "value": own.get(c, (None, 0))[0],
                        "n": run.data.count(c, "train"),
                    }
                    for name, c, t, (x, y) in zip(
                        chosen, chosen.positions.tolist(), traits, placed.points, strict=True
                    )
                ],
            }
        )
    aligned = list(tables.values())
    return {
        "title": "User vectors",
        "note": f"Private user vectors of {len(chosen)} users: {note}.",
        "trait_name": trait.name,
        "trait_kind": trait.kind,
        "value_name": tasks_in(first.data.meta)[0].client_metric,
        "linear_cka": linear_cka(aligned[0], aligned[1]) if len(aligned) == 2 else None,
        "panels": panels,
    }


def _shown(trait: UserTrait, clients: SomeIds) -> SomeIds:
    values = [trait.values[c] for c in clients.positions]
    if trait.kind == "continuous":
        shown = np.isfinite(np.array(values, float))
    else:
        times = Counter(value for value in values if value is not None)
        frequent = sorted(times, key=lambda v: (-times[v], v))[:LABELS_SHOWN]
        shown = np.array([value in frequent for value in values], bool)
    return SomeIds(clients.ids, clients.positions[shown])


def _numbers(table: np.ndarray, traits: list[Any], kind: str) -> dict[str, float | None]:
    if kind == "continuous":
        numbers = {"knn_r2": knn_r2(table, traits)}
    else:
        numbers = {
            "knn_agreement": knn_agreement(table, traits),
            "chance_agreement": chance_agreement(traits),
            "silhouette": silhouette(table, traits),
        }
    return {name: value if np.isfinite(value) else None for name, value in numbers.items()}


def cold_start_form(result: ColdStart) -> dict[str, Any]:
    """Return a cold-start measurement in the form that reports read."""
    curves: list[dict[str, Any]] = [
        {"name": "fitted private part", "mean": list(result.mean), "std": list(result.std)}
    ]
    if any(share is not None for share in result.frequent):
        curves.append({"name": "most frequent label of the same k", "mean": list(result.frequent)})
    return {
        "title": "New users",
        "note": f"{result.clients} users outside federation fit their private parameters on k own examples; "
        f"the federated part is frozen and nothing is uploaded. {falls_in_words(result)} "
        "Labels that tie for the most frequent count by their mean.",
        "metric": result.user_metric,
        "k": ["all" if k is None else k for k in result.k],
        "series": curves,
        "changes": [None if c is None else [c.mean, c.low, c.high] for c in result.changes],
        "users": result.clients,
    }


def falls_in_words(result: ColdStart) -> str:
    """Return a sentence on whether the metric becomes worse from some k to a larger one."""
    if result.clients < 2:
        return "A single user allows no test."
    if result.clients < FEW:
        return (
            f"With {result.clients} users nothing is claimed about users like these; that takes {FEW} users."
        )
    if not result.falls:
        return "Nowhere is a larger k significantly worse (95 %, paired over users, corrected over all pairs of k)."
    said = [
        f"k = {few} to {'all' if many is None else many}: "
        + wording.interval(change.mean, change.low, change.high, result.user_metric)
        for few, many, change in result.falls
    ]
    return (
        "Significantly worse with more examples (95 %, paired over users, corrected over all pairs of k): "
        f"{'; '.join(said)}."
    )


def adapted_form(found: Run, clients: Sequence[str] | None = None) -> dict[str, Any]:
    """Return clients (by default those in federation) before and after adapting as a table in the form that reports read: a row a client, the mean last.

    Before: each client's model as federation left it (the shared part where there is no other). A split without
    examples is left out.
    """
    task = tasks_in(found.data.meta)[0]
    metric = task.client_metric
    columns, values = ["client"], []
    for split in ("valid", "test"):
        judged = found.judge((found.before, "adapted"), split, clients)[0]
        before, after = (judged.per_client(found.before), judged.per_client("adapted"))
        if not before:
            continue
        columns += [f"{metric} on {split}, before", f"{metric} on {split}, after"]
        values += [before, after]
    rows = [
        [client, *(each[client][0] if client in each else None for each in values)]
        for client in found.members(clients)
    ]
    means = [float(np.mean([value for value, _ in v.values()])) for v in values]
    return {
        "title": f"Clients before and after adapting ({found.method.name})",
        "note": "Each client adapted on all of its own training examples; nothing was uploaded.",
        "metric": metric,
        "columns": columns,
        "rows": [*rows, ["mean over clients", *means]],
    }


def aggregation_time(
    server: Params, cohorts: Sequence[int] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), repeats: int = 5
) -> dict[str, Any]:
    """Measure the server's time to average m uploads as rounds do, for several m; linear in m (FURL, §3.5).

    Args:
        server: federated parameters; uploads have the same names and shapes.
        cohorts: the values of m.
        repeats: measurements of each, of which the median is reported.
    """
    generator = torch.Generator().manual_seed(0)
    uploads = [
        Split().upload(server, {n: _drawn(v, generator) for n, v in server.items()}, weight=1.0 + k)
        for k in range(AT_ONCE)
    ]
    seconds = []
    for m in cohorts:
        taken, ids = [], [f"{k:09}" for k in range(m)]
        for _ in range(repeats):
            began = time.perf_counter()
            mean = RunningMean(server, ids)
            for k, client in enumerate(ids):
                mean.add(client, uploads[k % AT_ONCE])
            mean.value()
            taken.append(time.perf_counter() - began)
        seconds.append(float(np.median(taken)))
    return {
        "title": "Aggregation time",
        "note": f"Median of {repeats}; uploads of {sum(v.numel() for v in server.values()):,} numbers.",
        "cohort": list(cohorts),
        "seconds": seconds,
    }


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros_like(like)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def add_ranking(run: Run, asked: Ranking) -> None:
    """Write how the models of a run's clients rank all items of ``test`` into its folder, as the analysis ``ranking``.

    Raises:
        ConfigError, DataError, MethodError: as for ``full_ranking``.
    """
    assert run.folder is not None
    least = -math.inf if asked.liked is None else asked.liked  # whatever the run's own configuration says
    found = run.full_ranking("test", ks=asked.ks, liked=least)
    popular = Popular(run.data)
    known = full_ranking(
        run.data, run.clients, lambda _: popular, "test", ks=asked.ks, liked=asked.liked
    ).metrics
    note = f"On test: {found.told} Items with the same score stand before it."
    analysis = {
        "title": "All items ranked",
        "note": note,
        "columns": ["metric", "mean over users", "counting what all users took"],
        "rows": [[metric, value, known[metric]] for metric, value in found.metrics.items()],
        "asked": {"ks": list(asked.ks), "liked": asked.liked},
    }
    write_analyses(run.folder, {"ranking": analysis})


def write_analyses(folder: Path, analyses: Mapping[str, Any]) -> Path:
    """Write or extend a run folder's ``analyses.json``, which says of which run and round they are.

    What was made after another round of the run is not kept.

    Raises:
        RunError: the folder holds no run or is in use, or the file is damaged or of another run.
    """
    read_info(folder)  # so that no lock is left where there is no run
    with locked(folder):
        return _written(folder, read_info(folder), analyses)


def _written(folder: Path, info: Mapping[str, Any], analyses: Mapping[str, Any]) -> Path:
    about = {"run": info["run"], "round": read_commit(folder, info).chosen}
    path = folder / "analyses.json"
    before, of = read_sealed_analyses(path)
    if of and of.get("run") != about["run"]:
        raise RunError(
            "{path} is of another run than {file}. Delete it, or restore the run's own.",
            path=path,
            file=folder / "run.json",
        )
    kept = before if of == about else {}
    all_of_it = {**kept, **analyses}
    write_whole(path, sealed_bytes({**all_of_it, "about": about, "format": FORMAT}))
    if info.get("analyses") != sorted(all_of_it):  # so that a report can say which ones are missing
        write_whole(folder / "run.json", sealed_bytes({**info, "analyses": sorted(all_of_it)}))
    return path
