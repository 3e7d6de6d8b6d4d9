"""A table or figure of the mixture of experts at one scale: its cells, their values, and the words around them.

Published numbers (arXiv:2010.02056) are fractions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError
from fedkeep.data import class_counts
from fedkeep.data.readers.cifar import CIFAR100_TEST
from fedkeep.experiments.reproductions import Request
from fedkeep.report.blocks import Figure
from fedkeep.report.facts import dealing
from fedkeep.report.text_tables import TextTable, mean_std, to_markdown
from fedkeep.report.wording import MISSING
from fedkeep_papers.kit import plots
from fedkeep_papers.kit.cells import Finished, note_on_stale, runs_of
from fedkeep_papers.kit.results import Row, over_seeds
from fedkeep_papers.moe.cells import run_cells
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import Adapting, Federation, Scene, clients_of, source_of
from fedkeep_papers.moe.variants import (
    AUGMENTED,
    AUTHORS,
    FEDAVG,
    FROM_TUNED,
    MIXTURE,
    OTHERS,
    TUNED,
    Variant,
)

PROTOCOLS = {"valid": "paper's protocol", "test": "clean protocol"}
METRIC = "accuracy_user_mean"


@dataclass(frozen=True)
class Size:
    """How much a scale runs.

    Attributes:
        federation, adapting: settings.
        seeds: by default.
        p: the fractions of majority classes of Figures 2-4.
        train: the training sizes of Figure 5, ``p5`` its fractions, and ``small`` its FedAvg: small sets are quick.
        variants: beside the paper's ways, of ``moe-variants``.
        federations: other settings of FedAvg there: (what changes, label, ways of adapting); none at full length, where
            each would be as long as Table 2.
    """

    federation: Federation
    adapting: Adapting
    seeds: tuple[int, ...]
    p: tuple[float, ...]
    train: tuple[int, ...]
    p5: tuple[float, ...]
    small: Federation
    variants: tuple[Variant, ...]
    federations: tuple[tuple[dict[str, Any], str, tuple[Variant, ...]], ...] = ()


EVERY_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
COARSE_P = (0.2, 0.4, 0.6, 0.8, 1.0)
AUGMENT = ({"augment": True}, "FedAvg augmented", (FEDAVG, TUNED, MIXTURE, *AUGMENTED[1:]))
PULLED = ({"mu": 0.01}, "FedProx", (FEDAVG, TUNED, MIXTURE))
MOMENTUM = ({"server_momentum": 0.9}, "server momentum", (FEDAVG, TUNED, MIXTURE))
SIZES = {
    "quick": Size(
        Federation(30),
        Adapting(16, 5, 2),
        (0,),
        (0.2, 0.6, 1.0),
        (10, 100),
        (0.2, 0.6, 1.0),
        Federation(30),
        (FROM_TUNED, AUGMENTED[2]),
    ),
    "medium": Size(
        Federation(300),
        Adapting(),
        (0, 1),
        COARSE_P,
        (10, 50, 100),
        (0.2, 0.6, 1.0),
        Federation(),
        (*OTHERS, *AUGMENTED),
        (AUGMENT, PULLED, MOMENTUM),
    ),
    "full": Size(
        Federation(),
        Adapting(),
        (0, 1, 2, 3),
        EVERY_P,
        (10, 50, 100, 500),
        COARSE_P,
        Federation(),
        (AUTHORS, FROM_TUNED, *AUGMENTED),
    ),
}


@dataclass(frozen=True)
class Way:
    """A way to clients' models: what FedAvg does, and how clients adapt from it.

    Attributes:
        variant: how clients adapt.
        federation: settings of FedAvg; None: the scale's.
        label: tells the way from others of the variant.
    """

    variant: Variant
    federation: Federation | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """For tables."""
        return self.variant.name + (f"; {self.label}" if self.label else "")


@dataclass(frozen=True)
class Sheet:
    """The cells of a table or figure at one scale.

    Attributes:
        request: folders, scale, seeds and workers.
        size: of the scale.
        cells: (cell, its variants).
        others: names of the table's runs that are no cells of the sheet.
    """

    request: Request
    size: Size
    cells: tuple[tuple[Cell, tuple[Variant, ...]], ...]
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of all runs."""
        return list(dict.fromkeys(cell.name(v) for cell, variants in self.cells for v in variants))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that are run."""
        return seeds_of(self.request, self.size)

    @property
    def folder(self) -> Path:
        """Of the cells' results."""
        return self.request.out / "moe"

    @property
    def runs(self) -> Path:
        """The folder of federated runs and experts."""
        return runs_of(self.request.out) / "moe"

    def source(self, scene: Scene) -> Mapping[str, str]:
        """Return the sha256 of the files of a scene's images."""
        return source_of(scene, self.request.data)

    def run(self) -> None:
        """Compute what is missing and wanted.

        Raises:
            DataError: the folder of data is not named.
            ConfigError: runs are chosen that it does not have.
        """
        if self.request.data is None:
            raise DataError(
                "The mixture of experts' scenes read real images. Name their folder with --data DIR or the variable "
                "FEDKEEP_DATA."
            )
        request = self.request
        request.check([*self.names, *self.others])
        run_cells(
            self.cells,
            request.data,
            self.folder,
            self.runs,
            request.jobs,
            request.progress,
            request.wants,
            request.on,
        )

    def values(self, scene: Scene, way: Way, split: str) -> dict[int, float]:
        """Return a way's mean accuracy over clients by seed."""
        means = {seed: f.result.mean(split) for seed, f in self.finished(scene, way).items()}
        return {seed: mean for seed, mean in means.items() if not math.isnan(mean)}

    def finished(self, scene: Scene, way: Way) -> dict[int, Finished[Result]]:
        """Return a way's finished cells by seed."""
        federation = way.federation or self.size.federation
        cells = {s: Cell(replace(scene, seed=s), federation, self.size.adapting) for s in self.seeds}
        slots = {s: cell.slot(self.folder, way.variant, self.source(scene)) for s, cell in cells.items()}
        return {s: found for s, slot in slots.items() if (found := slot.find()) is not None}

    def found(self) -> dict[str, Finished[Any] | None]:
        """Return every result that was asked for, by its name."""
        return {
            f"{cell.name(variant)} ({variant.name})": cell.slot(
                self.folder, variant, self.source(cell.scene)
            ).find()
            for cell, variants in self.cells
            for variant in variants
        }


def has_test_images_alone(scene: Scene, request: Request) -> bool:
    """Tell whether the folder of data has CIFAR-100's official test images and no others."""
    return request.data is not None and CIFAR100_TEST in source_of(scene, request.data)


def seeds_of(request: Request, size: Size) -> tuple[int, ...]:
    """Return the seeds that a request names, or the scale's."""
    return tuple(request.seeds) if request.seeds is not None else size.seeds


def sheet(
    request: Request, scenes: Iterable[Scene], ways: Sequence[Way], federation: Federation | None = None
) -> Sheet:
    """Return the cells of these scenes for all seeds of a scale; ``federation`` replaces the scale's FedAvg."""
    size = SIZES[request.scale]
    size = replace(size, federation=federation or size.federation)
    by_federation: dict[Federation, list[Variant]] = {}
    for way in ways:
        by_federation.setdefault(way.federation or size.federation, []).append(way.variant)
    cells = tuple(
        (Cell(replace(scene, seed=seed), federation, size.adapting), tuple(variants))
        for scene in scenes
        for federation, variants in by_federation.items()
        for seed in seeds_of(request, size)
    )
    return Sheet(request, size, cells)


def row(
    own: Sheet, scene: Scene, way: Way, split: str, published: float | None = None, *, title: str = ""
) -> Row:
    """Return the row of a way in a scene; ``title`` tells the scene from others."""
    name = scene_name(scene, split) + (f", {title}" if title and f"q = {scene.q:g}" not in title else "")
    found = own.finished(scene, way)
    values = {seed: f.result.mean(split) for seed, f in found.items()}
    scale = own.request.scale
    return over_seeds(name, way.name, METRIC, values, found.values(), published=published, scale=scale)


def scene_name(scene: Scene, split: str) -> str:
    """Return a scene's name in tables."""
    opted = f", {scene.opted_out}" if scene.q else ""
    return f"{scene.title}, {scene.clients} × {scene.train}, p = {scene.p:g}{opted}, {PROTOCOLS[split]}"


def differences(own: Sheet, scene: Scene, one: Way, other: Way, split: str) -> list[float]:
    """Return one minus the other for each seed that both have."""
    a, b = own.values(scene, one, split), own.values(scene, other, split)
    return [a[seed] - b[seed] for seed in a if seed in b]


def paired(own: Sheet, scenes: Sequence[Scene], pairs: Sequence[tuple[Way, Way]], note: str = "") -> str:
    """Return Markdown: a table of differences between ways, paired by seed, in both protocols."""
    lines = []
    for split, protocol in PROTOCOLS.items():
        for one, other in pairs:
            cells = [_points(differences(own, scene, one, other, split)) for scene in scenes]
            if one != other:
                lines.append((protocol, f"{one.name} − {other.name}", *cells))
    columns = ("protocol", "difference in points, paired by seed", *(f"p = {s.p:g}" for s in scenes))
    return to_markdown(TextTable(columns, tuple(dict.fromkeys(lines)), left=2, note=note))


def falls(own: Sheet, scenes: Mapping[float, Sequence[Scene]], ways: Sequence[Way]) -> str:
    """Return Markdown: what ways lose where clients opt out, against the first factor's scenes, in both protocols.

    Args:
        own: the sheet.
        scenes: by opt-out factor, at the same fractions p.
        ways: whose losses.
    """
    (first, usual), *others = scenes.items()
    lines = []
    for split, protocol in PROTOCOLS.items():
        for q, group in others:
            for way in ways:
                cells = []
                for before, after in zip(usual, group, strict=True):
                    known, left = own.values(before, way, split), own.values(after, way, split)
                    cells.append(_points(left[seed] - known[seed] for seed in left if seed in known))
                lines.append((protocol, f"q = {q:g}", way.name, *cells))
    columns = (
        "protocol",
        "opted out",
        f"change in points from q = {first:g}",
        *(f"p = {s.p:g}" for s in usual),
    )
    return to_markdown(TextTable(columns, tuple(lines), left=3))


def _points(differences: Iterable[float]) -> str:
    """Return the mean of differences of fractions, in points, and their deviation."""
    mean, std = mean_std(100 * d for d in differences)
    spread = "" if std is None else f" ± {std:.2f}"
    return MISSING if math.isnan(mean) else f"{mean:+.2f}{spread}".replace("-", "−")


def partitions(own: Sheet, folder: Path) -> list[Path]:
    """Draw the clients × classes of the first seed's scenes with the smallest and the largest p."""
    first = (cell.scene for cell, _ in own.cells if cell.scene.seed == own.seeds[0])
    ordered = sorted(first, key=lambda scene: (scene.p, scene.q))
    made = []
    for cell in dict.fromkeys((ordered[0], ordered[-1])):
        data = clients_of(cell, own.size.federation.config(cell), own.request.data)
        opted = data.columns.get("opted_in")
        out = [] if opted is None else [c for c in range(len(data)) if not opted[data.rows(c).start]]
        counts, title = class_counts(data, "train").tolist(), f"{cell.title}, training images, p = {cell.p:g}"
        chart = dealing(counts, data.ids, data.meta["label_names"], out, f"{title}, seed {cell.seed}")
        drawn = Figure(title, (chart,), ramp=("examples", "1", f"{max(map(max, counts)):,}"))
        made.append(plots.write(drawn, folder, f"partition-p{cell.p:g}-q{cell.q:g}"))
    return made


def preamble(own: Sheet) -> str:
    """Return Markdown that says what was run."""
    f, a, scenes = own.size.federation, own.size.adapting, [cell.scene for cell, _ in own.cells]
    scene = scenes[0]
    given = ", ".join(f"`{key} = {value}`" for key, value in own.request.changes.items())
    text = f"""
FedAvg: {f.rounds:,} rounds of {f.epochs} local epochs, batch {f.batch_size}, Adam {f.learning_rate:g}; on the devices
at most {a.epochs} epochs, the loss on the client's validation images measured every {a.every} epochs, stopped after
{a.patience} measurements without improvement, best weights kept.
{_cuts(f, a)}
Accuracy is the mean over clients, each on images drawn with its own majority classes: {scene.valid} validation images
("{PROTOCOLS["valid"]}": the same that stop training, so the numbers are optimistic) and {scene.test} others
("{PROTOCOLS["test"]}"). Opted-out clients are fine-tuned and counted like all.

Choices where the paper is silent or its code differs: the mixture is of probabilities (the authors' code mixes
log-probabilities, a row of its own); early stopping keeps the best weights (the code reports the best but goes on with
the last); counts are rounded, not truncated; networks as in the authors' code of November 2020.
"""
    if given:
        text += f"\nChanged: {given}.\n"
    if any(s.dataset == "cifar10" for s in scenes):
        text += (
            "\nThe CIFAR-10 images at hand are a JPEG re-encoding (quality about 75) of the lossless originals; "
            "accuracies are close to, but not comparable digit for digit with, those on the originals.\n"
        )
    if stale := note_on_stale(own.found()):
        text += f"\n{stale}\n"
    return text


def _cuts(federation: Federation, adapting: Adapting) -> str:
    """Return a sentence: what a scale cuts."""
    usual, full = Federation(), Adapting()
    cut = [f"{usual.rounds:,} rounds"] if federation.rounds != usual.rounds else []
    if adapting != full:
        cut.append(f"{full.epochs} epochs, measured every {full.every}, {full.patience} without improvement")
    return f"The paper: {'; '.join(cut)}. This scale cuts that." if cut else "As in the paper."


def result_name(name: str, scale: str) -> str:
    """Return the results' name: a shorter scale doesn't replace the full one's."""
    return name if scale == "full" else f"{name}-{scale}"


# Table 2: CIFAR-10, 5 clients, 500 images, q = 0, four runs: by p and method, (mean, deviation).
TABLE2: dict[float, dict[str, tuple[float, float]]] = {
    1.0: {
        "FedAvg": (0.2735, 0.0327),
        "Local": (0.8405, 0.0184),
        "Fine-tuned": (0.8530, 0.0330),
        "Mixture": (0.8645, 0.0528),
    },
    0.9: {
        "FedAvg": (0.3505, 0.0347),
        "Local": (0.7505, 0.0369),
        "Fine-tuned": (0.7521, 0.0288),
        "Mixture": (0.7535, 0.0262),
    },
    0.8: {
        "FedAvg": (0.3914, 0.0332),
        "Local": (0.6566, 0.0137),
        "Fine-tuned": (0.6561, 0.0152),
        "Mixture": (0.6717, 0.0196),
    },
}

# A plot in the authors' repository of 23 November 2020 (50 clients, 100 images each), read by eye to about a point; it
# is not certain to be the printed Figure 2. p = 0.2 to 1.0 in steps of 0.1.
FIGURE2_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FIGURE2: dict[str, tuple[float, ...]] = {
    "Mixture": (0.15, 0.22, 0.29, 0.37, 0.45, 0.53, 0.61, 0.70, 0.81),
    "Local": (0.095, 0.165, 0.23, 0.295, 0.36, 0.45, 0.54, 0.64, 0.805),
    "Fine-tuned": (0.115, 0.14, 0.19, 0.31, 0.44, 0.53, 0.57, 0.585, 0.685),
    "FedAvg": (0.105, 0.10, 0.08, 0.075, 0.065, 0.035, 0.025, 0.015, 0.01),
}
