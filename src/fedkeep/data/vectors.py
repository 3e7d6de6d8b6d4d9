"""Word vectors from files, and the embedding table that a vocabulary starts from."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, Spot
from fedkeep.core.files import expanded
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.arrays import read_npz
from fedkeep.data.readers.opened_files import existing, lines
from fedkeep.data.text import SPECIAL, WordVocabulary

UNKNOWN_RANGE = 0.1


@dataclass(frozen=True)
class WordVectors:
    """Vectors of words.

    Attributes:
        words: different words.
        vectors: (words, width) float32, finite; row i belongs to word i.
    """

    words: tuple[str, ...]
    vectors: NDArray[np.float32]

    @property
    def width(self) -> int:
        """The length of a vector."""
        return int(self.vectors.shape[1])

    def table(self, vocabulary: WordVocabulary, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
        """Return the rows that a vocabulary's embedding starts from (KTEPS §5.2): the words' vectors times ``scale``.

        Returns:
            (len(vocabulary), width) float32. Row 0, padding, is zero. The unknown word, and words without a vector, are
            drawn from U(−0.1, 0.1) with the seed.

        Raises:
            DataError: no word of the vocabulary has a vector.
        """
        place = {word: row for row, word in enumerate(self.words)}
        rows = np.asarray([place.get(word, -1) for word in vocabulary.symbols], dtype=np.int64)
        known = rows >= 0
        if not known.any():
            shown = ", ".join(map(repr, vocabulary.symbols[:3]))
            raise DataError(
                "None of the vocabulary's {rows:,} words ({shown}, …) has a vector. Are the texts "
                "lower-cased and cut into words as those that the vectors were made from?",
                rows=len(rows),
                shown=shown,
            )
        draw = numpy_generator(seed, "word_vectors")
        drawn = draw.uniform(-UNKNOWN_RANGE, UNKNOWN_RANGE, (len(vocabulary), self.width))
        table = drawn.astype(np.float32)
        table[0] = 0.0
        table[SPECIAL:][known] = np.float32(scale) * self.vectors[rows[known]]
        return table


def read_word_vectors(path: str | Path, keep: Collection[str] | None = None) -> WordVectors:
    """Read word vectors: GloVe or word2vec text (also ``.gz``), or an ``.npz`` file with ``words`` and ``vectors``.

    In text, each line holds a word and its numbers, between single spaces; a word may hold
    spaces itself (". . .", as published ones do) where the first line has none. A first line of two integers (how many
    words, how many numbers each) is word2vec's. Of a word that comes twice, the first vector counts: files are ordered
    by frequency, and published ones do repeat words.

    Args:
        path: the file.
        keep: words to keep, which spares the time to read the others; None: all.

    Raises:
        DataError: the file is missing, empty or truncated, a line has another width than the first, a word is missing,
            a number is none, NaN or infinite, or no word of ``keep`` is there; the message names file and line.
    """
    file = existing(expanded(path), key="model.word_vectors")
    found = _from_npz(file, keep) if file.suffix == ".npz" else _from_text(file, keep)
    if not found.words:
        reason = "holds no word" if keep is None else f"has none of the {len(keep):,} words that are wanted"
        raise DataError(
            "The file of word vectors {file} {reason}. Is it the right one?", file=file, reason=reason
        )
    return found


def _from_text(path: Path, keep: Collection[str] | None) -> WordVectors:
    wanted = None if keep is None else frozenset(keep)
    vectors: dict[str, NDArray[np.float32]] = {}
    width = announced = count = 0
    for number, line in lines(path):
        cells = line.rstrip(" ").split(" ")
        if number == 1 and len(cells) == 2 and all(re.fullmatch("[0-9]{1,9}", cell) for cell in cells):
            announced, width = int(cells[0]), int(cells[1])
            continue
        width = width or len(cells) - 1
        if len(cells) > width + 1 > 1 and all(cells[:-width]) and not any(map(_is_number, cells[1:-width])):
            cells = [" ".join(cells[:-width]), *cells[-width:]]
        if len(cells) != width + 1 or width < 1 or not cells[0]:
            raise DataError(
                "{file}, line {number}: wanted a word and {width} numbers between single spaces; got {got} "
                "cells: {line!r}.",
                file=path,
                number=number,
                width=max(width, 1),
                got=len(cells),
                line=line[:60],
            )
        count += 1
        if (wanted is None or cells[0] in wanted) and cells[0] not in vectors:
            vectors[cells[0]] = _numbers(path, number, cells)
    if count < announced:
        raise DataError(
            "{file} is truncated: its first line announces {announced} words; it holds {count}.",
            file=path,
            announced=announced,
            count=count,
        )
    stacked = np.stack(list(vectors.values())) if vectors else np.zeros((0, width), np.float32)
    return WordVectors(tuple(vectors), stacked)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(path: Path, line: int, cells: list[str]) -> NDArray[np.float32]:
    try:
        values = np.asarray([float(cell) for cell in cells[1:]])
    except ValueError as error:
        raise DataError(
            "{place}: wanted numbers behind {cell!r}; {error}.",
            place=Spot(path, line),
            cell=cells[0],
            error=error,
        ) from error
    vector = _single(values)
    if not np.isfinite(vector).all():
        raise DataError(
            "{place}: the vector of {cell!r} holds NaN or infinity.", place=Spot(path, line), cell=cells[0]
        )
    return vector


def _single(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the values as float32; what is too large becomes infinite, which the caller refuses."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _from_npz(path: Path, keep: Collection[str] | None) -> WordVectors:
    words, vectors = read_npz(path, ("words", "vectors"))
    if words.ndim != 1 or words.dtype.kind not in "SU" or vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise DataError(
            "{file}: wanted words, a row of texts, and vectors, a row of floats for each; got {got} of "
            "shape {shape} and {dtype} of shape {shape_2}.",
            file=path,
            got=words.dtype,
            shape=words.shape,
            dtype=vectors.dtype,
            shape_2=vectors.shape,
        )
    if len(words) != len(vectors):
        raise DataError(
            "{file}: wanted a vector for each word; got {got} words, {vectors_count} vectors.",
            file=path,
            got=len(words),
            vectors_count=len(vectors),
        )
    texts = [_decoded(path, row, word) for row, word in enumerate(words.tolist())]
    wanted = None if keep is None else frozenset(keep)
    rows: dict[str, int] = {}
    for row, text in enumerate(texts):
        if wanted is None or text in wanted:
            rows.setdefault(text, row)
    chosen = _single(vectors[list(rows.values())])
    wrong = np.flatnonzero(~np.isfinite(chosen).all(axis=1))
    if len(wrong):
        raise DataError(
            "{file}: the vector of {row!r} holds NaN or infinity.", file=path, row=list(rows)[wrong[0]]
        )
    return WordVectors(tuple(rows), chosen)


def _decoded(path: Path, row: int, word: str | bytes) -> str:
    try:
        text = word.decode() if isinstance(word, bytes) else word
    except UnicodeDecodeError as error:
        raise DataError(
            "{file}: word {row} is no UTF-8 text: {word!r}.", file=path, row=row, word=word
        ) from error
    if not text:
        raise DataError("{file}: word {row} is missing: an empty text has a vector.", file=path, row=row)
    return text
