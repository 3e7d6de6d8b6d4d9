"""``fedkeep reproduce public-fashion``: PFLlib's column Fashion-MNIST, in its protocol and in an honest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError
from fedkeep.core.records import read_records
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import Config
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.reproductions import Request
from fedkeep.experiments.run_directory import read_info
from fedkeep_papers.kit.cells import Slot, digest, note_on_stale, runs_of, settings_of
from fedkeep_papers.kit.results import Row, over_seeds, write_results

NAME = "public-fashion"
METHODS: Mapping[str, dict[str, Any]] = {
    "FedAvg": {"kind": "fedavg"},
    "FedProx": {"kind": "fedprox", "mu": 0.01},
    "Local": {"kind": "local"},
    "FedPer": {"kind": "fedper", "private": "fc.*"},
    "FedRep": {"kind": "fedrep", "private": "fc.*", "head_epochs": 1, "weighting": "examples"},
    "FedRoD": {"kind": "fedrod", "classifier": "fc"},
    "LG-FedAvg": {"kind": "lg_fedavg", "private": ["conv1.*", "conv2.*", "fc1.*"]},
    "Ditto": {"kind": "ditto", "lam": 0.1},
    "APFL": {"kind": "apfl", "weighting": "examples"},
}
PUBLISHED = {
    "FedAvg": 0.8585,
    "FedProx": 0.8563,
    "FedPer": 0.9744,
    "FedRep": 0.9756,
    "FedRoD": 0.9752,
    "Ditto": 0.9747,
    "APFL": 0.9725,
}
"""Accuracy after 2,000 rounds, at the round that was best on the test images (arXiv:2312.04992, Table 2)."""
PUBLISHED_ROUNDS = 2000
ROUNDS: Mapping[int, tuple[str, ...]] = {
    100: tuple(name for name in METHODS if name != "FedRoD"),
    200: ("Local", *PUBLISHED),
    PUBLISHED_ROUNDS: ("Local", *PUBLISHED),
}
"""Of which methods runs of so many rounds are made."""
LONGEST = {"quick": 2, "medium": 200, "full": PUBLISHED_ROUNDS}
"""The most rounds of a scale; the quick one has these alone."""
PROTOCOLS = {"best": "best round by test, as PFLlib", "chosen": "round chosen on validation"}
PREAMBLE = """\
20 clients, all 70,000 images divided by Dirichlet(0.1), three quarters of a client's to train; PFLlib's network, one
pass a round over the training images in mini-batches of 10, SGD with rate 0.005, all clients in every round. Accuracy
is over all clients' test images. Every mean weighs clients by their numbers of images, as PFLlib's do. The published
numbers are of 2,000 rounds, whatever the rounds beside which they stand. Five things differ: a fifth of the images that
PFLlib tests on are for validation here; a pass's last mini-batch may be smaller, where PFLlib leaves it out; the draw of
the images is another one; Ditto's λ is 0.1, where PFLlib's command line has 0; and APFL is its paper's algorithm:
a client's own model is trained by the gradient of the mixture. PFLlib trains it by its own gradient, and puts the
mixture in its place after each round.
"PFLlib's protocol" takes the largest accuracy on test of all rounds, which is too good by what chance adds."""


@dataclass(frozen=True)
class Found:
    """Accuracies on test, fractions.

    Attributes:
        best: the largest of all rounds.
        chosen: at the round that is best on validation.
        best_round, chosen_round: these rounds.
        environment: where it was computed.
    """

    best: float
    chosen: float
    best_round: int
    chosen_round: int
    environment: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A run: a method, for some rounds, with a seed; a task of ``experiments.long_jobs``.

    Attributes:
        method, rounds, seed: what is run.
        limit: how many images are read; None: all.
        data: the folder of real data.
        runs, results: the folders of runs and of finished cells.
        source: sha256 of the images' files.
    """

    method: str
    rounds: int
    seed: int
    limit: int | None
    data: Path | None
    runs: Path
    results: Path
    source: Mapping[str, str]

    @property
    def name(self) -> str:
        """For ``--only``, and the begin of the names of the run's folder and its file."""
        return f"fashion-{self.method.lower()}-{self.rounds}-{self.seed}"

    def config(self) -> Config:
        """Return the run's configuration: PFLlib's defaults."""
        limit = {} if self.limit is None else {"limit": self.limit}
        return Config.model_validate(
            {
                "name": self.method,
                "seed": self.seed,
                "data": {"reader": "pfllib_fashion", "seed": 1, **limit},
                "model": {"kind": "fedkeep_papers.public.pfllib:FourLayerCNN"},
                "method": {**METHODS[self.method], "batch_size": 10, "optimizer": {"learning_rate": 0.005}},
                "run": {"rounds": self.rounds, "cohort": 20, "evaluate_every": 1},
            }
        )

    @cached_property
    def slot(self) -> Slot[Found]:
        """Where the result is kept."""
        settings = settings_of(self.config())
        file = self.results / f"{self.name}-{digest(settings, self.source)}.json"
        return Slot(kind=Found, file=file, settings=settings, source=self.source, rounded=True)

    @property
    def folder(self) -> Path:
        """The run's; with other settings or data it is another."""
        return self.runs / self.slot.run

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Train, or go on with a run that was stopped; see ``places.LongJob``."""
        resume = (self.folder / "run.json").exists()
        run_config(
            self.config(),
            folder=self.data,
            out=self.folder,
            resume=resume,
            progress=progress,
            workers=None if alone else 1,
        )


def found_of(folder: Path) -> Found:
    """Return the result of a finished run.

    Raises:
        RunError: it was not evaluated.
    """
    records = [
        r for r in read_records(folder / "records.jsonl") if r.client is None and r.metric == "accuracy"
    ]
    valid, test = ({r.round: r.value for r in records if r.split == split} for split in ("valid", "test"))
    if not valid or not test:
        raise RunError("{folder} holds no accuracies on 'valid' and 'test'.", folder=folder)
    best, chosen = (max(split, key=lambda n, of=split: (of[n], -n)) for split in (test, valid))  # type: ignore[misc]
    environment = read_info(folder).get("environment") or {}
    return Found(test[best], test[chosen], best, chosen, environment)


def public_fashion(request: Request) -> Path:
    """Run what is not finished, and write the table.

    ``quick`` takes two rounds of 2,000 images, ``medium`` 100 and 200 rounds, ``full`` the 2,000 rounds too.

    Raises:
        DataError: the folder of data is not named, or holds no Fashion-MNIST.
    """
    quick = request.scale == "quick"
    runs = runs_of(request.out)
    results = runs / "public-quick" if quick else request.out / "public"
    place = (2_000 if quick else None, request.data, runs / f"{NAME}-{request.scale}", results)
    seeds = (0,) if request.seeds is None else tuple(request.seeds)
    longest = LONGEST[request.scale]
    asked = {longest: tuple(METHODS)} if quick else {n: of for n, of in ROUNDS.items() if n <= longest}
    lengths = [(m, n) for n, of in asked.items() for m in of]
    cells = {(m, n, seed): Cell(m, n, seed, *place, {}) for m, n in lengths for seed in seeds}
    request.check([cell.name for cell in cells.values()])
    source = source_of(next(iter(cells.values())))
    cells = {key: replace(cell, source=source) for key, cell in cells.items()}

    def write() -> Path:
        for cell in cells.values():
            if cell.slot.read() is None and is_finished(cell.folder):
                cell.slot.write(found_of(cell.folder))
        found = {key: f for key, cell in cells.items() if (f := cell.slot.find()) is not None}
        rows: list[Row] = []
        for method, rounds in lengths:
            own = {seed: found[method, rounds, seed] for seed in seeds if (method, rounds, seed) in found}
            for field, title in PROTOCOLS.items():
                published = PUBLISHED.get(method) if field == "best" and not quick else None
                values = {seed: asdict(f.result)[field] for seed, f in own.items()}
                rows.append(
                    over_seeds(
                        f"{rounds:,} rounds, {title}",
                        method,
                        "accuracy",
                        values,
                        own.values(),
                        published=published,
                        scale=request.scale,
                    )
                )
        stale = note_on_stale({cells[key].slot.file.stem: f for key, f in found.items()})
        name = NAME if request.scale == "full" else f"{NAME}-{request.scale}"
        text = "\n\n".join(part for part in (PREAMBLE, stale) if part)
        return write_results(request.out, name, rows, title="PFLlib's Fashion-MNIST", preamble=text)[1]

    todo = [cell for cell in cells.values() if request.wants(cell.name) and cell.slot.read() is None]
    run_long_jobs(todo, request.jobs, request.progress, write, on=request.on)
    return write()


def source_of(cell: Cell) -> Mapping[str, str]:
    """Return the sha256 of the images' files."""
    return dict(build_data(cell.config(), cell.data).meta["source"])


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a finished run."""
    return (folder / "run.json").exists() and bool(read_info(folder).get("status") == "finished")
