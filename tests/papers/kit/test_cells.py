"""The store of finished cells: what is written is read again, for the same settings, data and numerics only."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.experiments.environment import commit
from fedkeep.version import NUMERICS
from fedkeep_papers.furl.jobs import Kept
from fedkeep_papers.kit import cells
from fedkeep_papers.kit.cells import Finished, Measured, Slot, digest, note_on_stale
from fedkeep_papers.kteps.cells import Numbers
from tests.documents import ROOT

RESULTS = ROOT / "results"
NOW = commit() or ""


@dataclass(frozen=True)
class Point:
    value: Measured
    curve: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Elsewhere(Point):
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def slot(file: Path, **changes: Any) -> Slot[Point]:
    key = {"settings": {"rate": 0.1, "words": ("a",)}, "source": {"data.gz": "ab"}}
    return Slot(**{"kind": Point, "file": file, **key, **changes})


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_is_found_by_its_settings(tmp_path: Path, shared: bool) -> None:
    mine = slot(tmp_path / "new" / "it.json", shared=shared)
    assert mine.read() is None
    result = Point(1 / 3, ((1, 0.5), (2, 0.25)))
    mine.write(result, name="for readers")
    assert mine.read() == result
    assert replace(mine, settings={"rate": 0.1, "words": ("b",)}).read() is None
    assert replace(mine, source={"data.gz": "cd"}).read() is None
    mine.write(Point(0.5))
    assert mine.read() == Point(0.5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_of_other_numerics_is_shown_but_not_taken_for_todays(
    tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = slot(tmp_path / "it.json", shared=shared)
    mine.write(Point(0.5))
    assert note_on_stale({"it": mine.find(), "other": None}) == ""
    monkeypatch.setattr(cells, "NUMERICS", NUMERICS + 1)
    assert mine.read() is None
    found = mine.find()
    assert found == Finished(result=Point(0.5), numerics=NUMERICS, commit=NOW)
    assert note_on_stale({"it": found, "other": None}).startswith(
        "**Older numerics.** 1 of 1 finished cells "
    )
    mine.write(Point(0.25))
    assert mine.read() == Point(0.25)
    assert len(mine._entries()) == 1  # in the older one's place


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_of_another_revision_is_shown_but_not_taken_for_todays(tmp_path: Path, shared: bool) -> None:
    first = slot(tmp_path / "it.json", shared=shared)
    first.write(Point(0.5))
    assert "revision" not in first._entries()[0]
    mine = replace(first, revision=1)
    assert mine.read() is None
    found = mine.find()
    assert found == Finished(result=Point(0.5), numerics=NUMERICS, commit=NOW, revised=True)
    assert note_on_stale({"it": found, "same": first.find(), "other": None}) == (
        "**Older code.** 1 of 2 finished cells were computed by code that made other numbers than today's, and are "
        "computed again when the table is run: it."
    )
    mine.write(Point(0.25))
    assert mine.read() == Point(0.25)
    assert len(mine._entries()) == 1  # in the older one's place
    assert first.read() is None
    assert (first.run, mine.run) == ("it", "it-revision-1")


def test_a_result_that_does_not_say_its_numerics_is_of_the_oldest(tmp_path: Path) -> None:
    mine = slot(tmp_path / "it.json")
    mine.write(Point(0.5))
    entry = json.loads(mine.file.read_text(encoding="utf-8"))
    del entry["numerics"]
    mine.file.write_text(json.dumps(entry), encoding="utf-8")
    assert mine.find() == Finished(result=Point(0.5), numerics=1, commit=NOW)


def test_a_result_says_which_source_computed_it_and_how_long(tmp_path: Path) -> None:
    mine = slot(tmp_path / "it.json", kind=Elsewhere)
    result = Elsewhere(0.5, environment={"commit": "an older one"}, seconds=2.5)
    mine.write(result)
    assert mine.find() == Finished(result=result, numerics=NUMERICS, commit="an older one", seconds=2.5)


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
    assert math.isnan(found.value)
    assert found.curve == ((1, 0.6666667),)
    with pytest.raises(ValueError, match="not JSON compliant"):
        slot(tmp_path / "b.json").write(Point(math.nan))
    assert not (tmp_path / "b.json").exists()


@dataclass(frozen=True)
class Losses:
    value: float
    curve: tuple[tuple[float, float], ...]
    loss: list[float | None]
    by_client: dict[str, Measured]


def test_infinite_numbers_are_read_back_where_numbers_are_rounded(tmp_path: Path) -> None:
    result = Losses(math.inf, ((1.0, -math.inf),), [0.5, None, math.inf], {"a": math.inf, "b": 1.0})
    mine = slot(tmp_path / "a.json", rounded=True, kind=Losses)
    mine.write(result)
    assert mine.read() == result
    with pytest.raises(ValueError, match="not JSON compliant"):
        slot(tmp_path / "b.json", kind=Losses).write(result)


def test_settings_are_not_rounded(tmp_path: Path) -> None:
    mine = slot(tmp_path / "a.json", rounded=True, settings={"rate": 0.123456781})
    mine.write(Point(0.5))
    assert mine.read() == Point(0.5)
    assert replace(mine, settings={"rate": 0.123456784}).read() is None


def test_two_processes_write_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (slot(tmp_path / "it.json", shared=True, settings={"seed": n}) for n in range(2))
    real, threads = cells.write_whole, list[threading.Thread]()

    def late(path: Path, content: bytes) -> None:
        """Let the other process begin to write once this one has read the file."""
        if not threads:
            threads.append(threading.Thread(target=other.write, args=(Point(2.0),)))
            threads[0].start()
            threads[0].join(0.5)
        real(path, content)

    monkeypatch.setattr(cells, "write_whole", late)
    one.write(Point(1.0))
    threads[0].join()
    assert (one.read(), other.read()) == (Point(1.0), Point(2.0))


@dataclass(frozen=True)
class Longer(Point):
    note: str = field(default="none", metadata=cells.LATER)


def test_an_older_file_may_lack_a_later_field_alone(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert slot(path, kind=Longer).read() is None  # of older numerics
    found = slot(path, kind=Longer).find()
    assert found.result == Longer(1.0)
    path.write_text(json.dumps({**KEY, "value": 1.0, "note": "some"}), encoding="utf-8")
    with pytest.raises(RunError, match="it lacks curve"):
        slot(path, kind=Longer).find()


KEY = {"settings": {"rate": 0.1, "words": ["a"]}, "source": {"data.gz": "ab"}}
GOOD = {"value": 1.0, "curve": [], **KEY}


@pytest.mark.parametrize(
    ("content", "shared", "fault"),
    [
        ("[3]", True, "wanted an object with settings; got 3"),
        ('{"a": 1}', True, "wanted a list of results; got dict"),
        ('[{"value": 1.0}]', False, 'wanted an object with settings; got [{"value": 1.0}]'),
        (json.dumps(KEY), False, "it lacks value, curve"),
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
        key = {name: content[name] for name in ("settings", "source")}
        assert Slot(kind=kind, file=file, **key).find() is not None
