"""A table or figure of the mixture of experts at one scale: its cells, their values, and the words around them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep.core.errors import DataError
from fedkeep.experiments.reproduce.moe_cells import run_cells
from fedkeep.experiments.reproduce.moe_results import Cell, Result, read_result
from fedkeep.experiments.reproduce.moe_scene import NAMES, Adapting, Federation, Scene
from fedkeep.experiments.reproduce.moe_variants import Variant

if TYPE_CHECKING:
    from fedkeep.experiments.reproduce import Request
    from fedkeep.report.results import Row

PROTOCOLS = {"valid": "paper's protocol", "test": "clean protocol"}
METRIC = "accuracy_user_mean"


@dataclass(frozen=True)
class Size:
    """How much a scale runs.

    Attributes:
        federation, adapting: settings.
        seeds: by default.
        p: the fractions of majority classes of Figures 2-4.
        train: the training sizes of Figure 5, and ``p5`` its fractions.
    """

    federation: Federation
    adapting: Adapting
    seeds: tuple[int, ...]
    p: tuple[float, ...]
    train: tuple[int, ...]
    p5: tuple[float, ...]


EVERY_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
COARSE_P = (0.2, 0.4, 0.6, 0.8, 1.0)
SIZES = {
    "quick": Size(Federation(30), Adapting(16, 5, 2), (0,), (0.2, 0.6, 1.0), (10, 100), (0.2, 0.6, 1.0)),
    "medium": Size(Federation(300), Adapting(), (0, 1), COARSE_P, (10, 50, 100), (0.2, 0.6, 1.0)),
    "full": Size(Federation(), Adapting(), (0, 1, 2, 3), EVERY_P, (10, 50, 100, 500), COARSE_P),
}


@dataclass(frozen=True)
class Sheet:
    """The cells of a table or figure at one scale.

    Attributes:
        request: folders, scale, seeds and workers.
        size: of the scale.
        cells: (cell, its variants).
    """

    request: Request
    size: Size
    cells: tuple[tuple[Cell, tuple[Variant, ...]], ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that are run."""
        return seeds_of(self.request, self.size)

    @property
    def folder(self) -> Path:
        """Of the cells' results."""
        return self.request.out / "moe"

    def run(self) -> None:
        """Compute what is missing.

        Raises:
            DataError: the folder of data is not named.
        """
        if self.request.data is None:
            raise DataError(
                "The mixture of experts' scenes read real images. Name their folder with --data DIR or the variable "
                "FEDKEEP_DATA."
            )
        run_cells(
            self.cells, self.request.data, self.folder, self.request.out / "runs" / "moe", self.request.workers
        )  # fmt: skip

    def values(self, scene: Scene, variant: Variant, split: str, **changes: float) -> dict[int, float]:
        """Return a variant's mean accuracy over clients by seed."""
        found = {}
        for seed in self.seeds:
            federation = replace(self.size.federation, **changes)  # type: ignore[arg-type]
            result = self.result(Cell(replace(scene, seed=seed), federation, self.size.adapting), variant)
            if result is not None and not math.isnan(result.mean(split)):
                found[seed] = result.mean(split)
        return found

    def result(self, cell: Cell, variant: Variant) -> Result | None:
        """Return a result that was computed."""
        return read_result(cell, variant, self.folder)


def seeds_of(request: Request, size: Size) -> tuple[int, ...]:
    """Return the seeds that a request names, or the scale's."""
    return tuple(request.seeds) if request.seeds is not None else size.seeds


def sheet(
    request: Request, scenes: Iterable[Scene], variants: Sequence[Variant], federations: Sequence[Federation] = ()
) -> Sheet:  # fmt: skip
    """Return the cells of these scenes for all seeds of a scale; by default with the scale's FedAvg."""
    size = SIZES[request.scale]
    cells = tuple(
        (Cell(replace(scene, seed=seed), federation, size.adapting), tuple(variants))
        for scene in scenes
        for federation in (federations or (size.federation,))
        for seed in seeds_of(request, size)
    )
    return Sheet(request, size, cells)


def row(
    own: Sheet,
    scene: Scene,
    variant: Variant,
    split: str,
    published: float | None = None,
    *,
    title: str = "",
    **changes: float,
) -> Row:
    """Return the row of a variant in a scene; ``title`` tells it from others of other settings of FedAvg."""
    from fedkeep.report.results import over_seeds

    name = scene_name(scene, split) + (f", {title}" if title and f"q = {scene.q:g}" not in title else "")
    return over_seeds(
        name, variant.name, METRIC, own.values(scene, variant, split, **changes), published=published,
        scale=own.request.scale, commit=commit_of(own, scene, variant, **changes),
    )  # fmt: skip


def commit_of(own: Sheet, scene: Scene, variant: Variant, **changes: float) -> str:
    """Return the commits that computed a row's cells."""
    federation = replace(own.size.federation, **changes)  # type: ignore[arg-type]
    found = [
        own.result(Cell(replace(scene, seed=s), federation, own.size.adapting), variant) for s in own.seeds
    ]
    return ", ".join(dict.fromkeys(r.commit for r in found if r is not None and r.commit))


def scene_name(scene: Scene, split: str) -> str:
    """Return a scene's name in tables."""
    opted = f", q = {scene.q:g}" if scene.q else ""
    return (
        f"{NAMES[scene.dataset]}, {scene.clients} × {scene.train}, p = {scene.p:g}{opted}, {PROTOCOLS[split]}"
    )


def differences(own: Sheet, scene: Scene, one: Variant, other: Variant, split: str) -> list[float]:
    """Return one minus the other for each seed that both have."""
    a, b = own.values(scene, one, split), own.values(scene, other, split)
    return [a[seed] - b[seed] for seed in a if seed in b]


def partitions(own: Sheet, folder: Path) -> list[Path]:
    """Draw the clients × classes of the first seed's scenes with the smallest and the largest p."""
    from fedkeep.data import class_counts
    from fedkeep.experiments.build import build_data
    from fedkeep.report import plots

    ordered = sorted(own.cells, key=lambda pair: (pair[0].scene.p, pair[0].scene.q))
    made = []
    for cell in dict.fromkeys((ordered[0][0].scene, ordered[-1][0].scene)):
        data = build_data(own.size.federation.config(cell), own.request.data)
        opted = data.columns.get("opted_in")
        out = [] if opted is None else [c for c in range(len(data)) if not opted[data.rows(c).start]]
        path = folder / f"partition-p{cell.p:g}-q{cell.q:g}.png"
        made.append(
            plots.partition_plot(
                class_counts(data, "train").tolist(), path, clients=list(data.ids), classes=data.meta["label_names"],
                title=f"{NAMES[cell.dataset]}, training images, p = {cell.p:g}, seed {cell.seed}", opted_out=out,
            )
        )  # fmt: skip
    return made


def preamble(own: Sheet) -> str:
    """Return Markdown that says what was run."""
    f, a, scenes = own.size.federation, own.size.adapting, [cell.scene for cell, _ in own.cells]
    scene = scenes[0]
    paper = (f.rounds, a) == (Federation().rounds, Adapting())
    text = f"""
FedAvg: {f.rounds:,} rounds of {f.epochs} local epochs, batch {f.batch_size}, Adam {f.learning_rate:g}; on the devices
at most {a.epochs} epochs, the loss on the client's validation images measured every {a.every} epochs, stopped after
{a.patience} measurements without improvement, best weights kept.
{"As in the paper." if paper else f"The paper: {Federation().rounds:,} rounds and {Adapting()}; this scale cuts them."}
Accuracy is the mean over clients, each on images drawn with its own majority classes: {scene.valid} validation images
("{PROTOCOLS["valid"]}": the same that stop training, so the numbers are optimistic) and {scene.test} others
("{PROTOCOLS["test"]}"). Opted-out clients are fine-tuned and counted like all.

Choices where the paper is silent or its code differs: the mixture is of probabilities (the authors' code mixes
log-probabilities, a row of its own); early stopping keeps the best weights (the code reports the best but goes on with
the last); counts are rounded, not truncated; networks as in the authors' code of November 2020.
"""
    if any(s.dataset == "cifar10" for s in scenes):
        text += (
            "\nThe CIFAR-10 images at hand are a JPEG re-encoding (quality about 75) of the lossless originals; "
            "accuracies are close to, but not comparable digit for digit with, those on the originals.\n"
        )
    return text


def result_name(name: str, scale: str) -> str:
    """Return the results' name: a shorter scale doesn't replace the full one's."""
    return name if scale == "full" else f"{name}-{scale}"
