"""Names that are two though one may be meant (spaces, case, 1 and 1.0), and classes that nothing is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import shown
from fedkeep.data.columns import Ragged
from fedkeep.tasks import of_several, tasks_in


class Labelled(Protocol):
    """What of a data set is looked at here: its description, its columns, and the rows of a split."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its description."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns by name."""

    def split_rows(self, split: Any) -> np.ndarray:
        """Return the row numbers of a split."""


MOST = 3
"""How many groups of names a warning shows."""


def alike(names: Iterable[str]) -> list[list[int]]:
    """Return the places of names that differ only by spaces, case, or a ``.0`` behind a whole number, group by group.

    The case of a single character counts: letters are classes of their own where characters are told apart.
    """
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(_form(name), []).append(place)
    return [places for places in found.values() if len(places) > 1]


def _form(name: str) -> str:
    form = " ".join(name.split()) or name
    if len(form) > 1:
        form = form.casefold()
    return re.sub(r"^([+-]?\d+)\.0*$", r"\1", form) if "." in form else form


def spellings(what: str, names: Sequence[str], counts: NDArray[Any]) -> str:
    """Return what is to be said of names that are alike, with their numbers of examples; empty: of none."""
    groups = alike(names)
    if not groups:
        return ""
    told = "; ".join(
        " and ".join(f"{shown(names[n])} ({counts[n]:,} examples)" for n in group) for group in groups[:MOST]
    )
    more = f"; and {len(groups) - MOST} more" if len(groups) > MOST else ""
    return (
        f"Some {what} differ only by spaces, case or .0, and each counts as one of its own: {told}{more}. Where one is "
        f"meant, write it in one way."
    )


def label_warnings(data: Labelled) -> Iterator[str]:
    """Yield what is to be said of classes with names: those that are alike, and those in the test split alone."""
    names = list(map(str, data.meta.get("label_names") or ()))
    for task in tasks_in(data.meta) if names else ():
        label = data.columns.get(task.label)
        classes = task.kind.one_class or of_several(task.kind.name)
        if not classes or label is None or isinstance(label, Ragged):
            continue
        everything = _counts(label, len(names))
        trained, tested = (
            _counts(label[data.split_rows(split)], len(everything)) for split in ("train", "test")
        )
        if len(everything) == len(names) and (said := spellings("classes", names, everything)):
            yield said
        unseen = np.flatnonzero((tested > 0) & (trained == 0))
        if len(unseen):
            told = ", ".join(
                f"{shown(names[c]) if c < len(names) else c} ({tested[c]:,} examples)"
                for c in unseen[:MOST].tolist()
            )
            more = f", and {len(unseen) - MOST} more" if len(unseen) > MOST else ""
            yield (
                f"Classes that are in the test split alone, so nothing is trained on them: {told}{more}. Are they "
                f"spelled as in the training split?"
            )


def _counts(labels: NDArray[Any], classes: int) -> NDArray[Any]:
    """Return the examples of each class; of several labels an example, those that have it."""
    if labels.ndim == 2:
        found: NDArray[Any] = (labels > 0).sum(axis=0)
        return found
    return np.bincount(labels[labels >= 0], minlength=classes)
