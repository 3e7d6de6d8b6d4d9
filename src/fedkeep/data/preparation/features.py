"""Columns of numeric features, and the scales that bring them to mean 0 and deviation 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, warn
from fedkeep.data.preparation.contract import Code, ColumnSummary, Counted, Where, difference
from fedkeep.data.preparation.rules import Rules

UNIT = 172
"""Features are summed as whole multiples of 2^-172, which every float32 is: its 24 bits begin at 2^-149 or above."""
LARGE = 1000.0
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
            raise DataError(
                "Wanted {wanted} sums of features and of their squares. Sum the data up again.", wanted=wanted
            )

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
            raise DataError(
                "Wanted a mean and a scale, not 0, of each feature; got {got}.", got=len(self.means)
            )

    def encoded(self, raw: Features, where: Where) -> NDArray[np.float32]:
        """Return the features on their scales, float32 (rows, features)."""
        if raw.names != self.names:
            raise DataError(
                "{where}: {difference}.",
                where=where(0),
                difference=difference({"features": self.names}, {"features": raw.names}),
            )
        if not self.means:
            return self._single(raw.values)
        with np.errstate(over="ignore"):
            single = ((raw.values.astype(np.float64) - self.means) / self.scales).astype(np.float32)
        for row, feature in np.argwhere(np.isinf(single) & np.isfinite(raw.values))[:1].tolist():
            raise DataError(
                "{place}: the feature {feature!r} is {value:g}, and on its scale (mean {mean:.3g}, deviation "
                "{scale:.3g}) too large for float32. Drop such rows.",
                place=where(row),
                feature=self.names[feature],
                value=raw.values[row, feature],
                mean=self.means[feature],
                scale=self.scales[feature],
            )
        return single

    def _single(self, values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Return features as they are, in float32; large ones are warned of, above all those that become alike."""
        single = values.astype(np.float32, copy=False)
        largest = np.abs(values).max(0, initial=0.0)
        if len(large := np.flatnonzero(largest >= LARGE)):
            more = f", and {len(large) - 1} more are as large" if len(large) > 1 else ""
            warn(
                f"The feature {self.names[large[0]]!r} reaches {largest[large[0]]:.3g}{more}. From such numbers "
                f"training diverges easily, or learns from nothing else. Let features be standardised "
                f"([preparation] standardise = true), or scale them."
            )
        for feature in np.flatnonzero(largest >= APART).tolist() if single is not values else ():
            before, after = (len(np.unique(v[:, feature])) for v in (values, single))
            if after < before:
                warn(
                    f"The {before:,} different values of the feature {self.names[feature]!r} are {after:,} in float32. "
                    f"Let features be standardised ([preparation] standardise = true), or subtract a base first."
                )
        return single

    def fault(self, summary: FeatureSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        return difference({"features": self.names}, {"features": summary.names})

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return np.dtype(np.float32)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the features' names, and their scales where they have any."""
        scales = {"means": list(self.means), "scales": list(self.scales)}
        return {"features": list(self.names)} | ({"standardised": scales} if self.means else {})
