"""Columns of numbers: features and their scales, times, keys of items, and arrays that are taken as they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, shown
from fedkeep.data.columns import Column, Ragged
from fedkeep.data.preparation.columns import Code, ColumnSummary, Counted, Where, difference
from fedkeep.data.preparation.rules import Rules

UNIT = 172
"""Features are summed as whole multiples of 2^-172, which every float32 is: its 24 bits begin at 2^-149 or above."""
APART = 1 << 24
"""Float32 tells whole numbers below this apart."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """A raw column of numeric features.

    Attributes:
        names: of the features.
        values: float64 (rows, features), or float32; within float32's range.
    """

    kind: ClassVar[str] = "features"
    names: tuple[str, ...]
    values: NDArray[np.floating[Any]]

    def __len__(self) -> int:
        return len(self.values)

    def summary(self, rules: Rules, counted: Counted) -> FeatureSummary:
        """Sum the features of the rows to train on, and their squares, where they are to be standardised."""
        if not rules.standardise:
            return FeatureSummary(names=self.names)
        chosen = self.values[counted.rows]
        sums, squares = exact_sums(chosen)
        return FeatureSummary(
            names=self.names, standardise=True, count=len(chosen), sums=sums, squares=squares
        )


def exact_sums(values: NDArray[np.floating[Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return Σ x · 2^172 and Σ x² · 2^344 of each column, exactly, so that the order of summands changes nothing.

    What of a float64 lies below 2^-172 is left out.
    """
    sums, squares = [], []
    for column in values.T:
        fraction, power = np.frexp(column.astype(np.float64))
        whole = np.ldexp(fraction, 53).astype(np.int64)  # x = whole · 2^(power − 53)
        total = square = 0
        for one in np.unique(power).tolist():
            chosen, shift = whole[power == one], one - 53 + UNIT
            if shift < 0:
                chosen, shift = chosen >> min(-shift, 63), 0
            total += _sum(chosen) << shift
            high, low = chosen >> 26, chosen & (1 << 26) - 1  # whole = high · 2^26 + low
            square += ((_sum(high * high) << 52) + (_sum(high * low) << 27) + _sum(low * low)) << 2 * shift
        sums.append(total)
        squares.append(square)
    return tuple(sums), tuple(squares)


def _sum(values: NDArray[np.int64]) -> int:
    """Return a sum of numbers within 2^54, in two halves: a thousand of them would overflow."""
    return (int((values >> 27).sum()) << 27) + int((values & (1 << 27) - 1).sum())


@dataclass(frozen=True, kw_only=True)
class FeatureSummary(ColumnSummary):
    """What leaves a device of numeric features.

    Attributes:
        names: of the features.
        standardise: as for `Rules`; if not, nothing is summed.
        count: rows to train on.
        sums: Σ x · 2^172 of each feature.
        squares: Σ x² · 2^344 of each.
    """

    pooled: ClassVar[frozenset[str]] = frozenset({"count", "sums", "squares"})

    kind: Literal["features"] = "features"
    names: tuple[str, ...]
    standardise: bool = False
    count: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wanted = len(self.names) if self.standardise else 0
        if len(self.sums) != wanted or len(self.squares) != wanted or min(self.squares, default=0) < 0:
            raise DataError(f"Wanted {wanted} sums of features and of their squares. Sum the data up again.")

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the sums over all devices' rows."""
        every = [self, *others]
        return replace(
            self,
            count=sum(one.count for one in every),
            sums=tuple(map(sum, zip(*(one.sums for one in every), strict=True))),
            squares=tuple(map(sum, zip(*(one.squares for one in every), strict=True))),
        )

    def code(self, clients_a_word: int) -> FeatureCode:
        """Return mean and standard deviation of each feature; one that never changes is divided by 1."""
        if not self.standardise:
            return FeatureCode(names=self.names)
        if self.count < 1:
            raise DataError("Wanted examples to train on, to standardise features by; no device has any.")
        means = [Fraction(s, self.count << UNIT) for s in self.sums]
        each = [Fraction(q, self.count << 2 * UNIT) for q in self.squares]
        spread = [q - m * m for q, m in zip(each, means, strict=True)]
        if min(spread) < 0:
            raise DataError("The sums of features contradict each other. Sum the devices' data up again.")
        scales = tuple(math.sqrt(float(v)) or 1.0 for v in spread)
        return FeatureCode(names=self.names, means=tuple(map(float, means)), scales=scales)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        if not self.standardise:
            return f"the names of features ({len(self.names)}), and nothing of their values"
        return (
            f"the names of features ({len(self.names)}), and of each the sum and the sum of squares over "
            f"{self.count:,} rows to train on. With a single row, these are its values"
        )


@dataclass(frozen=True, kw_only=True)
class FeatureCode(Code):
    """The scales of features: (x − mean) / scale. Without any, features stay as they are.

    Attributes:
        names: of the features.
        means, scales: one of each feature; empty where nothing is standardised.
    """

    kind: Literal["features"] = "features"
    names: tuple[str, ...]
    means: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        wanted = (0, len(self.names))
        if len(self.means) != len(self.scales) or len(self.means) not in wanted or 0 in self.scales:
            raise DataError(f"Wanted a mean and a scale, not 0, of each feature; got {len(self.means)}.")

    def encoded(self, raw: Features, where: Where) -> NDArray[np.float32]:
        """Return the features on their scales, float32 (rows, features)."""
        if raw.names != self.names:
            raise DataError(f"{where(0)}: {difference({'features': self.names}, {'features': raw.names})}.")
        if not self.means:
            return self._single(raw.values)
        return ((raw.values.astype(np.float64) - self.means) / self.scales).astype(np.float32)

    def _single(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return features as they are, in float32; large ones that become alike are warned of."""
        single = values.astype(np.float32, copy=False)
        large = np.abs(values).max(0, initial=0.0) >= APART
        for feature in np.flatnonzero(large).tolist() if single is not values else ():
            before, after = (len(np.unique(v[:, feature])) for v in (values, single))
            if after < before:
                warnings.warn(
                    f"The {before:,} different values of the feature {self.names[feature]!r} are {after:,} in float32. "
                    f"Let features be standardised ([preparation] standardise = true), or subtract a base first.",
                    stacklevel=2,
                )
        return single

    def fault(self, summary: ColumnSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        assert isinstance(summary, FeatureSummary)
        return difference({"features": self.names}, {"features": summary.names})

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return np.dtype(np.float32)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the features' names, and their scales where they have any."""
        scales = {"means": list(self.means), "scales": list(self.scales)}
        return {"features": list(self.names)} | ({"standardised": scales} if self.means else {})


@dataclass(frozen=True, kw_only=True)
class Times:
    """A raw column of times: int64 or float64 (rows,), finite."""

    kind: ClassVar[str] = "time"
    values: NDArray[np.int64] | NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

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
            raise DataError(f"{where(row)}: wanted a whole number as time; got {raw.values[row]}.")
        return raw.values.astype(self.dtype)

    def fault(self, summary: ColumnSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        assert isinstance(summary, TimeSummary)
        return "times with fractions, where whole numbers are wanted" if self.whole > summary.whole else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64 or float64."""
        return np.dtype(np.int64 if self.whole else np.float64)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A raw column of whole numbers that name things, e.g. films: int64 (rows,)."""

    kind: ClassVar[str] = "key"
    values: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values)

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

    def code(self, clients_a_word: int) -> KeyCode:
        """Number the keys in their order."""
        return KeyCode(keys=tuple(sorted(set(self.keys))))

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        return f"which of the {len(self.keys):,} items occur, not how often"


@dataclass(frozen=True, kw_only=True)
class KeyCode(Code):
    """The numbers of keys: their places in rising order."""

    kind: Literal["key"] = "key"
    keys: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.keys, self.keys[1:], strict=False))
        if not self.keys or not rising or max(-self.keys[0] - 1, self.keys[-1]) >= 1 << 63:
            raise DataError("Wanted at least one item, and items that rise, below 2^63.")

    def encoded(self, raw: Keys, where: Where) -> NDArray[np.int64]:
        """Return the keys' numbers, int64 (rows,)."""
        known = np.asarray(self.keys, dtype=np.int64)
        place = np.searchsorted(known, raw.values).clip(max=len(known) - 1)
        wrong = np.flatnonzero(known[place] != raw.values)
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"{where(row)}: {raw.values[row]} is not one of the {len(known):,} items that are known."
            )
        return place.astype(np.int64)

    def fault(self, summary: ColumnSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        assert isinstance(summary, KeySummary)
        unknown = sorted(set(summary.keys) - set(self.keys))
        return (
            f"the item {unknown[0]} is not one of the {len(self.keys):,} that are known" if unknown else None
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64."""
        return np.dtype(np.int64)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return how many there are, and which: for the column ``item`` as ``items`` and ``item_ids``."""
        return {f"{column}s": len(self.keys), f"{column}_ids": list(self.keys)}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A raw column that needs no encoding."""

    kind: ClassVar[str] = "plain"
    values: Column

    def __len__(self) -> int:
        return len(self.values)

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
            raise DataError(f"There is no type of numbers {shown(self.type)}.")

    def encoded(self, raw: Plain, where: Where) -> Column:
        """Return the column as it is."""
        if fault := self.fault(plain_summary(raw.values)):
            raise DataError(f"{where(0)}: {fault}.")
        return raw.values

    def fault(self, summary: ColumnSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        assert isinstance(summary, PlainSummary)
        return difference(asdict(self), asdict(summary))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the column."""
        return np.dtype(self.type)
