"""Words as hashed ids: a vocabulary that nobody has to count, so no client's words are revealed to build it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged, check_max_length, offsets_of

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

    def encode_all(self, texts: Sequence[str], max_length: int | None = None) -> Ragged:
        """Return the ids of many texts as one ragged column, each cut at ``max_length`` words."""
        check_max_length(max_length)
        words = [_WORD.findall(text.lower())[:max_length] for text in texts]
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
