"""Every table in results/ is what today's configurations make of the finished cells beside it, and every cell has one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, toy
from fedkeep.experiments import build
from fedkeep.experiments.config import Config
from fedkeep.experiments.reproductions import Request, Scale, reproduce, reproductions
from fedkeep.report.blocks import Figure
from fedkeep.version import NUMERICS
from fedkeep_papers.adapters import table as adapters
from fedkeep_papers.furl import channels, scenes, table3
from fedkeep_papers.kit import plots
from fedkeep_papers.kit.cells import Finished, Slot, settings_of
from fedkeep_papers.kit.results import Row, read_results
from fedkeep_papers.kteps import book
from fedkeep_papers.kteps.cells import Cell as ReviewsCell
from fedkeep_papers.moe import cells, methods, sheet, tables
from fedkeep_papers.natural import table as natural
from fedkeep_papers.natural.scenes import SCENES as NATURAL
from fedkeep_papers.natural.scenes import Cell, Scene
from fedkeep_papers.public import fashion
from tests.documents import ROOT

RESULTS = ROOT / "results"
ROOMS = ("adapters", "channels", "furl", "kteps", "moe", "natural", "public")
READERS = {scene.name: Cell(scene, "FURL", 0, "full").config().data.reader for scene in NATURAL}
SCALES: tuple[Scale, ...] = ("quick", "medium")
OTHER_NAMES = {adapters.RESULTS: adapters.NAME}


def named(table: str) -> tuple[str, Scale]:
    """Return a table's reproduction and scale."""
    for scale in SCALES:
        if table.endswith(f"-{scale}"):
            name = table.removesuffix(f"-{scale}")
            return OTHER_NAMES.get(name, name), scale
    return OTHER_NAMES.get(table, table), "full"


KNOWN = sorted(p.stem for p in RESULTS.glob("*.json") if named(p.stem)[0] in reproductions())
TABLES = [
    name for name in KNOWN if not name.endswith("-table1")
]  # Tables 1 are of the data, and nothing is run


@cache
def entries(room: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return every finished cell of a room, with its file."""
    found = []
    for file in sorted((RESULTS / room).glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found += [(file, entry) for entry in (content if isinstance(content, list) else [content])]
    return found


@cache
def source_of(room: str, reader: str) -> Mapping[str, str]:
    """Return what the cells of a room say of the data that a reader reads; all say the same."""

    def reads(settings: Mapping[str, Any]) -> bool:
        scene: Mapping[str, Any] = settings.get("scene") or settings.get("config", settings)["data"]
        return reader in (scene.get("dataset"), scene.get("reader"))

    found = [entry["source"] for _, entry in entries(room) if reads(entry["settings"])]
    if not found:
        raise LookupError(reader)
    assert all(each == found[0] for each in found)
    return dict(found[0])


def source_of_reviews(cell: ReviewsCell) -> Mapping[str, str]:
    """Return what the cells say that start from the same word vectors; nothing where there is none of them."""
    begun = settings_of(cell.resolved())["model"].get("word_vectors")
    found = [
        entry["source"]
        for _, entry in entries("kteps")
        if entry["settings"]["config"]["model"].get("word_vectors") == begun
    ]
    assert all(each == found[0] for each in found)
    return dict(found[0]) if found else {}


def natural_source(scene: Scene, _: Path | None) -> Mapping[str, str]:
    """Return what the cells of a data set of natural users say; one without a cell is as if it were not installed."""
    try:
        return source_of("natural", READERS[scene.name])
    except LookupError:
        raise DataError(f"No run on {scene.name} is finished.") from None


@dataclass
class Made:
    """Tables made anew: a folder of results, those made so far, and the file and settings of every cell asked for."""

    folder: Path
    tables: set[str] = field(default_factory=set)
    asked: set[tuple[str, str]] = field(default_factory=set)

    def rows(self, table: str) -> list[Row]:
        """Make a table of results/, once, and return its rows."""
        if table not in self.tables:
            name, scale = named(table)
            seeds = sorted({seed for row in read_results(RESULTS / f"{table}.json") for seed in row.seeds})
            reproduce(name, Request(Path("data"), self.folder, scale, seeds, progress=False, finished=True))
            self.tables.add(table)
        return read_results(self.folder / f"{table}.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """What makes tables of results/ anew of the finished cells, without data and without pictures."""
    found = Made(tmp_path_factory.mktemp("results"))
    for room in ROOMS:
        (found.folder / room).symlink_to(RESULTS / room)
    real_find, real_data = Slot.find, build.build_data

    def find(self: Slot[Any]) -> Finished[Any] | None:
        found.asked.add((self.file.name, json.dumps(self.settings, sort_keys=True)))
        return real_find(self)

    def data(config: Config, folder: Path | None) -> FederatedData:
        if config.data.reader != "zulip_channels":
            return real_data(config, folder)
        small = toy()
        small.meta["source"] = source_of("furl", "zulip_channels")
        return small

    def undrawn(figure: Figure, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").touch()
        return folder / f"{name}.png"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "find", find)
        patch.setattr(scenes, "build_data", data)
        patch.setattr(channels, "source_of", lambda _: tuple(source_of("furl", "zulip_channels").items()))
        patch.setattr(adapters, "source_of", lambda _: tuple(entries("adapters")[0][1]["source"].items()))
        patch.setattr(table3._Sheet, "_references", lambda *_: [])
        patch.setattr(table3._Sheet, "_known", lambda *_: {})
        patch.setattr(book.Book, "source", lambda _, cell: source_of_reviews(cell))
        for place in (sheet, cells, methods):
            patch.setattr(place, "source_of", lambda scene, _: source_of("moe", scene.dataset))
        patch.setattr(natural, "source_of", natural_source)
        patch.setattr(fashion, "source_of", lambda _: source_of("public", "pfllib_fashion"))
        patch.setattr(tables, "partitions", lambda *_: [])
        patch.setattr(plots, "write", undrawn)
        yield found


FAST = (
    "adapters",
    "adapters-medium",
    "furl-channels",
    "kteps-table2",
    "moe-table2",
    "natural-users",
    "public-fashion-medium",
)


def older(folder: Path, table: str) -> list[str]:
    """Return what a table's page says of cells that older code computed."""
    lines = (folder / f"{table}.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(("**Older numerics.**", "**Older code.**"))]


@pytest.mark.parametrize(
    "table", [pytest.param(t, marks=() if t in FAST else pytest.mark.slow) for t in TABLES]
)
def test_a_table_is_what_its_cells_say(table: str, made: Made) -> None:
    kept = [row for row in read_results(RESULTS / f"{table}.json") if not row.method.startswith("(")]
    assert made.rows(table) == kept
    assert older(made.folder, table) == older(RESULTS, table)


@pytest.mark.slow
def test_every_cell_is_asked_for_by_a_table(made: Made) -> None:
    for table in TABLES:
        made.rows(table)
    have = {
        (file.name, json.dumps(entry["settings"], sort_keys=True))
        for room in ROOMS
        for file, entry in entries(room)
    }
    assert sorted(have - made.asked) == []


def test_every_cell_says_of_which_numerics_it_is() -> None:
    for room in ROOMS:
        for file, entry in entries(room):
            assert 1 <= entry["numerics"] <= NUMERICS, file.name


def test_other_results_are_of_benchmarks() -> None:
    """A file of results that no reproduction writes is a benchmark's, whose claims are tested by running it."""
    others = {p.stem for p in RESULTS.glob("*.json")} - set(KNOWN)
    modules = [p.stem.replace("_", "-") for p in (ROOT / "benchmarks").glob("*.py")]
    assert [n for n in others if not any(n == m or n.startswith(f"{m}-") for m in modules)] == []
