"""Reddit as LEAF's scripts write it: comments cut into sequences of words, with the word that follows each.

Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097. In ``x`` a comment is a list of sequences of one
length; in ``y`` it has as many ``target_tokens`` and ``count_tokens``, 1 where a place counts and 0 where it is padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.data.preparation import About, Plain, RawColumn
from fedkeep.data.text import PAD, SPECIAL, UNKNOWN, TokenVocabulary
from fedkeep.tasks.multiclass import IGNORED

PADDING = "<PAD>"
WORDS = 10_000
"""Ids of a vocabulary, as LEAF's script has them: padding, unknown, and the most frequent words."""
Targets = tuple[str | None, ...]
"""The words that follow those of a sequence; None where none counts."""


def has_targets(y: Any) -> bool:
    """Tell whether an entry of ``y`` is a comment's."""
    return isinstance(y, dict) and "target_tokens" in y


def sequences(comments: Sequence[Any], targets: Sequence[Any], place: str) -> tuple[list[Any], list[Any]]:
    """Return a user's sequences, and what follows in each.

    Raises:
        DataError: a comment is not of the form; ``place`` and its number are named.
    """
    x: list[Any] = []
    y: list[Any] = []
    for number, (comment, target) in enumerate(zip(comments, targets, strict=True)):
        given = [
            comment,
            *(target.get(n) if has_targets(target) else None for n in ("target_tokens", "count_tokens")),
        ]
        shapes = [
            [len(one) if isinstance(one, list) else None for one in lines]
            if isinstance(lines, list)
            else None
            for lines in given
        ]
        if shapes[0] is None or shapes[0] != shapes[1] or shapes[0] != shapes[2] or None in shapes[0]:
            raise DataError(
                "{place}, comment {row}: wanted lists of words in x, and as many target_tokens and count_tokens in y; got "
                "the lengths {got}.",
                place=place,
                row=number,
                got=shapes,
            )
        for words, following, counts in zip(*given, strict=True):
            if wrong := next((word for word in (*words, *following) if not isinstance(word, str)), None):
                raise DataError(
                    "{place}, comment {row}: wanted words; got {got!r}.", place=place, row=number, got=wrong
                )
            x.append(words)
            y.append(tuple(w if n and w != PADDING else None for w, n in zip(following, counts, strict=True)))
    return x, y


def columns_of_words(
    x: Sequence[list[str]], y: Sequence[Targets], training: Sequence[bool], size: int | None
) -> tuple[dict[str, RawColumn], About]:
    """Return the columns ``input_ids`` and ``label``, int64 (sequences, words), and what is known of them.

    Args:
        x: words, ``<PAD>`` among them.
        y: what follows; None becomes −100, which counts nowhere.
        training: which sequences the vocabulary is counted in.
        size: of the vocabulary, padding (0) and unknown (1) included; None: 10,000, as LEAF has.

    Raises:
        DataError: sequences differ in length.
    """
    lengths = {len(words) for words in x}
    if len(lengths) > 1:
        raise DataError("Wanted sequences of one length; got {got}.", got=sorted(lengths))
    counts = Counter(chain.from_iterable(words for words, trains in zip(x, training, strict=True) if trains))
    del counts[PADDING]
    vocabulary = TokenVocabulary.from_counts(counts, WORDS if size is None else size)
    place = {word: number for number, word in enumerate(vocabulary.symbols, SPECIAL)} | {PADDING: PAD}
    ids = [[place.get(word, UNKNOWN) for word in words] for words in x]
    following = [[IGNORED if word is None else place.get(word, UNKNOWN) for word in words] for words in y]
    columns: dict[str, RawColumn] = {
        "input_ids": Plain(values=np.asarray(ids, np.int64)),
        "label": Plain(values=np.asarray(following, np.int64)),
    }
    size = len(vocabulary)
    return columns, About(task="next_token", classes=size, vocabulary=vocabulary.to_dict())
