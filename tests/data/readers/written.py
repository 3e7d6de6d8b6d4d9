"""Tables written in every format, then read or refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedkeep.core.errors import DataError, Spot
from fedkeep.data import FederatedData, read_table
from tests.refusals import raises

ROWS: list[dict[str, Any]] = [
    {"user": "bo", "text": "ab, a", "label": "nba", "split": "train", "time": 3},
    {"user": "al", "text": "b\nc", "label": "cfb", "split": "val", "time": 2},
    {"user": "bo", "text": "zz", "label": "politics", "split": "test", "time": 1},
]


def csv_of(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    def cell(value: Any) -> str:
        return '"' + str(value).replace('"', '""') + '"'

    lines = [delimiter.join(rows[0])] + [delimiter.join(cell(v) for v in row.values()) for row in rows]
    return "\n".join(lines).encode() + b"\n"


def jsonl_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), sink)
    return bytes(sink.getvalue().to_pybytes())


def arrow_of(rows: list[dict[str, Any]], *, stream: bool = False) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(sink.getvalue().to_pybytes())


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "t.csv": csv_of,
    "t.csv.gz": lambda rows: gzip.compress(csv_of(rows)),
    "t.tsv": lambda rows: csv_of(rows, "\t"),
    "t.jsonl": jsonl_of,
    "t.jsonl.gz": lambda rows: gzip.compress(jsonl_of(rows)),
    "t.parquet": parquet_of,
    "t.feather": arrow_of,
    "t.arrow": lambda rows: arrow_of(rows, stream=True),
}
Content = bytes | list[dict[str, Any]]


def read(tmp_path: Path, content: Content, name: str = "t.jsonl", **settings: Any) -> FederatedData:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else WRITERS[name](content))
    return read_table(path, **{"tokens": "char"} | settings)


def refused(tmp_path: Path, content: Content, name: str = "t.jsonl", /, **expected: Any) -> str:
    """Assert that a table is refused with these facts, ``line`` or ``row`` being its place; return the message.

    Args:
        tmp_path, content, name: of the table.
        expected: facts; ``settings`` are the reader's.
    """
    settings = expected.pop("settings", {})
    for unit in {"line", "row"} & expected.keys():
        expected["place"] = Spot(tmp_path / name, expected.pop(unit), unit)
    with raises(DataError, **expected) as error:
        read(tmp_path, content, name, **settings)
    return str(error.value)


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}
