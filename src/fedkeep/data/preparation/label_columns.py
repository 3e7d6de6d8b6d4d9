"""Labels of classes: which there are, and their numbers."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, did_you_mean, shown
from fedkeep.data.columns import Repeated
from fedkeep.data.data_checks import check_close
from fedkeep.data.preparation.contract import (
    Code,
    ColumnSummary,
    Counted,
    RawColumn,
    Rules,
    Where,
    difference,
    hashes,
)
from fedkeep.tasks import listed_for_cells, of_sets, row_of, usual_kind


class LabelError(DataError):
    """A label that is no number of a class.

    Attributes:
        label: the label.
        why: what is wrong with it; a sentence with the names of facts in braces, read back with the facts in it.
    """

    def __init__(self, label: str, why: str, /, **facts: Any) -> None:
        super().__init__("Labels: " + why, label=label, **facts)
        self.label, self.why = label, str(self).removeprefix("Labels: ")


@dataclass(frozen=True, kw_only=True)
class Labels(RawColumn):
    """A raw column of labels, as words.

    Attributes:
        values: the labels.
        names: the labels in the order of their numbers, where they are known beforehand.
        task: "multiclass" or "binary"; None: by the number of classes.
        elsewhere: by client, labels of rows that were left out; they get a number too where no example can opt out.
    """

    kind: ClassVar[str] = "label"
    values: Sequence[str]
    names: tuple[str, ...] | None = None
    task: str | None = None
    elsewhere: Mapping[str, Collection[str]] = field(default_factory=dict)

    def summary(self, rules: Rules, counted: Counted) -> LabelSummary:
        """Tell which labels examples that opted in have, in any split, where nobody knows them beforehand."""
        if (known := _known(self.names, rules)) is not None:
            return LabelSummary(task=self.task, names=known)
        inside = counted.inside
        values = self.values
        if isinstance(values, Repeated):
            values = (values if inside is None else values.taken(values.number[inside])).different
            words = set(values)
        else:
            words = set(values if inside is None else compress(values, inside))
        more = self.elsewhere.values() if inside is None else ()
        return LabelSummary(task=self.task, words=tuple(sorted(set(map(one_form, words.union(*more))))))


@dataclass(frozen=True, kw_only=True)
class LabelSets(RawColumn):
    """A raw column of several labels for each example, as words.

    Attributes:
        values: the labels of each example, which may have none.
        names: the labels in the order of their columns, where they are known beforehand.
        task: the name of a kind of task whose labels are sets; None: the usual one.
    """

    kind: ClassVar[str] = "label"
    values: Sequence[tuple[str, ...]]
    names: tuple[str, ...] | None = None
    task: str | None = None

    def summary(self, rules: Rules, counted: Counted) -> LabelSummary:
        """Tell which labels examples that opted in have, in any split, where nobody knows them beforehand."""
        task = self.task or row_of(None)
        if (known := _known(self.names, rules)) is not None:
            return LabelSummary(task=task, names=known)
        told = self.values if counted.inside is None else compress(self.values, counted.inside)
        return LabelSummary(task=task, words=tuple(sorted({one_form(word) for own in told for word in own})))


def _known(names: tuple[str, ...] | None, rules: Rules) -> tuple[str, ...] | None:
    found = names if rules.label_names is None else rules.label_names
    return None if found is None else tuple(map(one_form, found))


@dataclass(frozen=True, kw_only=True)
class LabelSummary(ColumnSummary):
    """What leaves a device of a column of labels.

    Attributes:
        task, names: as for `Labels`.
        words: the different labels, sorted; empty where ``names`` are known, or every example opted out.
    """

    pooled: ClassVar[frozenset[str]] = frozenset({"words"})

    kind: Literal["label"] = "label"
    task: str | None = None
    names: tuple[str, ...] | None = None
    words: tuple[str, ...] = ()

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the labels of all."""
        return replace(self, words=tuple(sorted({*self.words}.union(*(other.words for other in others)))))

    @property
    def open(self) -> bool:
        """Whether nobody knows the labels beforehand."""
        return self.names is None

    @property
    def entries(self) -> Mapping[str, tuple[int, int]]:
        """The labels."""
        return dict.fromkeys(self.words, (0, 0))

    def with_entries(self, entries: Mapping[str, tuple[int, int]]) -> Self:
        """Return the labels that these are."""
        return replace(self, words=tuple(sorted(entries)))

    def code(self, clients_a_word: int) -> LabelCode:
        """Return the numbers of the labels.

        Whole numbers stay as they are; other labels are numbered in sorted order.

        Raises:
            LabelError: whole numbers that are no numbers of classes, numbers with decimals, or one number in two
                spellings.
            DataError: no device tells a label.
        """
        if self.names is not None:
            return LabelCode(task=self.task, names=self.names, integers=False)
        if not self.words:
            raise DataError(
                "Wanted at least one label of an example that opted in; got none. Name all labels in label_names."
            )
        if of_sets(self.task):
            return LabelCode(task=self.task, names=self.words, integers=False)
        if not all(word.isascii() and word.removeprefix("-").isdigit() for word in self.words):
            self._check_numbers()
            return LabelCode(task=self.task, names=tuple(sorted(set(self.words))), integers=False)
        for word in self.words:
            if len(word) > 18 or word.startswith("-"):
                raise LabelError(word, "wanted a label of 0 or more, of at most 18 digits; got {label!r}.")
        numbers = np.asarray(self.words).astype(np.int64)
        largest = self.words[int(numbers.argmax())]
        try:
            check_close(numbers, lambda _: "", "label_names, the labels in the order of their numbers")
        except DataError as error:
            raise LabelError(largest, "{why}", why=str(error).removeprefix(": ")) from None
        names = tuple(map(str, range(int(numbers.max()) + 1)))
        return LabelCode(task=self.task, names=names, integers=True)

    def _check_numbers(self) -> None:
        """Raise LabelError where all labels are numbers and one is missing, two are equal, or decimals lack a task."""
        try:
            numbers = np.asarray([float(word) for word in self.words])
        except ValueError:
            return
        if len(numbers) > 1 and np.isnan(numbers).any():
            word = self.words[int(np.isnan(numbers).argmax())]
            raise LabelError(
                word,
                "the others are numbers, and {label!r} says that one is missing. Drop such rows, or name every "
                "class in label_names.",
            )
        first = dict[float, str]()
        for word, number in zip(self.words, numbers.tolist(), strict=True):
            if (other := first.setdefault(number, word)) != word:
                raise LabelError(
                    word,
                    "wanted each number as label written in one way; got {other!r} and {label!r}, which are "
                    "equal. Write one of them everywhere, or name every class in label_names.",
                    other=other,
                )
        if self.task is None and np.isfinite(numbers).all() and (numbers % 1).any():
            word = self.words[int((numbers % 1 > 0).argmax())]
            raise LabelError(
                word,
                "wanted classes as labels; got numbers with decimals, such as {label!r}. Say which task: [data] "
                "task = {tasks}; or name all classes in label_names.",
                tasks=listed_for_cells(),
            )

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        if self.names is not None:
            return f"labels: nothing; the {len(self.names):,} classes are known beforehand"
        if not self.words:
            return "labels: nothing; every example opted out"
        few = ", ".join(map(repr, self.words[:8])) + (", …" if len(self.words) > 8 else "")
        return f"which labels there are, not how many of each: {few}"


@dataclass(frozen=True, kw_only=True)
class LabelCode(Code):
    """The numbers of labels: of one label its own, of several the places of 1 in a row of 0.

    Attributes:
        task: "multiclass", "binary" or "multi_label"; None: by the number of classes.
        names: the labels in the order of their numbers.
        integers: labels are whole numbers that stay as they are ("07" is 7).
    """

    grows: ClassVar[tuple[str, ...]] = ("names",)

    kind: Literal["label"] = "label"
    task: str | None
    names: tuple[str, ...]
    integers: bool

    def __post_init__(self) -> None:
        if not self.names:
            raise DataError("Wanted at least one label; got none.")
        if not self.integers and len(set(self.names)) < len(self.names):
            twice = next(name for name, times in Counter(self.names).items() if times > 1)
            raise DataError(
                "label_names names {name!r} more than once; each label has one number.", name=twice
            )

    def encoded(self, raw: Labels | LabelSets, where: Where) -> NDArray[np.int64]:
        """Return the labels' numbers, int64 (rows,); of several labels 1 for those that are there, (rows, labels).

        Raises:
            DataError: a label has none, or examples have one label where several are wanted, or the reverse.
        """
        if isinstance(raw, LabelSets) != of_sets(self.task):
            wanted, got = ("several", "one") if of_sets(self.task) else ("one", "several")
            raise DataError(
                "{place}: wanted {wanted} label an example; got {got}.",
                place=where(0),
                wanted=wanted,
                got=got,
            )
        words = raw.values if isinstance(raw, Labels) else [word for own in raw.values for word in own]
        different = words.different if isinstance(words, Repeated) else words
        number = {word: self._number(word) for word in set(different)}
        if None in number.values():
            raise self._unknown(raw, number, where)
        numbers = np.asarray([number[word] for word in different], dtype=np.int64)
        if isinstance(words, Repeated):
            numbers = numbers[words.number]
        if isinstance(raw, Labels):
            return numbers
        table = np.zeros((len(raw), len(self.names)), np.int64)
        table[np.repeat(np.arange(len(raw)), [len(own) for own in raw.values]), numbers] = 1
        return table

    def as_read(self, raw: Labels | LabelSets) -> NDArray[np.int64] | None:
        """Return hashes of the labels where an example has several: its row is longer where there are more."""
        return (
            hashes("\0".join(sorted(map(one_form, own))) for own in raw.values)
            if isinstance(raw, LabelSets)
            else None
        )

    def _unknown(self, raw: Labels | LabelSets, number: Mapping[str, int | None], where: Where) -> DataError:
        """Return what to say of the first row with a label that has no number."""
        rows = [[word] for word in raw.values] if isinstance(raw, Labels) else raw.values
        row, label = next((row, word) for row, own in enumerate(rows) for word in own if number[word] is None)
        return DataError(
            "{place}: label {label!r} is not one of label_names, {names}.{near}",
            place=where(row),
            label=label,
            names=list(self.names),
            near=did_you_mean(label[:40], self.names),
        )

    def _number(self, word: str) -> int | None:
        if not self.integers:
            return self._position.get(one_form(word))
        plain = word.isascii() and word.isdigit() and len(word) <= 18 and int(word) < len(self.names)
        return int(word) if plain else None

    @cached_property
    def _position(self) -> dict[str, int]:
        return {one_form(name): number for number, name in enumerate(self.names)}

    def fault(self, summary: LabelSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        if self.task != summary.task:
            return difference({"task": self.task}, {"task": summary.task})
        if summary.names is not None and summary.names != self.names:
            return difference({"label_names": self.names}, {"label_names": summary.names})
        unknown = [word for word in summary.words if self._number(word) is None]
        if unknown:
            near = did_you_mean(unknown[0][:40], self.names)
            return f"the label {shown(unknown[0])} is not one of {shown(list(self.names), 200)}.{near}"
        return None

    def extended(self, summary: LabelSummary, clients_a_word: int = 1) -> Self:
        """Return a code where labels that are new have the next numbers, in sorted order.

        Raises:
            DataError: there were two classes and are more now, which is another task.
        """
        words = summary.words if summary.names is None else tuple(map(one_form, summary.names))
        new = [word for word in words if self._number(word) is None]
        if not new:
            return self
        if self.integers:
            if not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in new):
                raise LabelError(new[0], "wanted whole numbers as labels, as there were; got {label!r}.")
            names = tuple(map(str, range(max(map(int, new)) + 1)))
        else:
            names = (*self.names, *new)
        found = replace(self, names=names)
        if (was := self.meta("label")["task"]) != (now := found.meta("label")["task"]):
            raise LabelError(
                new[0],
                "with {label!r} the task is {now}, and was {was}, which another model answers. Begin a new run, or "
                "name all labels in label_names from the beginning.",
                now=now,
                was=was,
            )
        return found

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64."""
        return np.dtype(np.int64)

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the task, the number of classes and their names."""
        classes = len(self.names) if of_sets(self.task) else max(2, len(self.names))
        task = self.task or usual_kind(True, classes).name
        return {"task": task, "classes": classes, "label_names": list(self.names)}


def one_form(label: str) -> str:
    """Return a label in Unicode's normal form C, as ids are: é is one class however it was typed."""
    return label if label.isascii() else unicodedata.normalize("NFC", label)
