"""The contract of a column on its way from a client's file into a model: raw values, their summary, their code.

A raw column stays on its device. Its summary leaves it: what is declared there, and nothing else. The code is made from
all summaries, and is the same for every device.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.data.columns import Column, Rows
from fedkeep.data.preparation.rules import Rules

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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"
