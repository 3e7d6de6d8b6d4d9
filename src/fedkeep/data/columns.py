"""Rows of unequal length, and sequences of client ids that cost nothing per client until one is asked for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError

Rows = NDArray[np.int64]
"""Row numbers of a data set, in any order."""

LONGEST_ID = 200


class Ragged:
    """Rows of unequal length in one flat array: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: token or character ids, shape (tokens,), any integer dtype; 0 is kept for padding.
        offsets: int64, shape (rows + 1,), from 0 to ``len(values)``, never falling.

    Raises:
        DataError: the offsets don't describe the values.
    """

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        self.values = np.asarray(values)
        self.offsets = np.asarray(offsets, dtype=np.int64)
        if self.values.ndim != 1 or self.values.dtype.kind not in "iu":
            raise DataError(
                f"The values of a ragged column must be one flat array of integers (token ids); got shape "
                f"{self.values.shape} of {self.values.dtype}."
            )
        check_offsets(self.offsets, len(self.values), "a ragged column's offsets", "values")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | NDArray[Any]], dtype: str = "int64") -> Ragged:
        """Return a ragged column of these rows."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        return cls(
            np.concatenate(arrays) if arrays else np.zeros(0, dtype),
            offsets_of(np.asarray([len(row) for row in arrays], dtype=np.int64)),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self):,} rows, {len(self.values):,} values of {self.values.dtype})"

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets together."""
        return self.values.nbytes + self.offsets.nbytes

    def lengths(self, rows: Rows) -> NDArray[np.int64]:
        """Return the rows' lengths."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def take(self, rows: Rows) -> Ragged:
        """Return a ragged column of these rows, in this order."""
        start = self.offsets[rows]
        length = self.offsets[rows + 1] - start
        offsets = offsets_of(length)
        # Position of every value kept: its place in its row, plus where that row starts here.
        at = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], length)
        return Ragged(self.values[at], offsets)

    def padded(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows as a rectangle padded with 0 behind, and their lengths.

        An empty row has length 1 and holds one pad, so that a recurrent network always has a step to take.

        Returns:
            ids, int64 (rows, longest), and lengths, int64 (rows,).
        """
        start = self.offsets[rows]
        length = self.offsets[rows + 1] - start
        longest = max(1, int(length.max())) if len(length) else 1
        place = np.arange(longest)
        if len(self.values):
            # mode="clip" spares the check of bounds; what it reads beyond a row's end is zeroed below.
            ids = self.values.take(start[:, None] + place, mode="clip").astype(np.int64)  # (rows, longest)
            ids *= place < length[:, None]
        else:
            ids = np.zeros((len(start), longest), np.int64)
        return ids, np.maximum(length, 1)


Column = np.ndarray[Any, Any] | Ragged
"""A dense array, first axis examples, or a ragged column."""


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each of consecutive pieces starts and the last ends: (0, l₀, l₀ + l₁, …), int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def check_offsets(offsets: NDArray[np.int64], end: int, what: str, of: str) -> None:
    """Raise DataError unless ``offsets`` rise from 0 to ``end``."""
    flat = offsets.ndim == 1 and len(offsets) > 0
    if not flat or offsets[0] != 0 or offsets[-1] != end or not _rising(offsets):
        got = f"a fall, or {offsets[0]} to {offsets[-1]}" if flat else f"shape {offsets.shape}"
        raise DataError(f"Wanted {what} to rise from 0 to {end}, the number of {of}; got {got}.")


def _rising(offsets: NDArray[np.int64], block: int = 1 << 20) -> bool:
    # In blocks: the offsets may be mapped from a file larger than memory.
    return not any((np.diff(offsets[at : at + block + 1]) < 0).any() for at in range(0, len(offsets), block))


class RangeIds(Sequence[str]):
    """The ids ``pattern.format(0)`` … ``pattern.format(n - 1)``, made when asked for.

    Args:
        n: number of clients.
        pattern: text with one ``{}`` for the client's number.

    Raises:
        DataError: the pattern has not exactly one ``{}``, or makes ids that are not allowed.
    """

    def __init__(self, n: int, pattern: str = "user-{}") -> None:
        if pattern.count("{}") != 1 or pattern.count("{") != 1 or pattern.count("}") != 1:
            raise DataError(
                f"A pattern of client ids needs exactly one '{{}}', as in 'user-{{}}'; got {pattern!r}."
            )
        self.n, self.pattern = n, pattern
        self._before, self._after = pattern.split("{}")
        check_id(pattern.format(max(n - 1, 0)))

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, client: int) -> str: ...
    @overload
    def __getitem__(self, client: slice) -> list[str]: ...
    def __getitem__(self, client: int | slice) -> str | list[str]:
        if isinstance(client, slice):
            return [f"{self._before}{number}{self._after}" for number in range(self.n)[client]]
        return f"{self._before}{range(self.n)[client]}{self._after}"

    def position(self, client_id: str) -> int:
        """Return the position of an id, or -1 if it is not among them."""
        if len(client_id) <= len(self._before) + len(self._after):
            return -1
        digits = client_id[len(self._before) : len(client_id) - len(self._after)]
        plain = digits.isascii() and digits.isdigit() and len(digits) <= 18
        if not plain or not 0 <= int(digits) < self.n or self[int(digits)] != client_id:
            return -1
        return int(digits)


class PackedIds(Sequence[str]):
    """Client ids as one array of UTF-8 bytes, found by bisection: no Python object per client.

    Args:
        text: the ids' bytes, one ragged row per client.
        order: positions of the clients sorted by id, int64 (clients,).
    """

    def __init__(self, text: Ragged, order: NDArray[np.int64]) -> None:
        self.text, self.order = text, order

    @classmethod
    def pack(cls, ids: Sequence[str]) -> PackedIds:
        """Pack ids; they are taken as they come and must have been checked."""
        encoded = [client_id.encode("utf-8") for client_id in ids]
        text = Ragged(
            np.frombuffer(b"".join(encoded), np.uint8),
            offsets_of(np.asarray([len(one) for one in encoded], dtype=np.int64)),
        )
        return cls(text, np.asarray(sorted(range(len(encoded)), key=encoded.__getitem__), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.text)

    @overload
    def __getitem__(self, client: int) -> str: ...
    @overload
    def __getitem__(self, client: slice) -> list[str]: ...
    def __getitem__(self, client: int | slice) -> str | list[str]:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        return self.text[client].tobytes().decode("utf-8")

    def position(self, client_id: str) -> int:
        """Return the position of an id, or -1 if it is not among them."""
        wanted = client_id.encode("utf-8", "surrogatepass")

        def at(rank: int) -> bytes:
            return self.text[int(self.order[rank])].tobytes()

        rank = bisect.bisect_left(range(len(self)), wanted, key=at)
        return int(self.order[rank]) if rank < len(self) and at(rank) == wanted else -1


Ids = RangeIds | PackedIds
"""A sequence of client ids that finds an id's position without an object per client."""


def check_id(client_id: object) -> str:
    """Return a client id, or raise DataError if it is not a short, printable, non-empty string."""
    rule = f"A client id must be a string of 1 to {LONGEST_ID} characters without control characters"
    if not isinstance(client_id, str):
        raise DataError(f"{rule}; got {client_id!r}. Use str(...) on numbers.")
    if not client_id:
        raise DataError(f"{rule}; got an empty string. Name every client.")
    if len(client_id) > LONGEST_ID:
        raise DataError(
            f"{rule}; got {len(client_id)} characters starting {client_id[:20]!r}. Use a shorter name."
        )
    if not client_id.isprintable() and any(_is_control(character) for character in client_id):
        raise DataError(f"{rule}; got {client_id!r}. Remove them.")
    return client_id


def _is_control(character: str) -> bool:
    code = ord(character)
    # C0 and C1 controls, line and paragraph separators, and lone surrogates, which no file can hold.
    return code < 32 or 127 <= code < 160 or code in (0x2028, 0x2029) or 0xD800 <= code < 0xE000


def check_ids(ids: Sequence[str]) -> Ids:
    """Return ids in a form that finds positions; each must be allowed and unique (DataError)."""
    if isinstance(ids, RangeIds | PackedIds):
        return ids
    seen: set[str] = set()
    for client_id in ids:
        if check_id(client_id) in seen:
            raise DataError(
                f"Client ids must be unique; {client_id!r} occurs more than once. Merge its rows or rename it."
            )
        seen.add(client_id)
    return PackedIds.pack(list(ids))


def check_max_length(max_length: int | None) -> None:
    """Raise DataError unless a text keeps at least one symbol (None: all of them)."""
    if max_length is not None and max_length < 1:
        raise DataError(
            f"max_length is how many characters or words of a text to keep, at least 1; got {max_length}."
        )
