"""Records: one JSON line per (round, split, client or aggregate, metric). Reports read nothing else, and put together
by key what they read.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedkeep.core.errors import RunError, Spot
from fedkeep.core.sealed import FORMAT, is_sealed, seal, unread

NOTHING = hashlib.sha256().hexdigest()
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Record:
    """One measured number.

    Attributes:
        round: rounds finished when it was measured.
        epoch: passes over the training data finished when it was measured.
        split: ``train``, ``valid``, ``test``, or ``traffic`` and ``time`` for bytes and seconds.
        client: a client's id, or None for the aggregate over clients.
        metric: the metric's name, e.g. ``accuracy`` (a fraction), ``upload_bytes``, ``seconds``.
        value: the number; NaN is written as null.
        n: how many examples (or clients) it was measured on.
    """

    round: int
    epoch: float
    split: str
    client: str | None
    metric: str
    value: float
    n: int


KINDS = {
    "round": (int,),
    "epoch": (int, float),
    "split": (str,),
    "client": (str, type(None)),
    "metric": (str,),
    "value": (int, float),
    "n": (int,),
}
"""The types of a record's fields; a truth value is no number."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a growing file was committed.

    Attributes:
        size: how many bytes the file was long.
        sha256: of these bytes.
    """

    size: int = 0
    sha256: str = NOTHING

    def read(self, path: Path) -> builtins.bytes:
        """Return the committed bytes of a file; what follows them is of no finished round.

        Raises:
            RunError: the file is shorter, cannot be read, or its bytes are others.
        """
        try:
            if not self.size and not path.exists():
                return b""
            with open(path, "rb") as file:
                content = file.read(self.size)
        except OSError as error:
            raise unread(path, error) from error
        if len(content) < self.size:
            raise RunError(
                "{file} is shorter than the {size} bytes that were committed; restore the run from a copy.",
                file=path,
                size=self.size,
            )
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise RunError(
                "{file} is damaged or was edited: its checksum is not the committed one. Restore the run "
                "from a copy.",
                file=path,
            )
        return content


NONE = Extent()


def improves(value: float, known: float, *, lower_is_better: bool) -> bool:
    """Tell whether a value on ``valid`` is better than the best so far, so that its round is the best one.

    An equal value is not better. Any value is better than none, NaN or infinity, which no finite one gives way to.
    """
    if not math.isfinite(known):
        return True
    return math.isfinite(value) and (value < known if lower_is_better else value > known)


def best_round(values: Mapping[int, float], *, lower_is_better: bool) -> int | None:
    """Return the round whose value is best by `improves`, of values by round; None where there is none."""
    chosen, known = None, math.nan
    for round in sorted(values):
        if improves(values[round], known, lower_is_better=lower_is_better):
            chosen, known = round, values[round]
    return chosen


def to_line(record: Record) -> str:
    """Return the record as one line of JSON, with its newline."""
    fields = asdict(record)
    if not math.isfinite(record.value):
        fields["value"] = None
    return json.dumps(fields) + "\n"


def from_line(line: str) -> Record:
    """Return the record that a line holds.

    Raises:
        ValueError: the line is no JSON object with exactly a record's fields, each of its type.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict) or set(fields) != set(Record.__dataclass_fields__):
        raise ValueError(f"a record has the fields {list(Record.__dataclass_fields__)}")
    if fields["value"] is None:
        fields["value"] = math.nan
    if any(type(fields[name]) not in kinds for name, kinds in KINDS.items()) or not math.isfinite(
        fields["epoch"]
    ):
        raise ValueError("a field has the wrong type")
    return Record(**fields)


def read_records(path: Path, extent: Extent | None = None) -> Iterator[Record]:
    """Yield the records of a file; a last line without a newline (a torn write) is left out.

    So is what lies behind the extent that was committed, where one is given.

    Raises:
        RunError: the file is missing, a line is damaged, or the file is not what was committed.
    """
    try:
        content = path.read_bytes() if extent is None else extent.read(path)
        lines = content.decode("utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise _unread_records(path, error) from error
    yield from _parsed(path, lines)


def _unread_records(path: Path, error: Exception) -> RunError:
    return RunError("Cannot read the records {file}: {error}.", file=path, error=error)


def _parsed(path: Path, lines: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield from_line(line)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RunError(
                "{place}: not a record ({error}). Was the file edited?",
                place=Spot(path, number),
                error=error,
            ) from error


def sealed_records(records: Iterable[Record], about: Mapping[str, Any]) -> bytes:
    """Return a file of records that were made all at once: their lines, then one that vouches for them.

    ``about`` are plain data that say where the records come from, e.g. the run's id and round.
    """
    content = "".join(map(to_line, records)).encode()
    last = seal({**about, "format": FORMAT, "sha256": hashlib.sha256(content).hexdigest()})
    return content + (json.dumps(last) + "\n").encode()


def read_sealed_records(path: Path) -> tuple[list[Record], dict[str, Any]]:
    """Return the records of a file that ``sealed_records`` made, and what they are about.

    Raises:
        RunError: the file cannot be read, or is not as it was written.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unread_records(path, error) from error
    end = content.rstrip(b"\n").rfind(b"\n") + 1
    try:
        about = json.loads(content[end:])
        right = isinstance(about, dict) and is_sealed(about)
    except (ValueError, RecursionError):
        right = False
    if not right or about["sha256"] != hashlib.sha256(content[:end]).hexdigest():
        raise RunError(
            "{file} is damaged or was edited: its last line does not vouch for the rest. Delete it, and "
            "it is made again where it is wanted.",
            file=path,
        )
    return list(_parsed(path, content[:end].decode("utf-8").splitlines(keepends=True))), about


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in their order; keys stand as they first came."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
