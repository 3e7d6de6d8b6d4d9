"""Tar files of images, as webdataset's writers leave them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, ImageSet
from fedkeep.data.readers import tars
from fedkeep.experiments.build import build_data
from tests.experiments.configs import config
from tests.refusals import raises


def png(grey: int, shape: tuple[int, ...] = (4, 6)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full(shape, grey, np.uint8)).save(file, "PNG")
    return file.getvalue()


def packed(path: Path, members: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, content in members.items():
            given = content.encode() if isinstance(content, str) else content
            about = tarfile.TarInfo(name)
            about.size = len(given)
            tar.addfile(about, io.BytesIO(given))
    return path


def shown(data: FederatedData | ImageSet) -> list[int]:
    images = data.images if isinstance(data, ImageSet) else data.columns["image"]
    return [int(n) for n in np.asarray(images)[:, 0, 0, 0]]


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz", "s.tgz"])
def test_members_of_one_name_are_an_example(tmp_path: Path, name: str) -> None:
    members = {"a/2.png": png(2), "a/2.cls": "10\n", "README": "x", "a/1.cls": "9", "a/1.PNG": png(1)}
    found = tars(packed(tmp_path / name, members))
    assert (found.images.shape, found.label_names, found.train) == ((2, 1, 4, 6), ("9", "10"), 2)
    assert dict(zip(shown(found), found.labels.tolist(), strict=True)) == {2: 1, 1: 0}


def test_files_of_splits_and_a_json_that_says_the_client(tmp_path: Path) -> None:
    for n, part in enumerate(("train", "val", "test")):
        about = json.dumps({"who": "ann" if n else "bo", "kind": "cat" if n % 2 else "dog"})
        packed(tmp_path / f"set-{part}-000{n}.tar", {"0.png": png(n), "0.json": about})
    data = tars(tmp_path, client="who", label="kind")
    assert isinstance(data, FederatedData)
    assert (list(data.ids), data.meta["label_names"]) == (["ann", "bo"], ["cat", "dog"])
    assert [data.counts(part).tolist() for part in ("train", "valid", "test")] == [[0, 1], [1, 0], [1, 0]]
    assert (shown(data), data.columns["label"].tolist()) == ([1, 2, 0], [0, 1, 1])
    packed(tmp_path / "more.tar", {"0.png": png(5), "0.json": json.dumps({"who": "c", "kind": "cat"})})
    with raises(DataError, file=tmp_path / "more.tar"):
        tars(tmp_path, client="who", label="kind")


def test_a_file_a_client_by_a_configuration(tmp_path: Path) -> None:
    for name in ("ann.train.tar", "ann.test.tar", "bo.train.tar"):
        packed(tmp_path / "shards" / name, {f"{n}.{e}": c for n in range(2) for e, c in EXAMPLE.items()})
    table = {"reader": "tars", "path": "shards/*.tar", "client": "tar", "label": "txt", "image": "png"}
    data = build_data(config(data=table), tmp_path)
    assert [data.counts(part).tolist() for part in ("train", "test")] == [[2, 2], [2, 0]]
    nobody = {"reader": "tars", "path": "shards", "label": "txt", "image": "png"}
    nobody["partition"] = {"kind": "by_size", "clients": 2}  # type: ignore[assignment]
    assert len(build_data(config(data=nobody), tmp_path)) == 2


EXAMPLE: dict[str, bytes | str] = {"png": png(3), "mask.png": png(0), "txt": "cat"}


@pytest.mark.parametrize(
    ("members", "options", "facts"),
    [
        ({"1.png": png(0)}, {}, {"what": "label", "name": "cls", "there": ["png"]}),
        ({"1.png": png(0), "1.json": "{"}, {}, {"place": "1"}),
        ({"1.png": png(0), "1.cls": b"\xff"}, {}, {"what": "label", "name": "cls"}),
        ({"1.png": png(0), "1.cls": "0"}, {"client": "user"}, {"what": "client", "there": ["cls", "png"]}),
        ({"1.png": png(0), "1.cls": "0", "1.json": '{"user": [1]}'}, {"client": "user"}, {"got": [1]}),
        ({"1.png": png(0), "1.jpg": png(0), "1.cls": "0"}, {}, {"there": ["cls", "jpg", "png"]}),
        ({"1.png": png(0), "1.cls": "0"}, {"image": "jpg"}, {"what": "a member .jpg"}),
        ({"1.png": b"no", "1.cls": "0"}, {}, {"where": "1"}),
        ({"1.png": png(0), "1.cls": "0", "2.png": png(0, (5, 5)), "2.cls": "0"}, {}, {"file": "2", "got": 5}),
        ({"1.png": png(0), "1.PNG": png(0), "1.cls": "0"}, {}, {"member": "1.PNG"}),
        ({"README": "x"}, {}, {}),
    ],
)
def test_examples_that_do_not_fit(
    tmp_path: Path, members: dict[str, bytes | str], options: dict[str, Any], facts: dict[str, Any]
) -> None:
    file = packed(tmp_path / "s.tar", members)
    with pytest.raises(DataError) as error:
        tars(file, **options)
    for name, wanted in facts.items():
        got = error.value.facts[name]
        assert str(got) == f"{file}, {wanted}" if name in ("place", "where", "file") else got == wanted
    assert str(file) in str(error.value)


@pytest.mark.parametrize("name", ["s.tar", "s.tar.gz"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97])
def test_a_file_that_is_cut_off(tmp_path: Path, name: str, share: float) -> None:
    draw = np.random.default_rng(0)
    members = {f"{n}.{e}": draw.bytes(3000) if e == "png" else "0" for n in range(8) for e in ("png", "cls")}
    file = packed(tmp_path / name, members)
    content = file.read_bytes()
    end = len(content.rstrip(b"\0")) if name == "s.tar" else len(content)
    for cut in (int(share * end), int(share * end) // 512 * 512):  # between two members, too
        file.write_bytes(content[:cut])
        with raises(DataError, file=file):
            tars(file)


def test_places_that_are_none(tmp_path: Path) -> None:
    with raises(DataError, got="s.zip"):
        (tmp_path / "s.zip").write_bytes(b"PK")
        tars(tmp_path / "s.zip")
    with raises(DataError, folder=tmp_path):
        tars(tmp_path)
    (tmp_path / "s.tar").write_bytes(b"no tar" * 200)
    with raises(DataError, file=tmp_path / "s.tar"):
        tars(tmp_path)
