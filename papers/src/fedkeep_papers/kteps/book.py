"""What the tables and figures of KTEPS share: scenes, methods, cells, and how results are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data.readers.opened_files import sha256
from fedkeep.experiments.build import build_data
from fedkeep.experiments.config import Config
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.plugins import builtin_names
from fedkeep.experiments.reproductions import Request
from fedkeep.metrics import ag, ap
from fedkeep_papers.kit.cells import Finished, note_on_stale, runs_of
from fedkeep_papers.kit.results import over_seeds, write_results
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.cells import Cell, CellJob, Numbers, Overrides, missing, note_on_gpus

RATIO = 0.01
"""Of the learning rate in personalisation: the column of Table 5 that equals Table 3."""
MEASURED = ("personalization.ratio", str(RATIO))
"""What every table sets: it takes its numbers from curves at ratios of its own."""
FEDAVG = "kteps/fedavg"
"""The configuration that stands for all where only the data matter."""
WORDS = ("man", "good", "book", "movie", "price")
"""Whose neighbours Figure 5 compares; "man" is the paper's."""


@dataclass(frozen=True)
class Scene:
    """A data set of the tables.

    Attributes:
        name: the paper's.
        folder: its place in the folder of data; a scene whose folder is missing is left out.
        overrides: what it changes in the configurations, which are FDU's.
        scales: what a scale changes further.
        changes: what a request changes, last of all.
    """

    name: str
    folder: str
    overrides: Overrides = ()
    scales: Mapping[str, Overrides] = field(default_factory=dict)
    changes: Overrides = ()


SCENES = (
    Scene(
        "FDU",
        "fdu_mtl",
        scales={
            "quick": (
                ("run.rounds", "4"),
                ("data.domains", '["books", "electronics", "kitchen_housewares", "MR"]'),
                ("personalization.steps", "40"),
            ),
            "medium": (("run.rounds", "15"),),
            "full": (),
        },
    ),
    Scene(
        "IYY",
        "tang",
        (
            ("data.reader", "tang"),
            ("method.batch_size", "64"),
            ("method.optimizer.learning_rate", "0.1"),
            ("method.optimizer.rates", '{ "*embedding.*" = 0.01 }'),
            ("run.rounds", "20"),
            ("run.cohort", "3"),
        ),
        {
            "quick": (("run.rounds", "2"), ("data.limit", "200"), ("personalization.steps", "40")),
            "medium": (("run.rounds", "5"), ("data.limit", "10000")),
            "full": (),
        },
    ),
)
"""FDU, which the figures and Table 8 are about, and IYY."""


@dataclass(frozen=True)
class Entry:
    """A method of the tables.

    Attributes:
        config: its built-in configuration.
        ag: what Ag judges: the shared part, each client's own model where there is no shared one, or nothing.
        tuned: whether Ap fine-tunes; a method that shares nothing is judged as it is (Indiv).
        ratios, inferences: further curves and predictions that Tables 5 and 6 ask for.
        words: whose neighbours Figure 5 asks for.
    """

    config: str
    ag: str = "shared"
    tuned: bool = True
    ratios: tuple[float, ...] = (RATIO,)
    inferences: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


OWN_WORDS = "KTEPS⋆, own words"
"""Ours: the projection is of the rows of a client's own words, and the others stay as they are."""

METHODS: Mapping[str, Entry] = {
    "Indiv": Entry("kteps/indiv", ag="own", tuned=False, ratios=()),
    "FS": Entry("kteps/fs"),
    "ASP-MTL": Entry("kteps/asp-mtl", ag="own"),
    "FedAvg": Entry(FEDAVG),
    "FedPer": Entry("kteps/fedper", ag="none"),
    "LG-FedAvg": Entry("kteps/lg-fedavg", ag="none"),
    "FedFusion": Entry("kteps/fedfusion"),
    "PFL-DA": Entry("kteps/pfl-da"),
    "FedProx": Entry("kteps/fedprox"),
    "FedMMD": Entry("kteps/fedmmd"),
    "KTEPS": Entry("kteps/kteps", ratios=published.RATIOS, inferences=published.INFERENCES),
    "KTEPS⋆": Entry("kteps/kteps-star", ratios=published.RATIOS, inferences=published.INFERENCES),
    OWN_WORDS: Entry(
        "kteps/kteps-star-own-words", ratios=published.RATIOS, inferences=published.INFERENCES, words=WORDS
    ),
}

Value = Callable[[Numbers], float]


@dataclass(frozen=True)
class Line:
    """One number of a table: which cells, by seed, and what to take from each."""

    scene: str
    method: str
    metric: str
    cells: Mapping[int, Cell]
    value: Value
    published: float | None = None


OF_FDU = """
**The data.** FDU-MTL is the paper's data set in the copy that is published, in which 559 test reviews stand word for
word among the training reviews; they are kept. The paper does not speak of them.
""".strip()
OF_IYY = """
IYY is run where the folder `tang` of the data holds Tang's files; else its rows show the published numbers alone.
""".strip()
CAVEATS = """
**The missing settings.** The word vectors are not GloVe 6B but skip-gram vectors of 137 million tokens. Lost in every
copy of the paper, and chosen here: the formula of Ap (the mean over the curve), the steps and the interval of
personalisation (200, 20), the noise on uploads (σ = 0.001 for KTEPS and KTEPS⋆), the temperature (4), the kernel's
width, and how many runs its numbers are means of. Accuracies are means over clients, each counting once.
""".strip()


class Book:
    """The cells of one call: their files, what is in them, and where tables go."""

    def __init__(self, request: Request, name: str) -> None:
        if request.data is None:
            raise DataError(
                "The scene FDU reads real data. Name its folder with --data DIR or the variable FEDKEEP_DATA."
            )
        self.request, self.name = request, name
        self.data: Path = request.data
        self.scale = request.scale
        self.seeds = (
            tuple(request.seeds) if request.seeds is not None else (0, 1, 2) if self.scale == "full" else (0,)
        )
        quick = self.scale == "quick"
        self.folder = runs_of(request.out) / "kteps-quick" if quick else request.out / "kteps"
        self.scratch = runs_of(request.out) / f"kteps-{self.scale}-running"
        self.result = name if self.scale == "full" else f"{name}-{self.scale}"
        self.fdu, *others = every = [_changed(scene, request.changes) for scene in SCENES]
        if any(now.name != scene.name for now, scene in zip(every, SCENES, strict=True)):
            others = []
        self.every = [self.fdu, *others]
        self.scenes = [self.fdu, *(s for s in others if (self.data / s.folder).is_dir())]
        self._known: dict[tuple[str, str | None], tuple[dict[str, str], int]] = {}

    def cells(
        self,
        scene: Scene,
        method: str,
        changes: Mapping[str, Any] | None = None,
        words: tuple[str, ...] = (),
        inferences: tuple[str, ...] = (),
    ) -> dict[int, Cell]:
        """Return a method's cell for each seed; none where its configuration does not exist.

        Args:
            scene: the data.
            method: one of ``METHODS``.
            changes: options of the method that are not the configuration's.
            words, inferences: whose neighbours to compare and what predicts besides, where options are changed.
        """
        entry = METHODS[method]
        if entry.config not in builtin_names() or scene not in self.scenes:
            return {}
        options = sorted((changes or {}).items())
        own = tuple((f"method.{key}", json.dumps(value)) for key, value in options) + self._tasks(
            scene, entry
        )
        shown = "".join(f"-{key}-{value}" for key, value in options)
        slug = entry.config.removeprefix("kteps/")
        return {
            seed: Cell(
                f"{scene.name.lower()}-{slug}{shown}-{self.scale}-{seed}",
                entry.config,
                self.overrides(scene, entry.config, own, seed),
                (RATIO,) if changes else entry.ratios,
                inferences if changes else entry.inferences,
                words if changes else entry.words,
            )
            for seed in self.seeds
        }

    def title(self, scene: Scene) -> str:
        """Return a scene's name for rows; it says so where its data are not there and its rows stay empty."""
        return scene.name if scene in self.scenes else f"{scene.name}, no data here"

    def overrides(self, scene: Scene, config: str, own: Overrides, seed: int) -> Overrides:
        """Return what a cell changes in its configuration: the scene's and the scale's, its own, and a request's.

        Raises:
            ConfigError: the request changes what the cell sets itself, so that its row would not be what it says.
        """
        for key, value in (*own, MEASURED) if scene.changes else ():
            mine, theirs = (
                Cell("", config, (*scene.overrides, *order)).resolved()
                for order in ((*scene.changes, (key, value)), ((key, value), *scene.changes))
            )
            if mine != theirs:
                raise ConfigError(
                    "{name} sets {key} itself, here to {value}; changed by --set, its rows would not be what "
                    "they say. Leave it out, or train a single run with it: fedkeep run.",
                    name=self.name,
                    key=key,
                    value=value,
                )
        return (*scene.overrides, *scene.scales[self.scale], *own, *scene.changes, ("seed", str(seed)))

    def source(self, cell: Cell) -> dict[str, str]:
        """Return the sha256 of the files that a cell reads."""
        return self._read(cell.resolved())[0]

    def _read(self, config: Config) -> tuple[dict[str, str], int]:
        """Return the sha256 of the files that a configuration reads, and how many clients they hold."""
        key = config.data.reader, config.model.word_vectors
        if key not in self._known:
            data = build_data(config, self.data)
            source = dict(data.meta["source"])
            if config.model.word_vectors:
                path = self.data / config.model.word_vectors
                source[path.name] = sha256(path) if path.is_file() else ""
            self._known[key] = source, len(data)
        return self._known[key]

    def _tasks(self, scene: Scene, entry: Entry) -> tuple[tuple[str, str], ...]:
        """Return how many clients ASP-MTL tells apart, where the data are not those of its configuration."""
        if entry.config != "kteps/asp-mtl" or scene.name == SCENES[0].name:
            return ()
        overrides = (*scene.overrides, *scene.scales[self.scale], *scene.changes)
        return (("method.tasks", str(self._read(Cell("", entry.config, overrides).resolved())[1])),)

    def task(self, cell: Cell) -> CellJob:
        """Return the cell's place."""
        source = self.source(cell)
        return CellJob(cell, self.data, source, cell.slot(self.folder, source), self.scratch)

    def numbers(self, cells: Mapping[int, Cell]) -> dict[int, Numbers]:
        """Return what the finished ones of some cells left, by seed; those that broke down are left out."""
        return {seed: f.result for seed, f in self.finished(cells).items()}

    def finished(self, cells: Mapping[int, Cell]) -> dict[int, Finished[Numbers]]:
        """Return the finished ones of some cells, by seed; those that broke down are left out."""
        found = {seed: self.task(cell).slot.find() for seed, cell in cells.items()}
        return {seed: f for seed, f in found.items() if f is not None and not f.result.fault}

    def run(self, tasks: Sequence[CellJob], finished: Callable[[], object] | None = None) -> None:
        """Run those of some tasks that are missing and wanted.

        Args:
            tasks: they are checked before the first of them is trained.
            finished: called after every one.
        """
        wanted = [task for task in missing(tasks) if self.request.wants(task.name)]
        for task in wanted:
            task.check()
        run_long_jobs(wanted, self.request.jobs, self.request.progress, finished, on=self.request.on)

    def make(
        self,
        lines: Sequence[Line],
        title: str,
        about: str,
        further: Callable[[], str] = lambda: "",
        figures: Callable[[Path], list[Path]] = lambda _: [],
        possible: Sequence[Mapping[int, Cell]] = (),
    ) -> Path:
        """Run what is missing, and write the results after every cell; returns the Markdown's path.

        Args:
            lines: the numbers of the table; those that have neither cells nor a published number are left out.
            title: its heading.
            about: what is below it.
            further: writes what follows, from the cells that are finished.
            figures: draws the pictures beside a path without an ending; returns their files.
            possible: further cells, by seed: of choices made before, or of other calls; the request's patterns may name
                them too.
        """
        lines = [line for line in lines if line.cells or line.published is not None]
        tasks = [self.task(cell) for line in lines for cell in line.cells.values()]
        others = [self.task(cell) for cells in possible for cell in cells.values()]
        self.request.check(list(dict.fromkeys(task.name for task in (*tasks, *others))))

        def write() -> None:
            self._write(lines, others, title, about, further(), [])

        self.run(tasks, write)
        return self._write(lines, others, title, about, further(), figures(self.request.out / self.result))

    def _write(
        self,
        lines: Sequence[Line],
        others: Sequence[CellJob],
        title: str,
        about: str,
        further: str,
        figures: list[Path],
    ) -> Path:
        rows, faults = [], []
        for line in lines:
            found = self.finished(line.cells)
            rows.append(
                over_seeds(
                    line.scene,
                    line.method,
                    line.metric,
                    {seed: float(line.value(f.result)) for seed, f in found.items()},
                    found.values(),
                    published=line.published,
                    scale=self.scale,
                )
            )
        tasks = [*(self.task(cell) for line in lines for cell in line.cells.values()), *others]
        known = {task.cell.name: task.slot.find() for task in tasks}
        faults = [
            f"- {name}: {f.result.fault}" for name, f in known.items() if f is not None and f.result.fault
        ]
        notes = "\n\n".join(note for note in (note_on_stale(known), note_on_gpus(known)) if note)
        preamble = f"{about.strip()}\n\n{self._what_was_run(lines)}\n\n{notes}\n{further}"
        if faults:
            preamble += "\n\nRuns that broke down:\n\n" + "\n".join(faults) + "\n"
        _, markdown = write_results(
            self.request.out, self.result, rows, title=title, preamble=preamble, figures=figures
        )
        return markdown

    def _what_was_run(self, lines: Sequence[Line]) -> str:
        cut = {s.name: s.scales[self.scale] for s in self.scenes}
        said = "; ".join(
            f"{name}: {', '.join(f'`{key} = {value}`' for key, value in changes) or 'nothing is cut'}"
            for name, changes in cut.items()
        )
        changes = ", ".join(f"`{key} = {value}`" for key, value in self.request.changes.items())
        of_iyy = (
            f" {OF_IYY}"
            if any(line.scene.startswith(scene.name) for scene in SCENES[1:] for line in lines)
            else ""
        )
        data = f"{OF_FDU}{of_iyy}\n\n" if self.fdu.name == SCENES[0].name else ""
        return (
            f"{data}{CAVEATS}\n\nScale `{self.scale}` ({said}).{f' Changed: {changes}.' if changes else ''}"
        )


def _changed(scene: Scene, changes: Mapping[str, str]) -> Scene:
    """Return a scene with a request's changes; other data have a name of their own, and no scale cuts them."""
    usual, reader = (
        Cell("", FEDAVG, (*scene.overrides, *more)).resolved().data.reader for more in ((), changes.items())
    )
    if reader == usual:
        return replace(scene, changes=tuple(changes.items()))
    scales = {
        name: tuple(c for c in cuts if not c[0].startswith("data.")) for name, cuts in scene.scales.items()
    }
    return replace(scene, name=reader, scales=scales, changes=tuple(changes.items()))


def global_accuracy(entry: Entry) -> Value:
    """Return what takes Ag from a cell."""
    return lambda n: ag(n.shared if entry.ag == "shared" else n.test)


def personalized(entry: Entry, what: str = "mean", ratio: float = RATIO, predict: str = "own") -> Value:
    """Return what takes Ap from a cell: the mean of its curve, its last value, or each client's best."""
    if not entry.tuned:
        return lambda n: ag(n.test)
    return lambda n: float(getattr(ap(n.curves[str(ratio)][predict]), what))
