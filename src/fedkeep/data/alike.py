"""What is odd about data, said before training: names that are two though one may be meant (spaces, case, 1 and 1.0),
classes that nothing is trained on, one class alone, features that never change, clients of one example each, examples
that are both trained on and tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, shown
from fedkeep.core.records import by_key
from fedkeep.data.columns import Column, Ragged
from fedkeep.tasks import tasks_in


class LabelledRows(Protocol):
    """What of a data set is looked at here: its description, its columns, the rows of a split, and whose they are."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Its description."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns by name."""

    def split_rows(self, split: Any) -> np.ndarray:
        """Return the row numbers of a split."""

    def counts(self, split: Any) -> np.ndarray:
        """Return how many examples of a split each client has."""


ID = re.compile(r"(.*[_ ])?(id|index|no|nr|row)|", re.IGNORECASE)
"""Names of columns that number rows or things."""
MOST = 3
"""How many groups of names a warning shows."""
LOOKED = 100_000
"""Rows that are looked at."""
LEAST = 20
"""Of fewer examples to train on, or of fewer clients, it is not said that they are alike."""
SAID = 0.01
"""The share of test examples that are trained on, too, above which it is said."""
MOST_BYTES = 1 << 28
"""Inputs that are larger, as files of many images, are not searched for equal examples."""
BLOCK = 1 << 14
"""Rows that are looked at together."""


CODES = ("label_names", "item_ids", "vocabulary", "features", "channels", "standardised", "units")
"""What of a description says which label, item, word or amount a number stands for."""


def check_codes(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError where a number stands for another label, item, word or amount than in the data trained on.

    Args:
        was: the description (``meta``) of the data trained on.
        now: of others. What one of both does not say is not compared; a list may go on after what is known.
    """
    for key in CODES:
        known, new = was.get(key), now.get(key)
        if known is not None and new is not None and not _goes_on(known, new):
            raise DataError(
                "In these rows a number stands for something else than where the run was trained: {key} is {new}, "
                "there {known}. Encode them as there: raw_table(FILE, ...).encoded(Encoding.from_json("
                "run.data.meta['encoded_by'])), or raw_image_folder and the like, of fedkeep.data.readers; Encoding is in "
                "fedkeep.data.preparation.",
                key=key,
                new=shown(new),
                known=shown(known),
            )


def _goes_on(known: Any, new: Any) -> bool:
    if isinstance(known, Mapping) and isinstance(new, Mapping):
        counted = {"size"} if "symbols" in known else set()  # it grows with the symbols
        return all(name in new and _goes_on(known[name], new[name]) for name in known.keys() - counted)
    if isinstance(known, list | tuple) and isinstance(new, list | tuple):
        return list(known) == list(new)[: len(known)]
    return bool(known == new)


def alike(names: Iterable[str]) -> list[list[int]]:
    """Return the places of names that differ only by spaces, case, or a ``.0`` behind a whole number, group by group.

    The case of a single character counts: letters are classes of their own where characters are told apart.
    """
    names = list(names)
    whole = "".join(names)
    by_case = "." not in whole and whole.split() == [whole]  # it is all in which they can differ
    if by_case and len({name.casefold() if len(name) > 1 else name for name in names}) == len(names):
        return []
    found = by_key((_form(name), place) for place, name in enumerate(names))
    return [places for places in found.values() if len(places) > 1]


def _form(name: str) -> str:
    form = " ".join(name.split()) or name
    if len(form) > 1:
        form = form.casefold()
    return re.sub(r"^([+-]?\d+)\.0*$", r"\1", form) if "." in form else form


def respelled(new: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield new names with the known ones from which they differ by case, or by spaces around them, alone."""
    forms = {name.strip().casefold(): name for name in known}
    for name in new:
        if (other := forms.get(name.strip().casefold())) is not None:
            yield name, other


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


def oddities(data: LabelledRows) -> Iterator[str]:
    """Yield why little can be learned from data, or from their test: one label, features that never change or only number
    rows, examples that are trained on and tested, and clients of one example each.
    """
    train = data.split_rows("train")[:LOOKED]
    for task in tasks_in(data.meta) if len(train) >= LEAST else ():
        label = data.columns.get(task.label)
        if isinstance(label, np.ndarray) and label.ndim == 1:
            own = label[train]
            if (own == own[0]).all():
                names = data.meta.get("label_names")
                said = (
                    shown(names[own[0]])
                    if names and task.kind.one_class
                    else f"{task.in_units(own[:1])[0]:g}"
                )
                yield (
                    f"Every example to train on has the label {said}: there is nothing to learn. Name another column "
                    f"as label, or look at how examples are divided."
                )
    x = data.columns.get("x")
    if isinstance(x, np.ndarray) and x.ndim == 2 and len(train) >= LEAST:
        constant = (x[train] == x[train[0]]).all(axis=0)
        if constant.all():
            yield (
                "Every feature is the same in all examples to train on, so a model sees nothing that tells them "
                "apart. Name other columns as features."
            )
        names = data.meta.get("features") or ()
        for place, name in enumerate(names if len(names) == x.shape[1] else ()):
            if _counts_rows(str(name), x[:LOOKED, place]):
                yield (
                    f"The feature {name!r} is another number in every row, as an id is: a model learns rows by heart "
                    f"from it. Leave it out of the features."
                )
    tested, twice = int(data.counts("test").sum()), repeated(data)
    if twice > SAID * tested:
        yield (
            f"{twice:,} of {tested:,} test examples stand among those to train on, too, with the same inputs, so test "
            f"also shows what a model knows by heart. Keep one of each, or give equal rows one split (a column split)."
        )
    count = data.counts("train") + data.counts("valid") + data.counts("test")
    if len(count) >= LEAST and (count == 1).mean() > 0.5:
        yield (
            f"{(count == 1).sum():,} of {len(count):,} clients have one example each, so nothing of theirs is both "
            f"trained on and tested. Is another column the client's?"
        )


def repeated(data: LabelledRows) -> int:
    """Return how many test examples have the same inputs as one that is trained on; 0 where chance alone makes that likely.

    Inputs are all columns but labels. Where they are few whole numbers, as an item's, or features of few different values,
    equal rows say nothing: there must be a hundred times as many possible rows as examples. Of inputs beyond ``MOST_BYTES`` 0.
    """
    kinds = tasks_in(data.meta)
    labels = {task.label for task in kinds} | {"opted_in"}
    inputs = {name: column for name, column in data.columns.items() if name not in labels}
    train, test = data.split_rows("train"), data.split_rows("test")
    wide = [c for c in inputs.values() if isinstance(c, Ragged) or c.ndim > 1]
    if not wide or not len(train) or sum(c.nbytes for c in inputs.values()) > MOST_BYTES:
        return 0
    seen = set(_digests(inputs.values(), train))
    found = sum(digest in seen for digest in _digests(inputs.values(), test))
    x = data.columns.get("x")
    if found and isinstance(x, np.ndarray) and x.ndim == 2 and len(wide) == 1:
        few = x[train[:LOOKED]]
        possible = sum(float(np.log(len(np.unique(few[:, place])))) for place in range(x.shape[1]))
        return found if possible > np.log(100.0 * len(train)) else 0
    return found


def _digests(columns: Iterable[Column], rows: NDArray[Any]) -> Iterator[int]:
    """Yield a hash of each row's values."""
    columns = list(columns)
    for start in range(0, len(rows), BLOCK):
        some = rows[start : start + BLOCK]
        yield from map(hash, zip(*(_bytes(column, some) for column in columns), strict=True))


def _bytes(column: Column, rows: NDArray[Any]) -> list[bytes]:
    if isinstance(column, Ragged):
        return [column[int(row)].tobytes() for row in rows]
    block = np.ascontiguousarray(column[rows]).reshape(len(rows), -1)
    content, width = block.tobytes(), block.shape[1] * block.itemsize
    return [content[place : place + width] for place in range(0, len(content), width)]


def _counts_rows(name: str, values: NDArray[Any]) -> bool:
    """Tell whether numbers all differ, and are at equal distances, as 1, 2, 3, ... are, or an id by their name."""
    gaps = np.diff(np.sort(values.astype(np.float64)))
    if len(gaps) < LEAST or gaps.min() <= 0:
        return False
    return bool(gaps.max() < 1.01 * gaps.min()) or bool(ID.fullmatch(name))


def label_warnings(data: LabelledRows) -> Iterator[str]:
    """Yield what is to be said of classes: of names that are alike, and of classes in the test split alone."""
    names = list(map(str, data.meta.get("label_names") or ()))
    for task in tasks_in(data.meta):
        label = data.columns.get(task.label)
        classes = task.kind.one_class or task.kind.sets
        if not classes or label is None or isinstance(label, Ragged):
            continue
        everything = _counts(label, len(names))
        trained, tested = (
            _counts(label[data.split_rows(split)], len(everything)) for split in ("train", "test")
        )
        if names and len(everything) == len(names) and (said := spellings("classes", names, everything)):
            yield said
        unseen = np.flatnonzero((tested > 0) & (trained == 0))
        if len(unseen) and (names or trained.sum() >= LEAST):
            told = ", ".join(
                f"{shown(names[c]) if c < len(names) else c} ({tested[c]:,} examples)"
                for c in unseen[:MOST].tolist()
            )
            more = f", and {len(unseen) - MOST} more" if len(unseen) > MOST else ""
            yield (
                f"Classes that are in the test split alone, so nothing is trained on them: {told}{more}. "
                + ("Are they spelled as in the training split?" if names else "Are their numbers right?")
            )


def _counts(labels: NDArray[Any], classes: int) -> NDArray[Any]:
    """Return the examples of each class; of several labels an example, those that have it."""
    if labels.ndim == 2:
        found: NDArray[Any] = (labels > 0).sum(axis=0)
        return found
    return np.bincount(labels[labels >= 0], minlength=classes)
