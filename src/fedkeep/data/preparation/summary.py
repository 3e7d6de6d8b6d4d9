"""The summary of a device's data: what it tells the server before the first round, and nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.core.records import by_key
from fedkeep.data.preparation.contract import STRICT, ColumnSummary, difference
from fedkeep.data.preparation.feature_columns import FeatureSummary, TargetsSummary, TargetSummary
from fedkeep.data.preparation.label_columns import LabelSummary
from fedkeep.data.preparation.numbers import KeySummary, PlainSummary, TimeSummary
from fedkeep.data.preparation.pooling import COUNT, from_lanes, to_lanes
from fedkeep.data.preparation.reading import Readable
from fedkeep.data.preparation.series_columns import SeriesSummary
from fedkeep.data.preparation.texts import TextSummary
from fedkeep.tasks import of_numbers, usual_kind

Entries = Mapping[tuple[str, str], tuple[int, int]]
"""By column and text, how often it occurs and how many clients have it; 0 where it is not counted."""
NONE = "Wanted at least one summary; got none."


@dataclass(frozen=True, kw_only=True)
class About:
    """What a reader knows of its data without looking at the examples; fields as in ``FederatedData.meta``."""

    __pydantic_config__: ClassVar[Any] = STRICT

    task: str | None = None
    classes: int | None = None
    items: int | None = None
    vocabulary: dict[str, Any] | int | None = None
    label_names: tuple[str, ...] | None = None
    tasks: dict[str, dict[str, str]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.vocabulary, dict) and type(self.vocabulary.get("size")) is not int:
            raise DataError("Wanted a vocabulary that tells its size, a whole number. Make it again.")

    @property
    def meta(self) -> dict[str, Any]:
        """The fields that are known."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return found | ({} if self.label_names is None else {"label_names": list(self.label_names)})

    @property
    def form(self) -> dict[str, Any]:
        """What summaries must agree in: not in the number of classes, nor in what follows from it."""
        return asdict(replace(self, classes=None, task=None)) | {"numbers": of_numbers(self.task)}

    def merged(self, other: About) -> About:
        """Return what is known of both; their forms are the same."""
        known = [classes for classes in (self.classes, other.classes) if classes is not None]
        task = self.task if self.task == other.task else usual_kind(not of_numbers(self.task)).name
        return replace(self, task=task, classes=max(known, default=None))


@dataclass(frozen=True, kw_only=True)
class Summary(Readable):
    """What a device tells of its clients' data, summed over them. No client, no example and no text is named.

    Attributes:
        clients: how many there are.
        clients_a_word: as for `Rules`.
        columns: each column's summary by name.
        about: what the reader knows without looking at the examples.
    """

    kinds = (
        TextSummary,
        LabelSummary,
        FeatureSummary,
        SeriesSummary,
        TargetSummary,
        TargetsSummary,
        TimeSummary,
        KeySummary,
        PlainSummary,
    )
    clients: int
    clients_a_word: int = 1
    columns: Mapping[str, ColumnSummary]
    about: About = About()

    def __post_init__(self) -> None:
        if self.clients < 1 or self.clients_a_word < 1 or not self.columns:
            raise DataError("Wanted a client and a column at least. Sum the device's data up again.")
        for name, column in self.columns.items():
            if isinstance(column, TextSummary) and column.counts:
                most = max(column.clients.values(), default=0)
                if bool(column.clients) != (self.clients_a_word > 1) or most > self.clients:
                    raise DataError(
                        "The column {column!r} does not say for each word how many of {clients} clients have it, or "
                        "more than that. Sum the device's data up again.",
                        column=name,
                        clients=self.clients,
                    )

    @property
    def form(self) -> dict[str, Any]:
        """What the summaries of several devices must agree in, as plain data."""
        columns = {name: column.form for name, column in sorted(self.columns.items())}
        form = {"columns": columns, "about": self.about.form, "clients_a_word": self.clients_a_word}
        plain: dict[str, Any] = json.loads(json.dumps(form))
        return plain

    def difference(self, wanted: Summary) -> str | None:
        """Return in what a device's data differ from others' in kind; None where they can be trained on together."""
        if fault := columns_differ(wanted.columns, self.columns):
            return fault
        ours, theirs = self.form, wanted.form
        for name, form in theirs["columns"].items():
            if fault := difference(form, ours["columns"][name]):
                return f"the column {name!r} has {fault}"
        if self.clients_a_word != wanted.clients_a_word:
            return f"clients_a_word {self.clients_a_word}, not {wanted.clients_a_word}"
        return difference(theirs["about"], ours["about"])

    @property
    def open(self) -> list[str]:
        """The columns that may have ``entries``, by name; it follows from the form."""
        return [name for name, column in sorted(self.columns.items()) if column.open]

    @property
    def widths(self) -> tuple[int, ...]:
        """How many limbs each number that is summed over devices takes, column by column; it follows from the form.

        Where a column is open, the last number is how many entries all of them have.
        """
        widths = [width for _, column in sorted(self.columns.items()) for width in column.widths]
        return (*widths, *(COUNT for _ in self.open[:1]))

    @property
    def numbers(self) -> NDArray[np.uint64]:
        """All numbers that are summed over devices, as lanes of a secure sum, uint64 (Σ widths,)."""
        numbers = [number for _, column in sorted(self.columns.items()) for number in column.numbers]
        several = [sum(len(self.columns[name].entries) for name in self.open)] if self.open else []
        return to_lanes([*numbers, *several], self.widths)

    def with_numbers(self, lanes: NDArray[np.uint64]) -> tuple[Summary, int]:
        """Return the same with other numbers, which stand in lanes as :attr:`numbers` has them, and how many entries.

        Raises:
            DataError: they contradict each other.
        """
        numbers, place = from_lanes(lanes, self.widths), 0
        columns = dict(self.columns)
        for name, column in sorted(self.columns.items()):
            columns[name] = column.with_numbers(numbers[place : place + len(column.widths)])
            place += len(column.widths)
        return replace(self, columns=columns), numbers[-1] if self.open else 0

    @property
    def entries(self) -> Entries:
        """All columns' entries, by column and text."""
        return {
            (name, text): numbers
            for name in self.open
            for text, numbers in self.columns[name].entries.items()
        }

    def with_entries(self, entries: Entries) -> Summary:
        """Return the same with other entries."""
        each: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in self.open}
        for (name, text), numbers in entries.items():
            each[name][text] = numbers
        columns = {name: self.columns[name].with_entries(own) for name, own in each.items()}
        return replace(self, columns={**self.columns, **columns})

    @property
    def blank(self) -> Summary:
        """The same without a number and an entry: what a device tells in the clear where these leave in secure sums."""
        return self.with_numbers(np.zeros(sum(self.widths), np.uint64))[0].with_entries({})

    def describe(self, *, secure: bool = False) -> str:
        """Return in plain words what the server learns from this summary, a line for each column.

        Args:
            secure: whether its method sums securely.
        """
        who = "one client" if self.clients == 1 else f"{self.clients:,} clients together"
        lines = [f"What the summary of {who} tells the server:"]
        lines += [f"  {name}: {column.reveals()}." for name, column in sorted(self.columns.items())]
        if self.about.meta:
            lines.append(f"  What the data say of themselves: {', '.join(self.about.meta)}.")
        lines.append("No example, no text and no client's traits or id is in it. No noise is added.")
        if secure:
            lines.append(
                "With secure sums ([method.secure]) names of columns and features, what the data say of themselves and the "
                "number of clients leave as they are; all else leaves in sums over devices alone. Words that the vocabulary "
                "has no room for leave as hashes."
            )
        elif self.clients == 1:
            lines.append("It is the summary of a single client, so all of this is known of that client.")
        return "\n".join(lines)


def columns_differ(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Return which column is missing, is one too many, or is of another kind."""
    for name in sorted({*wanted, *got}):
        if name not in got:
            return f"the column {name!r} is missing"
        if name not in wanted:
            return f"there is a column {name!r}, which the others lack"
        if got[name].kind != wanted[name].kind:
            return f"the column {name!r} is of the kind {got[name].kind!r}, not {wanted[name].kind!r}"
    return None


def merged(summaries: Iterable[Summary]) -> Summary:
    """Return the summary of all devices' data together: the same in whatever order they come.

    Raises:
        DataError: there is none, or two differ in kind; see :func:`agreeing`.
    """
    every = list(summaries)
    if not every:
        raise DataError(NONE)
    first, *rest = every
    for summary in rest:
        if fault := summary.difference(first):
            raise DataError(
                "The summaries differ: in one, {fault}. Give all devices the same settings of data.",
                fault=fault,
            )
    columns = {
        name: column.merged([one.columns[name] for one in rest]) for name, column in first.columns.items()
    }
    about = functools.reduce(About.merged, (one.about for one in rest), first.about)
    return replace(first, clients=sum(one.clients for one in every), columns=columns, about=about)


def agreeing(summaries: Mapping[str, Summary]) -> tuple[Summary, dict[str, str]]:
    """Return the summary of the devices that agree in kind, and by name why the others don't fit.

    Where devices differ, those with the most clients are right; the names of devices and their order change nothing.

    Raises:
        DataError: there is no summary.
    """
    named = sorted(summaries.items())
    groups = by_key((json.dumps(summary.form, sort_keys=True), name) for name, summary in named)
    if not groups:
        raise DataError(NONE)
    best = min(groups, key=lambda form: (-sum(summaries[name].clients for name in groups[form]), form))
    inside = merged(summaries[name] for name in groups[best])
    left = sorted(summaries.keys() - set(groups[best]))
    return inside, {name: summaries[name].difference(inside) or "" for name in left}
