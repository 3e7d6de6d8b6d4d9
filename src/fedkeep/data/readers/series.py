"""Columns whose cells hold a series of numbers each: lists, as JSON lines and Parquet have them, or declared texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged, check_max_length, offsets_of
from fedkeep.data.preparation import Series
from fedkeep.data.preparation.series_columns import LARGEST, series_in
from fedkeep.data.readers.cells import RawTable
from fedkeep.data.readers.kinds import SERIES, check_kind


def is_series(table: RawTable, name: str, declared: str | None = None) -> bool:
    """Tell whether a column is declared to hold a series in each cell, or holds lists."""
    if declared is not None:
        check_kind(name, declared)
        return declared == SERIES
    values = table.columns[name].values
    if isinstance(values, list):
        return any(isinstance(cell, list) for cell in values)
    return _of_lists(values.type)


def _of_lists(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def seems_series(cells: Sequence[Any]) -> bool:
    """Tell whether texts look as series do: most hold three numbers or more, and nothing else."""
    there = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
    read = [_parsed(cell, ".") for cell in there]
    right = sum(
        isinstance(one, list) and len(one) > 2 and not isinstance(series_in(one), str) for one in read
    )
    return right > len(there) / 2


def series_of(
    table: RawTable,
    names: Sequence[str],
    kinds: Mapping[str, str],
    *,
    max_length: int,
    standardise: bool = True,
) -> Series:
    """Return columns as the channels of one series in each row.

    Args:
        table: where they stand.
        names: of the columns. Of a column of lists of numbers a channel has the column's name; lists of lists have a channel
            for each place, such as ``name[0]``.
        kinds: those that are declared, by name.
        max_length: steps to keep.
        standardise: as of ``Series``.

    Raises:
        DataError: a cell holds no list, an empty one, one with a text, NaN or infinity in it, or with steps of unequal
            width; columns have different numbers of steps in a row; or a column holds single values. File, row and column
            are named.
    """
    check_max_length(max_length)
    of_series = [name for name in names if is_series(table, name, kinds.get(name))]
    read = {name: _slow(table, name) if (one := _fast(table, name)) is None else one for name in of_series}
    if single := [name for name in names if name not in read]:
        raise DataError(
            "The column {column!r} holds a single value in each row, and {series!r} a series. A model reads either: name "
            "features of one kind; or write the value at every step, as a series.",
            column=single[0],
            series=of_series[0],
        )
    channels: list[str] = []
    for name, one in read.items():
        width = one.values.shape[1]
        channels += [name] if width == 1 else [f"{name}[{place}]" for place in range(width)]
        lengths = [np.diff(each.offsets) for each in (read[names[0]], one)]
        for row in np.flatnonzero(lengths[0] != lengths[1])[:1].tolist():
            raise DataError(
                "{place}: wanted as many steps in column {column!r} as in {first!r}, {wanted}; got {got}.",
                place=table.where(row),
                column=name,
                first=names[0],
                wanted=int(lengths[0][row]),
                got=int(lengths[1][row]),
            )
    steps = np.concatenate([each.values for each in read.values()], axis=1)
    return Series(
        names=tuple(channels),
        values=Ragged(steps, read[names[0]].offsets),
        max_length=max_length,
        standardise=standardise,
    )


def _fast(table: RawTable, name: str) -> Ragged | None:
    """Return a column of lists that pyarrow reads as numbers; None where something is to be said, or to be parsed."""
    from pyarrow import ArrowException, compute, types

    values = table.columns[name].values
    if isinstance(values, list) or not _of_lists(values.type) or values.null_count:
        return None
    try:
        lengths = compute.list_value_length(values).to_numpy()
        flat, width = compute.list_flatten(values), 1
        if _of_lists(flat.type):
            widths = compute.list_value_length(flat).to_numpy()
            if flat.null_count or not len(widths) or widths.min() != widths.max():
                return None
            width, flat = int(widths[0]), compute.list_flatten(flat)
        if flat.null_count or not (types.is_integer(flat.type) or types.is_floating(flat.type)):
            return None
        numbers = compute.cast(flat, "float64", safe=False).to_numpy()
    except ArrowException:
        return None
    if not len(lengths) or lengths.min() < 1 or not width or not (np.abs(numbers) <= LARGEST).all():
        return None
    return Ragged(numbers.reshape(-1, width), offsets_of(lengths))


def _slow(table: RawTable, name: str) -> Ragged:
    """Return a column cell by cell; DataError at the first that is no series."""
    made: list[NDArray[np.float64]] = []
    for row, cell in enumerate(table.columns[name].tolist()):
        read = _parsed(cell, table.decimal) if isinstance(cell, str) else cell
        one = series_in(read)
        if not isinstance(one, str) and made and one.shape[1] != made[0].shape[1]:
            one = f"steps of {one.shape[1]} after steps of {made[0].shape[1]}"
        if isinstance(one, str):
            raise DataError(
                "{place}: wanted a list of numbers in column {column!r}, a series of one step or more; got {got}. Correct "
                "it, or drop the row.",
                place=table.where(row),
                column=name,
                got=one,
            )
        made.append(one)
    return Ragged(np.concatenate(made), offsets_of(np.asarray([len(one) for one in made])))


def _parsed(cell: str, decimal: str) -> Any:
    """Return what a text such as "1.0 2.5", "[1.0, 2.5]" or "[[1, 2], [3, 4]]" lists; texts stay where they are no number."""
    text = cell.strip()
    if text.startswith("[["):
        try:
            return json.loads(text)
        except ValueError:
            return cell
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    marks = r"[\s;]+" if decimal == "," else r"[\s;,]+"
    return [_number(part, decimal) for part in re.split(marks, text.strip()) if part]


def _number(text: str, decimal: str) -> float | str:
    try:
        return text if "_" in text else float(text.replace(decimal, "."))
    except ValueError:
        return text
