"""Hostile arrays: saved data, word vectors and image sets that are damaged or odd, see ``benchmarks.fault_makers``."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.fault_makers import NAMES, Trial, mutated, odd, require, sound, str_of
from fedkeep import FederatedData
from fedkeep.core.sealed import seal
from fedkeep.data import Ragged
from fedkeep.data.disk import checksums


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
    return npy(np.full(shape, random.choice((0, 1, 3, 200))).astype(kind))


def saved_data(random: Random, folder: Path) -> Trial:
    """A saved data set with a file that is damaged, odd, missing or of another."""
    files = dict(_saved())
    for _ in range(random.randint(1, 2)):
        name = random.choice(sorted(files))
        what = random.choice((0, 0, 0, 1, 2, 3, 4))
        if what == 0:
            kept = 128 if name.endswith(".npy") and random.random() < 0.7 else 0  # bytes of its header
            files[name] = files[name][:kept] + mutated(random, files[name][kept:])
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
    if random.random() < 0.8:  # else the checksums tell
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError):
            about = json.loads((place / "data.json").read_bytes())
            (place / "data.json").write_text(json.dumps(seal({**about, "crc32": checksums(place)})))
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

    reader._decoded.cache_clear()
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
