"""Series of numbers, of any number of steps: where they are cut, and the scales of each channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_range
from fedkeep.data.columns import Ragged, offsets_of
from fedkeep.data.preparation.contract import (
    Code,
    ColumnSummary,
    Counted,
    RawColumn,
    Rules,
    Where,
    difference,
    unlike,
)
from fedkeep.data.preparation.feature_columns import FeatureCode, Features, WholeSummary


@dataclass(frozen=True, kw_only=True)
class Series(RawColumn):
    """A raw column of series.

    Attributes:
        names: of the channels, the values of a step.
        values: (steps, channels) float64 of each row, finite and within float32's range.
        max_length: steps of a series to keep.
        standardise: as of `Features`.
    """

    kind: ClassVar[str] = "series"
    names: tuple[str, ...]
    values: Ragged
    max_length: int
    standardise: bool = True

    def summary(self, rules: Rules, counted: Counted) -> SeriesSummary:
        """Sum each channel over the steps kept of the rows to train on, and its squares, if it is to be standardised."""
        longest = self.max_length if rules.max_length is None else rules.max_length
        steps = cut(self.values.take(counted.rows), longest).values
        return SeriesSummary.of_steps(self, steps, longest, rules)


def cut(series: Ragged, longest: int) -> Ragged:
    """Return series without the steps behind the first ``longest``."""
    length = np.diff(series.offsets)
    if not len(length) or length.max() <= longest:
        return series
    place = np.arange(len(series.values)) - np.repeat(series.offsets[:-1], length)
    return Ragged(series.values[place < longest], offsets_of(np.minimum(length, longest)))


@dataclass(frozen=True, kw_only=True)
class SeriesSummary(ColumnSummary):
    """What leaves a device of series: ``count``, ``sums`` and ``squares`` are of steps, as of `FeatureSummary` of rows.

    Attributes:
        names: of the channels.
        max_length: steps of a series that are kept.
    """

    pooled: ClassVar[frozenset[str]] = frozenset({"count", "sums", "squares"})

    kind: Literal["series"] = "series"
    names: tuple[str, ...]
    max_length: int
    standardise: bool = False
    count: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_range("[1, inf]", DataError, max_length=self.max_length)
        _ = self._of_features

    @classmethod
    def of_steps(cls, raw: Series, steps: NDArray[np.floating[Any]], longest: int, rules: Rules) -> Self:
        """Return the summary of all steps of rows to train on, (steps, channels)."""
        features = Features(names=raw.names, values=steps, standardise=raw.standardise)
        every = np.arange(len(steps))
        found = features.summary(rules, Counted(rows=every, client=np.zeros(len(steps), np.int64)))
        return cls(
            names=raw.names,
            max_length=longest,
            standardise=found.standardise,
            count=found.count,
            sums=found.sums,
            squares=found.squares,
        )

    @property
    def _of_features(self) -> WholeSummary:
        """The same of steps as rows; DataError where it contradicts itself."""
        return WholeSummary(
            names=self.names,
            standardise=self.standardise,
            count=self.count,
            sums=self.sums,
            squares=self.squares,
        )

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the sums over all devices' steps."""
        found = self._of_features.merged([one._of_features for one in others])
        return replace(self, count=found.count, sums=found.sums, squares=found.squares)

    @property
    def widths(self) -> tuple[int, ...]:
        """As of `FeatureSummary`."""
        return self._of_features.widths

    @property
    def numbers(self) -> tuple[int, ...]:
        """As of `FeatureSummary`."""
        return self._of_features.numbers

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return the same with other sums."""
        found = self._of_features.with_numbers(numbers)
        return replace(self, count=found.count, sums=found.sums, squares=found.squares)

    def code(self, clients_a_word: int) -> SeriesCode:
        """Return mean and standard deviation of each channel."""
        made = self._of_features.code(clients_a_word)
        return SeriesCode(names=self.names, max_length=self.max_length, means=made.means, scales=made.scales)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        if not self.standardise:
            return f"the names of a series' channels ({len(self.names)}), and nothing of their values"
        return (
            f"the names of a series' channels ({len(self.names)}), and of each the sum and the sum of squares over "
            f"{self.count:,} steps of rows to train on"
        )


@dataclass(frozen=True, kw_only=True)
class SeriesCode(Code):
    """Where series are cut, and the scales of their channels: (x − mean) / scale; without any they stay as they are.

    Attributes:
        names: of the channels.
        max_length: steps of a series that are kept.
        means, scales: one of each channel; empty where nothing is standardised.
    """

    kind: Literal["series"] = "series"
    names: tuple[str, ...]
    max_length: int
    means: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_range("[1, inf]", DataError, max_length=self.max_length)
        _ = self._of_features

    @property
    def _of_features(self) -> FeatureCode:
        return FeatureCode(names=self.names, means=self.means, scales=self.scales)

    def encoded(self, raw: Series, where: Where) -> Ragged:
        """Return the series, cut and on their channels' scales, float32."""
        if fault := difference({"channels": self.names}, {"channels": raw.names}):
            raise unlike(where, fault)
        kept = cut(raw.values, self.max_length)

        def whose(step: int) -> object:
            return where(int(np.searchsorted(kept.offsets, step, side="right")) - 1)

        steps = self._of_features.encoded(Features(names=self.names, values=kept.values), whose)
        return Ragged(steps, kept.offsets)

    def of_rows(self, rows: Iterable[Any]) -> Series:
        """Return examples as a reader would have read them: each a list of steps, of one channel or of several.

        Raises:
            DataError: a row is no such list, is empty, or has another number of channels.
        """
        made = [series_in(row) for row in rows]
        for number, one in enumerate(made):
            if isinstance(one, str) or one.shape[1] != len(self.names):
                raise DataError(
                    "Row {row}: wanted a list of steps, each of the {count} values {names}; got {got}.",
                    row=number,
                    count=len(self.names),
                    names=", ".join(self.names),
                    got=one if isinstance(one, str) else f"{one.shape[1]} values a step",
                )
        arrays = [one for one in made if not isinstance(one, str)]
        values = np.concatenate(arrays) if arrays else np.zeros((0, len(self.names)))
        offsets = offsets_of(np.asarray([len(one) for one in arrays], np.int64))
        return Series(names=self.names, values=Ragged(values, offsets), max_length=self.max_length)

    def fault(self, summary: SeriesSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        ours, theirs = ({"channels": each.names, "max_length": each.max_length} for each in (self, summary))
        return difference(ours, theirs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return np.dtype(np.float32)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the channels' names, the longest length, and the scales where there are any."""
        scales = {"means": list(self.means), "scales": list(self.scales)}
        found = {"channels": list(self.names), "max_length": self.max_length}
        return found | ({"standardised": scales} if self.means else {})


LARGEST = float(np.finfo(np.float32).max)


def series_in(cell: Any) -> NDArray[np.float64] | str:
    """Return the steps of a list of numbers, or of lists of them, as (steps, channels); in words what is wrong."""
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if not isinstance(cell, list | tuple):
        return repr(cell)
    if not len(cell):
        return "an empty list"
    steps = [each.tolist() if isinstance(each, np.ndarray) else each for each in cell]
    rows = [list(each) if isinstance(each, list | tuple) else [each] for each in steps]
    nested = [isinstance(each, list | tuple) for each in steps]
    for place, values in enumerate(rows):
        for value in values:
            if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
                return f"{value!r} in step {place}"
            if not abs(float(value)) <= LARGEST:
                return f"{value} in step {place}"
        if len(values) != len(rows[0]) or nested[place] != nested[0]:
            return f"step {place} of {len(values)} after steps of {len(rows[0])}"
    if not rows[0]:
        return "steps without a value"
    return np.asarray(rows, np.float64)
