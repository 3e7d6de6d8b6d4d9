"""Columns of numeric features and of a number to predict, and the scales that bring them to mean 0 and deviation 1."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, shown, warn
from fedkeep.data.columns import Rows, is_missing
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
from fedkeep.data.preparation.pooling import COUNT, SQUARE, SUM

UNIT = 172
"""Features are summed as whole multiples of 2^-172, which every float32 is: its 24 bits begin at 2^-149 or above."""
BLOCK = 1 << 16
"""Rows that are summed at a time; they fit into a processor's cache."""
SMALL = 1 << 18
"""Squares of whole numbers below this, summed over a block, are below 2^53, so float64 holds the sum."""
LARGE = 1000.0
APART = 1 << 24
"""Float32 tells whole numbers below this apart."""


@dataclass(frozen=True, kw_only=True)
class Features(RawColumn):
    """A raw column of numeric features.

    Attributes:
        names: of the features.
        values: float64 (rows, features), or float32; within float32's range. NaN where a value is missing. Of a
            category, numbers of its levels.
        kinds: of the features that are no plain numbers, by name: "truth", "date", with its form, or "category".
        levels: the levels of each category.
        standardise: whether they are, where the rules leave it to the reader.
    """

    kind: ClassVar[str] = "features"
    names: tuple[str, ...]
    values: NDArray[np.floating[Any]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    standardise: bool = True

    def summary(self, rules: Rules, counted: Counted) -> FeatureSummary:
        """Sum the features of the rows to train on, and their squares, where they are to be standardised."""
        missing, levels = {}, {}
        for name, column in zip(self.names, self.values.T, strict=True):
            known = counted.chosen(column)
            if (gaps := np.isnan(known)).any():
                missing[name] = int(gaps.sum())
                known = known[~gaps]
            if name in self.levels:
                numbers = np.flatnonzero(np.bincount(known.astype(np.int64)))
                levels[name] = tuple(sorted(self.levels[name][n] for n in numbers.tolist()))
        return FeatureSummary(
            names=self.names,
            kinds=dict(self.kinds),
            levels=levels,
            missing=missing,
            **_sums(
                (
                    None if name in self.levels else self.values[:, place]
                    for place, name in enumerate(self.names)
                ),
                self.standardise,
                rules,
                counted,
            ),
        )

    def numbers(self, place: int) -> NDArray[np.floating[Any]]:
        """Return a feature's values with 0 for what is missing; of a category all are 0."""
        column: NDArray[np.floating[Any]] = self.values[:, place]
        if self.names[place] in self.levels:
            return np.zeros_like(column)
        return np.nan_to_num(column, nan=0.0) if np.isnan(column).any() else column


@dataclass(frozen=True, kw_only=True)
class Target(RawColumn):
    """A raw column of numbers to predict: float64 (rows,), within float32's range; ``standardise`` as of `Features`.

    ``in_units``: their task wants them as they are, whatever the rules say.
    """

    kind: ClassVar[str] = "target"
    values: NDArray[np.floating[Any]]
    standardise: bool = True
    in_units: bool = False

    def summary(self, rules: Rules, counted: Counted) -> TargetSummary:
        """Sum the numbers of the rows to train on, and their squares, where they are to be standardised."""
        rules = replace(rules, standardise=False) if self.in_units else rules
        return TargetSummary(**_sums([self.values], self.standardise, rules, counted))


@dataclass(frozen=True, kw_only=True)
class Targets(Features):
    """Several numbers to predict, none of them missing; as of `Features`, and ``in_units`` as of `Target`."""

    kind: ClassVar[str] = "targets"
    in_units: bool = False

    def summary(self, rules: Rules, counted: Counted) -> TargetsSummary:
        """Sum the numbers of the rows to train on, and their squares, where they are to be standardised."""
        rules = replace(rules, standardise=False) if self.in_units else rules
        return TargetsSummary(names=self.names, **_sums(self.values.T, self.standardise, rules, counted))


def _sums(
    columns: Iterable[NDArray[np.floating[Any]] | None], usual: bool, rules: Rules, counted: Counted
) -> dict[str, Any]:
    """Return what leaves a device of features, each (rows,); None: of a category, whose sums are 0."""
    if not (usual if rules.standardise is None else rules.standardise):
        return {"standardise": False}
    sums, squares = exact_sums(
        np.zeros(0) if column is None else counted.chosen(column) for column in columns
    )
    return {"standardise": True, "count": len(counted.rows), "sums": sums, "squares": squares}


def exact_sums(columns: Iterable[NDArray[np.floating[Any]]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return Σ x · 2^172 and Σ x² · 2^344 of each column, exactly, so that the order of summands changes nothing.

    What of a float64 lies below 2^-172 is left out, and so is NaN.
    """
    sums, squares = [], []
    for column in columns:
        total = square = 0
        for start in range(0, len(column), BLOCK):
            block = column[start : start + BLOCK].astype(np.float64)
            block[np.isnan(block)] = 0
            if (np.abs(block) < SMALL).all() and (block == np.rint(block)).all():
                total += int(block.sum()) << UNIT  # float64 holds each of these sums
                square += int(np.square(block).sum()) << 2 * UNIT
                continue
            fraction, power = np.frexp(block)
            whole = np.ldexp(fraction, 53).astype(np.int64)  # x = whole · 2^(power − 53)
            least = int(power.min())
            for one in (np.flatnonzero(np.bincount(power - least)) + least).tolist():
                chosen, shift = whole[power == one], one - 53 + UNIT
                if shift < 0:
                    chosen, shift = chosen >> min(-shift, 63), 0
                total += _sum(chosen) << shift
                high, low = chosen >> 26, chosen & (1 << 26) - 1  # whole = high · 2^26 + low
                square += (
                    (_sum(high * high) << 52) + (_sum(high * low) << 27) + _sum(low * low)
                ) << 2 * shift
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
        sums: Σ x · 2^172 of each feature, 0 of a category.
        squares: Σ x² · 2^344 of each.
        kinds: as of `Features`.
        levels: of each category, those that occur in rows to train on.
        missing: in how many rows to train on a feature is missing, where it is in any.
    """

    pooled: ClassVar[frozenset[str]] = frozenset({"count", "sums", "squares", "levels", "missing"})

    kind: Literal["features"] = "features"
    names: tuple[str, ...]
    standardise: bool = False
    count: int = 0
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = len(self.names) if self.standardise else 0
        if len(self.sums) != wanted or len(self.squares) != wanted or min(self.squares, default=0) < 0:
            raise DataError(
                "Wanted {wanted} sums of features and of their squares. Sum the data up again.", wanted=wanted
            )
        _check_named(self, self.missing)

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the sums over all devices' rows."""
        every = [self, *others]
        return replace(
            self,
            count=sum(one.count for one in every),
            sums=tuple(map(sum, zip(*(one.sums for one in every), strict=True))),
            squares=tuple(map(sum, zip(*(one.squares for one in every), strict=True))),
            levels={
                name: tuple(sorted({*words}.union(*(one.levels.get(name, ()) for one in others))))
                for name, words in self.levels.items()
            },
            missing={n: sum(one.missing.get(n, 0) for one in every) for one in every for n in one.missing},
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """A count, sums and squares where they are standardised, and a count of gaps of each feature."""
        each = len(self.names) if self.standardise else 0
        return (COUNT, *(SUM,) * each, *(SQUARE,) * each, *(COUNT,) * len(self._may_miss))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the order of the widths."""
        return (
            self.count,
            *self.sums,
            *self.squares,
            *(self.missing.get(name, 0) for name in self._may_miss),
        )

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return the same with other sums and counts."""
        each = len(self.names) if self.standardise else 0
        count, sums, squares = numbers[0], numbers[1 : 1 + each], numbers[1 + each : 1 + 2 * each]
        gaps = dict(zip(self._may_miss, numbers[1 + 2 * each :], strict=True))
        if min((count, *gaps.values())) < 0:
            raise DataError("Wanted numbers of rows of at least 0. Sum the devices' data up again.")
        missing = {name: times for name, times in gaps.items() if times}
        return replace(self, count=count, sums=tuple(sums), squares=tuple(squares), missing=missing)

    @property
    def _may_miss(self) -> tuple[str, ...]:
        """Of which features a value may be missing."""
        return self.names

    @property
    def open(self) -> bool:
        """Whether there are categories."""
        return bool(self.levels)

    @property
    def entries(self) -> Mapping[str, tuple[int, int]]:
        """The levels of all categories, each behind the number of its feature."""
        return {
            f"{place} {word}": (0, 0)
            for place, name in enumerate(self.names)
            for word in self.levels.get(name, ())
        }

    def with_entries(self, entries: Mapping[str, tuple[int, int]]) -> Self:
        """Return the levels that these are."""
        found: dict[str, list[str]] = {name: [] for name in self.levels}
        for place, _, word in (text.partition(" ") for text in entries):
            found[self.names[int(place)]].append(word)
        return replace(self, levels={name: tuple(sorted(words)) for name, words in found.items()})

    def code(self, clients_a_word: int) -> FeatureCode:
        """Return mean and standard deviation of each feature; one that never changes is divided by 1."""
        about: dict[str, Any] = {
            "kinds": self.kinds,
            "levels": self.levels,
            "missing": tuple(sorted(self.missing)),
        }
        if not self.standardise:
            return FeatureCode(names=self.names, **about)
        if self.count < 1:
            raise DataError("Wanted examples to train on, to standardise features by; no device has any.")
        counts = [max(1, self.count - self.missing.get(name, 0)) for name in self.names]
        means = [Fraction(s, n << UNIT) for s, n in zip(self.sums, counts, strict=True)]
        each = [Fraction(q, n << 2 * UNIT) for q, n in zip(self.squares, counts, strict=True)]
        spread = [q - m * m for q, m in zip(each, means, strict=True)]
        if min(spread) < 0:
            raise DataError("The sums of features contradict each other. Sum the devices' data up again.")
        scales = tuple(math.sqrt(float(v)) or 1.0 for v in spread)
        return FeatureCode(names=self.names, means=tuple(map(float, means)), scales=scales, **about)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        more = "".join(f"; the categories of {n}: {', '.join(words)}" for n, words in self.levels.items())
        if self.missing:
            more += f"; in how many rows a value is missing: {', '.join(map('{0[0]} {0[1]:,}'.format, self.missing.items()))}"
        if not self.standardise:
            return f"the names of features ({len(self.names)}){more or ', and nothing of their values'}"
        return (
            f"the names of features ({len(self.names)}), and of each the sum and the sum of squares over "
            f"{self.count:,} rows to train on{more}. With a single row, these are its values"
        )


def _check_named(about: FeatureSummary | FeatureCode, missing: Collection[str]) -> None:
    """Raise DataError unless kinds, categories and gaps are of the features there are."""
    named = {*about.kinds, *about.levels, *missing}
    categories = {name for name, kind in about.kinds.items() if kind == "category"}
    if not named <= {*about.names} or categories != about.levels.keys():
        raise DataError(
            "Wanted kinds and categories of the features {features}; got {got}.",
            features=list(about.names),
            got=sorted(named),
        )


@dataclass(frozen=True, kw_only=True)
class WholeSummary(FeatureSummary):
    """As of `FeatureSummary`, of features of which no value is missing."""

    @property
    def widths(self) -> tuple[int, ...]:
        """None, where nothing is standardised."""
        return super().widths if self.standardise else ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """None, where nothing is standardised."""
        return super().numbers if self.standardise else ()

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return the same with other sums."""
        return super().with_numbers(numbers) if self.standardise else self

    @property
    def _may_miss(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class TargetSummary(WholeSummary):
    """What leaves a device of a number to predict; as of `FeatureSummary`, for one feature."""

    kind: Literal["target"] = "target"  # type: ignore[assignment]
    names: tuple[str, ...] = ("label",)

    def code(self, clients_a_word: int) -> TargetCode:
        """Return its mean and standard deviation."""
        made = FeatureSummary.code(self, clients_a_word)
        return TargetCode(means=made.means, scales=made.scales)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        if not self.standardise:
            return "numbers to predict: nothing of their values"
        return (
            f"of the number to predict the sum and the sum of squares over {self.count:,} rows to train on. With a "
            f"single row, this is its label"
        )


@dataclass(frozen=True, kw_only=True)
class TargetsSummary(WholeSummary):
    """What leaves a device of several numbers to predict; as of `FeatureSummary`."""

    kind: Literal["targets"] = "targets"  # type: ignore[assignment]

    def code(self, clients_a_word: int) -> TargetsCode:
        """Return mean and standard deviation of each."""
        made = FeatureSummary.code(self, clients_a_word)
        return TargetsCode(names=self.names, means=made.means, scales=made.scales)

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        names = ", ".join(self.names)
        if not self.standardise:
            return f"the names of the numbers to predict ({names}), and nothing of their values"
        return (
            f"of each number to predict ({names}) the sum and the sum of squares over {self.count:,} rows to train on. "
            f"With a single row, these are its labels"
        )


@dataclass(frozen=True, kw_only=True)
class FeatureCode(Code):
    """The scales of features: (x − mean) / scale. Without any, features stay as they are.

    A category becomes a column of 0 and 1 for each of its levels; another level than these is 0 in all. A value that is
    missing is the mean, 0 where nothing is standardised; where some were missing in training a column of 1 says so.

    Attributes:
        names: of the features.
        means, scales: one of each feature; empty where nothing is standardised.
        kinds: as of `Features`.
        levels: of each category.
        missing: names of features of which some were missing.
    """

    kind: Literal["features"] = "features"
    names: tuple[str, ...]
    means: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    kinds: dict[str, str] = field(default_factory=dict)
    levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The names of the columns that features become."""
        found: list[str] = []
        for name in self.names:
            found += [f"{name}={word}" for word in self.levels[name]] if name in self.levels else [name]
            found += [f"{name} missing"] * (name in self.missing)
        return found

    def __post_init__(self) -> None:
        wanted = (0, len(self.names))
        if len(self.means) != len(self.scales) or len(self.means) not in wanted or 0 in self.scales:
            raise DataError(
                "Wanted a mean and a scale, not 0, of each feature; got {got}.", got=len(self.means)
            )
        _check_named(self, self.missing)

    def encoded(self, raw: Features, where: Where, rows: Rows | None = None) -> NDArray[np.float32]:
        """Return the features on their scales, float32 (rows, columns); of ``rows`` alone, in their order, where there are any."""
        ours, theirs = ({"features": f.names, "kinds": dict(f.kinds)} for f in (self, raw))
        if fault := difference(ours, theirs):
            raise unlike(where, fault)
        found = {name: _first_gap(raw.values[:, place]) for place, name in enumerate(self.names)}
        gaps = {name: row for name, row in found.items() if row is not None}
        for name in (name for name in gaps if name not in self.missing):
            warn(
                f"{where(gaps[name])}: {name!r} is missing, as it was in no row to train on; "
                f"{'it is none of the categories' if name in self.levels else 'its mean is taken' if self.means else '0 is taken'}."
            )
        for name, known in self.levels.items():
            if new := [word for word in raw.levels[name] if word not in known]:
                warn(
                    f"{name!r} has {shown(new)}, which no row to train on had: there it is none of the categories, "
                    f"{shown(list(known))}."
                )
        if not self.means:
            self._warn_of_large(raw)
            if raw.values.dtype == np.float32 and not self.levels and not self.missing and not gaps:
                return raw.values if rows is None else raw.values[rows]
        own = {name: self._levels_of(name, raw) for name in self.levels}
        made = np.empty((len(raw) if rows is None else len(rows), len(self.columns)), np.float32)
        for start in range(0, len(made), BLOCK):
            some = made[start : start + BLOCK]
            own_rows = np.arange(start, start + len(some)) if rows is None else rows[start : start + BLOCK]
            self._fill(some, raw.values, own_rows, own, where)
        return made

    def _levels_of(self, name: str, raw: Features) -> NDArray[np.int64]:
        """Return the number here of each level of a reader's category, -1 where there is none, and of none behind them."""
        number = {word: n for n, word in enumerate(self.levels[name])}
        return np.asarray([*(number.get(word, -1) for word in raw.levels[name]), -1], np.int64)

    def _fill(
        self,
        made: NDArray[np.float32],
        values: NDArray[np.floating[Any]],
        rows: Rows,
        own: Mapping[str, NDArray[np.int64]],
        where: Where,
    ) -> None:
        """Write some rows of features, (all rows, features), on their scales into (rows, columns)."""
        to = iter(made.T)
        for place, name in enumerate(self.names):
            column = values[:, place][rows]
            gaps = np.isnan(column)
            if name in self.levels:
                level = own[name][np.where(gaps, len(own[name]) - 1, column).astype(np.int64)]
                for n in range(len(self.levels[name])):
                    next(to)[:] = level == n
            else:
                scaled = self._scaled(np.where(gaps, 0, column), place, rows, where)
                scaled[gaps] = 0
                next(to)[:] = scaled
            if name in self.missing:
                next(to)[:] = gaps

    def of_rows(self, rows: Iterable[Sequence[Any]]) -> Features:
        """Return examples as a reader would have read them: numbers, dates, words of categories, or None, in each row.

        Raises:
            DataError: a row has another length, or a value is not of its feature's kind.
        """
        values, levels = [], {name: {word: n for n, word in enumerate(w)} for name, w in self.levels.items()}
        for number, row in enumerate(rows):
            if len(row) != len(self.names):
                raise DataError(
                    "Row {row}: wanted the features {wanted}; got {got} values.",
                    row=number,
                    wanted=list(self.names),
                    got=len(row),
                )
            values.append(
                [self._value(n, v, levels.get(n), number) for n, v in zip(self.names, row, strict=True)]
            )
        return Features(
            names=self.names,
            values=np.asarray(values, np.float64).reshape(-1, len(self.names)),
            kinds=self.kinds,
            levels={name: tuple(known) for name, known in levels.items()},
        )

    def _value(self, name: str, value: Any, known: dict[str, int] | None, row: int) -> float:
        if is_missing(value):
            return math.nan
        if known is not None:
            return known.setdefault(str(value), len(known))
        try:
            if self.kinds.get(name, "").startswith("date") and not isinstance(value, int | float):
                moment = datetime.fromisoformat(str(value))
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / 86_400
            return float(value)
        except (TypeError, ValueError):
            raise DataError(
                "Row {row}: wanted a {kind} in column {column!r}; got {got!r}.",
                row=row,
                kind=self.kinds.get(name, "number"),
                column=name,
                got=value,
            ) from None

    def _scaled(
        self, values: NDArray[np.floating[Any]], place: int, rows: Rows, where: Where
    ) -> NDArray[np.float32]:
        """Return a feature's numbers in some rows, on its scale, float32 (rows,)."""
        if not self.means:
            return values.astype(np.float32)
        mean, scale = self.means[place], self.scales[place]
        with np.errstate(over="ignore"):
            single = ((values.astype(np.float64) - mean) / scale).astype(np.float32)
        for row in np.flatnonzero(np.isinf(single) & np.isfinite(values))[:1].tolist():
            raise DataError(
                "{place}: the feature {feature!r} is {value:g}, and on its scale (mean {mean:.3g}, deviation "
                "{scale:.3g}) too large for float32. Drop such rows.",
                place=where(int(rows[row])),
                feature=self.names[place],
                value=values[row],
                mean=mean,
                scale=scale,
            )
        return single

    def _warn_of_large(self, raw: Features) -> None:
        """Warn of large numbers that stay as they are, above all of those that become alike in float32."""
        columns = {n: raw.numbers(place) for place, n in enumerate(self.names) if n not in self.levels}
        largest = {name: float(np.abs(values).max(initial=0.0)) for name, values in columns.items()}
        if large := [name for name, most in largest.items() if most >= LARGE]:
            more = f", and {len(large) - 1} more are as large" if len(large) > 1 else ""
            warn(
                f"The feature {large[0]!r} reaches {largest[large[0]]:.3g}{more}. From such numbers training diverges "
                f"easily, or learns from nothing else. Leave out [preparation] standardise = false, or scale them."
            )
        for name in [name for name, most in largest.items() if most >= APART]:
            before, after = (len(np.unique(v)) for v in (columns[name], columns[name].astype(np.float32)))
            if after < before:
                warn(
                    f"The {before:,} different values of the feature {name!r} are {after:,} in float32. "
                    f"Leave out [preparation] standardise = false, or subtract a base first."
                )

    def fault(self, summary: FeatureSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        ours, theirs = ({"features": f.names, "kinds": f.kinds} for f in (self, summary))
        return difference(ours, theirs)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return np.dtype(np.float32)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the features' names, and their scales where they have any."""
        scales = {"means": list(self.means), "scales": list(self.scales)}
        return {"features": self.columns} | ({"standardised": scales} if self.means else {})


def _first_gap(column: NDArray[np.floating[Any]]) -> int | None:
    """Return the first row in which a feature is missing; None where it never is."""
    for start in range(0, len(column), BLOCK):
        if (gaps := np.isnan(column[start : start + BLOCK])).any():
            return start + int(gaps.argmax())
    return None


@dataclass(frozen=True, kw_only=True)
class TargetCode(FeatureCode):
    """The scale of a number to predict: (y − mean) / scale."""

    kind: Literal["target"] = "target"  # type: ignore[assignment]
    names: tuple[str, ...] = ("label",)

    def encoded(self, raw: Target, where: Where) -> NDArray[np.float32]:  # type: ignore[override]
        """Return the numbers on their scale, float32 (rows,)."""
        return FeatureCode.encoded(self, Features(names=self.names, values=raw.values[:, None]), where)[:, 0]

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return mean and scale, as ``units``, where the numbers are standardised."""
        return {"units": [self.means[0], self.scales[0]]} if self.means else {}


@dataclass(frozen=True, kw_only=True)
class TargetsCode(FeatureCode):
    """The scales of several numbers to predict: (y − mean) / scale."""

    kind: Literal["targets"] = "targets"  # type: ignore[assignment]

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return how many there are, their names, and means and scales, as ``units``, where they are standardised."""
        units = {"units": [list(self.means), list(self.scales)]} if self.means else {}
        return {"classes": len(self.names), "label_names": list(self.names)} | units
