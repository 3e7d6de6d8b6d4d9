"""What is predicted: one table of tasks, a record for each kind with all that sets it apart.

Loss, size of the output, the labels' checks, metrics with their direction and words, the reference that counts and the best
possible result stand in the record. Nothing else knows a kind by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedkeep.core.errors import DataError, check_choice
from fedkeep.tasks.binary import BINARY
from fedkeep.tasks.kind import Baseline, Kind, Means, Metric, Task
from fedkeep.tasks.multi_label import MULTI_LABEL
from fedkeep.tasks.multiclass import MULTICLASS, NEXT_TOKEN, PIXELS, TOKENS
from fedkeep.tasks.ranking import RANKING
from fedkeep.tasks.regression import MULTI_OUTPUT, REGRESSION

__all__ = [
    "BINARY",
    "KINDS",
    "MULTICLASS",
    "MULTI_LABEL",
    "MULTI_OUTPUT",
    "NEXT_TOKEN",
    "PIXELS",
    "RANKING",
    "REGRESSION",
    "TOKENS",
    "Baseline",
    "Kind",
    "Means",
    "Metric",
    "Task",
    "kinds_of",
    "of_numbers",
    "of_rows",
    "of_several",
    "tasks_in",
]

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        MULTICLASS,
        BINARY,
        REGRESSION,
        RANKING,
        TOKENS,
        NEXT_TOKEN,
        PIXELS,
        MULTI_LABEL,
        MULTI_OUTPUT,
    )
}
"""The table of tasks, by name."""


def of_numbers(kind: object) -> bool:
    """Tell whether labels of the kind of task of this name are numbers; a name that is not known is of no numbers."""
    return kind in KINDS and not KINDS[str(kind)].whole


def of_several(kind: object) -> bool:
    """Tell whether an example has a row of labels, each yes or no, where the kind of task has this name."""
    return kind == MULTI_LABEL.name


def of_rows(kind: object) -> bool:
    """Tell whether an example has a row of labels, for each of which a model gives one output."""
    return kind in (MULTI_LABEL.name, MULTI_OUTPUT.name)


def tasks_in(meta: Mapping[str, Any]) -> list[Task]:
    """Return the tasks that a data set's description names.

    Raises:
        DataError: one has no such kind, or one of several no column of labels.
    """
    several = meta.get("tasks")
    if not several:
        name = meta.get("task", MULTICLASS.name)
        check_choice("meta['task'] must be", name, list(KINDS), DataError)
        units = meta.get("units")
        return [Task(KINDS[name], units=None if units is None else (units[0], units[1]))]
    for name, task in several.items():
        check_choice(f"meta['tasks'][{name!r}]['task'] must be", task.get("task"), list(KINDS), DataError)
        if "label" not in task:
            raise DataError(
                "meta['tasks'][{name!r}] must name its column of labels as 'label'; got {got!r}.",
                name=name,
                got=task,
            )
    return [Task(KINDS[task["task"]], task["label"], name) for name, task in several.items()]


def kinds_of(tasks: Sequence[Task]) -> str | dict[str, str]:
    """Return the name of the only task's kind, or of several by their names."""
    return {task.name: task.kind.name for task in tasks if task.name is not None} or tasks[0].kind.name
