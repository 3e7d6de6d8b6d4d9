"""What personalisation was worth: finished runs, compared from their folders alone.

Counting: each user's most frequent training label (of a regression the mean), the reference that learns nothing.

Where examples have a column ``time``, later ones count more: the r-th last of a user weighs γ^r, and γ is chosen by the
loss on validation. Shares of labels are p = (Σ w + g) / (W + 1), g being the shares over all users: so ties, and users
without training examples, go by what is frequent everywhere. Of a ranking, a candidate's score is how
often all users took that item (column ``item``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.core.describe import differences
from fedkeep.core.errors import ConfigError
from fedkeep.core.params import Params
from fedkeep.data import FederatedData
from fedkeep.experiments.analyses import write_analyses
from fedkeep.experiments.build import build_data
from fedkeep.experiments.drive import places_of
from fedkeep.experiments.load import check_same_data, folder_of_data, run_folder_config
from fedkeep.metrics import CLASS_METRICS
from fedkeep.report.groups import Configuration, configurations
from fedkeep.report.pairing import Side, kept, own_side, reference_side
from fedkeep.report.runs import RunFiles, read_run
from fedkeep.report.worth_page import Comparison, comparisons, limits, recognised, sentences, subjects, tenths
from fedkeep.tasks import Baseline, Task, tasks_in
from fedkeep.tasks.kind import COUNTING
from fedkeep.tasks.results import ExampleResults, before_task


def worth_of(
    runs: Sequence[Path],
    against: Sequence[Path] = (),
    metric: str | None = None,
    *,
    references: bool = False,
    data_folder: Path | None = None,
) -> list[Comparison]:
    """Compare personalised models with references, on the same test examples.

    Each model is taken at its round that was best on validation. Runs that differ in their seed only are one model. Its
    references are the shared part alone, where the runs kept that (``evaluate_shared``), and ``against``; where that is
    empty, those among ``runs`` that are FedAvg, local training, or FedAvg with fine-tuning.

    Args:
        runs: folders of runs.
        against: folders of the references' runs, with the same seeds.
        metric: ``accuracy`` or ``loss``; None: accuracy, for a regression the loss.
        references: compare with counting too, see ``fedkeep.experiments.worth``. It reads the data; what it finds is
            kept in the folder of a model's first run, for its page.
        data_folder: the folder of real data, for ``references``.

    Raises:
        RunError: a folder holds no run, or something in it is damaged.
        ConfigError: data, test examples or seeds differ, the metric has no value for a single example, or there is
            nothing to compare with.
    """
    if metric in CLASS_METRICS:
        raise ConfigError(
            "{metric} has no value for a single example, so no user is told apart by it. Choose accuracy or loss; "
            "gains in {metric} over all examples stand in fedkeep report and in --json, of runs with "
            "run.metrics = ['{metric}'].",
            metric=metric,
        )
    groups = configurations([read_run(Path(folder)) for folder in runs])
    named = [reference_side(g) for g in configurations([read_run(Path(folder)) for folder in against])]
    found: list[Comparison] = []
    for group in groups if named else _personal(groups):
        own = own_side(group)
        others, faults = (named, []) if named else recognised(group, groups)
        counting = [counting_side(own, data_folder)] if references else []
        more, not_made = comparisons(own, [*others, *counting], metric)
        if faults or not_made:
            raise ConfigError([*faults, *not_made][0])
        if references:
            write_analyses(
                group.runs[0].folder, {"counting": _form([c for c in more if c.reference == "counting"])}
            )
        found += more
    return found


def _form(found: Sequence[Comparison]) -> dict[str, Any]:
    """Return comparisons with counting as a table in the form that reports read."""
    rows = [[c.title, " ".join((*sentences(c), *tenths(c), *limits(c.found)))] for c in found]
    note = (
        "Counting predicts a user's most frequent training label, of a regression the mean, of a ranking what all "
        "users took most often; it learns nothing else."
    )
    return {
        "title": "Against counting",
        "note": note,
        "columns": ["model", "what it was worth"],
        "rows": rows,
    }


def _personal(groups: Sequence[Configuration]) -> list[Configuration]:
    found = subjects(groups)
    if not found:
        raise ConfigError(
            "None of these runs personalises: {groups}. Name a run of another method, or "
            "what to compare with by --against RUN.",
            groups=", ".join(g.label for g in groups),
        )
    return found


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
            data = build_data(config, folder or folder_of_data(run.folder))
        check_same_data(run.folder, data, _fingerprint(run))
        runs.append(replace(run, examples=counted(data, kept(run))))
    kinds = [task.kind for task in tasks_in(data.meta)] if data is not None else []
    names = {kind.counting.name for kind in kinds if kind.counting is not None}
    return Side(names.pop() if len(names) == 1 else COUNTING, tuple(runs), "own", "counting")


def counted(data: FederatedData, examples: ExampleResults) -> ExampleResults:
    """Return what counting makes of the same test and validation examples, as the model ``own``."""
    test, valid = Params(), Params()
    for task in tasks_in(data.meta):
        decay = _best_decay(data, task, examples)
        for split, tensors in ((test, examples.tensors), (valid, examples.valid)):
            before = before_task(task.name)
            if f"{before}client" in tensors:
                found = counted_rows(data, task, tensors[f"{before}row"].numpy(), decay=decay)
                columns = {
                    name: tensors[before + name].clone()
                    for name in ("client", "row", "label", "place", "class")
                    if before + name in tensors
                }
                if "class" not in columns:
                    found.pop("class", None)
                columns |= {f"own/{name}": torch.from_numpy(value) for name, value in found.items()}
                split |= {before + name: column for name, column in columns.items()}
    return replace(examples, tensors=test, valid=valid)


def _best_decay(data: FederatedData, task: Task, examples: ExampleResults) -> float:
    rows = examples.valid.get(f"{before_task(task.name)}row")
    if "time" not in data.columns or rows is None:
        return 1.0
    loss = {
        decay: float(counted_rows(data, task, rows.numpy(), decay=decay)["loss"].mean()) for decay in DECAYS
    }
    return min(loss, key=lambda decay: loss[decay])


def counted_rows(
    data: FederatedData, task: Task, rows: Array, *, decay: float = 1.0, together: bool = False
) -> dict[str, Array]:
    """Return what counting makes of examples: ``loss``, ``score`` and, of classes, ``class`` of each result.

    Args:
        data: the data; training examples are counted.
        task: whose labels.
        rows: the examples' rows.
        decay: what each earlier example of a client counts, in multiples of the next one.
        together: count all clients' examples as one client's.

    Raises:
        ConfigError: such labels are not counted.
    """
    if task.kind.counting is None:
        raise ConfigError(
            "Counting labels is no reference for the task {task!r}; compare with another run.",
            task=task.kind.name,
        )
    train = data.split_rows("train")
    label: Array = task.judged(np.asarray(data.columns[task.label]))
    known_label = ~np.isnan(label) if label.dtype.kind == "f" else label >= 0
    train = train[known_label[train] if label.ndim == 1 else known_label[train].all(1)]
    place = None if label.ndim == 1 else places_of(rows)
    item = data.columns.get("item")
    owner, asked = data.clients_of(train), data.clients_of(rows)
    known = Baseline(
        clients=1 if together else len(data),
        owner=np.zeros_like(owner) if together else owner,
        weight=_weights(data, train, decay),
        label=label[train],
        asked=np.zeros_like(asked) if together else asked,
        true=label[rows] if place is None else label[rows, place],
        place=place,
        trained_items=None if item is None else np.asarray(item)[train],
        asked_items=None if item is None else np.asarray(item)[rows],
    )
    return dict(task.kind.counting.found(known))


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
