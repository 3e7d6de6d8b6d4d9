"""Whatever comes in is refused with an error of fedkeep, or what comes out keeps its promises."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fault_makers import sound
from benchmarks.fault_settings import plain
from fedkeep import FederatedData
from fedkeep.core.errors import ConfigError, DataError, FedkeepError
from fedkeep.core.sealed import seal
from fedkeep.data import Ragged, read_table, read_word_vectors
from fedkeep.data.disk import checksums
from fedkeep.data.ids import as_id, group_rows
from fedkeep.data.readers.image_files import read_idx
from fedkeep.experiments.build import build_data, build_method, build_model
from fedkeep.experiments.config import parse_config, parse_overrides
from tests.fuzz import strategies as hostile

TOY = '[data]\nreader = "toy"\n[model]\nkind = "linear"\n[method]\nkind = "furl"\n[run]\nrounds = 2\n'


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder for each example; a fixture's would be shared by all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(st.lists(hostile.ids, min_size=1, max_size=6))
def test_ids(given_ids: list[Any]) -> None:
    try:
        names, number = group_rows(given_ids)
    except DataError:
        return
    assert [names[place] for place in number] == [as_id(one) for one in given_ids]
    assert all(as_id(name) == name for name in names)
    data = FederatedData.from_columns(given_ids, {"label": np.zeros(len(given_ids), int)})
    assert [data.ids[data.index(one)] for one in given_ids] == [as_id(one) for one in given_ids]


@given(hostile.tables(), st.sampled_from(["text", "height"]), st.sampled_from([None, "regression", "binary"]))
def test_json_tables(rows: list[dict[str, Any]], column: str, task: str | None) -> None:
    with folder() as place, contextlib.suppress(DataError):
        (place / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sound(read_table(place / "t.jsonl", features=None if column == "text" else [column], task=task))


@given(hostile.tables(), st.data())
def test_damaged_csv_tables(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    cells = [[str(v) if v != 10**400 else "9" * 401 for v in row.values()] for row in rows]
    text = "\n".join(",".join(line) for line in [list(rows[0]), *cells])
    content = data.draw(hostile.damaged(text.encode("utf-8", "surrogatepass")))
    with folder() as place, contextlib.suppress(DataError):
        (place / "t.csv").write_bytes(content)
        sound(read_table(place / "t.csv"))


@given(hostile.damaged(gzip.compress(b"user,text,label\nann,x,0\nbo,y,1\n" * 3, mtime=0)))
def test_damaged_gzip(content: bytes) -> None:
    with folder() as place, contextlib.suppress(DataError):
        (place / "t.csv.gz").write_bytes(content)
        sound(read_table(place / "t.csv.gz"))


def saved(place: Path) -> list[str]:
    """Save a small data set; returns its files' names."""
    columns = {"x": np.arange(8.0), "text": Ragged.from_rows([[1, 2]] * 8), "label": np.arange(8) % 2}
    FederatedData.from_columns(["a", "b"] * 4, columns).split_per_user().save(place)
    return sorted(path.name for path in place.iterdir())


def fitting(folder: Path, changes: dict[str, Any]) -> None:
    """Rewrite the description with changes, and let the checksums fit."""
    path = folder / "data.json"
    about = json.loads(path.read_text()) | {"crc32": checksums(folder)} | changes
    with contextlib.suppress(ValueError, RecursionError):  # no file could hold it with a checksum
        about = seal(about)
    path.write_bytes(hostile.json_bytes(about))


@given(st.integers(0, 20), hostile.npy_files(), st.booleans())
def test_arrays_of_saved_data(number: int, content: bytes, mmap: bool) -> None:
    with folder() as place, contextlib.suppress(DataError):
        names = [name for name in saved(place / "d") if name.endswith(".npy")]
        (place / "d" / names[number % len(names)]).write_bytes(content)
        fitting(place / "d", {})
        data = FederatedData.load(place / "d", mmap=mmap)
        if not mmap:
            sound(data)


@given(st.sampled_from(["ids", "meta", "columns", "split", "format"]), hostile.json_values)
def test_descriptions_of_saved_data(key: str, value: Any) -> None:
    with folder() as place, contextlib.suppress(DataError):
        saved(place / "d")
        fitting(place / "d", {key: value})
        sound(FederatedData.load(place / "d", mmap=False))


@given(st.data(), st.booleans())
def test_damaged_npz(data: st.DataObject, compressed: bool) -> None:
    with folder() as place:
        path = place / "v.npz"
        words, vectors = np.array(["a", "b", "c"]), np.arange(6, dtype=np.float32).reshape(3, 2)
        (np.savez_compressed if compressed else np.savez)(path, words=words, vectors=vectors)
        path.write_bytes(data.draw(hostile.damaged(path.read_bytes())))
        try:
            found = read_word_vectors(path)
        except DataError:
            return
        assert found.words == ("a", "b", "c")
        assert found.vectors.tolist() == vectors.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=4), st.binary(max_size=40))
def test_idx_files(header: list[int], body: bytes) -> None:
    with folder() as place:
        path = place / "i.gz"
        path.write_bytes(gzip.compress(np.array([2051, *header], ">u4").tobytes() + body))
        try:
            found = read_idx(path, (2, 2))
        except DataError:
            return
        assert found.shape[1:] == (2, 2)


@given(hostile.overrides)
def test_configurations(words: list[str]) -> None:
    try:
        config = parse_config(TOY, "toy.toml", parse_overrides(words))
    except ConfigError:
        return
    assert plain(parse_config(config.to_toml())) == plain(config)
    with contextlib.suppress(FedkeepError):
        method = build_method(config.method)
        data = build_data(config)
        method.check(build_model(config, data))
