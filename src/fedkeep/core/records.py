"""Records: one JSON line per (round, split, client or aggregate, metric). Reports read nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fedkeep.core.errors import RunError


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


def to_line(record: Record) -> str:
    """Return the record as one line of JSON, with its newline."""
    fields = asdict(record)
    if not math.isfinite(record.value):
        fields["value"] = None
    return json.dumps(fields) + "\n"


def from_line(line: str) -> Record:
    """Return the record that a line holds.

    Raises:
        ValueError: the line is no JSON object with exactly a record's fields.
    """
    fields = json.loads(line)
    if not isinstance(fields, dict) or set(fields) != set(Record.__dataclass_fields__):
        raise ValueError(f"a record has the fields {list(Record.__dataclass_fields__)}")
    if fields["value"] is None:
        fields["value"] = math.nan
    return Record(**fields)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file; a last line without a newline (a torn write) is left out.

    Raises:
        RunError: the file is missing, or a line is damaged; names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"Cannot read the records {path}: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield from_line(line)
        except (ValueError, TypeError) as error:
            raise RunError(f"{path}, line {number}: not a record ({error}). Was the file edited?") from error


def select(
    records: Iterable[Record], *, metric: str | None = None, split: str | None = None, aggregate: bool = True
) -> list[Record]:
    """Return the records of one metric and split: the aggregates, or with ``aggregate=False`` the clients'."""
    return [
        r
        for r in records
        if (metric is None or r.metric == metric)
        and (split is None or r.split == split)
        and (r.client is None) == aggregate
    ]
