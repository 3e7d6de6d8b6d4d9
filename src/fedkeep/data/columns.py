"""Columns of examples: dense arrays, and rows of unequal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError

Rows = NDArray[np.int64]
"""Row numbers of a data set, in any order."""
T = TypeVar("T")
AS_READ = "_as_read_"
"""Before a column's name: the column that tells its rows apart where their numbers may become others."""


class Repeated(Sequence[T], Generic[T]):
    """A column whose rows share few values: the different ones are held once, and of each row the number of its own.

    Args:
        different: the values; each is some row's, and two may be equal.
        number: int64 (rows,).
    """

    def __init__(self, different: Sequence[T], number: NDArray[np.int64]) -> None:
        self.different, self.number = different, number

    def __len__(self) -> int:
        return len(self.number)

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> Repeated[T]: ...
    def __getitem__(self, row: int | slice) -> T | Repeated[T]:
        return self.taken(self.number[row]) if isinstance(row, slice) else self.different[self.number[row]]

    def __iter__(self) -> Iterator[T]:
        return map(self.different.__getitem__, self.number.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.different, dtype)[self.number]

    def taken(self, number: NDArray[np.int64]) -> Repeated[T]:
        """Return a column of these numbers, without values that are no row's."""
        used, place = np.unique(number, return_inverse=True)
        return Repeated([self.different[n] for n in used.tolist()], place.astype(np.int64))


class Ragged:
    """Rows of unequal length in one flat array: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: token or character ids, shape (tokens,), any integer dtype, of which 0 is kept for padding; or the steps of
            series, shape (steps, values a step), floats.
        offsets: int64, shape (rows + 1,), from 0 to ``len(values)``, never falling.

    Raises:
        DataError: the offsets don't describe the values.
    """

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        self.values = np.asarray(values)
        self.offsets = as_offsets(offsets, "a ragged column's offsets")
        axes = {"i": 1, "u": 1, "f": 2}.get(self.values.dtype.kind)
        if self.values.ndim != axes:
            raise DataError(
                "The values of a ragged column must be one flat array of integers (token ids), or floats of the shape "
                "(steps, values a step); got shape {got} of {dtype}.",
                got=self.values.shape,
                dtype=self.values.dtype,
            )
        check_offsets(self.offsets, len(self.values), "a ragged column's offsets", "values")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any] | NDArray[Any]], dtype: str = "int64") -> Ragged:
        """Return a ragged column of these rows.

        Args:
            rows: of whole numbers, each (tokens,); or of floats, each (steps, values a step), as many in every row.
            dtype: of the column; "float32" for series.

        Raises:
            DataError: a value is no whole number of this type, or a series is none or of another width than the first.
        """
        if np.dtype(dtype).kind == "f":
            arrays = [_steps(row, dtype) for row in rows]
            wrong = next((n for n, a in enumerate(arrays) if a.shape[1] != arrays[0].shape[1]), None)
            if wrong is not None:
                raise DataError(
                    "Wanted {wanted} values a step in every series, as in the first; got {got} in row {row}.",
                    wanted=arrays[0].shape[1],
                    got=arrays[wrong].shape[1],
                    row=wrong,
                )
        else:
            arrays = [_whole(row, dtype) for row in rows]
        return cls(
            np.concatenate(arrays)
            if arrays
            else np.zeros((0, 1) if np.dtype(dtype).kind == "f" else 0, dtype),
            offsets_of(np.asarray([len(row) for row in arrays], dtype=np.int64)),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        count = len(self.offsets) - 1
        if not -count <= row < count:
            raise IndexError(f"row {row} of {count}")
        row %= count
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self):,} rows, {len(self.values):,} values of {self.values.dtype})"

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets together."""
        return self.values.nbytes + self.offsets.nbytes

    @property
    def holds_ids(self) -> bool:
        """Whether values are ids of tokens; else they are steps of series."""
        return self.values.ndim == 1

    def lengths(self, rows: Rows) -> NDArray[np.int64]:
        """Return the rows' lengths."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def take(self, rows: Rows) -> Ragged:
        """Return a ragged column of these rows, in this order."""
        start = self.offsets[rows]
        length = self.offsets[rows + 1] - start
        offsets = offsets_of(length)
        # Position of every value kept: its place in its row, plus where that row starts here.
        at = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], length)
        return Ragged(self.values[at], offsets)

    def padded(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return rows as a rectangle padded with 0 behind, and their lengths.

        An empty row has length 1 and holds one pad, so that a recurrent network always has a step to take.

        Returns:
            ids, int64 (rows, longest), or steps, floats (rows, longest, values a step); and lengths, int64 (rows,).
        """
        start = self.offsets[rows]
        length = self.offsets[rows + 1] - start
        longest = max(1, int(length.max())) if len(length) else 1
        place = np.arange(longest)
        if self.values.ndim > 1:
            steps = np.zeros((len(start), longest, *self.values.shape[1:]), self.values.dtype)
            inside = place < length[:, None]
            steps[inside] = self.values[(start[:, None] + place)[inside]]
            return steps, np.maximum(length, 1)
        if len(self.values):
            # mode="clip" spares the check of bounds; what it reads beyond a row's end is zeroed below.
            ids = self.values.take(start[:, None] + place, mode="clip").astype(np.int64)  # (rows, longest)
            ids *= place < length[:, None]
        else:
            ids = np.zeros((len(start), longest), np.int64)
        return ids, np.maximum(length, 1)


def _steps(row: Sequence[Any] | NDArray[Any], dtype: str) -> NDArray[Any]:
    try:
        given = np.asarray(row)
    except ValueError:  # steps of unequal width
        given = np.zeros(0, object)
    if given.ndim != 2 or given.dtype.kind not in "biuf":
        raise DataError(
            "Wanted series of numbers, each of the shape (steps, values a step); got the shape {got} of {dtype}.",
            got=given.shape,
            dtype=given.dtype,
        )
    return given.astype(dtype)


def _whole(row: Sequence[int] | NDArray[Any], dtype: str) -> NDArray[Any]:
    given = np.asarray(row)
    if not given.size:
        return np.zeros(0, dtype)
    with np.errstate(invalid="ignore"):
        made = given.astype(dtype) if given.dtype.kind in "biuf" else None
    if made is None or (made != given).any():
        raise DataError(
            "Wanted rows of whole numbers that {dtype} holds; got {got!r}.", dtype=dtype, got=given.tolist()
        )
    return made


Column = np.ndarray[Any, Any] | Ragged
"""A dense array, first axis examples, or a ragged column."""


def is_missing(value: object) -> bool:
    """Tell whether a value stands for none: None, NaN, or what pandas writes there."""
    nan = isinstance(value, float | np.floating) and bool(np.isnan(value))
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


def stable_order(keys: NDArray[np.int64]) -> Rows:
    """Return the order that sorts keys of at least 0, where equal ones keep theirs: ``argsort(kind="stable")``, faster.

    NumPy sorts 16 bits by counting; larger keys are sorted by their low 16 bits first, then by the next.
    """
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    most, shift = int(keys.max(initial=0)), 16
    while most >> shift:
        order = order[np.argsort(((keys[order] >> shift) & 0xFFFF).astype(np.uint16), kind="stable")]
        shift += 16
    return order


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each of consecutive pieces starts and the last ends: (0, l₀, l₀ + l₁, …), int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def as_offsets(given: ArrayLike, what: str) -> NDArray[np.int64]:
    """Return whole numbers as int64; DataError where they are none, or too large for it."""
    array = np.asarray(given)
    if array.dtype.kind not in "iu" and (array.size or array.dtype.kind != "f"):  # numpy takes [] for floats
        raise DataError("Wanted {wanted} as whole numbers; got {got}.", wanted=what, got=array.dtype)
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(
            "Wanted {wanted} below 2^63; got {got}.",
            wanted=what,
            got=array.max(),
        )
    return array.astype(np.int64, copy=False)


def check_offsets(offsets: NDArray[np.int64], end: int, what: str, of: str) -> None:
    """Raise DataError unless ``offsets`` rise from 0 to ``end``."""
    flat = offsets.ndim == 1 and len(offsets) > 0
    if not flat or offsets[0] != 0 or offsets[-1] != end or not _rising(offsets):
        got = f"a fall, or {offsets[0]} to {offsets[-1]}" if flat else f"shape {offsets.shape}"
        raise DataError(
            "Wanted {wanted} to rise from 0 to {end}, the number of {of}; got {got}.",
            wanted=what,
            end=end,
            of=of,
            got=got,
        )


def _rising(offsets: NDArray[np.int64], block: int = 1 << 20) -> bool:
    # In blocks: the offsets may be mapped from a file larger than memory.
    return not any((np.diff(offsets[at : at + block + 1]) < 0).any() for at in range(0, len(offsets), block))


def check_max_length(max_length: int | None) -> None:
    """Raise DataError unless a text or a series keeps at least one step (None: all of them)."""
    if max_length is not None and max_length < 1:
        raise DataError(
            "max_length is how many characters or words of a text to keep, or steps of a series, at least 1; got {got}.",
            got=max_length,
        )
