"""The encoding that all devices of a federation share: the vocabulary, numbers of labels, scales and lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean, raising
from fedkeep.core.params import Batch
from fedkeep.data.columns import Ragged
from fedkeep.data.federated import FederatedData
from fedkeep.data.preparation.contract import Code, RawColumn, Where, difference
from fedkeep.data.preparation.feature_columns import FeatureCode, Features, Target, TargetCode, TargetsCode
from fedkeep.data.preparation.label_columns import LabelCode, Labels, LabelSets
from fedkeep.data.preparation.numbers import (
    KeyCode,
    KeyColumn,
    Plain,
    PlainCode,
    TimeCode,
    Times,
)
from fedkeep.data.preparation.reading import Readable
from fedkeep.data.preparation.series_columns import Series, SeriesCode
from fedkeep.data.preparation.summary import About, Summary, columns_differ
from fedkeep.data.preparation.texts import TextCode, Texts
from fedkeep.tasks import KINDS, of_sets


@dataclass(frozen=True, kw_only=True)
class Encoding(Readable):
    """How every device turns its examples into numbers.

    Attributes:
        columns: each column's code by name.
        about: what readers know without looking at the examples.
    """

    kinds = (
        TextCode,
        LabelCode,
        FeatureCode,
        SeriesCode,
        TargetCode,
        TargetsCode,
        TimeCode,
        KeyCode,
        PlainCode,
    )
    columns: Mapping[str, Code]
    about: About = About()

    @classmethod
    def of(cls, summary: Summary) -> Encoding:
        """Make the encoding that follows from the summary of all devices.

        Raises:
            DataError: none does, e.g. whole numbers as labels that are no numbers of classes.
        """
        codes = {name: column.code(summary.clients_a_word) for name, column in summary.columns.items()}
        return cls(columns=codes, about=summary.about)

    def extended(self, summary: Summary) -> Encoding:
        """Return the encoding of data that have grown: labels, items and counted words that are new get the next numbers.

        All else stays: categories that are new are none of those known, scales are those of the data before.

        Raises:
            DataError: a column is missing, is one too many or of another kind, or a new value cannot get a number.
        """
        self.check_kinds(summary.columns, replace(summary.about, classes=None))
        columns = {
            name: code.extended(summary.columns[name], summary.clients_a_word)
            for name, code in self.columns.items()
        }
        found = Encoding(columns=columns, about=self.about.merged(summary.about))
        found.check(summary)
        return found

    def extends(self, older: Encoding) -> bool:
        """Tell whether all numbers that an older encoding gives stand for the same here."""
        return (
            self.columns.keys() == older.columns.keys()
            and all(code.extends(older.columns[name]) for name, code in self.columns.items())
            and self.about.form == older.about.form
            and (self.about.classes or 0) >= (older.about.classes or 0)
        )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the encoding, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def meta(self) -> dict[str, Any]:
        """What ``FederatedData.meta`` says of data in this encoding: task, classes, vocabulary, label_names, …"""
        return {
            key: v for name, code in self.columns.items() for key, v in code.meta(name).items()
        } | self.about.meta

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that it fixes: vocabulary, classes (1 for regression), items, features (of a step), channels, side."""
        meta, sizes = self.meta, {}
        if (vocabulary := meta.get("vocabulary")) is not None:
            sizes["vocabulary"] = int(vocabulary["size"] if isinstance(vocabulary, Mapping) else vocabulary)
        sizes |= {name: int(meta[name]) for name in ("classes", "items") if meta.get(name) is not None}
        kind = KINDS.get(str(meta.get("task")))
        if kind is not None and not kind.whole and not kind.several:
            sizes["classes"] = 1
        x, image = self.columns.get("x"), self.columns.get("image")
        if isinstance(x, FeatureCode):
            sizes["features"] = len(x.columns)
        if isinstance(x, PlainCode) and not x.ragged and len(x.shape) == 1:
            sizes["features"] = x.shape[0]
        if isinstance(x, PlainCode) and len(x.shape) == (1 if x.ragged else 2):
            sizes["step_features"] = x.shape[-1]
        if isinstance(x, SeriesCode):
            sizes["step_features"] = len(x.names)
        if isinstance(image, PlainCode) and not image.ragged and len(image.shape) == 3:
            sizes |= {"channels": image.shape[0], "side": image.shape[1]}
        return sizes

    def fault(self, summary: Summary) -> str | None:
        """Return why a device's data do not fit this encoding; None where they do."""
        if fault := columns_differ(self.columns, summary.columns):
            return fault
        for name, code in self.columns.items():
            if fault := code.fault(summary.columns[name]):
                return f"the column {name!r}: {fault}"
        return self._about_fault(summary.about)

    def _about_fault(self, about: About) -> str | None:
        if (
            about.classes is not None
            and self.about.classes is not None
            and about.classes > self.about.classes
        ):
            return f"there are {about.classes} classes, more than {self.about.classes}"
        return difference(self.about.form, about.form)

    def check_kinds(self, columns: Mapping[str, Any], about: About) -> None:
        """Raise DataError where a column is missing, is one too many or of another kind; each has a ``kind``."""
        _refuse(columns_differ(self.columns, columns) or self._about_fault(about))

    def check(self, summary: Summary) -> None:
        """Raise DataError where a device's data do not fit."""
        _refuse(self.fault(summary))

    def batch(self, **columns: Any) -> Batch:
        """Return new examples in numbers, as a model that was trained in this encoding takes them.

        Args:
            columns: by name, an entry for each example: texts; labels as words; of features a row of numbers, as they
                were before any scales, in the order of the features' names; of series a list of such rows, or of numbers.

        Returns:
            As of ``FederatedData.batch``, but fractions are in torch's default type.

        Raises:
            DataError: there is no such column, or a value does not fit it.
        """
        data = self.examples(columns)
        batch = data.batch(range(max(map(len, data.columns.values()), default=0)))
        return {n: v.to(torch.get_default_dtype()) if v.is_floating_point() else v for n, v in batch.items()}

    def examples(self, columns: Mapping[str, Any], where: Where | None = None) -> FederatedData:
        """Return new examples in numbers, all of one client and in their order.

        Args:
            columns: as for :meth:`batch`.
            where: names a row in an error; None: by its column and number.

        Raises:
            DataError: there is no such column, or a value does not fit it.
        """
        if not isinstance(columns, Mapping):
            raise DataError(
                "Wanted examples as columns by name, {{{known!r}: …}}; got {got}.",
                known=next(iter(self.columns), "x"),
                got=type(columns).__name__,
            )
        for name in columns:
            if name not in self.columns:
                known = f"{', '.join(self.columns)}.{did_you_mean(name, self.columns)}"
                raise DataError(
                    "The model was trained on no column {column!r}; the data that it learned from have {known}",
                    column=name,
                    known=known,
                )
        encoded = {
            name: self.columns[name].encoded(
                _raw(name, self.columns[name], values), where or f"{name}, row {{}}".format
            )
            for name, values in columns.items()
        }
        rows = max(map(len, encoded.values()), default=0)
        return FederatedData.from_columns(np.zeros(rows, np.int64), encoded, meta=self.meta)


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise DataError("The data do not fit the federation's encoding: {fault}.", fault=fault)


def _raw(name: str, code: Code, values: Any) -> RawColumn:
    """Return a column of new values as a reader would have read it."""
    if isinstance(code, TextCode):
        return Texts(
            values=_words(name, values), tokens=code.tokens, size=code.size, max_length=code.max_length
        )
    if isinstance(code, LabelCode) and of_sets(code.task):
        return LabelSets(values=[tuple(_words(name, own)) for own in values], task=code.task)
    if isinstance(code, LabelCode):
        return Labels(values=_words(name, values))
    if isinstance(code, TargetCode):
        return Target(values=_numbers(name, values, np.dtype(np.float64)))
    if isinstance(values, Features | Series):
        return values
    if isinstance(code, SeriesCode):
        return code.of_rows(values)
    if isinstance(code, FeatureCode) and (code.kinds or code.missing):
        return code.of_rows(values)
    if isinstance(code, FeatureCode):
        what = f" (the features {', '.join(code.names)})"
        numbers = _numbers(name, values, np.dtype(np.float64), (len(code.names),), what)
        if len(bad := np.flatnonzero(np.isnan(numbers).any(1))):
            raise DataError(
                "Row {row} of column {column!r} holds NaN, and no value was missing in training.",
                row=int(bad[0]),
                column=name,
            )
        return Features(names=code.names, values=numbers)
    if isinstance(code, KeyCode):
        return KeyColumn(values=_numbers(name, values, code.dtype))
    if isinstance(code, TimeCode):
        return Times(values=_numbers(name, values, np.dtype(np.float64)))
    assert isinstance(code, PlainCode)
    if not code.ragged:
        return Plain(values=_numbers(name, values, code.dtype, code.shape))
    return Plain(values=Ragged.from_rows(values, code.type))


def _words(name: str, values: Any) -> Sequence[str]:
    listed = isinstance(values, Iterable) and not isinstance(values, str)
    if not listed or not all(isinstance(value, str) for value in values):
        raise DataError(
            "The column {column!r}: wanted a list of texts, one an example; got {got!r}.",
            column=name,
            got=values,
        )
    return list(values)


def _numbers(
    name: str, values: Any, dtype: np.dtype[Any], shape: tuple[int, ...] = (), what: str = ""
) -> NDArray[Any]:
    wanted = (
        f"The column {name!r}: wanted numbers of shape ({', '.join(['examples', *map(str, shape)])}){what}"
    )
    with raising(DataError, "{wanted}; got {why}", TypeError, ValueError, RuntimeError, wanted=wanted):
        array = np.asarray(values)
    if array.dtype.kind not in "biuf" or array.ndim != 1 + len(shape) or array.shape[1:] != shape:
        one = " Give one example as a list of one." if array.shape == shape and shape else ""
        raise DataError(
            "{wanted}; got {got} of shape {shape}.{one}",
            wanted=wanted,
            got=array.dtype,
            shape=array.shape,
            one=one,
        )
    made = array.astype(dtype)
    if made.dtype.kind in "biu" and not np.array_equal(made, array):
        raise DataError(
            "{wanted}, whole ones as {dtype} holds them; got {got!r}.",
            wanted=wanted,
            dtype=dtype,
            got=array.tolist(),
        )
    return made
