"""The encoding that all devices of a federation share: the vocabulary, numbers of labels, scales and lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedkeep.core.errors import DataError
from fedkeep.data.preparation.columns import Code, difference
from fedkeep.data.preparation.labels import LabelCode
from fedkeep.data.preparation.numbers import FeatureCode, KeyCode, PlainCode, TimeCode
from fedkeep.data.preparation.reading import from_json, to_json
from fedkeep.data.preparation.summary import About, Summary, columns_differ
from fedkeep.data.preparation.texts import TextCode

KINDS = (TextCode, LabelCode, FeatureCode, TimeCode, KeyCode, PlainCode)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How every device turns its examples into numbers.

    Attributes:
        columns: each column's code by name.
        about: what readers know without looking at the examples.
    """

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
        """The sizes that it fixes: vocabulary, classes, items, features, channels and side (of images)."""
        meta, sizes = self.meta, {}
        if (vocabulary := meta.get("vocabulary")) is not None:
            sizes["vocabulary"] = int(vocabulary["size"] if isinstance(vocabulary, Mapping) else vocabulary)
        sizes |= {name: int(meta[name]) for name in ("classes", "items") if meta.get(name) is not None}
        x, image = self.columns.get("x"), self.columns.get("image")
        if isinstance(x, FeatureCode):
            sizes["features"] = len(x.names)
        if isinstance(x, PlainCode) and not x.ragged and len(x.shape) == 1:
            sizes["features"] = x.shape[0]
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

    def to_json(self) -> str:
        """Return the encoding as JSON; the same encoding is always the same text."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "The encoding") -> Encoding:
        """Read what :meth:`to_json` gave.

        Raises:
            DataError: a field is missing, unknown, of another type, or contradicts another; ``where`` is named.
        """
        return from_json(cls, text, {"about": About}, KINDS, where)


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise DataError(f"The data do not fit the federation's encoding: {fault}.")
