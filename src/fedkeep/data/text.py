"""Vocabularies: text to small integers, by characters or by words, where 0 is padding, 1 is anything unknown; and what
the clients of a text data set hold: numbers of texts, words a text, different words.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError, raising
from fedkeep.core.files import expanded, write_whole
from fedkeep.data.columns import Ragged, check_max_length, offsets_of
from fedkeep.data.federated import FederatedData
from fedkeep.tasks.multiclass import IGNORED

PAD, UNKNOWN = 0, 1
SPECIAL = 2
LONGEST = 40
"""Characters of the longest token that is counted: a longer one is a text without spaces, or an address."""


class Vocabulary(ABC):
    """Symbols with ids from 2 on, the most frequent first.

    Args:
        symbols: different symbols, in the order of their ids.

    Raises:
        DataError: a symbol twice, or one that is none.
    """

    kind: ClassVar[str]
    between: ClassVar[str] = " "  # what stands between the symbols of a text
    longest: ClassVar[int | None] = LONGEST  # characters of a symbol that is counted

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = tuple(symbols)
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols, start=SPECIAL)}
        if len(self._ids) < len(self.symbols):
            twice = next(symbol for symbol, times in Counter(self.symbols).items() if times > 1)
            raise DataError(
                "A vocabulary needs different symbols; {name!r} occurs more than once.", name=twice
            )

    def __len__(self) -> int:
        """Return the number of ids, padding and unknown included: the rows of an embedding."""
        return len(self.symbols) + SPECIAL

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Vocabulary) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash((self.kind, self.symbols))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} ids)"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest integer type that holds every id."""
        return np.dtype(np.uint8 if len(self) <= 256 else np.uint16 if len(self) <= 65536 else np.int32)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], size: int | None = None, min_count: int = 1) -> Self:
        """Build from frequencies, which may be sums over clients: nobody's text has to leave.

        Args:
            counts: frequency of each symbol in training text.
            size: most ids to have, padding and unknown included; None: no cap.
            min_count: symbols seen less often are unknown.

        Ties go to the smaller symbol, so that the order of the counts changes nothing.
        """
        if size is not None and size < SPECIAL:
            raise DataError(
                "A vocabulary's size counts padding and unknown, so it must be at least 2; got {got}.",
                got=size,
            )
        ranked = sorted((-number, symbol) for symbol, number in counts.items() if number >= min_count)
        return cls(symbol for _, symbol in ranked[: None if size is None else size - SPECIAL])

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int | None = None, min_count: int = 1) -> Self:
        """Build from training texts. Take the training split's only: a test text must not shape the ids."""
        return cls.from_counts(cls.count(texts), size, min_count)

    @staticmethod
    @abstractmethod
    def words(text: str) -> Sequence[str]:
        """Return the symbols of a text, in order."""

    @classmethod
    def count(cls, texts: Iterable[str]) -> Counter[str]:
        """Return the frequency of each symbol that is not too long; counts of several clients add."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(word for word in cls.words(text) if len(word) <= (cls.longest or len(word)))
        return counts

    def encode(self, text: str, max_length: int | None = None) -> NDArray[Any]:
        """Return a text's ids, shape (symbols,), cut at ``max_length`` symbols."""
        return self.encode_all([text], max_length).values

    @abstractmethod
    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` symbols."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids: padding is left out, unknown becomes U+FFFD."""
        symbols = ("\ufffd" if i == UNKNOWN else self.symbols[i - SPECIAL] for i in ids if i != PAD)
        return self.between.join(symbols)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, and :func:`vocabulary_from` reads."""
        return {"kind": self.kind, "size": len(self), "symbols": list(self.symbols)}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave."""
        symbols = entry.get("symbols")
        if (
            entry.get("kind") != cls.kind
            or not isinstance(symbols, list)
            or not all(isinstance(s, str) for s in symbols)
        ):
            raise DataError(
                "Wanted a {kind} vocabulary with a list of symbols; got kind {got!r} and symbols {type}.",
                kind=cls.kind,
                got=entry.get("kind"),
                type=type(symbols).__name__,
            )
        return cls(symbols)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as JSON.

        Raises:
            RunError: the file can't be written; an older one is as it was.
        """
        write_whole(expanded(path), json.dumps(self.to_dict(), indent=0).encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: the file is missing, is no JSON, or holds another kind of vocabulary.
        """
        with (
            raising(
                DataError, "The vocabulary {file} is not JSON: {why}.", ValueError, RecursionError, file=path
            ),
            raising(DataError, "Cannot read the vocabulary {file}: {why}.", OSError, file=path),
            raising(DataError, "The vocabulary {file} does not exist.", FileNotFoundError, file=path),
        ):
            entry = json.loads(expanded(path).read_text(encoding="utf-8"))
        if not isinstance(entry, dict):
            raise DataError(
                "Wanted a JSON object in the vocabulary {file}; got a {entry_type}.",
                file=path,
                entry_type=type(entry).__name__,
            )
        return cls.from_dict(entry)


class CharVocabulary(Vocabulary):
    """Ids of characters."""

    kind = "char"
    between = ""

    def __init__(self, symbols: Iterable[str]) -> None:
        super().__init__(symbols)
        for symbol in self.symbols:
            if len(symbol) != 1:
                raise DataError(
                    "A symbol of a character vocabulary is one character; got {got!r}.", got=symbol
                )
        codes = np.asarray([ord(symbol) for symbol in self.symbols], dtype=np.int64)
        # One slot beyond the highest known code point stays unknown, and every higher one is clipped to it.
        self._table = np.full(int(codes.max(initial=0)) + 2, UNKNOWN, self.dtype)
        self._table[codes] = np.arange(SPECIAL, SPECIAL + len(codes))

    @staticmethod
    def words(text: str) -> Sequence[str]:
        """Return the characters of a text, in order."""
        return text

    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` characters."""
        check_max_length(max_length)
        cut = [text[:max_length] for text in texts]
        codes = np.frombuffer("".join(cut).encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
        return Ragged(
            self._table.take(codes.astype(np.int64), mode="clip"),
            offsets_of(np.fromiter(map(len, cut), np.int64, len(cut))),
        )


class WordVocabulary(Vocabulary):
    """Ids of words: what stands between white space."""

    kind = "word"

    @staticmethod
    def words(text: str) -> list[str]:
        """Return the words of a text, in order."""
        return text.split()

    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` words."""
        check_max_length(max_length)
        return self._ids_of([self.words(text)[:max_length] for text in texts])

    def _ids_of(self, words: Sequence[Sequence[str]]) -> Ragged:
        offsets = offsets_of(np.fromiter(map(len, words), np.int64, len(words)))
        ids = (self._ids.get(word, UNKNOWN) for text in words for word in text)
        return Ragged(np.fromiter(ids, self.dtype, int(offsets[-1])), offsets)


class TokenVocabulary(WordVocabulary):
    """Ids of the words of tokenised text: what stands between spaces, other white space included.

    A text without a word is one unknown word, so that every text has a token of its own to be read.
    """

    kind = "token"
    longest = None  # somebody cut the text

    @staticmethod
    def words(text: str) -> list[str]:
        """Return the words of a text, in order."""
        return [word for word in text.split(" ") if word]

    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` words, none empty."""
        check_max_length(max_length)
        # No word is empty, so "" is unknown to every vocabulary.
        return self._ids_of([self.words(text)[:max_length] or [""] for text in texts])


def vocabulary_from(entry: Mapping[str, Any]) -> CharVocabulary | WordVocabulary | HashedWords:
    """Return the vocabulary that ``meta["vocabulary"]`` of a data set describes."""
    kinds = {made.kind: made for made in (CharVocabulary, WordVocabulary, TokenVocabulary)}
    hashed = {made.kind: made for made in (HashedWords, UnicodeWords)}
    if entry.get("kind") in list(hashed) and type(entry.get("size")) is int:
        return hashed[entry["kind"]](entry["size"])
    if entry.get("kind") not in list(kinds):
        raise DataError(
            "Wanted a vocabulary of kind {known}; got {got!r}.",
            known=", ".join(map(repr, (*kinds, *hashed))),
            got=entry.get("kind"),
        )
    return kinds[entry["kind"]].from_dict(entry)


_WORD = re.compile(r"[^\W\d_]+|\d+|[^\s\w]|_")


class HashedWords:
    """Ids of lower-cased words, numbers and signs: 1 + CRC-32 modulo (size − 1); 0 is padding.

    Args:
        size: number of ids, padding included. Words that share an id cannot be told apart.
    """

    kind = "hashed_words"

    def __init__(self, size: int = 16384) -> None:
        if size < 2:
            raise DataError(
                "Hashed words need a size of at least 2 (padding and one id); got {got}.", got=size
            )
        self.size = size

    def __len__(self) -> int:
        return self.size

    @staticmethod
    def words(text: str) -> list[str]:
        """Return the words of a text, in order."""
        return _WORD.findall(text.lower())

    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` words."""
        check_max_length(max_length)
        words = [self.words(text)[:max_length] for text in texts]
        offsets = offsets_of(np.fromiter(map(len, words), np.int64, len(words)))
        place = {word: self._place(word) for word in {word for text in words for word in text}}
        kind = np.uint16 if self.size <= 1 << 16 else np.int32
        ids = (place[word] for text in words for word in text)
        return Ragged(np.fromiter(ids, kind, int(offsets[-1])), offsets)

    def _place(self, word: str) -> int:
        return 1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % (self.size - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the description that ``meta["vocabulary"]`` keeps."""
        return {"kind": self.kind, "size": self.size}


class UnicodeWords(HashedWords):
    """Ids of words as Unicode cuts them (UAX 29), lower-cased, in composed form (NFC) and hashed as `HashedWords` are.

    What stands between white space is cut into words, numbers and single signs; an emoji is one. In scripts without
    spaces between words each character is a word, and so is each pair of neighbours, behind the second.
    """

    kind = "unicode_words"

    @staticmethod
    def words(text: str) -> list[str]:
        """Return the words of a text, in order; of a text without any one empty word, so that each text has a token."""
        boundary, alone = _rules()
        found, before = list[str](), ""
        for piece in boundary.split(unicodedata.normalize("NFC", text.lower())):
            if not piece or piece.isspace():
                before = ""
                continue
            found.append(piece)
            single = alone.fullmatch(piece) is not None
            if single and before:
                found.append(before + piece)
            before = piece if single else ""
        return found or [""]


@cache
def _rules() -> tuple[Any, Any]:
    """Return what matches the boundaries of words, and a character of a script without spaces between words."""
    import regex  # loaded by who reads texts

    scripts = "".join(
        rf"\p{{Script={name}}}" for name in ("Han", "Hiragana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
    )
    return regex.compile(r"(?V1w)\b"), regex.compile(rf"(?V1)[{scripts}]\p{{M}}*")


def next_tokens(input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> NDArray[np.int64]:
    """Return for each token the one that follows, int64 (examples, tokens): the labels of the task ``"next_token"``.

    Args:
        input_ids: (examples, tokens), padded to one length.
        attention_mask: (examples, tokens), 0 where padded; None: nowhere, which is doubted where an id stands at rows'
            ends alone, in runs of different lengths.

    Returns:
        −100 where nothing follows; such places count neither in the loss nor in a metric.

    Raises:
        DataError: the shapes are others, or rows look padded and no mask says where.
    """
    ids = np.asarray(input_ids)
    mask: NDArray[Any] = np.ones(ids.shape) if attention_mask is None else np.asarray(attention_mask)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or mask.shape != ids.shape:
        raise DataError(
            "Wanted input_ids as integers (examples, tokens) and a mask of that shape; got {got} {shape} "
            "and {mask}.",
            got=ids.dtype,
            shape=ids.shape,
            mask=mask.shape,
        )
    if attention_mask is None and (pad := _padded_with(ids)) is not None:
        raise DataError(
            "Rows end in the id {pad}, which stands nowhere else, as if they were padded with it; each would be a token to predict, and count in "
            "the perplexity. Give attention_mask, 0 where padded; where none is, np.ones_like(input_ids).",
            pad=pad,
        )
    label = np.full(ids.shape, IGNORED, np.int64)
    label[:, :-1] = np.where(mask[:, :-1] * mask[:, 1:] > 0, ids[:, 1:], IGNORED)
    return label


def _padded_with(ids: NDArray[np.integer[Any]]) -> int | None:
    """Return the id that rows seem padded with: it stands at their ends alone, in runs of different lengths."""
    if not ids.size:
        return None
    last = ids[:, -1]
    run = np.cumprod((ids == last[:, None])[:, ::-1], axis=1).sum(1)
    for one in np.unique(last[run > 1]).tolist():
        runs = np.where(last == one, run, 0)
        if len(np.unique(runs)) > 1 and (ids == one).sum() == runs.sum():
            return int(one)
    return None


@dataclass(frozen=True)
class TextStatistics:
    """A client's texts (KTEPS Table 1).

    Attributes:
        client: the client's id.
        train, valid, test: numbers of texts, N^k and N^k_te.
        mean_words: words of a training text, before it is cut where the reader tells; NaN without training texts.
        different_words: |V^k|, the different known words of the training texts as they are trained on.
    """

    client: str
    train: int
    valid: int
    test: int
    mean_words: float
    different_words: int


def text_statistics(data: FederatedData, column: str = "text") -> list[TextStatistics]:
    """Return the statistics of each client.

    Raises:
        DataError: there is no ragged column of this name, or the data are not split.
    """
    ids = data.columns.get(column)
    if not isinstance(ids, Ragged):
        raise DataError(
            "Wanted texts in a ragged column {column!r}; the data have {columns}.",
            column=column,
            columns=sorted(name for name in data.columns if not name.startswith("_")),
        )
    whole = data.columns.get("_words")
    words = np.diff(ids.offsets) if whole is None or isinstance(whole, Ragged) else whole
    found = []
    for client in range(len(data)):
        train = data.rows(client, "train")
        rows = np.arange(train.start, train.stop)
        used = np.unique(ids.take(rows).values)
        found.append(
            TextStatistics(
                client=data.ids[client],
                train=len(train),
                valid=data.count(client, "valid"),
                test=data.count(client, "test"),
                mean_words=float(words[rows].mean()) if len(rows) else float("nan"),
                different_words=int((used >= SPECIAL).sum()),
            )
        )
    return found
