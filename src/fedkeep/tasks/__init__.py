"""What is predicted: one table of tasks, a record for each kind with all that sets it apart.

Loss, size of the output, the labels' checks, metrics with their direction and words, the reference that counts and the best
possible result stand in the record. Nothing else knows a kind by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    "listed",
    "listed_for_cells",
    "of_classes",
    "of_numbers",
    "of_sets",
    "row_of",
    "tasks_in",
    "usual_kind",
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


def of_sets(kind: object) -> bool:
    """Tell whether an example's label of the kind of task of this name is a set of names, as ``Kind.sets``."""
    return kind in KINDS and KINDS[str(kind)].sets


def usual_kind(whole: bool, classes: int | None = None) -> Kind:
    """Return the kind of one label an example where nobody says it: numbers, two classes, or more.

    Args:
        whole: whether labels are integers.
        classes: how many there are, then; None: nobody knows, so that there may be more than two.
    """
    if not whole:
        return REGRESSION
    return MULTICLASS if classes is None or classes > 2 else BINARY


def row_of(kind: str | None) -> str | None:
    """Return the name of the kind where an example has a row of labels of this kind; None: there is none.

    Args:
        kind: a kind's name; None: nobody says it, and each label of the row is there or not.
    """
    if kind is None:
        return MULTI_LABEL.name
    return kind if KINDS[kind].several else KINDS[kind].row


def of_classes(axes: int) -> Kind:
    """Return the kind of labels that are classes and have so many axes: the batch's, then one for tokens, two for pixels."""
    return next((kind for kind in KINDS.values() if kind.has_classes and kind.axes == axes), TOKENS)


def listed(kinds: Iterable[Kind]) -> str:
    """Return kinds in words: their names, and which labels are of each."""
    return ", ".join(f"{kind.name!r} {kind.where}" for kind in kinds)


def listed_for_cells() -> str:
    """Return the kinds in words whose labels are one cell of a table each."""
    return listed(kind for kind in KINDS.values() if kind.from_table and kind.axes == 1)


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
