"""The table that the mixture of experts' paper lacks: the library's personalised methods on the same scenes.

Every method trains its own federation with FedAvg's local settings (Adam, 3 epochs, batch 10) and is judged at the
round that is best on the validation images, the counterpart of early stopping; one that adapts afterwards is judged
after the last round. Its settings beyond these are the
method's defaults or its paper's. The ways from one run of FedAvg come from the cells of ``moe-table2``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep.core.optim import adam, sgd
from fedkeep.core.records import Record
from fedkeep.experiments.build import build_data, build_model
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.reproductions import Request
from fedkeep.experiments.run import Run
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import (
    Method,
    Phase,
    apfl,
    averaging,
    ditto,
    fedmmd,
    fedper,
    fedprox,
    fedrecon,
    fedrep,
    lg_fedavg,
    per_fedavg,
    pfedme,
    pfl_da,
)
from fedkeep.methods.pfl_da import AddGate
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep.report.wording import MISSING
from fedkeep_papers.kit.cells import Slot, note_on_stale
from fedkeep_papers.kit.results import Row, over_seeds, write_results
from fedkeep_papers.moe.scene import Federation, Scene, changed, source_of
from fedkeep_papers.moe.sheet import (
    METRIC,
    PROTOCOLS,
    TABLE2,
    Way,
    preamble,
    result_name,
    row,
    scene_name,
    sheet,
)
from fedkeep_papers.moe.variants import PAPER

HEAD, ENCODER = "out.*", ("conv1.*", "conv2.*", "fc1.*")
MEAN = averaging(by="examples")
"""Of all methods: clients have equally many images, so what they are weighed by changes rounding alone."""
ROUNDS = {"quick": 10, "medium": 150, "full": 500}


@dataclass(frozen=True)
class Entry:
    """A method of the table.

    Attributes:
        about: its settings in words.
        make: makes it, given the local phase.
        adapts: clients have models of their own only after the method's adaptation, at the end.
    """

    about: str
    make: Callable[[Phase], Method]
    adapts: bool = False


METHODS: dict[str, Entry] = {
    "FedProx": Entry("μ = 0.01", lambda p: fedprox(0.01, local=p)),
    "FedMMD": Entry("λ = 0.01", lambda p: fedmmd(local=p)),
    "FedPer": Entry("a private last layer", lambda p: fedper(HEAD, local=p)),
    "FedRep": Entry(
        "a private last layer, 3 epochs of it, then 3 of the rest",
        lambda p: fedrep(HEAD, head_epochs=3, local=p, server=MEAN),
    ),
    "LG-FedAvg": Entry(
        "both convolutions and the first linear layer are private", lambda p: lg_fedavg(ENCODER, local=p)
    ),
    "FedRecon": Entry(
        "the last layer is made anew in each round, by 50 steps of SGD 0.1", lambda p: fedrecon(HEAD, local=p)
    ),
    "Ditto": Entry("λ = 0.1", lambda p: ditto(0.1, local=p)),
    "APFL": Entry("α is learned, from 0.5", lambda p: apfl(0.5, local=p, server=MEAN)),
    "pFedMe": Entry(
        "λ = 15, 5 steps of Adam 1e-3 on each mini-batch; w by SGD 0.01",
        lambda p: pfedme(
            15.0,
            own_optimizer=adam(10 * p.optimizer.learning_rate),
            local=p.but(optimizer=sgd(0.01)),
            server=MEAN,
        ),
    ),
    "Per-FedAvg": Entry(
        "first order, α = 0.01; judged after one step of each client",
        lambda p: per_fedavg(local=p, server=MEAN),
        adapts=True,
    ),
    "PFL-DA": Entry(
        "a private copy and a linear gate on features", lambda p: pfl_da(local=p).but(extend=AddGate("out"))
    ),
}


@dataclass(frozen=True)
class Found:
    """A cell's result: mean accuracies over clients.

    Attributes:
        name: of the method.
        valid, test: at the round that is best on the validation images.
        round: that round.
        last_valid, last_test: at the last round.
        curve: round, valid and test of every evaluation.
    """

    name: str
    valid: float
    test: float
    round: int
    last_valid: float
    last_test: float
    curve: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class MethodCell:
    """One federation of a method.

    Attributes:
        name: of ``METHODS``.
        scene: the data.
        rounds: of federation.
        epochs, batch_size, learning_rate: local training, as FedAvg's.
    """

    name: str
    scene: Scene
    rounds: int
    epochs: int = Federation.epochs
    batch_size: int = Federation.batch_size
    learning_rate: float = Federation.learning_rate

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as plain data."""
        return {**asdict(self), "scene": self.scene.settings(), "about": METHODS[self.name].about}

    def slot(self, folder: Path, source: Mapping[str, str]) -> Slot[Found]:
        """Return where the result is kept, given the sha256 of the images' files."""
        return Slot(kind=Found, file=self.file(folder), settings=self.settings(), source=source)

    def file(self, folder: Path) -> Path:
        """Return the file of the result."""
        name = self.name.lower()
        return (
            folder
            / f"{self.scene.slug}-{name}-r{self.rounds}{'' if self.epochs == 3 else f'-e{self.epochs}'}.json"
        )

    def method(self) -> Method:
        """Return the method."""
        phase = Phase(optimizer=adam(self.learning_rate), epochs=self.epochs, batch_size=self.batch_size)
        return METHODS[self.name].make(phase)


@dataclass(frozen=True)
class MethodJob:
    """Computes a cell.

    Attributes:
        cell: the cell.
        data: the folder of real data.
        results, runs: folders.
    """

    cell: MethodCell
    data: Path | None
    results: Path
    runs: Path

    @property
    def name(self) -> str:
        """The file's."""
        return self.cell.file(self.results).stem

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Compute the cell and leave its file; see ``places.LongJob``."""
        run = self.run(None if alone else 1, progress).last
        valid, test = (_curve(run.history, split) for split in ("valid", "test"))
        if METHODS[self.cell.name].adapts:
            valid, test = ({run.round: run.evaluate(split)[METRIC]} for split in ("valid", "test"))
        best = max(valid, key=lambda number: (valid[number], -number))
        curve = tuple((number, valid[number], test[number]) for number in sorted(valid))
        self.cell.slot(self.results, source_of(self.cell.scene, self.data)).write(
            Found(self.cell.name, valid[best], test[best], best, valid[run.round], test[run.round], curve)
        )

    def run(self, workers: int | None = None, progress: bool | None = None) -> Run:
        """Train, or go on with a run that was stopped; the arguments are ``simulate``'s."""
        cell = self.cell
        config = Federation(cell.rounds).config(cell.scene)
        data = build_data(config, self.data)
        out = self.runs / cell.file(self.results).stem
        return simulate(
            build_model(config, data),
            cell.method(),
            data,
            rounds=cell.rounds,
            cohort=cell.scene.clients,
            seed=cell.scene.seed,
            out=out,
            resume=(out / "run.json").exists(),
            name=cell.name,
            progress=progress,
            evaluate_every=max(1, cell.rounds // 50),
            workers=workers,
        )


def _curve(history: Sequence[Record], split: str) -> dict[int, float]:
    own = (r for r in history if r.split == split and r.metric == METRIC and r.client is None)
    return {r.round: r.value for r in own if math.isfinite(r.value)}


def table(request: Request) -> Path:
    """All methods on the scenes of Table 2, both protocols."""
    scenes = [changed(Scene(p=p), request.changes) for p in TABLE2]
    ways = [Way(v) for v in PAPER]
    own = sheet(request, scenes, ways)
    rounds = ROUNDS[request.scale]
    cells = {
        (name, scene, seed): MethodCell(name, replace(scene, seed=seed), rounds, own.size.federation.epochs)
        for name in METHODS
        for scene in scenes
        for seed in own.seeds
    }
    own = replace(own, others=tuple(cell.file(own.folder).stem for cell in cells.values()))
    own.run()
    slots = {key: c.slot(own.folder, own.source(c.scene)) for key, c in cells.items()}
    missing = [
        MethodJob(cells[key], request.data, own.folder, own.runs)
        for key, slot in slots.items()
        if slot.read() is None
    ]
    todo = [task for task in missing if request.wants(task.name)]
    run_long_jobs(todo, request.jobs, request.progress, on=request.on)
    rows = []
    for split in PROTOCOLS:
        for scene in scenes:
            published = TABLE2[scene.p] if split == "valid" and not request.changes else {}
            rows += [row(own, scene, w, split, published.get(w.name, (None, None))[0]) for w in ways]
            for name in METHODS:
                found = {s: f for s in own.seeds if (f := slots[name, scene, s].find()) is not None}
                values = {s: f.result.valid if split == "valid" else f.result.test for s, f in found.items()}
                title = scene_name(scene, split)
                rows.append(over_seeds(title, name, METRIC, values, found.values(), scale=request.scale))
    settings = "\n".join(f"- {name}: {entry.about}" for name, entry in METHODS.items())
    adapting = ", ".join(name for name, entry in METHODS.items() if entry.adapts)
    extra = (
        f"FedProx to PFL-DA train {rounds:,} rounds of their own, all clients in each, and are judged at the round "
        f"that is best on the validation images, but for {adapting} after the last one, when clients adapt; "
        f"FedProx and FedMMD have one global model. No method's settings were searched:\n\n{settings}"
    )
    name = result_name("moe-methods", request.scale)
    title = "Personalised methods on the mixture of experts' scenes"
    stale = note_on_stale({cells[key].file(own.folder).stem: slot.find() for key, slot in slots.items()})
    text = "\n\n".join([preamble(own), extra, stale, _together(rows, scenes)])
    return write_results(request.out, name, rows, title=title, preamble=text)[1]


def _together(rows: Sequence[Row], scenes: Sequence[Scene]) -> str:
    """Return Markdown: the clean protocol in one table, a method a row."""
    known = {(r.method, r.scene): r.value for r in rows}
    lines = []
    for name in dict.fromkeys(r.method for r in rows):
        values = [known[name, scene_name(scene, "test")] for scene in scenes]
        whole = [v for v in values if v is not None]
        mean = sum(whole) / len(values) if len(whole) == len(values) else None
        lines.append((name, *(MISSING if v is None else f"{100 * v:.1f}" for v in (*values, mean))))
    columns = ("accuracy (%), clean protocol", *(f"p = {s.p:g}" for s in scenes), "mean")
    return to_markdown(TextTable(columns, tuple(lines)))
