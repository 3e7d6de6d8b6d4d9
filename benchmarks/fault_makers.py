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
from fedkeep.data import Ragged
from fedkeep.data.ids import as_id, check_ids

Trial = Callable[[], None]
Maker = Callable[[Random, Path], Trial]
NAMES = ("ann", "bo", "Zoë", "../eve", "7")
CELLS: tuple[Any, ...] = (
    "", " ", "nan", "inf", "-1", "1e400", "1_0", "9" * 19, "9" * 5000, "x" * 300, "\0", "\x1b[2J", "\u202e", "e\u0301",
    "\ufeff", '"', "'", ",", "\t", "\r", "\u2028", "٣", "20231231", "2147483648", "True", "[]", "{}", "=1+1", "\ud800",
    None, True, False, 0, -1, 10**18, 2**63, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf"), [], [[1]], {},
    {"a": 1},
)  # fmt: skip


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
    """Return bytes damaged in one to three ways."""
    for _ in range(random.randint(1, 3)):
        at, end = sorted((random.randint(0, len(content)), random.randint(0, len(content))))
        before, piece, after = content[:at], content[at:end], content[end:]
        match random.randrange(7):
            case 0:
                flipped = bytes([piece[0] ^ (1 << random.randrange(8))]) + piece[1:] if piece else piece
                content = before + flipped + after
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
    share = random.choice((0.0, 0.02, 0.2))
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


def _read_options(random: Random) -> dict[str, Any]:
    return {
        "features": random.choice((None, None, ["height"], ["height", "time"], [])),
        "task": random.choice((None, None, "regression", "binary", "multiclass")),
        "tokens": random.choice(("char", "word", "words")),
        "vocabulary": random.choice((None, 2, 50)),
        "max_length": random.choice((1, 20, 0)),
        "label_names": random.choice((None, None, ["0", "1", "2"], ["0", "0"], [])),
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


# --- arrays


@cache
def _saved() -> dict[str, bytes]:
    import tempfile

    rows = 24
    data = FederatedData.from_columns(
        [NAMES[i % 4] for i in range(rows)],
        {
            "x": np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2),
            "text": Ragged.from_rows([[1, 2, 3][: i % 4] for i in range(rows)], "uint8"),
            "label": np.arange(rows) % 3,
        },
        meta={"name": "saved", "label_names": ["a", "b", "c"]},
    ).split_per_user()
    with tempfile.TemporaryDirectory() as folder:
        data.save(f"{folder}/d")
        return {path.name: path.read_bytes() for path in sorted(Path(folder, "d").iterdir())}


def npy(array: Any) -> bytes:
    """Return an array as an npy file's bytes."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def odd_array(random: Random) -> bytes:
    """Return an npy file that is whole, but not what a data set wants; or a header that lies."""
    if random.random() < 0.3:
        shape = random.choice(("(1000000000000, 8)", "(-1,)", "(2, 3", "()", "(0,)", "(9, 9)", "(" * 500))
        kind = random.choice(("<f8", "|O", "<i8", ">i4", "<U9", "|V8", "<M8[s]", "x"))
        text = f"{{'descr': '{kind}', 'fortran_order': {random.choice(('False', 'True', '3'))}, 'shape': {shape}, }}"
        header = text.encode()
        return (
            b"\x93NUMPY"
            + bytes([random.randrange(5), 0])
            + len(header).to_bytes(2, "little")
            + header
            + bytes(64)
        )
    kind = random.choice(
        ("int64", "float64", "uint8", "uint64", "int8", "bool", "complex64", "U3", "float16", ">i8")
    )
    shape = random.choice(((), (0,), (24,), (25,), (5,), (4, 4), (24, 2), (1, 1, 1)))
    values = np.asarray(random.choice((0, 1, 3, 200)), dtype=kind)
    return npy(np.full(shape, values))


def saved_data(random: Random, folder: Path) -> Trial:
    """A saved data set with a file that is damaged, odd, missing or of another."""
    files = dict(_saved())
    for _ in range(random.randint(1, 2)):
        name = random.choice(sorted(files))
        what = random.randrange(5)
        if what == 0:
            files[name] = mutated(random, files[name])
        elif what == 1:
            files[name] = files[random.choice(sorted(files))]
        elif what == 2 and len(files) > 1:
            del files[name]
        elif name == "data.json":
            about = json.loads(_saved()["data.json"])
            where = random.choice((about, about["meta"], about["columns"]))
            where[random.choice((*where, "extra"))] = odd(random, None, 1)
            files[name] = json.dumps(about).encode()
        else:
            files[name] = odd_array(random)
    place = folder / "d"
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    mmap = random.random() < 0.5

    def trial() -> None:
        data = FederatedData.load(place, mmap=mmap)
        if not mmap:  # with it, columns of floats are not looked at before they are used
            sound(data)
        for name in data.ids:
            data.index(name)
        data.fingerprint()

    return trial


def _npz(random: Random, arrays: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if random.random() < 0.5 else np.savez)(out, **arrays)
    return out.getvalue()


def word_vectors(random: Random, folder: Path) -> Trial:
    """Word vectors as damaged ``.npz`` (its checksums must tell) or text."""
    from fedkeep.data import read_word_vectors

    words = [f"w{i}" for i in range(20)]
    values = np.arange(60, dtype=np.float32).reshape(20, 3)
    if random.random() < 0.5:
        path, content = folder / "v.npz", _npz(random, {"words": np.asarray(words), "vectors": values})
    else:
        rows = [random.choice(("20 3", "9" * 20 + " 3", "w 1 2 3"))]
        for word, vector in zip(words, values, strict=True):
            rows.append(" ".join([word, *(str_of(odd(random, number, 0.01)) for number in vector)]))
        path, content = folder / "v.txt", "\n".join(rows).encode("utf-8", "surrogatepass")
    path.write_bytes(mutated(random, content))

    def trial() -> None:
        found = read_word_vectors(path)
        require(
            len(found.words) == len(found.vectors) and bool(np.isfinite(found.vectors).all()), "odd vectors"
        )
        if path.suffix == ".npz":
            require(
                list(found.words) == words and np.array_equal(found.vectors, values),
                "differs from the intact file",
            )

    return trial


def images(random: Random, folder: Path) -> Trial:
    """Damaged files of CIFAR-10 (npz, binary) and of Fashion-MNIST (IDX)."""
    from fedkeep.data import cifar10, cifar100, fashion_mnist

    draw = np.random.default_rng(random.randrange(1 << 30))
    pixels, labels = draw.integers(0, 9, (6, 32, 32, 3), np.uint8), np.arange(6)
    form = random.choice(("lossless", "binary", "idx"))
    if form == "lossless":
        content = _npz(random, {"images": pixels, "labels": labels})
        (folder / "cifar10_train4000_lossless.npz").write_bytes(mutated(random, content))

        def lossless() -> None:
            found = cifar10(folder, "lossless")
            same = np.array_equal(found.images, pixels.transpose(0, 3, 1, 2)) and np.array_equal(
                found.labels, labels
            )
            require(same, "differs from the intact file")

        return lossless
    if form == "binary":
        records = b"".join(bytes([i, i]) + pixels[i].tobytes() for i in range(6))
        for name in ("train.bin", "test.bin"):
            (folder / name).write_bytes(mutated(random, records) if random.random() < 0.7 else records)
        return lambda: None if cifar100(folder, whole=False).labels.max() < 100 else require(False, "a label")
    for part in ("train", "t10k"):
        for kind, magic, values in (
            ("images-idx3", 2051, pixels[:, :28, :28, 0]),
            ("labels-idx1", 2049, labels),
        ):
            sizes = [odd_size(random, n) for n in values.shape]
            body = np.array([magic, *sizes], ">u4").tobytes() + values.astype(np.uint8).tobytes()
            packed = gzip.compress(mutated(random, body) if random.random() < 0.2 else body)
            content = mutated(random, packed) if random.random() < 0.2 else packed
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(content)
    return lambda: None if fashion_mnist(folder).labels.max() < 10 else require(False, "a label")


def odd_size(random: Random, usual: int) -> int:
    """Return a size of a header, now and then one that lies."""
    return random.choice((0, 1, 2**31, 2**32 - 1)) if random.random() < 0.1 else usual


def pictures(random: Random, folder: Path) -> Trial:
    """Parquet files of damaged images."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    from fedkeep.data import cifar10
    from fedkeep.data.readers import pictures as reader

    reader._KEPT.clear()
    for part in ("train", "test"):
        rows = []
        for number in range(3):
            out = io.BytesIO()
            form = random.choice(("PNG", "JPEG"))
            Image.fromarray(np.full((32, 32, 3), number * 40, np.uint8)).save(out, form)
            content = mutated(random, out.getvalue()) if random.random() < 0.3 else out.getvalue()
            rows.append({"jpeg": content, "label": random.choice((number, number, 10**18))})
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
        content = mutated(random, out.getvalue()) if random.random() < 0.3 else out.getvalue()
        (folder / f"{part}.parquet").write_bytes(content)
    return lambda: None if cifar10(folder).labels.max() < 10 else require(False, "a label")


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
