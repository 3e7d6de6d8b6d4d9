"""Client ids: what one is, and sequences of them that find an id's position without an object per client.

An id is a text of 1 to 200 printable characters in Unicode's normal form C, so that é is the same however it was typed.
An integer stands for its decimal digits: client 7 is client "7" wherever a client is named by its id.
"""

from __future__ import annotations

import bisect
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, warn
from fedkeep.data.alike import spellings
from fedkeep.data.columns import Ragged, Repeated, is_missing, offsets_of

LONGEST_ID = 200
RULE = f"A client id is a text of 1 to {LONGEST_ID} printable characters, or an integer"
BLOCK_BYTES = 1 << 22  # of ids that are compared at a time
TOGETHER = 1024  # ids that are decoded at once where all are asked for in turn


def as_id(given: object, where: str = "") -> str:
    """Return a client's id: text in normal form C, an integer as its decimal digits.

    Args:
        given: what was given as an id.
        where: put before the message, e.g. ``"Row 3: "``.

    Raises:
        DataError: it is no text and no integer, is empty, too long, or holds a character that can't be printed
            (controls, marks that turn the direction of writing, other white space than the space, lone surrogates).
    """
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        if abs(int(given)) < 10 ** (LONGEST_ID - 1):
            return str(int(given))
        why = f"it has more than {LONGEST_ID - 1} digits"
    elif not isinstance(given, str):
        why = f"a {type(given).__name__} is none; use str(...) or .decode()"
        if is_missing(given):
            why = "it is missing; drop the row, or say whose it is"
    else:
        text = str(given) if given.isascii() else unicodedata.normalize("NFC", given)
        if 0 < len(text) <= LONGEST_ID and text.isprintable():
            return text
        wrong = next((character for character in text if not character.isprintable()), "")
        why = "name every client"
        if len(text) > LONGEST_ID:
            why = f"it has {len(text)} characters"
        elif wrong:
            why = f"remove the character U+{ord(wrong):04X}"
    raise DataError("{where}{rule}; got {got!r}: {why}.", where=where, rule=RULE, got=given, why=why)


def group_rows(client: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the different clients of many rows, and the number of each row's client among them.

    Args:
        client: an id per row, texts or integers: a list, a `Repeated` column, or an array of one axis.

    Returns:
        Ids in order (integers by value, where nothing else is there; else by code point), and int64 (rows,).

    Raises:
        DataError: not one id per row, or one that is none; the row is named.
    """
    of_row = None
    if isinstance(client, Repeated):
        given, of_row = client.different, client.number
    elif isinstance(client, list | tuple):
        given = client
    else:
        array = np.asarray(client)
        if array.ndim == 1 and array.dtype.kind == "f" and len(missing := np.flatnonzero(np.isnan(array))):
            as_id(None, f"Row {missing[0]}: ")
        if array.ndim != 1 or array.dtype.kind not in "iuUTO":
            raise DataError(
                "Wanted one client id per row, texts or integers; got an array of shape {shape} and type "
                "{dtype}. Whole numbers in another type become integers by .astype(int).",
                shape=array.shape,
                dtype=array.dtype,
            )
        if array.dtype.kind in "iu":
            numbers, number = np.unique(array, return_inverse=True)
            return [str(n) for n in numbers.tolist()], number.astype(np.int64)
        given = array.tolist()
    kinds = set(map(type, given))
    if not all(issubclass(kind, str | int | np.integer) and kind is not bool for kind in kinds):
        for row, one in enumerate(given):
            as_id(one, f"Row {row}: ")
    first: dict[Any, int] = {}
    seen = np.fromiter((first.setdefault(one, len(first)) for one in given), np.int64, len(given))
    names = _checked(first, given)
    by_value = all(issubclass(kind, int | np.integer) for kind in kinds)
    ids = sorted(set(names), key=int if by_value else None)  # é written in two ways is one client
    place = {name: number for number, name in enumerate(ids)}
    number = np.fromiter((place[name] for name in names), np.int64, len(names))[seen]
    if of_row is not None:
        number = number[of_row]
    if said := spellings("client ids", ids, np.bincount(number, minlength=len(ids))):
        warn(said)
    return ids, number


def _checked(names: Iterable[Any], given: Sequence[Any]) -> list[str]:
    names = list(names)
    if are_plain_ids(names):
        return names
    found = []
    for name in names:
        try:
            found.append(as_id(name))
        except DataError:
            as_id(name, f"Row {given.index(name)}: ")
            raise
    return found


class LazyTexts(Sequence[str], ABC):
    """Texts that are made when they are asked for: a subclass makes one of them by its place."""

    @abstractmethod
    def at(self, place: int) -> str:
        """Return the text at a place from 0 on that there is."""

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self.at(one) for one in range(len(self))[place]]
        return self.at(range(len(self))[place])

    def __iter__(self) -> Iterator[str]:
        return map(self.at, range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self[:3]}{', …' * (len(self) > 3)} {len(self):,} ids)"


class RangeIds(LazyTexts):
    """The ids ``pattern.format(0)`` … ``pattern.format(n - 1)``, made when asked for.

    Args:
        n: number of clients.
        pattern: text with one ``{}`` for the client's number.

    Raises:
        DataError: the pattern has not exactly one ``{}``, or makes ids that are not allowed; or n is no number of
            clients.
    """

    def __init__(self, n: int, pattern: str = "user-{}") -> None:
        if pattern.count("{}") != 1 or pattern.count("{") != 1 or pattern.count("}") != 1:
            raise DataError(
                "A pattern of client ids needs exactly one '{{}}', as in 'user-{{}}'; got {got!r}.",
                got=pattern,
            )
        if not 0 <= n < 1 << 62:
            raise DataError("Wanted a number of clients of at least 0 and below 2^62; got {got}.", got=n)
        self.n, self.pattern = n, pattern
        self._before, self._after = pattern.split("{}")
        if as_id(longest := self.at(max(n - 1, 0))) != longest:
            raise DataError(
                "{rule}, in Unicode's normal form C; the pattern {pattern!r} makes others.",
                rule=RULE,
                pattern=pattern,
            )

    def __len__(self) -> int:
        return self.n

    def at(self, place: int) -> str:
        """Return the id of a client."""
        return f"{self._before}{place}{self._after}"

    def position(self, client_id: str) -> int:
        """Return the position of an id, or -1 if it is not among them."""
        if len(client_id) <= len(self._before) + len(self._after):
            return -1
        digits = client_id[len(self._before) : len(client_id) - len(self._after)]
        plain = digits.isascii() and digits.isdigit() and len(digits) <= 18
        if not plain or not 0 <= int(digits) < self.n or self[int(digits)] != client_id:
            return -1
        return int(digits)


class PackedIds(LazyTexts):
    """Client ids as one array of UTF-8 bytes, found by bisection: no Python object per client.

    Args:
        text: the ids' bytes, one ragged row per client.
        order: positions of the clients sorted by id, int64 (clients,).
    """

    def __init__(self, text: Ragged, order: NDArray[np.int64]) -> None:
        self.text, self.order = text, order
        self._some: tuple[int, list[str]] = (0, [])  # ids that were read together, from this place on
        self._last = -1

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

    def at(self, place: int) -> str:
        """Return the id of a client."""
        start, names = self._some
        if start <= place < start + len(names):
            return names[place - start]
        found = self._decoded(
            place, TOGETHER if place == self._last + 1 else 1
        )  # who asks for the next one goes on
        self._last = place + len(found) - 1
        self._some = (place, found)
        return found[0]

    def _decoded(self, start: int, count: int) -> list[str]:
        """Return so many ids from a place on, or up to the last."""
        ends = self.text.offsets[start : start + count + 1].tolist()
        letters = self.text.values[ends[0] : ends[-1]].tobytes()
        return [letters[a - ends[0] : b - ends[0]].decode("utf-8") for a, b in pairwise(ends)]

    def position(self, client_id: str) -> int:
        """Return the position of an id, or -1 if it is not among them."""
        wanted = client_id.encode("utf-8", "surrogatepass")
        letters, ends, order = self.text.values, self.text.offsets, self.order

        def at(rank: int) -> bytes:
            place = order[rank]
            return letters[ends[place] : ends[place + 1]].tobytes()

        rank = bisect.bisect_left(range(len(order)), wanted, key=at)
        return int(order[rank]) if rank < len(order) and at(rank) == wanted else -1

    def check(self) -> None:
        """Raise DataError or ValueError unless these are ids, each once, and ``order`` sorts them.

        For ids from a file: a million of 12 characters take a tenth of a second.
        """
        clients = len(self)
        if self.text.values.dtype != np.uint8 or self.order.dtype.kind != "i":
            raise ValueError(f"ids as {self.text.values.dtype}, in an order of {self.order.dtype}")
        if self.order.shape != (clients,):
            raise ValueError(f"{clients} ids in an order of shape {self.order.shape}")
        if clients and (self.order.min() < 0 or self.order.max() >= clients):
            raise ValueError("the order of the ids names a client that is not there")
        self._check_texts()
        for block in self._sorted_blocks():
            if not (block[:-1] < block[1:]).all():
                raise ValueError("the ids are not all different, or their order does not sort them")

    def _check_texts(self) -> None:
        length = np.diff(self.text.offsets)
        values = self.text.values
        plain = not len(values) or bool(values.min() >= 0x20 and values.max() <= 0x7E)
        if plain and (not len(length) or (length.min() > 0 and length.max() <= LONGEST_ID)):
            return
        for client in range(len(self)):
            if as_id(self[client], f"Client {client}: ") != self[client]:
                raise DataError(
                    "Client {client}: {rule}, in Unicode's normal form C; got {got!r}.",
                    client=client,
                    rule=RULE,
                    got=self[client],
                )

    def _sorted_blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all ids in order as arrays of bytes, each block beginning with the last id of the one before."""
        longest = max(1, int(np.diff(self.text.offsets).max(initial=0)))
        size = max(2, BLOCK_BYTES // longest)
        place = np.arange(longest)
        for at in range(0, max(len(self) - 1, 0), size - 1):
            rows = np.asarray(self.order[at : at + size])
            start, length = self.text.offsets[rows], self.text.lengths(rows)
            padded = self.text.values.take(start[:, None] + place, mode="clip")
            padded[place >= length[:, None]] = 0
            yield padded.view(f"S{longest}")[:, 0]


Ids = RangeIds | PackedIds
"""A sequence of client ids that finds an id's position without an object per client."""


class SomeIds(LazyTexts):
    """The ids of some of a data set's clients, made when asked for.

    Attributes:
        ids: of all clients.
        positions: where these stand among them, int64.
    """

    def __init__(self, ids: Sequence[str], positions: NDArray[np.int64]) -> None:
        self.ids, self.positions = ids, positions

    def __len__(self) -> int:
        return len(self.positions)

    def at(self, place: int) -> str:
        """Return the id of one of them."""
        return self.ids[int(self.positions[place])]

    def __iter__(self) -> Iterator[str]:
        at = self.ids.at if isinstance(self.ids, LazyTexts) else self.ids.__getitem__
        return map(at, self.positions.tolist())

    def __repr__(self) -> str:
        return f"SomeIds({self[:3]}{', …' * (len(self) > 3)} {len(self):,} of {len(self.ids):,} clients)"


def check_ids(ids: Iterable[object]) -> Ids:
    """Return ids in a form that finds positions; each must be allowed and unique (DataError)."""
    if isinstance(ids, RangeIds | PackedIds):
        return ids
    given: list[Any] = list(ids)
    names = (
        given if are_plain_ids(given) else [as_id(one, f"Client {row}: ") for row, one in enumerate(given)]
    )
    if len(set(names)) < len(names):
        seen: set[object] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DataError(
            "Client ids must be unique; {name!r} occurs more than once. Merge its rows or rename it.",
            name=twice,
        )
    return PackedIds.pack(names)


def are_plain_ids(given: Sequence[Any]) -> bool:
    """Whether all are printable ASCII texts of an allowed length, which are ids as they are."""
    if set(map(type, given)) != {str}:
        return False
    whole = "".join(given)
    return (
        whole.isascii()
        and whole.isprintable()
        and 0 < min(map(len, given)) <= max(map(len, given)) <= LONGEST_ID
    )
