"""Results of judging as tensors, and back: sums, or every example's result where the device's policy lets it leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from fedkeep.core.errors import UploadError, shown
from fedkeep.core.params import Params, difference_of_names
from fedkeep.engines import Judged, Judgement, Leaves, Tallies
from fedkeep.engines.tally import ROWS
from fedkeep.metrics.auc import BINS
from fedkeep.tasks import KINDS, Task
from fedkeep.tasks.results import Model

WHOLE = ("people", "count", "right", "agreed", "scores")
"""Columns of a tally that hold whole numbers of at least 0."""
POSITIVE = ("loss", "absolute", "accuracy")
"""Columns of at least 0, or NaN, that are no whole numbers."""
EXAMPLE = ("client", "loss", "score", "label", "row")
MOST, MOST_WHOLE = 1e300, 2**53
"""Numbers beyond are no sums of examples, and those of several nodes would have no room."""
NO_LABELS = (torch.bfloat16, torch.complex64)


class JudgedHeader(BaseModel):
    """What is said of a result beside its numbers.

    ``clients``: with tallies the client of each row, an empty text where a row is a sum; with examples the ids that
    clients' numbers stand for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    split: Literal["valid", "test"]
    kind: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    label: str
    name: str | None
    models: Annotated[list[Model], Field(min_length=1)]
    leaves: Leaves
    clients: list[str]


def judged_tensors(split: str, judged: Judged) -> tuple[dict[str, Any], Params]:
    """Return what is said of a result, and its columns by name: a tally's, or ``M/COLUMN`` of each model's examples."""
    tensors: Params = {}
    if judged.examples:
        numbers = np.unique(judged.examples[0].client)
        clients = [str(judged.roster[int(c)]) for c in numbers]
        for m, one in enumerate(judged.examples):
            columns = dict(zip(EXAMPLE, one.columns, strict=True))
            columns["client"] = np.searchsorted(numbers, one.client)
            tensors |= {f"{m}/{name}": torch.from_numpy(values.copy()) for name, values in columns.items()}
    else:
        clients = list(judged.tallies.clients)
        tensors = {name: torch.from_numpy(np.array(getattr(judged.tallies, name))) for name in ROWS}
    task = judged.task
    header = {
        "split": split,
        "kind": task.kind.name,
        "label": task.label,
        "name": task.name,
        "models": list(judged.models),
        "leaves": judged.leaves,
        "clients": clients,
    }
    return header, tensors


def read_judged(header: JudgedHeader, tensors: Params) -> Judged:
    """Return what ``judged_tensors`` wrote.

    Raises:
        UploadError: names, shapes, types or values are not those of a result.
    """
    task, models = Task(KINDS[header.kind], header.label, header.name), tuple(header.models)
    if len(set(models)) < len(models):
        raise _refused(f"a model stands twice in {list(models)}")
    if header.leaves == "examples":
        examples = _examples(task, len(models), len(header.clients), tensors)
        return Judged(
            task=task, models=models, leaves=header.leaves, examples=examples, roster=header.clients
        )
    return Judged(
        task=task, models=models, leaves=header.leaves, table=_table(task, models, header.clients, tensors)
    )


def _table(task: Task, models: tuple[Model, ...], clients: Sequence[str], tensors: Params) -> Tallies:
    k, m, p = len(clients), len(models), len(list(combinations(models, 2)))
    shapes = dict.fromkeys(ROWS, (k, m)) | {
        "people": (k,),
        "count": (k,),
        "agreed": (k, p, 2, 2),
        "difference": (k, p, 2),
        "scores": (k, m, 2, BINS if task.kind.ranks_scores else 0),
    }
    if fault := difference_of_names(shapes, tensors):
        raise _refused(fault)
    for name, shape in shapes.items():
        value = tensors[name]
        _check(name, value, shape, torch.int64 if name in WHOLE else torch.float64)
        _check_range(name, value, at_least_0=name in WHOLE or name in POSITIVE)
    if bool((tensors["right"] > tensors["count"][:, None]).any()):
        raise _refused("'right' is more than 'count'")
    if bool(((tensors["people"] == 0) & (tensors["count"] > 0)).any()):
        raise _refused("'count' tells of examples of nobody")
    columns: dict[str, Any] = {name: tensors[name].numpy() for name in ROWS}
    return Tallies(task=task, models=models, clients=tuple(clients), **columns)


def _examples(task: Task, models: int, clients: int, tensors: Params) -> tuple[Judgement, ...]:
    wanted = [f"{m}/{name}" for m in range(models) for name in EXAMPLE]
    if fault := difference_of_names(wanted, tensors):
        raise _refused(fault)
    count = len(tensors["0/client"]) if tensors["0/client"].dim() else -1
    for name in wanted:
        value, column = tensors[name], name.partition("/")[2]
        if column == "label" and value.dtype in NO_LABELS:
            raise _refused(f"{shown(name)} should be real numbers, is {value.dtype}")
        kind = {"client": torch.int64, "row": torch.int64, "label": value.dtype}
        _check(name, value, (count,), kind.get(column, torch.float64))
        if column == "loss":
            _check_range(name, value, at_least_0=True)
        elif column == "score" and (fault := task.kind.score_fault(value)):
            raise _refused(f"{shown(name)} {fault}")
    found = []
    for m in range(models):
        columns = [tensors[f"{m}/{name}"].numpy() for name in EXAMPLE]
        if count and not (columns[0].min() >= 0 and columns[0].max() < clients):
            raise _refused(f"an example is of none of the {clients} clients")
        found.append(Judgement.joined(task, [columns]))
    return tuple(found)


def _check(name: str, value: torch.Tensor, shape: tuple[int, ...], kind: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype != kind:
        got = f"{tuple(value.shape)} {value.dtype}"
        raise _refused(f"{shown(name)} should be {shape} {kind}, is {got}")


def _check_range(name: str, value: torch.Tensor, *, at_least_0: bool) -> None:
    """Raise UploadError at a number that comes of no examples; a model that diverged has NaN and infinity."""
    if at_least_0 and bool((value < 0).any()):
        raise _refused(f"{shown(name)} holds a number below 0")
    if value.is_floating_point():
        if bool(((value.abs() > MOST) & ~value.isinf()).any()):
            raise _refused(f"{shown(name)} holds a number beyond {MOST:g}")
    elif bool((value > MOST_WHOLE).any()):
        raise _refused(f"{shown(name)} holds a number beyond 2^53")


def _refused(fault: str) -> UploadError:
    return UploadError(f"A result of judging was refused: {fault}.")
