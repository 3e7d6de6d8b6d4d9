"""Counting: each user's most frequent training label (of a regression the mean), the reference that learns nothing.

Where examples have a column ``time``, later ones count more: the r-th last of a user weighs γ^r, and γ is chosen by the
loss on validation. Shares of labels are p = (Σ w + g) / (W + 1), g being the shares over all users: so ties, and users
without training examples, go by what is frequent everywhere. Of a ranking, a candidate's score is how
often all users took that item (column ``item``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.core.describe import differences
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.examples import Examples, before_task
from fedkeep.core.params import Params
from fedkeep.core.ranking import ranks_of
from fedkeep.data import FederatedData
from fedkeep.engines import Task, tasks_of
from fedkeep.experiments.build import build_data
from fedkeep.experiments.load import run_folder_config
from fedkeep.report.pairing import COUNTING, COUNTING_TAKEN, MEAN_LABEL, Side, kept
from fedkeep.report.runs import RunFiles

DECAYS = (1.0, 0.98, 0.95, 0.9, 0.8, 0.6)

Array = np.ndarray[Any, Any]


def counting_side(side: Side, folder: Path | None = None) -> Side:
    """Return counting as a reference for a model, on the same test examples.

    Args:
        side: the model.
        folder: the folder of real data.

    Raises:
        RunError: a run keeps no configuration, or the data differ from those it was made with.
        ConfigError, DataError: as for ``build_data``.
    """
    runs, data = [], None
    for run in side.runs:
        config, _ = run_folder_config(run.folder)
        if data is None or differences(data.fingerprint(), _fingerprint(run)):
            data = build_data(config, folder)
        lines = differences(data.fingerprint(), _fingerprint(run))
        if lines:
            shown = "\n  ".join(lines[:4])
            raise RunError(
                f"The data differ from those that {run.folder} was made with:\n  {shown}\n"
                f"Name the same with --data DIR."
            )
        runs.append(replace(run, examples=counted(data, kept(run))))
    names = {"ranking": COUNTING_TAKEN, "regression": MEAN_LABEL}
    found = {names.get(task.kind, COUNTING) for task in tasks_of(data)} if data is not None else set()
    return Side(found.pop() if len(found) == 1 else COUNTING, tuple(runs), "own", "counting")


def counted(data: FederatedData, examples: Examples) -> Examples:
    """Return what counting makes of the same test and validation examples, as the model ``own``."""
    test, valid = Params(), Params()
    for task in tasks_of(data):
        decay = _best_decay(data, task, examples)
        for split, tensors in ((test, examples.tensors), (valid, examples.valid)):
            before = before_task(task.name)
            if f"{before}client" in tensors:
                found = _judged(data, task, decay, tensors[f"{before}row"].numpy())
                columns = {
                    name: tensors[before + name].clone()
                    for name in ("client", "row", "label", "class")
                    if before + name in tensors
                }
                if "class" not in columns:
                    found.pop("own/class", None)
                columns |= {name: torch.from_numpy(value) for name, value in found.items()}
                split |= {before + name: column for name, column in columns.items()}
    return replace(examples, tensors=test, valid=valid)


def _best_decay(data: FederatedData, task: Task, examples: Examples) -> float:
    rows = examples.valid.get(f"{before_task(task.name)}row")
    if "time" not in data.columns or rows is None:
        return 1.0
    loss = {decay: float(_judged(data, task, decay, rows.numpy())["own/loss"].mean()) for decay in DECAYS}
    return min(loss, key=lambda decay: loss[decay])


def _judged(data: FederatedData, task: Task, decay: float, rows: Array) -> dict[str, Array]:
    """Return loss and score of examples by row, in the form that runs keep them."""
    train = data.split_rows("train")
    label = np.asarray(data.columns[task.label])
    if label.ndim > 1:
        raise ConfigError("Counting labels is no reference for tokens; compare with another run.")
    known = ~np.isnan(label[train]) if label.dtype.kind == "f" else label[train] >= 0
    train = train[known]
    owner, weight = data.clients_of(train), _weights(data, train, decay)
    own, true = data.clients_of(rows), label[rows]
    total = np.bincount(owner, weight, len(data))
    if task.kind == "regression":
        sums = np.bincount(owner, weight * label[train], len(data)) + (
            label[train].mean() if len(train) else 0.0
        )
        error = (sums / (total + 1))[own] - true
        return {"own/loss": error**2, "own/score": error}
    if task.kind == "ranking":
        return _popular(np.asarray(data.columns["item"]), label, train, rows)
    classes = int(max(label[train].max(initial=0), true.max(initial=0), 1)) + 1
    table = np.bincount(owner * classes + label[train], weight, len(data) * classes).reshape(-1, classes)
    everywhere = (np.bincount(label[train], minlength=classes) + 1) / (len(train) + classes)
    share = (table + everywhere) / (total + 1)[:, None]
    mine = share[own]
    loss = -np.log(mine[np.arange(len(rows)), true])
    if task.kind == "binary":
        return {"own/loss": loss, "own/score": np.log(mine[:, 1]) - np.log(mine[:, 0])}
    likeliest = mine.argmax(1)
    return {
        "own/loss": loss,
        "own/score": (likeliest == true).astype(np.uint8),
        "own/class": likeliest.astype(np.int32),
    }


def _popular(item: Array, label: Array, train: Array, rows: Array) -> dict[str, Array]:
    """Return what comes of scoring a ranking's items by how often all users took them in training, plus one."""
    taken = item[train, label[train]]
    score = 1.0 + np.bincount(taken, minlength=int(item.max()) + 1)[item[rows]]
    own = score[np.arange(len(rows)), label[rows]]
    loss = np.log(score.sum(1)) - np.log(own)
    return {"own/loss": loss, "own/score": ranks_of(score, label[rows]).astype(np.int32)}


def _weights(data: FederatedData, rows: Array, decay: float) -> Array:
    if decay == 1:
        return np.ones(len(rows))
    owner = data.clients_of(rows)
    order = np.lexsort((np.asarray(data.columns["time"])[rows], owner))
    last = np.cumsum(np.bincount(owner, minlength=len(data))) - 1  # each client's last place in that order
    weight = np.empty(len(rows))
    weight[order] = decay ** (last[owner[order]] - np.arange(len(rows)))
    return weight


def _fingerprint(run: RunFiles) -> Any:
    return (run.info.get("data") or {}).get("fingerprint")
