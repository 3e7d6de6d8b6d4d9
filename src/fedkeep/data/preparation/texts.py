"""Texts: how often each character or word occurs, and the vocabulary that follows from it (KTEPS §5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged
from fedkeep.data.preparation.contract import (
    Code,
    ColumnSummary,
    Counted,
    H,
    RawColumn,
    Rules,
    Where,
    difference,
    hashes,
)
from fedkeep.data.text import (
    SPECIAL,
    CharVocabulary,
    HashedWords,
    TokenVocabulary,
    UnicodeWords,
    Vocabulary,
    WordVocabulary,
    vocabulary_from,
)

Tokens = Literal["char", "word", "token", "hashed_words", "unicode_words"]
AnyVocabulary = CharVocabulary | WordVocabulary | HashedWords
COUNTED: dict[str, type[Vocabulary]] = {
    made.kind: made for made in (CharVocabulary, WordVocabulary, TokenVocabulary)
}
HASHED = (HashedWords.kind, UnicodeWords.kind)
USUAL = {"char": 256, "word": 20_000, "token": 20_000} | dict.fromkeys(HASHED, HashedWords().size)
"""The most ids of a vocabulary where the rules name its tokens and not its size."""
CALLED = {"char": "characters", "word": "words", "token": "words"} | dict.fromkeys(HASHED, "words")


@dataclass(frozen=True, kw_only=True)
class Texts(RawColumn):
    """A raw column of texts.

    Attributes:
        values: the texts.
        tokens: what they are cut into; see `Rules`.
        size: the most ids to have, padding and unknown included.
        max_length: characters or words of a text to keep.
        given: a vocabulary that is known beforehand, so that nothing has to be counted.
    """

    kind: ClassVar[str] = "text"
    values: Sequence[str]
    tokens: str
    size: int
    max_length: int
    given: AnyVocabulary | None = None

    def summary(self, rules: Rules, counted: Counted) -> TextSummary:
        """Count the symbols of the texts to train on, client by client."""
        settings: dict[str, Any] = {"tokens": self.tokens, "size": self.size, "max_length": self.max_length}
        if rules.tokens not in (None, self.tokens):
            settings["size"] = USUAL[rules.tokens]
        asked = {"tokens": rules.tokens, "size": rules.vocabulary, "max_length": rules.max_length}
        settings |= {name: value for name, value in asked.items() if value is not None}
        own = self.given if rules.tokens is None and rules.vocabulary is None else None
        if own is not None:
            settings |= {"tokens": own.kind, "size": len(own)}
            symbols = own.symbols if isinstance(own, Vocabulary) else None
            return TextSummary(**settings, symbols=symbols)
        if settings["tokens"] in HASHED:
            return TextSummary(**settings)
        total, clients = self._counts(COUNTED[settings["tokens"]], rules, counted)
        told = {symbol: clients[symbol] for symbol in total} if rules.clients_a_word > 1 else {}
        return TextSummary(**settings, counts=total, clients=told)

    def _counts(
        self, kind: type[Vocabulary], rules: Rules, counted: Counted
    ) -> tuple[dict[str, int], Mapping[str, int]]:
        """Return how often each symbol occurs, and, where the rules need it, how many clients have it."""
        if rules.clients_a_word == rules.clients_a_word_here == 1:
            return _writable(kind.count(self.values[row] for row in counted.rows)), {}
        total, clients = Counter[str](), Counter[str]()
        by_client = counted.rows[np.argsort(counted.client, kind="stable")]
        starts = np.flatnonzero(np.diff(np.sort(counted.client))) + 1
        for rows in np.split(by_client, starts):
            found = kind.count(self.values[row] for row in rows)
            total.update(found)
            clients.update(found.keys())
        kept = {s: n for s, n in total.items() if clients[s] >= rules.clients_a_word_here}
        return _writable(kept), clients


def _writable(counts: Mapping[str, int]) -> dict[str, int]:
    """Leave out symbols with half a pair of surrogates, which no file can hold: they are unknown."""
    return {s: n for s, n in counts.items() if s.isascii() or not any("\ud800" <= c <= "\udfff" for c in s)}


@dataclass(frozen=True, kw_only=True)
class TextSummary(ColumnSummary):
    """What leaves a device of a column of texts.

    Attributes:
        tokens, size, max_length: as for `Texts`.
        symbols: of a vocabulary that is known beforehand.
        counts: how often each symbol occurs in the texts to train on; empty where nothing has to be counted.
        clients: how many clients have it; empty where ``Rules.clients_a_word`` is 1.
    """

    pooled: ClassVar[frozenset[str]] = frozenset({"counts", "clients"})

    kind: Literal["text"] = "text"
    tokens: Tokens
    size: int
    max_length: int
    symbols: tuple[str, ...] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    clients: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min((*self.counts.values(), *self.clients.values()), default=1) < 1:
            raise DataError("Wanted counts of words of at least 1. Sum the device's data up again.")
        if self.clients and self.clients.keys() != self.counts.keys():
            raise DataError("Wanted for each word how many clients have it. Sum the device's data up again.")

    @property
    def open(self) -> bool:
        """Whether words are counted."""
        return self.symbols is None and self.tokens not in HASHED

    @property
    def entries(self) -> Mapping[str, tuple[int, int]]:
        """The words."""
        return {word: (count, self.clients.get(word, 0)) for word, count in self.counts.items()}

    def with_entries(self, entries: Mapping[str, tuple[int, int]]) -> Self:
        """Return the words and counts that these are."""
        counts = {word: count for word, (count, _) in entries.items()}
        return replace(self, counts=counts, clients={word: n for word, (_, n) in entries.items() if n})

    def needed(self, entries: Mapping[H, tuple[int, int]], clients_a_word: int) -> Collection[H]:
        """Return the most frequent words that enough clients have, as many as there is room for; of ties at the end all."""
        enough = {
            one: count
            for one, (count, clients) in entries.items()
            if clients >= clients_a_word or clients_a_word <= 1
        }
        room = max(1, self.size - SPECIAL)
        if len(enough) <= room:
            return enough.keys()
        least = sorted(enough.values(), reverse=True)[room - 1]
        return [one for one, count in enough.items() if count >= least]

    def merged(self, others: Sequence[Self]) -> Self:
        """Return the sums of the counts."""
        counts, clients = Counter(self.counts), Counter(self.clients)
        for other in others:
            counts.update(other.counts)
            clients.update(other.clients)
        return replace(self, counts=dict(counts), clients=dict(clients))

    def code(self, clients_a_word: int) -> TextCode:
        """Return the vocabulary of the most frequent symbols; ties go to the smaller one."""
        kept, symbols = self.common(clients_a_word), self.symbols
        if self.open:
            if not kept:
                raise DataError(
                    "No {tokens} are left to number: nobody has a text to train on, or fewer clients have "
                    "each than wanted, all in all (preparation.clients_a_word) or on a device (its clients_a_word, by "
                    "default 2). Hash them, with preparation.tokens = 'unicode_words', or let devices tell more.",
                    tokens=CALLED[self.tokens],
                )
            symbols = COUNTED[self.tokens].from_counts(kept, self.size).symbols
        size = self.size if symbols is None else len(symbols) + 2
        return TextCode(tokens=self.tokens, size=size, max_length=self.max_length, symbols=symbols)

    def common(self, clients_a_word: int) -> Mapping[str, int]:
        """Return how often each symbol occurs that so many clients have."""
        if clients_a_word <= 1:
            return self.counts
        return {s: n for s, n in self.counts.items() if self.clients[s] >= clients_a_word}

    def reveals(self) -> str:
        """Return in plain words what the server learns from it."""
        what = CALLED[self.tokens]
        if not self.counts:
            return f"texts of {what}: nothing is counted"
        own = f", and how many clients have each: {sum(n == 1 for n in self.clients.values()):,} only one"
        top = sorted(self.counts, key=lambda s: (-self.counts[s], s))[:5]
        return (
            f"how often each of {len(self.counts):,} {what} occurs in the texts to train on (most: "
            f"{', '.join(map(repr, top))}){own if self.clients else ''}. Rare {what} can point to a person"
        )


@dataclass(frozen=True, kw_only=True)
class TextCode(Code):
    """A vocabulary, and where texts are cut.

    Attributes:
        tokens, max_length: as for `Texts`.
        size: the number of ids, padding and unknown included: the rows of an embedding.
        symbols: in the order of their ids, from 2; None for hashed words.
    """

    grows: ClassVar[tuple[str, ...]] = ("symbols", "size")

    kind: Literal["text"] = "text"
    tokens: Tokens
    size: int
    max_length: int
    symbols: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if self.max_length < 1 or len(self.vocabulary) != self.size:
            raise DataError(
                "Wanted a vocabulary of {size} ids, and texts of at least 1; got {got} and {max_length}.",
                size=self.size,
                got=len(self.vocabulary),
                max_length=self.max_length,
            )

    @cached_property
    def vocabulary(self) -> AnyVocabulary:
        """The vocabulary."""
        symbols = None if self.symbols is None else list(self.symbols)
        return vocabulary_from({"kind": self.tokens, "size": self.size, "symbols": symbols})

    def encoded(self, raw: Texts, where: Where) -> Ragged:
        """Return the texts' ids; a symbol that the vocabulary lacks is unknown (1)."""
        return self.vocabulary.encode_all(raw.values, self.max_length)

    def as_read(self, raw: Texts) -> NDArray[np.int64] | None:
        """Return hashes of the texts where symbols are numbered: one that is unknown may have a number later."""
        return None if self.symbols is None else hashes(raw.values)

    def fault(self, summary: TextSummary) -> str | None:
        """Return why a device's column does not fit; None where it does."""
        names = ("tokens", "max_length") if summary.symbols is None else ("tokens", "max_length", "symbols")
        return difference({n: getattr(self, n) for n in names}, {n: getattr(summary, n) for n in names})

    def extended(self, summary: TextSummary, clients_a_word: int) -> Self:
        """Return a code where the most frequent of the new symbols have the next ids, as many as there is room for.

        A vocabulary that was given, and one of hashed words, stays.
        """
        if self.symbols is None or summary.symbols is not None:
            return self
        known = set(self.symbols)
        new = {s: n for s, n in summary.common(clients_a_word).items() if s not in known}
        room = max(0, summary.size - self.size)
        symbols = COUNTED[self.tokens].from_counts(new, SPECIAL + room).symbols
        return replace(self, symbols=(*self.symbols, *symbols), size=self.size + len(symbols))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integer type that holds every id."""
        found = self.vocabulary
        if isinstance(found, HashedWords):
            return np.dtype(np.uint16 if found.size <= 1 << 16 else np.int32)
        return found.dtype

    def meta(self, column: str) -> Mapping[str, Any]:
        """Return the vocabulary and the longest length."""
        return {"vocabulary": self.vocabulary.to_dict(), "max_length": self.max_length}
