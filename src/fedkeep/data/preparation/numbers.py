"""Columns of numbers: times, keys of items, and arrays that are taken as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Column, Ragged
from fedkeep.data.preparation.contract import (
    Code,
    ColumnSummary,
    Counted,
    RawColumn,
    Rules,
    Where,
    difference,
)
from fedkeep.data.preparation.pooling import COUNT


@dataclass(frozen=True, kw_only=True)
class Times(RawColumn):
    """A raw column of times: int64 or float64 (rows,), finite."""

    kind: ClassVar[str] = "time"
    values: NDArray[np.int64] | NDArray[np.float64]

    def summary(self, rules: Rules, counted: Counted) -> TimeSummary:
        """Tell whether all times of examples that opted in are whole numbers."""
        return TimeSummary(whole=not counted.told(self.fractions).any())

    @property
    def fractions(self) -> NDArray[np.bool_]:
        """True for each row whose time is no whole number below 2^63."""
        if self.values.dtype.kind == "i":
            return np.zeros(len(self), bool)
        found: NDArray[np.bool_] = (self.values != np.floor(self.values)) | (np.abs(self.values) >= 2**63)
        return found


@dataclass(frozen=True, kw_only=True)
class TimeSummary(ColumnSummary):
    """What leaves a device of times: whether all are whole numbers."""

    pooled: ClassVar[frozenset[str]] = frozenset({"whole"})

    kind: Literal["time"] = "time"
    whole: bool

    def merged(self, others: Sequence[Self]) -> Self:
        """Return whether all devices' times are whole numbers."""
        return replace(self, whole=self.whole and all(other.whole for other in others))

    @property
    def widths(self) -> tuple[int, ...]:
        """A count."""
        return (COUNT,)

    @property
    def numbers(self) -> tuple[int, ...]:
        """How many devices have times with fractions."""
        return (int(not self.whole),)

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return whether no device has times with fractions."""
        (fractions,) = numbers
        return replace(self, whole=not fractions)

    def code(self, clients_a_word: int) -> TimeCode:
        """Return whole numbers as int64, others as float64."""
        return TimeCode(whole=self.whole)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        return "times: whether all are whole numbers"


@dataclass(frozen=True, kw_only=True)
class TimeCode(Code):
    """Times as int64 where all devices' are whole numbers, else as float64."""

    kind: Literal["time"] = "time"
    whole: bool

    def encoded(self, raw: Times, where: Where) -> Column:
        """Return the times, int64 or float64 (rows,)."""
        if self.whole and raw.fractions.any():
            row = int(raw.fractions.argmax())
            raise DataError(
                "{place}: wanted a whole number as time; got {got}.", place=where(row), got=raw.values[row]
            )
        return raw.values.astype(self.dtype)

    def fault(self, summary: TimeSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        return "times with fractions, where whole numbers are wanted" if self.whole > summary.whole else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64 or float64."""
        return np.dtype(np.int64 if self.whole else np.float64)


@dataclass(frozen=True, kw_only=True)
class KeyColumn(RawColumn):
    """A raw column of whole numbers that name things, e.g. films: int64 (rows,)."""

    kind: ClassVar[str] = "key"
    values: NDArray[np.int64]

    def summary(self, rules: Rules, counted: Counted) -> KeySummary:
        """Tell which examples that opted in have, in any split."""
        return KeySummary(keys=tuple(np.unique(counted.told(self.values)).tolist()))


@dataclass(frozen=True, kw_only=True)
class KeySummary(ColumnSummary):
    """What leaves a device of keys: the different ones, rising."""

    pooled: ClassVar[frozenset[str]] = frozenset({"keys"})

    kind: Literal["key"] = "key"
    keys: tuple[int, ...]

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the keys of all."""
        return replace(self, keys=tuple(sorted({*self.keys}.union(*(other.keys for other in others)))))

    @property
    def open(self) -> bool:
        """Always."""
        return True

    @property
    def entries(self) -> Mapping[str, tuple[int, int]]:
        """The keys."""
        return dict.fromkeys(map(str, self.keys), (0, 0))

    def with_entries(self, entries: Mapping[str, tuple[int, int]]) -> Self:
        """Return the keys that these are."""
        return replace(self, keys=tuple(sorted(map(int, entries))))

    def code(self, clients_a_word: int) -> KeyCode:
        """Number the keys in their order."""
        return KeyCode(keys=tuple(sorted(set(self.keys))))

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        return f"which of the {len(self.keys):,} items occur, not how often"


@dataclass(frozen=True, kw_only=True)
class KeyCode(Code):
    """The numbers of keys: their places, which rise with them but for keys that came later."""

    grows: ClassVar[tuple[str, ...]] = ("keys",)

    kind: Literal["key"] = "key"
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        if (
            len(set(self.keys)) < max(1, len(self.keys))
            or max(-min(self.keys) - 1, max(self.keys)) >= 1 << 63
        ):
            raise DataError("Wanted at least one item, and different ones, below 2^63.")

    def encoded(self, raw: KeyColumn, where: Where) -> NDArray[np.int64]:
        """Return the keys' numbers, int64 (rows,)."""
        known = np.asarray(self.keys, dtype=np.int64)
        order = np.argsort(known)
        place: NDArray[np.int64] = order[
            np.searchsorted(known, raw.values, sorter=order).clip(max=len(known) - 1)
        ]
        wrong = np.flatnonzero(known[place] != raw.values)
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                "{place}: {value} is not one of the {known:,} items that are known.",
                place=where(row),
                value=raw.values[row],
                known=len(known),
            )
        return place

    def fault(self, summary: KeySummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        unknown = sorted(set(summary.keys) - set(self.keys))
        return (
            f"the item {unknown[0]} is not one of the {len(self.keys):,} that are known" if unknown else None
        )

    def extended(self, summary: KeySummary, clients_a_word: int = 1) -> Self:
        """Return a code where keys that are new have the next numbers."""
        return replace(self, keys=(*self.keys, *sorted(set(summary.keys) - set(self.keys))))

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64."""
        return np.dtype(np.int64)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return how many there are, and which: for the column ``item`` as ``items`` and ``item_ids``."""
        return {f"{column}s": len(self.keys), f"{column}_ids": list(self.keys)}


@dataclass(frozen=True, kw_only=True)
class Plain(RawColumn):
    """A raw column that needs no encoding."""

    kind: ClassVar[str] = "plain"
    values: Column

    def summary(self, rules: Rules, counted: Counted) -> PlainSummary:
        """Tell the column's type."""
        return plain_summary(self.values)


def plain_summary(column: Column) -> PlainSummary:
    """Return what leaves a device of a column that needs no encoding."""
    array = column.values if isinstance(column, Ragged) else column
    return PlainSummary(type=array.dtype.name, shape=array.shape[1:], ragged=isinstance(column, Ragged))


@dataclass(frozen=True, kw_only=True)
class PlainSummary(ColumnSummary):
    """The type of a column, the shape of an example, and whether examples differ in length."""

    kind: Literal["plain"] = "plain"
    type: str
    shape: tuple[int, ...] = ()
    ragged: bool = False

    def code(self, clients_a_word: int) -> PlainCode:
        """Return the same."""
        return PlainCode(type=self.type, shape=self.shape, ragged=self.ragged)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        return f"numbers: their type ({self.type}) and shape, nothing of their values"


@dataclass(frozen=True, kw_only=True)
class PlainCode(Code):
    """The type of a column, the shape of an example, and whether examples differ in length."""

    kind: Literal["plain"] = "plain"
    type: str
    shape: tuple[int, ...] = ()
    ragged: bool = False

    def __post_init__(self) -> None:
        try:
            known = np.dtype(self.type).name == self.type and self.dtype.kind in "biuf"
        except TypeError:
            known = False
        if not known:
            raise DataError("There is no type of numbers {type!r}.", type=self.type)

    def encoded(self, raw: Plain, where: Where) -> Column:
        """Return the column as it is."""
        if fault := self.fault(plain_summary(raw.values)):
            raise DataError("{place}: {fault}.", place=where(0), fault=fault)
        return raw.values

    def fault(self, summary: PlainSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        return difference(asdict(self), asdict(summary))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the column."""
        return np.dtype(self.type)
