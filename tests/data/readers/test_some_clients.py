"""``clients = N``: each reader gives the rows of as many clients as asked for, and looks at nobody else's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError, Spot
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Raw, prepared
from fedkeep.data.readers import load_table, raw_image_folder, raw_leaf, raw_table, raw_tars
from fedkeep.data.subsets import drawn, subset
from fedkeep.experiments.build import build_data
from tests.data.readers.test_image_folder import drawn as images_in
from tests.data.readers.test_leaf import content
from tests.data.readers.test_tars import packed, png
from tests.data.readers.written import WRITERS, csv_of
from tests.experiments.configs import config
from tests.refusals import raises

PEOPLE = [f"p{n}" for n in range(9)]
KEPT = drawn(PEOPLE, 3)
OTHERS = [name for name in PEOPLE if name not in KEPT]


def rows(of: list[str] = PEOPLE) -> list[dict[str, Any]]:
    every = [{"user": PEOPLE[n % 9], "x": n, "label": "ab"[n % 2]} for n in range(90)]
    return [row for row in every if row["user"] in of]


def same(few: Raw, whole: Raw) -> None:
    """Assert that a source is what ``subset`` takes of all."""
    wanted, got = prepared(subset(whole, clients=3)), prepared(few)
    assert set(got.ids) == KEPT
    assert got.fingerprint() == wanted.fingerprint()


@pytest.mark.parametrize("sample", [200, 1 << 22])
@pytest.mark.parametrize("name", WRITERS)
def test_of_a_table(tmp_path: Path, name: str, sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_table, "SAMPLE", sample)  # below it files are read as they are
    monkeypatch.setattr(load_table, "BLOCK", 1 << 10)
    (tmp_path / name).write_bytes(WRITERS[name](rows()))
    options: dict[str, Any] = {"features": ["x"]}
    few = raw_table(tmp_path / name, clients=3, **options)
    same(few, raw_table(tmp_path / name, **options))
    unit, first = (
        ("row", 0)
        if name.endswith(("parquet", "arrow", "feather"))
        else ("line", 1 if "jsonl" in name else 2)
    )
    numbers = [n + first for n, row in enumerate(rows()) if row["user"] in KEPT]
    assert [few.where(row) for row in (0, 1, 29)] == [
        Spot(tmp_path / name, numbers[row], unit) for row in (0, 1, 29)
    ]


def test_of_a_frame_and_of_a_sheet(tmp_path: Path) -> None:
    import pyarrow

    frame = pyarrow.Table.from_pylist(rows())
    same(raw_table(frame, features=["x"], clients=3), raw_table(frame, features=["x"]))
    book = pytest.importorskip("openpyxl").Workbook()
    for row in [list(rows()[0]), *(list(row.values()) for row in rows())]:
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    same(*(raw_table(tmp_path / "t.xlsx", features=["x"], **own) for own in ({"clients": 3}, {})))


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_an_id_that_is_none_is_named_by_its_row(tmp_path: Path, name: str) -> None:
    bad = rows()
    bad[50]["user"] = ""
    (tmp_path / name).write_bytes(WRITERS[name](bad))
    place = {"t.csv": "line 52", "t.jsonl": "line 51", "t.parquet": "row 50"}[name]
    with raises(DataError, said=place):
        raw_table(tmp_path / name, features=["x"], clients=3)


def test_nobody_elses_cells_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(csv_of([row | ({"x": "?!"} if row["user"] in OTHERS else {}) for row in rows()]))
    assert raw_table(path, features=["x"], kinds={"x": "number"}, clients=3).ids == sorted(KEPT)
    bad = rows()
    bad[next(n for n, row in enumerate(bad) if n > 40 and row["user"] in KEPT)]["x"] = "?!"
    line = 2 + next(n for n, row in enumerate(bad) if row["x"] == "?!")
    path.write_bytes(csv_of(bad))
    with raises(DataError, said=f"line {line}"):
        raw_table(path, features=["x"], kinds={"x": "number"}, clients=3)


def test_of_a_file_a_client_no_other_is_opened(tmp_path: Path) -> None:
    for name in PEOPLE:
        (tmp_path / f"{name}.csv").write_bytes(
            csv_of([{"x": r["x"], "label": r["label"]} for r in rows([name])])
        )
    whole = raw_table(tmp_path, features=["x"])
    for name in OTHERS[1:] if PEOPLE[0] in OTHERS else OTHERS:  # the first file's columns are looked at
        (tmp_path / f"{name}.csv").write_text("broken")
    few = raw_table(tmp_path, features=["x"], clients=3)
    same(few, whole)
    for name in PEOPLE:
        (tmp_path / f"{name}.csv").write_bytes(csv_of(rows([name])))
    same(raw_table(tmp_path, features=["x"], clients=3), raw_table(tmp_path, features=["x"]))


def test_of_rows_and_further_rows_for_testing(tmp_path: Path) -> None:
    for part, name in enumerate(("train.csv", "test.csv")):
        (tmp_path / name).write_bytes(csv_of(rows()[part * 60 : 60 + part * 30]))
    options: dict[str, Any] = {"features": ["x"], "test_path": tmp_path / "test.csv"}
    same(*(raw_table(tmp_path / "train.csv", **options, **own) for own in ({"clients": 3}, {})))


@pytest.mark.parametrize("form", ["as its scripts write it", "examples first"])
def test_of_leafs_files(tmp_path: Path, form: str) -> None:
    def write(bad: object) -> Path:
        for number, some in enumerate((PEOPLE[:5], PEOPLE[5:])):
            users: Any = {name: ([[n, 0.5] for n in range(4)], [0, 1, 0, 1]) for name in some}
            for name in {*some} - KEPT:
                users[name][0][0][0] = bad
            made = content(users)
            (tmp_path / f"{number}.json").write_text(
                json.dumps(made if form.startswith("as") else dict(reversed(made.items())))
            )
        return tmp_path

    whole = raw_leaf(write(1.5))
    few = raw_leaf(write("one") if form.startswith("as") else tmp_path, clients=3)
    same(few, whole)


def test_of_images_no_other_is_decoded(tmp_path: Path) -> None:
    names = [f"{person}/{kind}/{n}.png" for person in PEOPLE for kind in "ab" for n in range(2)]
    images_in(tmp_path, *names)
    whole = raw_image_folder(tmp_path, levels="client/class")
    for name in names:
        if name.split("/")[0] in OTHERS:
            (tmp_path / name).write_bytes(b"no image")
    few = raw_image_folder(tmp_path, levels="client/class", clients=3)
    assert isinstance(few, Raw)
    assert isinstance(whole, Raw)
    same(few, whole)
    with raises(DataError):
        raw_image_folder(tmp_path, levels="*/class", clients=3)


@pytest.mark.parametrize("client", ["tar", "who"])
def test_of_tars(tmp_path: Path, client: str) -> None:
    def write(others: Callable[[int], bytes]) -> None:
        for number, person in enumerate(PEOPLE):
            made = png if person in KEPT else others
            members: dict[str, Any] = {}
            for n in range(4):
                members |= {f"{n}.png": made(number + n), f"{n}.cls": str(n % 2), f"{n}.who": person}
            packed(tmp_path / f"{person}.tar", members)

    write(png)
    whole = raw_tars(tmp_path, client=client)
    write(lambda grey: b"no image")
    few = raw_tars(tmp_path, client=client, clients=3)
    assert isinstance(few, Raw)
    assert isinstance(whole, Raw)
    same(few, whole)
    with raises(DataError):
        raw_tars(tmp_path, clients=3)


def test_in_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(csv_of(rows()))

    def read(**options: Any) -> FederatedData:
        given = {"reader": "table", "path": "t.csv", "features": ["x"], "clients": 3, **options}
        return build_data(config(data=given), tmp_path)

    assert set(read().ids) == KEPT
    assert read(examples=4).counts().tolist() == [4, 4, 4]
    dealt = read(partition={"kind": "dirichlet", "clients": 4, "alpha": 10.0, "least": 2})
    assert len(dealt.ids) == 3  # of the four that the partition makes of all rows
    assert np.sum(dealt.counts()) > 30
    with raises(DataError, wanted=10, there=9):
        read(clients=10)
    with raises(DataError, got=0):
        read(clients=0)
