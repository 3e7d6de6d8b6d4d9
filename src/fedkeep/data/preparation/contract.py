"""The contract of a column on its way from a client's file into a model: raw values, their summary, their code.

A raw column stays on its device. Its summary leaves it: what is declared there, and nothing else. The code is made from
all summaries, and is the same for every device. ``Rules`` are what the server of a federation asks for in them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import ConfigError, DataError, check_choice, check_range
from fedkeep.data.columns import Column, Rows

STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""How pydantic reads a summary or a code from JSON."""

H = TypeVar("H")
Where = Callable[[int], object]
"""Names a row, for messages: its file and line."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The rows that shape an encoding: those to train on, or all where nothing says which these are.

    Rows that opted out are not among them.

    Attributes:
        rows: int64 (rows,).
        client: the number of each row's client, int64 (rows,).
        inside: False for each row of the column that opted out, bool (all rows,); None: none can.
    """

    rows: Rows
    client: NDArray[np.int64]
    inside: NDArray[np.bool_] | None = None

    def chosen(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return what a column, (all rows,), holds in the rows that shape the encoding; it is not to be written to."""
        return values if len(self.rows) == len(values) else values[self.rows]

    def told(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return what a column holds in rows that opted in, in any split."""
        return values if self.inside is None else values[self.inside]


@dataclass(frozen=True, kw_only=True)
class RawColumn(ABC):
    """Values as they were read: nothing is numbered or cut yet.

    Attributes:
        kind: that of its summary and its code.
        values: one of each row.
    """

    kind: ClassVar[str]
    values: Any

    def __len__(self) -> int:
        return len(self.values)

    @abstractmethod
    def summary(self, rules: Rules, counted: Counted) -> ColumnSummary:
        """Return what may leave the device."""


@dataclass(frozen=True, kw_only=True)
class ColumnSummary(ABC):
    """What a device tells of a column. ``pooled`` names the fields that are summed over devices; others must agree."""

    pooled: ClassVar[frozenset[str]] = frozenset()
    __pydantic_config__: ClassVar[Any] = STRICT

    @property
    def form(self) -> dict[str, Any]:
        """What summaries must agree in."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.pooled}

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the summary of all these devices' rows; their forms are the same."""
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """How many limbs each of ``numbers`` takes in a secure sum; it follows from the form alone."""
        return ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """What is summed over devices, as whole numbers; those of a merged summary are the sums of its parts'."""
        return ()

    def with_numbers(self, numbers: Sequence[int]) -> Self:
        """Return the same with other numbers.

        Raises:
            DataError: they contradict each other.
        """
        return self

    @property
    def open(self) -> bool:
        """Whether it may have ``entries``; it follows from the form alone."""
        return False

    @property
    def entries(self) -> Mapping[str, tuple[int, int]]:
        """Texts that nobody knows beforehand, each with how often it occurs and how many clients have it (0: not counted)."""
        return {}

    def with_entries(self, entries: Mapping[str, tuple[int, int]]) -> Self:
        """Return the same with other entries."""
        return self

    def needed(self, entries: Mapping[H, tuple[int, int]], clients_a_word: int) -> Collection[H]:
        """Return those of all devices' entries, known by whatever stands for their texts, that the code may name."""
        return entries.keys()

    @abstractmethod
    def code(self, clients_a_word: int) -> Code:
        """Return the code that follows from the summary of all.

        Raises:
            DataError: none does, e.g. labels are no numbers of classes.
        """

    @abstractmethod
    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""


@dataclass(frozen=True, kw_only=True)
class Code(ABC):
    """How a column becomes numbers. ``grows`` names the fields that `extended` makes longer: first what has numbers, in order."""

    grows: ClassVar[tuple[str, ...]] = ()
    __pydantic_config__: ClassVar[Any] = STRICT

    @abstractmethod
    def encoded(self, raw: Any, where: Where) -> Column:
        """Return a raw column in numbers.

        Raises:
            DataError: a value has no number; ``where`` names its row.
        """

    def as_read(self, raw: Any) -> NDArray[np.int64] | None:
        """Return a hash of each row as it was read, where its numbers may become others when the code is extended; or None."""
        return None

    @abstractmethod
    def fault(self, summary: Any) -> str | None:
        """Return why a device's column, of the same kind, does not fit; None where it does."""

    def extended(self, summary: Any, clients_a_word: int) -> Self:
        """Return a code that also has numbers for what later data bring; numbers that are given stay as they are.

        Args:
            summary: of the later data.
            clients_a_word: as of ``Rules``.

        Raises:
            DataError: what is new cannot have one.
        """
        return self

    def extends(self, older: Code) -> bool:
        """Tell whether all numbers that an older code gives stand for the same here."""
        if self == older or type(self) is not type(older) or not self.grows:
            return self == older
        now, was = (getattr(one, self.grows[0]) or () for one in (self, older))
        same = replace(self, **{name: getattr(older, name) for name in self.grows}) == older
        return same and bool(was) and now[: len(was)] == was

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The type of the encoded column."""

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return what ``FederatedData.meta`` says of it."""
        return {}


def hashes(texts: Iterable[str]) -> NDArray[np.int64]:
    """Return a hash of each text, int64 (texts,)."""
    each = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(each), np.int64)


def difference(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """Return the first field in which two forms differ: "max_length 5, not 7"."""
    for name in [*wanted, *got]:
        if wanted.get(name) != got.get(name):
            return f"{name} {_short(got.get(name))}, not {_short(wanted.get(name))}"
    return None


def unlike(where: Where, fault: str) -> DataError:
    """Return what to say of a column that is not of an encoding's form."""
    return DataError("{where}: {difference}.", where=where(0), difference=fault)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"


TOKENS = ("char", "word", "token", "hashed_words", "unicode_words")

KINDS = {
    "standardise": ("features", "series", "target"),
    "tokens": ("text",),
    "vocabulary": ("text",),
    "max_length": ("text", "series"),
    "clients_a_word": ("text",),
    "label_names": ("label",),
}
"""The kinds of column that each rule is for; ``clients_a_word_here`` is a device's own, whatever its data."""

LEAST = {"clients_a_word": 1, "clients_a_word_here": 1, "vocabulary": 2, "max_length": 1}


class RuleError(ConfigError):
    """A rule is for none of the columns."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How data are summed up and numbered. None leaves a matter to each device's own reader.

    Attributes:
        clients_a_word: a character or word counts only where at least so many clients have it (1: every one).
        clients_a_word_here: a character or word leaves a device only where at least so many of its own clients have it.
            Above 1, the vocabulary depends on how clients are divided over devices.
        standardise: subtract from each numeric feature, each channel of a series, and from a number to predict, its mean, and divide by its
            standard deviation; metrics and predictions are in its own units again. None: unless the reader is told not to.
        tokens: what texts are cut into. "unicode_words" (words by Unicode's rules) and "hashed_words" (runs of letters
            or of digits, and signs) are hashed, so that nothing is counted. "char", "word" (between white space) and
            "token" (between spaces) are counted.
        vocabulary: the most ids that a vocabulary may have, padding and unknown included. None: the reader's number, or
            where ``tokens`` are others than the reader's, 256 characters, 20,000 words or 16,384 hashed ones.
        max_length: characters or words of a text, or steps of a series, to keep.
        label_names: the labels in the order of their numbers; then no client has to tell its labels.

    Raises:
        ConfigError: a number is too small, or there are no such tokens.
    """

    clients_a_word: int = 1
    clients_a_word_here: int = 1
    standardise: bool | None = None
    tokens: str | None = None
    vocabulary: int | None = None
    max_length: int | None = None
    label_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_choice("preparation.tokens: wanted", self.tokens, TOKENS)
        for name, least in LEAST.items():
            check_range(f"[{least}, inf]", **{f"preparation.{name}": getattr(self, name)})

    def check_used(self, kinds: Mapping[str, str]) -> None:
        """Raise RuleError where a rule is given and none of the columns, by name with their kinds, follows it."""
        for name, fitting in KINDS.items():
            asked = getattr(self, name) not in (getattr(Rules, name), False)
            if asked and not {*fitting} & {*kinds.values()}:
                there = ", ".join(f"{column} ({its})" for column, its in kinds.items())
                raise RuleError(
                    "preparation.{name}: wanted a column of the kind {kind!r}, which it is for; got {got}. Leave "
                    "it out. Columns that a reader encoded already are plain, and no rule changes them.",
                    name=name,
                    kind=fitting[0],
                    got=there,
                )
