"""Hostile inputs: damaged and nonsensical files, configurations, ids and command lines.

A maker writes an input into an empty folder and returns the trial: a function that reads it. The trial either refuses
with an error of fedkeep, or accepts what keeps every promise; else it raises ``SilentError``.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fedkeep import FederatedData
from fedkeep.data.ids import as_id, check_ids

Trial = Callable[[], None]
Maker = Callable[[Random, Path], Trial]
NAMES = ("ann", "bo", "Zoë", "../eve", "7")
CELLS: tuple[Any, ...] = (
    "",
    " ",
    "nan",
    "inf",
    "-1",
    "1e400",
    "1_0",
    "9" * 19,
    "9" * 5000,
    "x" * 300,
    "\0",
    "\x1b[2J",
    "\u202e",
    "e\u0301",
    "\ufeff",
    '"',
    "'",
    ",",
    "\t",
    "\r",
    "\u2028",
    "٣",
    "20231231",
    "2147483648",
    "True",
    "[]",
    "{}",
    "=1+1",
    "\ud800",
    None,
    True,
    False,
    0,
    -1,
    10**18,
    2**63,
    10**30,
    10**400,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    [],
    [[1]],
    {},
    {"a": 1},
)


ODD_BYTES = (b"9" * 5000, b"[" * 5000, b"\xff" * 4, b"-1", b"\0")


class SilentError(Exception):
    """What was accepted breaks a promise."""


def sound(data: FederatedData) -> None:
    """Raise SilentError unless an accepted data set keeps its promises and can be used."""
    label = data.columns.get("label")
    if isinstance(label, np.ndarray) and data.meta["task"] != "regression":
        require(label.min() >= 0 and label.max() < data.meta["classes"], "a label is no class")
    for name, column in data.columns.items():
        require(len(column) == data.examples, f"column {name!r} has another length")
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            require(bool(np.isfinite(column).all()), f"column {name!r} is not finite")
    require(len(set(data.ids)) == len(data), "an id occurs twice")
    for number, name in enumerate(data.ids):
        require(as_id(name) == name and data.index(name) == number, "an id is not found")
    require(int(data.counts().sum()) == data.examples, "clients own more or fewer rows than there are")
    whole = data if data.bounds is not None else data.split_per_user()
    whole.batch(range(min(whole.examples, 50)))
    json.dumps(whole.fingerprint())


def require(holds: bool, what: str) -> None:
    """Raise SilentError unless it holds."""
    if not holds:
        raise SilentError(what)


def mutated(random: Random, content: bytes) -> bytes:
    """Return bytes damaged in one to three ways; half of the time only bits are flipped, which few formats notice."""
    subtle = random.random() < 0.5
    for _ in range(random.randint(1, 3)):
        at, end = sorted((random.randint(0, len(content)), random.randint(0, len(content))))
        before, piece, after = content[:at], content[at:end], content[end:]
        match 0 if subtle else random.randrange(7):
            case 0 if piece:
                content = before + bytes([piece[0] ^ (1 << random.randrange(8))]) + piece[1:] + after
            case 1:
                content = before + bytes(len(piece)) + after
            case 2:
                content = before
            case 3:
                content = after
            case 4:
                content = before + piece + piece + after
            case 5:
                content = before + random.randbytes(random.randint(1, 9)) + piece + after
            case _:
                content = before + random.choice(ODD_BYTES) + piece + after
    return content


def odd(random: Random, usual: Any, share: float = 0.15) -> Any:
    """Return the usual value, or now and then an odd one."""
    return random.choice(CELLS) if random.random() < share else usual


# --- tables


def _rows(random: Random) -> list[dict[str, Any]]:
    share = random.choice((0.0, 0.01, 0.1))
    return [
        {
            "user": odd(random, random.choice(NAMES), share),
            "text": odd(random, "good day " * random.randrange(4), share),
            "height": odd(random, random.random(), share),
            "label": odd(random, random.choice(("0", "1", "2")), share),
            "split": odd(random, random.choice(("train", "valid", "test")), share / 2),
            "time": odd(random, random.randrange(10**9), share / 2),
        }
        for _ in range(random.randint(1, 12))
    ]


def mostly(random: Random, usual: Any, *others: Any) -> Any:
    """Return the usual value, or now and then one of the others."""
    return random.choice(others) if random.random() < 0.15 else usual


def _read_options(random: Random) -> dict[str, Any]:
    return {
        "features": mostly(random, None, ["height"], ["height", "time"], []),
        "task": mostly(random, None, "regression", "binary", "multiclass", "ranking"),
        "tokens": mostly(random, "char", "word", "words"),
        "vocabulary": mostly(random, None, 2, 50),
        "max_length": mostly(random, 20, 1, 0),
        "label_names": mostly(random, None, ["0", "1", "2"], ["0", "0"], []),
    }


def _table(path: Path, random: Random) -> Trial:
    from fedkeep.data import read_table

    options = _read_options(random)
    return lambda: sound(read_table(path, **options))


def csv_table(random: Random, folder: Path) -> Trial:
    """A CSV or TSV file with odd cells and damaged bytes."""
    rows, path = _rows(random), folder / random.choice(("t.csv", "t.tsv"))
    between = "\t" if path.suffix == ".tsv" else ","
    lines = [between.join(rows[0]), *(between.join(str_of(v) for v in row.values()) for row in rows)]
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    path.write_bytes(mutated(random, content) if random.random() < 0.5 else content)
    return _table(path, random)


def str_of(value: Any) -> str:
    """Return what a table's cell holds for a value."""
    return str(value) if not isinstance(value, int) or abs(value) < 10**4000 else "9" * 5000


def json_table(random: Random, folder: Path) -> Trial:
    """A file of JSON lines with odd values, nesting and damaged bytes."""
    content = "\n".join(json.dumps(row) for row in _rows(random)).encode()
    (folder / "t.jsonl").write_bytes(mutated(random, content) if random.random() < 0.5 else content)
    return _table(folder / "t.jsonl", random)


@cache
def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "user": NAMES[i % 4],
            "text": "good day",
            "height": i / 3,
            "label": i % 3,
            "split": "train",
            "time": i,
        }
        for i in range(30)
    ]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def parquet_table(random: Random, folder: Path) -> Trial:
    """A damaged Parquet file."""
    (folder / "t.parquet").write_bytes(mutated(random, _parquet()))
    return _table(folder / "t.parquet", random)


def gzip_table(random: Random, folder: Path) -> Trial:
    """A damaged gzip file, whose checksum must tell: what is accepted equals the intact file."""
    from fedkeep.data import read_table

    lines = [f"{NAMES[i % 4]},day {i},{i % 3}" for i in range(40)]
    content = gzip.compress("\n".join(["user,text,label", *lines]).encode(), mtime=0)
    path, intact = folder / "t.csv.gz", folder / "intact.csv.gz"
    intact.write_bytes(content)
    path.write_bytes(mutated(random, content))

    def trial() -> None:
        found = read_table(path)
        require(found.fingerprint() == read_table(intact).fingerprint(), "differs from the intact file")

    return trial


def reviews_files(random: Random, folder: Path) -> Trial:
    """A folder of reviews, a file for each client."""
    from fedkeep.data import review_files

    for name in random.sample(("tea", "film", "e\u0301", "a b", "x" * 100), 3):
        for part in ("train", "test"):
            rows = [f"{odd(random, 'good')} {n},{odd(random, n % 2, 0.05)}" for n in range(4)]
            content = "\n".join(["text,label", *rows]).encode("utf-8", "surrogatepass")
            path = folder / "reviews" / f"{name}.{part}.csv"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(mutated(random, content) if random.random() < 0.2 else content)
    return lambda: sound(review_files(folder / "reviews"))


def movie_ratings(random: Random, folder: Path) -> Trial:
    """Damaged ratings of MovieLens."""
    from fedkeep.data import movielens

    name, between = random.choice((("u.data", "\t"), ("ratings.dat", "::")))
    usual = (1, 5, 3.5, 10**9)
    rows = [between.join(str_of(odd(random, cell, 0.02)) for cell in usual) for _ in range(12)]
    content = "\n".join(rows).encode("utf-8", "surrogatepass")
    (folder / name).write_bytes(mutated(random, content) if random.random() < 0.5 else content)
    return lambda: sound(movielens(folder))


# --- ids


def odd_ids(random: Random, folder: Path) -> Trial:
    """Rows and clients with odd ids, as lists and arrays."""
    known = [*NAMES, 1, np.int64(3), "é", "e\u0301", 2**70, "1", b"ann", 1.0, np.str_("bo"), *CELLS]
    given: Any = [random.choice(known) if random.random() < 0.2 else random.choice(NAMES) for _ in range(8)]
    if random.random() < 0.4:
        simple = [one for one in given if isinstance(one, str | int | float) and not isinstance(one, bool)]
        kind = random.choice((object, None, "U8", "U8"))
        given = np.array(simple if kind is object else [str_of(one) for one in simple], dtype=kind)
    rows = len(given)

    def trial() -> None:
        data = FederatedData.from_columns(given, {"label": np.arange(rows) % 2})
        sound(data)
        for row, one in enumerate(given if isinstance(given, list) else given.tolist()):
            require(data.ids[data.index(one)] == as_id(one), f"row {row} has another client")
        check_ids(list(data.ids))

    return trial
