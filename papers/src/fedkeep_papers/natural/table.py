"""``fedkeep reproduce natural-users``: eight methods on data of natural users, and what personalisation was worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedkeep.core.errors import DataError
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.reproductions import Request
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep.report.wording import MISSING, difference, is_fraction, metric_name, plain
from fedkeep_papers.kit.cells import Finished, Slot, note_on_stale, runs_of
from fedkeep_papers.kit.results import Row, over_seeds, write_results
from fedkeep_papers.natural import cells
from fedkeep_papers.natural.cells import REFERENCES, Found, Gain, Run
from fedkeep_papers.natural.scenes import COUNTING, METHODS, SCENES, SEEDS, Cell, Scene, source_of

NAME = "natural-users"
ABOUT = """\
Every method has the same model, mini-batches, learning rates and number of rounds on a data set, set by hand for FURL
on the validation examples and not searched for the others. A run is judged at its round that is best on validation.
Data and licences: docs/how-to/reproduce.md. "Published" is the mixed model of lme4 on the same examples."""


def natural_users(request: Request) -> Path:
    """Run what is not finished, and write the table and the worth report; it goes on where it stopped.

    Raises:
        DataError: a package that holds data is not installed; says the command. Data sets of which ``request.only``
            wants nothing may be missing.
    """
    sheet = Sheet(request)
    request.check([cell.name for cell in sheet.cells])
    wanted = {s.name: [c for c in sheet.cells if c.scene == s and request.wants(c.name)] for s in SCENES}
    known = [scene for scene in SCENES if sheet.source(scene, needed=bool(wanted[scene.name])) is not None]
    for scene in known:
        tasks = [sheet.run(cell) for cell in wanted[scene.name] if sheet.slot(cell).read() is None]
        run_long_jobs(tasks, request.jobs, request.progress, sheet.write, on=request.on)
        if not request.finished:
            sheet.keep(scene)
    return sheet.write()


@dataclass
class Sheet:
    """The cells of one call, and the table that is made of them."""

    request: Request
    sources: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        quick = self.request.scale == "quick"
        runs = runs_of(self.request.out)
        self.runs = runs / f"{NAME}-{self.request.scale}"
        self.folder = runs / "natural-quick" if quick else self.request.out / "natural"
        self.seeds = (
            tuple(self.request.seeds)
            if self.request.seeds is not None
            else SEEDS
            if self.request.scale == "full"
            else (0,)
        )
        self.cells = [
            Cell(scene, method, seed, self.request.scale)
            for scene in SCENES
            for seed in self.seeds
            for method in METHODS
        ]

    def source(self, scene: Scene, needed: bool) -> Mapping[str, str] | None:
        """Return the sha256 of a data set's files; None where it is not installed, and not needed."""
        if scene.name not in self.sources:
            try:
                self.sources[scene.name] = source_of(scene, self.request.data)
            except DataError:
                if needed:
                    raise
                return None
        return self.sources[scene.name]

    def slot(self, cell: Cell) -> Slot[Found]:
        """Return where a run's result is kept."""
        return cells.slot_of(cell, self.folder, self.sources[cell.scene.name])

    def run(self, cell: Cell) -> Run:
        """Return the task that computes a run."""
        return Run(cell, self.request.data, self.runs, self.slot(cell))

    def run_folder(self, cell: Cell) -> Path:
        """Return the folder of a cell's run; with other settings or data it is another."""
        return self.runs / self.slot(cell).run

    def of(self, scene: Scene, method: str) -> list[Cell]:
        """Return a method's cells, one for each seed."""
        return [cell for cell in self.cells if (cell.scene, cell.method) == (scene, method)]

    def finished(self, scene: Scene, method: str) -> list[Cell]:
        """Return the cells of a method whose results are there, of the seeds that all references have too."""
        seeds = set(self.seeds)
        for name in {method, *REFERENCES}:
            seeds &= {cell.seed for cell in self.of(scene, name) if self.slot(cell).read() is not None}
        return [cell for cell in self.of(scene, method) if cell.seed in seeds]

    def keep(self, scene: Scene) -> None:
        """Count, and compare methods with references, from the runs that are in the folder of runs."""
        source, data = self.sources[scene.name], self.request.data
        counting = cells.counting_slot(scene, self.folder, source, self.request.scale)
        first = next(
            (c for c in self.cells if c.scene == scene and cells.is_finished(self.run_folder(c))), None
        )
        if first is not None and counting.read() is None:
            counting.write(cells.counting_found(self.run_folder(first), data))
        for method in METHODS:
            own = self.finished(scene, method)
            slot = cells.gains_slot(own, self.folder, source) if own else None
            seeds = {cell.seed for cell in own}
            folders = {
                name: [self.run_folder(cell) for cell in self.of(scene, name) if cell.seed in seeds]
                for name in (method, *REFERENCES)
            }
            there = all(cells.is_finished(folder) for each in folders.values() for folder in each)
            if slot is not None and method != "FedAvg" and slot.read() is None and there:
                slot.write(cells.gains_of(method, folders, data))

    def write(self) -> Path:
        """Write the results from what is finished."""
        rows: list[Row] = []
        stale: dict[str, Finished[Found]] = {}
        for scene in SCENES:
            known = scene.name in self.sources
            for method in (COUNTING, *METHODS):
                slots = {cell.seed: self.slot(cell) for cell in self.of(scene, method)} if known else {}
                if known and method == COUNTING:
                    source = self.sources[scene.name]
                    slots = {0: cells.counting_slot(scene, self.folder, source, self.request.scale)}
                found = {seed: f for seed, slot in slots.items() if (f := slot.find()) is not None}
                stale |= {slots[seed].file.stem: f for seed, f in found.items()}
                rows += self._rows(scene, method, found)
        parts = [
            ABOUT,
            _together(rows),
            *_beside(rows),
            self._unfinished(),
            note_on_stale(stale),
            *(self._worth(scene) for scene in SCENES),
        ]
        name = NAME if self.request.scale == "full" else f"{NAME}-{self.request.scale}"
        text = "\n\n".join(part for part in parts if part)
        return write_results(self.request.out, name, rows, title="Natural users", preamble=text)[1]

    def _rows(self, scene: Scene, method: str, found: Mapping[int, Finished[Found]]) -> list[Row]:
        return [
            over_seeds(
                scene.title,
                method,
                metric,
                {seed: f.result.metrics[metric] for seed, f in found.items()},
                found.values(),
                published=scene.published.get(method) if metric == scene.metrics[0] else None,
                scale=self.request.scale,
            )
            for metric in scene.metrics
        ]

    def _unfinished(self) -> str:
        missing = [
            cell.scene.name
            for cell in self.cells
            if cell.scene.name not in self.sources or self.slot(cell).find() is None
        ]
        if not missing:
            return ""
        count, each = Counter(missing), len(self.cells) // len(SCENES)
        named = ", ".join(f"{n} of {each} on {name}" for name, n in count.items())
        return f"**Not finished**: {len(missing)} of {len(self.cells)} runs: {named}."

    def _worth(self, scene: Scene) -> str:
        """Return Markdown: every method against every reference."""
        if scene.name not in self.sources:
            return ""
        lines: list[tuple[str, ...]] = []
        for method in METHODS:
            own = self.finished(scene, method)
            found = cells.gains_slot(own, self.folder, self.sources[scene.name]).find() if own else None
            lines += [_line(method, gain, len(own)) for gain in (found.result.gains if found else ())]
        if not lines:
            return ""
        columns = (
            "method",
            "against",
            "gain (95 % interval)",
            "at least gain",
            "at least lose",
            "named better",
            "named worse",
            "seeds",
        )
        note = "Each user counts once, whatever the number of examples; docs/compare.md says how to read it."
        table = TextTable(
            columns, tuple(lines), f"{scene.title}: what personalisation was worth", note, left=2
        )
        return to_markdown(table, level=2)


def _together(rows: Sequence[Row]) -> str:
    """Return Markdown: the headline of every data set in one table, a method a row."""
    known = {(r.scene, r.method, r.metric): r for r in rows}

    def written(row: Row) -> str:
        if row.value is None:
            return MISSING
        scale, digits, sign = (100, 2, " %") if is_fraction(row.metric) else (1, 4, "")
        spread = "" if row.std is None else f" ± {scale * row.std:.{digits}f}"
        return f"{scale * row.value:.{digits}f}{spread}{sign}"

    columns = ("method", *(f"{s.title}: {metric_name(s.metrics[0])}" for s in SCENES))
    lines = [(m, *(written(known[s.title, m, s.metrics[0]]) for s in SCENES)) for m in (COUNTING, *METHODS)]
    return to_markdown(TextTable(columns, tuple(lines)))


def _beside(rows: Sequence[Row]) -> list[str]:
    """Return sentences about the numbers that others found too, with all their digits."""
    return [
        f"{r.scene}: {r.method}'s {metric_name(r.metric)} is {r.value:.4f}, published {r.published:.4f}: "
        f"{100 * (r.value / r.published - 1):+.2f} %."
        for r in rows
        if r.value is not None and r.published is not None
    ]


def _line(method: str, g: Gain, seeds: int) -> tuple[str, ...]:
    written = [MISSING] if g.gain is None else [_gain(value, g.unit) for value in g.gain]
    gain = f"{written[0]} ({written[1]} to {written[2]}) {g.unit}" if g.gain else MISSING
    shares = [f"{100 * n // g.users} %" for n in (g.at_least_better, g.at_least_worse)]
    return (method, g.against, gain, *shares, str(g.better), str(g.worse), str(seeds))


def _gain(value: float, unit: str) -> str:
    if unit != "points":
        return plain(value)
    return difference(value, "accuracy").removesuffix(" points").removeprefix("+")
