"""What a data set must satisfy before anything trains on it. Every failure names the row and its client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError, check_choice, raising, warn
from fedkeep.data.columns import Column, Ragged, is_missing
from fedkeep.data.splits import SPLITS
from fedkeep.tasks import KINDS, Kind, listed, usual_kind
from fedkeep.tasks.multiclass import IGNORED

MANY_CLASSES = 1000
ROWS = 1 << 16  # that are looked at together
OPTED_IN = "opted_in"
"""The column that says which examples may influence what leaves their client, see ``consent``."""
RESERVED = {
    "client": "centralised training puts the client's number there",
    "weight": "engines put the padding's weights there",
}


def as_columns(columns: Mapping[str, Column], rows: int | None = None) -> dict[str, Column]:
    """Return columns in types that torch can hold; all must have the same number of rows, and at least one.

    Raises:
        DataError: no column or no row, a name that no argument can have, unequal lengths, text or objects.
    """
    if not isinstance(columns, Mapping):
        raise DataError(
            "Wanted columns by name, e.g. {{'x': features, 'label': labels}}; got {got}. FederatedData.from_frame takes "
            "a data frame.",
            got=type(columns).__name__,
        )
    if not columns:
        raise DataError(
            "Wanted at least one column; got none. Give for example {'x': features, 'label': labels}."
        )
    good = {name: _as_column(name, column) for name, column in columns.items()}
    for name, column in good.items():
        if isinstance(column, Ragged) and f"{name}_length" in good:
            raise DataError(
                "Column '{column}_length' clashes with the lengths of the ragged column {column!r}. Rename it.",
                column=name,
            )
    first = next(iter(good))
    wanted, whose = (len(good[first]), f"column {first!r}") if rows is None else (rows, "the client ids")
    for name, column in good.items():
        if len(column) != wanted:
            raise DataError(
                "Wanted {wanted} rows in column {column!r}, as in {whose}; got {got}.",
                wanted=wanted,
                column=name,
                whose=whose,
                got=len(column),
            )
    if wanted == 0:
        raise DataError(
            "Wanted at least one example; got an empty data set. Check the source and its filters."
        )
    return good


def _as_column(name: str, column: Column) -> Column:
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(
            "A column's name must be a valid argument name, as a model's forward takes it; got {got!r}.",
            got=name,
        )
    if name in RESERVED:
        raise DataError(
            "The column name {column!r} is reserved: {why}. Rename the column.",
            column=name,
            why=RESERVED[name],
        )
    if isinstance(column, Ragged):
        if name == OPTED_IN:
            raise DataError(
                "Column {column!r} must have one True or False for each example; got Ragged.", column=name
            )
        return column
    # A tensor without a type of numpy's, or that wants a gradient
    with (
        raising(
            DataError,
            "Column {column!r} has rows of unequal size. Use Ragged.from_rows for token ids, "
            "Ragged.from_rows(rows, 'float32') for series, or pad the rows.",
            ValueError,
            column=name,
        ),
        raising(
            DataError,
            "Column {column!r} is no array that numpy can hold: {why}. Give tensors as "
            "column.detach().float().",
            TypeError,
            RuntimeError,
            column=name,
        ),
    ):
        array = np.asarray(column)
    if np.ma.is_masked(column):  # asarray shows what lies under the mask
        raise DataError(
            "Column {column!r} is a masked array, whose {masked} masked values are not to be used. Drop these rows or "
            "fill in a number, column.filled(...).",
            column=name,
            masked=np.ma.getmaskarray(column).sum(),
        )
    if array.dtype.kind in "OUST":
        flat = array.ravel().tolist()
        missing = next((place for place, value in enumerate(flat) if is_missing(value)), None)
        if missing is not None:
            raise DataError(
                "Row {row} of column {column!r} is missing ({got!r}). Drop such rows, or fill in a number.",
                row=missing // max(1, array[0].size if array.ndim > 1 else 1),
                column=name,
                got=flat[missing],
            )
        raise DataError(
            "Column {column!r} holds {dtype} values, but a model takes numbers. Encode texts with CharVocabulary or "
            "WordVocabulary; number labels: names, numbers = np.unique(labels, return_inverse=True); of numbers give "
            "np.array(column.tolist()).",
            column=name,
            dtype=array.dtype,
        )
    if array.dtype.kind not in "biuf" or array.ndim < 1:
        dates = " Write dates as numbers: column.astype('datetime64[s]').astype('int64') gives seconds."
        raise DataError(
            "Column {column!r} must be an array of numbers or booleans; got {dtype}, shape {shape}.{advice}",
            column=name,
            dtype=array.dtype,
            shape=array.shape,
            advice=dates if array.dtype.kind == "M" else "",
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(
            "Column {column!r} holds {got}; wanted integers below 2^63.", column=name, got=array.max()
        )
    if name == OPTED_IN:
        return _as_truths(name, array)
    if name == "label" and array.dtype.kind in "biu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)  # torch indexes with int64, and knows little of wide unsigned types
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _as_truths(name: str, array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a column of True and False, given as such or as 1 and 0."""
    if array.ndim != 1:
        raise DataError(
            "Column {column!r} must have one True or False for each example; got shape {got}.",
            column=name,
            got=array.shape,
        )
    truths = array.astype(np.bool_)
    other = np.flatnonzero(array != truths)
    if len(other):
        raise DataError(
            "Column {column!r} must be True or False (or 1 or 0); row {row} has {got}.",
            column=name,
            row=other[0],
            got=array[other[0]],
        )
    return truths


def as_split(split: ArrayLike, rows: int) -> NDArray[np.int64]:
    """Return 0, 1 or 2 for "train", "valid" or "test" in each row."""
    names = np.asarray(split)
    if names.shape != (rows,):
        raise DataError(
            "Wanted {wanted} split names, one per row; got shape {got}.", wanted=rows, got=names.shape
        )
    part = np.full(rows, -1, np.int64)
    for number, name in enumerate(SPLITS):
        part[names == name] = number
    wrong = np.flatnonzero(part < 0)
    if len(wrong):
        check_choice(f"Row {wrong[0]}: wanted the split", str(names[wrong[0]]), SPLITS, DataError)
    return part


def completed(
    columns: dict[str, Column], meta: dict[str, Any], clients: int, owner: Callable[[int], str]
) -> dict[str, Any]:
    """Return meta with ``task`` and ``classes`` filled in from the labels, and its traits checked.

    Integer labels of a regression become float32. Where nothing says how many classes there are, integer labels must
    be numbered closely, see :func:`check_close`.
    """
    label = columns.get("label")
    classes = meta.get("classes")
    if classes is not None and (
        isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1
    ):
        raise DataError("Wanted meta['classes'] as a whole number of at least 1; got {got!r}.", got=classes)
    name = meta.get("task")
    if label is not None and name is not None:
        check_choice("meta['task'] must be", name, list(KINDS), DataError)
    kind = KINDS.get(str(name))
    axes = 1 if kind is None else kind.axes
    if isinstance(label, Ragged) or (label is not None and label.ndim != axes):
        raise _wrong_axes(label, kind)
    if label is not None:
        whole = label.dtype.kind == "i"
        if whole and classes is None and (kind is None or kind.close):
            check_close(
                label, lambda row: f"Row {row} (client {owner(row)!r})", "meta['classes'] = the number"
            )
        if kind is None:
            classes = classes or (int(label.max()) + 1 if whole else 1)
            kind = usual_kind(whole, int(classes))
            meta["task"] = kind.name
        if not kind.whole:
            columns["label"] = label if not whole else label.astype(np.float32)
        elif not whole:
            raise DataError(
                "Wanted integer labels for a {task} task; got {dtype}. Use integers, or say meta['task'] = 'regression'.",
                task=kind.name,
                dtype=label.dtype,
            )
        kind.check_labels(label, columns, None if classes is None else int(classes))
        if meta.get("classes") is None:
            meta["classes"] = kind.size(label)
    traits = meta.get("traits") or {}
    if not isinstance(traits, Mapping) or not all(
        isinstance(v, Sequence | np.ndarray) for v in traits.values()
    ):
        raise DataError("Wanted meta['traits'] as names with a list of values each, one per client.")
    for name, values in traits.items():
        if len(values) != clients:
            raise DataError(
                "Wanted {wanted} values of trait {name!r}, one per client; got {got}.",
                wanted=clients,
                name=name,
                got=len(values),
            )
    return meta


def _wrong_axes(label: Column, kind: Kind | None) -> DataError:
    got = "a ragged column" if isinstance(label, Ragged) else f"shape {label.shape}"
    shape = ("(examples,)", "(examples, labels)", "(examples, height, width)")[
        0 if kind is None else kind.axes - 1
    ]
    task = "" if kind is None else f", as meta['task'] is {kind.name!r}"
    return DataError(
        "Wanted labels of the shape {wanted}{task}; got {got}. Pad rows of tokens to one length with labels of {ignored}; "
        "name the column otherwise; or say meta['task'] = {kinds}. Labels of several kinds are a column and a task each: "
        "meta['tasks'], with the loss terms.multi_task.",
        wanted=shape,
        task=task,
        got=got,
        ignored=IGNORED,
        kinds=listed(kind for kind in KINDS.values() if kind.axes > 1),
    )


def check_close(labels: NDArray[np.int64], where: Callable[[int], str], way_out: str) -> None:
    """Raise DataError where integer labels are numbered so sparsely that they are hardly numbers of classes; warn where
    they count from 1.

    A model gets an output for each number from 0 to the largest label. More than 1,000 outputs, of which fewer than one
    in ten ever occurs, are a slip (a date, an identifier, one bad row) more often than a wish.

    Args:
        labels: int64 (rows,), at least one.
        where: names a row.
        way_out: what to give where it is a wish, in the message.
    """
    row = int(labels.argmax())
    largest, different = int(labels[row]), len(np.unique(labels))
    if largest >= MANY_CLASSES and largest >= 10 * different:
        raise DataError(
            "{place}: the label {label} would make {classes:,} classes, of which {occur:,} occur. Number labels 0, 1, "
            "2, …, or give {way_out}, or task 'regression' where labels are numbers.",
            place=where(row),
            label=largest,
            classes=largest + 1,
            occur=different,
            way_out=way_out,
        )
    if labels.min() == 1 and largest == different > 1:
        warn(
            f"Labels are 1 to {largest}, so there are {largest + 1} classes: no example has the label 0. Number labels "
            f"from 0, or give {way_out}."
        )


def check_columns(columns: Mapping[str, Column], owner: Callable[[int], str]) -> None:
    """Raise DataError at the first NaN or infinity of a float column."""
    for name, column in columns.items():
        if isinstance(column, Ragged):
            if column.holds_ids or _are_finite(column.values):
                continue
            bad = np.flatnonzero(~np.isfinite(column.values).all(axis=1))
            wrong = np.unique(np.searchsorted(column.offsets, bad, side="right") - 1)
        elif column.dtype.kind != "f" or _are_finite(column):
            continue
        else:
            wrong = np.flatnonzero(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
        if len(wrong):
            row = int(wrong[0])
            value = column[row].ravel()[~np.isfinite(column[row].ravel())][0]
            raise DataError(
                "Column {column!r} holds {got} in row {row} (client {client!r}), and {more} more rows hold such values. "
                "Drop these rows or fill in a number.",
                column=name,
                got=float(value),
                row=row,
                client=owner(row),
                more=len(wrong) - 1,
            )


def _are_finite(column: NDArray[Any]) -> bool:
    return all(np.isfinite(column[at : at + ROWS]).all() for at in range(0, len(column), ROWS))


def check_labels(columns: Mapping[str, Column], meta: Mapping[str, Any], owner: Callable[[int], str]) -> None:
    """Raise DataError at the first label that is not one of the task's classes."""
    label = columns.get("label")
    if label is None or isinstance(label, Ragged):
        return
    kind, classes = KINDS[meta["task"]], int(meta["classes"])
    values = kind.values(classes)
    if values is None:
        return
    outside = (label < 0) | (label >= values)
    if kind.ignored is not None:
        outside &= label != kind.ignored
    if outside.any():
        row = int(np.argwhere(outside)[0][0])
        ignored = "" if kind.ignored is None else f", and {kind.ignored} for what does not count"
        raise DataError(
            "Wanted labels 0 to {largest} ({classes} classes){ignored}; got {got} in row {row} (client {client!r}) and "
            "{more} more out of range. Correct the labels or meta['classes'].",
            largest=values - 1,
            classes=classes,
            ignored=ignored,
            got=int(label[outside][0]),
            row=row,
            client=owner(row),
            more=int(outside.sum()) - 1,
        )
