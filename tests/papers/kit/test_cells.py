"""The store of finished cells: what is written is read again, for the same settings only; the repository's are found."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.furl import scenes
from fedkeep_papers.furl.jobs import Kept
from fedkeep_papers.kit.cells import Measured, Slot, digest
from fedkeep_papers.kteps import book, published
from fedkeep_papers.kteps.cells import Numbers
from fedkeep_papers.moe.methods import Found, MethodCell
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.variants import Variant
from tests.documents import ROOT

RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Point:
    value: Measured
    curve: tuple[tuple[int, float], ...] = ()


def slot(file: Path, **changes: Any) -> Slot[Point]:
    return Slot(**{"kind": Point, "file": file, "settings": {"rate": 0.1, "words": ("a",)}, **changes})


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_is_found_by_its_settings(tmp_path: Path, shared: bool) -> None:
    mine = slot(tmp_path / "new" / "it.json", shared=shared)
    assert mine.read() is None
    result = Point(1 / 3, ((1, 0.5), (2, 0.25)))
    mine.write(result, name="for readers")
    assert mine.read() == result
    assert replace(mine, settings={"rate": 0.1, "words": ("b",)}).read() is None
    mine.write(Point(0.5))
    assert mine.read() == Point(0.5)


def test_several_share_a_file(tmp_path: Path) -> None:
    slots = [slot(tmp_path / "it.json", shared=True, settings={"seed": n}) for n in range(3)]
    for n, each in enumerate(slots):
        each.write(Point(float(n)), name=f"number {n}")
    slots[1].write(Point(7.0), name="again")
    assert [each.read() for each in slots] == [Point(0.0), Point(7.0), Point(2.0)]
    lines = (tmp_path / "it.json").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "["
    assert [json.loads(line.rstrip(","))["name"] for line in lines[1:-1]] == ["number 0", "number 2", "again"]


def test_numbers_are_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    slot(tmp_path / "a.json", rounded=True, settings={"rate": 1 / 3}).write(Point(math.nan, ((1, 2 / 3),)))
    found = slot(tmp_path / "a.json", settings={"rate": 1 / 3}).read()
    assert found is not None
    assert math.isnan(found.value)
    assert found.curve == ((1, 0.6666667),)
    with pytest.raises(ValueError, match="not JSON compliant"):
        slot(tmp_path / "b.json").write(Point(math.nan))
    assert not (tmp_path / "b.json").exists()


GOOD = {"value": 1.0, "curve": [], "settings": {"rate": 0.1, "words": ["a"]}}


@pytest.mark.parametrize(
    ("content", "shared", "fault"),
    [
        ("[3]", True, "wanted an object with settings; got 3"),
        ('{"a": 1}', True, "wanted a list of results; got dict"),
        ('[{"value": 1.0}]', False, 'wanted an object with settings; got [{"value": 1.0}]'),
        (json.dumps({"settings": GOOD["settings"]}), False, "it lacks value, curve"),
        (
            json.dumps({**GOOD, "curve": [[1, "x"]]}),
            False,
            "curve.0.1: Input should be a valid number, unable ",
        ),
    ],
)
def test_a_damaged_file_is_named(content: str, shared: bool, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RunError) as error:
        slot(path, shared=shared).read()
    assert str(error.value).startswith(f"{path} holds no finished cell: {fault}")
    assert str(error.value).endswith(". Delete it, and it is computed again.")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"holds no finished cell: Expecting .*\. Delete it"):
        slot(path, shared=shared).read()


@pytest.mark.parametrize(("room", "kind"), [("furl", Kept), ("kteps", Numbers)])
def test_files_of_the_repository_have_their_digests(room: str, kind: Any) -> None:
    files = sorted((RESULTS / room).glob("*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert file.stem.endswith(f"-{digest(content['settings'], content['source'])}")
        assert Slot(kind=kind, file=file, settings=content["settings"]).read() is not None


def test_the_cells_of_furl_table3_are_found() -> None:
    request = Request(Path("data"), RESULTS, "full")
    for scene in scenes.SCENES:
        for (_, seed), spec in scenes.specs_of(scene, request, RESULTS / "runs").items():
            one = next((RESULTS / "furl").glob(f"{scene.stands_for.lower()}-global-server-{seed}-*.json"))
            source = json.loads(one.read_text(encoding="utf-8"))["source"]
            assert spec.slot(RESULTS / "furl", source).read() is not None, spec.name


def test_the_cells_of_kteps_table3_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(self: book.Book, cell: Any) -> dict[str, str]:
        file = next((RESULTS / "kteps").glob(f"{cell.name}-*.json"))
        found: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["source"]
        return found

    monkeypatch.setattr(book.Book, "source", source)
    own = book.Book(Request(Path("data"), RESULTS, "full", [0]), "kteps-table3")
    for method in published.AP_METHODS:
        assert own.numbers(own.cells(book.SCENES[0], method)), method


def test_the_cells_of_the_mixture_are_found() -> None:
    ways = methods = 0
    for file in sorted((RESULTS / "moe").glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for entry in content if isinstance(content, list) else [content]:
            settings = entry["settings"]
            scene = Scene(**settings["scene"])
            if "about" in settings:
                numbers = {n: settings[n] for n in ("rounds", "epochs", "batch_size", "learning_rate")}
                methods += 1
                method = MethodCell(settings["name"], scene, **numbers).slot(RESULTS / "moe")
                assert method.file == file
                found: Found | Result | None = method.read()
            else:
                federation = Federation(**(settings["federation"] or {}))
                cell = Cell(scene, federation, Adapting(**(settings["adapting"] or adapting_of(file))))
                variant = Variant(entry["name"], **settings["variant"])
                ways += 1
                way = cell.slot(RESULTS / "moe", variant)
                assert way.file == file
                found = way.read()
            assert found is not None, (file.name, entry["name"])
            assert list(found.valid if isinstance(found, Result) else [found.valid]) == (
                entry["valid"] if isinstance(found, Result) else [entry["valid"]]
            )
    assert (ways, methods) == (313, 33)


def adapting_of(file: Path) -> dict[str, int]:
    """Return the settings of adaptation that a file's name says; FedAvg's results do not depend on them."""
    said = [part for part in file.stem.split("-") if part.startswith("a") and part.count("x") == 2]
    return (
        dict(zip(("epochs", "every", "patience"), map(int, said[0][1:].split("x")), strict=True))
        if said
        else {}
    )
