"""A figure that the mixture of experts' paper lacks: opting out of a part of one's data, and experts of several kinds.

The paper says that both are possible and shows neither. Clients adapt one by one from the same run of FedAvg, so a
client's result does not depend on its neighbours' experts: the row of several kinds takes each client's from the cell
in which all have its kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkeep.experiments.reproductions import Request
from fedkeep.report.text_tables import TextTable, mean_std, to_markdown
from fedkeep.report.wording import MISSING
from fedkeep_papers.kit import plots
from fedkeep_papers.kit.results import Row, over_seeds, write_results
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import MAJORITY, By, Scene, changed
from fedkeep_papers.moe.sheet import (
    METRIC,
    PROTOCOLS,
    SIZES,
    Sheet,
    Way,
    preamble,
    result_name,
    row,
    scene_name,
    seeds_of,
)
from fedkeep_papers.moe.variants import KINDS, LOCAL, MIXTURE, PAPER, TUNED

P = {"quick": (0.6,), "medium": (0.6,), "full": (0.2, 0.6, 1.0)}
FEW: dict[By, tuple[float, ...]] = {"client": (0.5, 0.9), "example": (0.4, 0.8), "class": (1 / MAJORITY,)}
"""What opts out: 2 and 4 of five clients, as in Figure 3, and as many images; one of a client's majority classes."""
MANY: dict[By, tuple[float, ...]] = {**FEW, "client": (0.2, 0.5, 0.7, 0.9), "example": (0.2, 0.4, 0.6, 0.8)}
WHO: dict[By, str] = {
    "client": "whole clients",
    "example": "each client's images, at random",
    "class": "each client's majority class",
}
ARCHITECTURES = ("the paper's CNN", "small CNN", "linear")
WAYS = tuple(Way(v) for v in PAPER)
ALIKE = {v.name: tuple(Way(k) for k in (v, *KINDS) if k.kind == v.kind) for v in (LOCAL, MIXTURE)}
"""Ways in which all clients have an expert of one kind, in the order of ``ARCHITECTURES``."""


def figure6(request: Request) -> Path:
    """CIFAR-10, 5 clients of 500 images: who opts out of what, and local experts of three kinds."""
    size = SIZES[request.scale]
    fractions = MANY if request.scale == "full" else FEW
    scenes = [changed(Scene(p=p), request.changes) for p in P[request.scale]]
    groups = [
        [scene, *(replace(scene, q=q, by=by) for by in fractions for q in fractions[by])] for scene in scenes
    ]
    cells = tuple(
        (
            Cell(replace(scene, seed=seed), size.federation, size.adapting),
            PAPER if scene.q else (*PAPER, *KINDS),
        )
        for group in groups
        for scene in group
        for seed in seeds_of(request, size)
    )
    own = Sheet(request, size, cells)
    own.run()
    rows: list[Row] = []
    for split in PROTOCOLS:
        for whole, *parts in groups:
            rows += [row(own, whole, way, split) for way in (*WAYS, *(Way(v) for v in KINDS))]
            rows += [several(own, whole, name, split) for name in ALIKE]
            rows += [row(own, part, way, split) for part in parts for way in WAYS]
    name = result_name("moe-figure6", request.scale)
    drawn = [
        draw(own, groups, split, request.out / name) for split in PROTOCOLS for draw in (_curves, _gains)
    ]
    figures = [path for paths in drawn for path in paths]
    text = "\n\n".join([preamble(own), ABOUT, _shares(own, groups), _kinds(own, groups)])
    title = "Federated mixture of experts, beyond the paper: a part of one's data out, local experts of several kinds"
    return write_results(request.out, name, rows, title=title, preamble=text, figures=figures)[1]


def share(scene: Scene) -> float:
    """Return the share of all training images that opt out: whole clients, images or classes, so truncated."""
    if scene.by == "client":
        return int(scene.q * scene.clients + 1e-9) / scene.clients
    if scene.by == "example":
        return int(scene.q * scene.train + 1e-9) / scene.train
    each, odd = divmod(math.floor(scene.p * scene.train + 0.5 + 1e-9), MAJORITY)
    return sum(each + (place < odd) for place in range(scene.hidden)) / scene.train


def mixed(alike: Sequence[Result], split: str) -> float:
    """Return the mean accuracy where client c has the expert c modulo their number.

    Args:
        alike: results of clients whose experts are all of one kind, for each kind.
        split: of the examples.
    """
    found = [getattr(result, split) for result in alike]
    return float(np.mean([found[c % len(found)][c] for c in range(len(found[0]))]))


def several(own: Sheet, scene: Scene, name: str, split: str) -> Row:
    """Return the row of clients with experts of all kinds, in turn, of the seeds that have a cell of each."""
    by_kind = [own.finished(scene, way) for way in ALIKE[name]]
    cells = {seed: [of[seed] for of in by_kind] for seed in own.seeds if all(seed in of for of in by_kind)}
    return over_seeds(
        scene_name(scene, split),
        f"{name}, several kinds",
        METRIC,
        {seed: mixed([cell.result for cell in alike], split) for seed, alike in cells.items()},
        [cell for alike in cells.values() for cell in alike],
        scale=own.request.scale,
    )


def _mean(own: Sheet, scene: Scene, way: Way, split: str) -> float:
    return mean_std(own.values(scene, way, split).values())[0]


def _points(value: float, form: str = ".1f") -> str:
    return MISSING if math.isnan(value) else format(100 * value, form).replace("-", "−")


def _curves(own: Sheet, groups: Sequence[Sequence[Scene]], split: str, folder: Path) -> list[Path]:
    """Draw accuracy against the share that opts out, a panel for each of who does, a figure for each p."""
    made = []
    for group in groups:
        panels: dict[str, dict[str, list[tuple[float, float, float | None]]]] = {}
        for by, title in WHO.items():
            panels[title] = {}
            for way in WAYS:
                points = [(share(s), _mean(own, s, way, split), None) for s in group if not s.q or s.by == by]
                panels[title][way.name] = [point for point in points if not math.isnan(point[1])]
        if any(points for curves in panels.values() for points in curves.values()):
            drawn = plots.sweep_panels(panels, metric=METRIC, setting="share of training images out")
            name = f"out-p{group[0].p:g}-{'paper' if split == 'valid' else 'clean'}"
            made.append(plots.write(drawn, folder, name))
    return made


def _gains(own: Sheet, groups: Sequence[Sequence[Scene]], split: str, folder: Path) -> list[Path]:
    """Draw what the mixture adds to each client's local expert of each kind, the first seed's."""
    maps: dict[str, dict[tuple[str, str], float]] = {}
    for scene, *_ in groups:
        for kind, pair in zip(ARCHITECTURES, zip(*ALIKE.values(), strict=True), strict=True):
            found = [own.finished(scene, way).get(own.seeds[0]) for way in pair]
            accuracies = [getattr(f.result, split) for f in found if f is not None]
            if len(accuracies) == len(pair):
                both = enumerate(zip(*accuracies, strict=True))
                gains = {(kind, f"{c}"): joint - alone for c, (alone, joint) in both}
                maps.setdefault(f"p = {scene.p:g}", {}).update(gains)
    if not maps:
        return []
    drawn = plots.difference_maps(
        maps, metric=METRIC, across="client", down="local expert", label="mixture − local"
    )
    return [plots.write(drawn, folder, f"kinds-{'paper' if split == 'valid' else 'clean'}")]


ABOUT = f"""
**Beyond the paper.** It says that clients may keep out a part of their data, and that their experts may differ; it
shows neither. What stays out of FedAvg is all that some clients have, images of every client drawn at random, or the
first of every client's {MAJORITY} majority classes. On their devices all clients learn from all they have.

"Several kinds": clients 0, 3, … have {ARCHITECTURES[0]} as local expert, 1, 4, … a {ARCHITECTURES[1]} of a
thirteenth of its parameters, 2, 5, … a {ARCHITECTURES[2]} classifier on pixels. The global expert and the gates are
{ARCHITECTURES[0]} everywhere. On its device a client trains by itself, so its accuracy is that where all clients have
its kind, and is taken from there. What the mixture adds to each client is drawn of the first seed alone.
"""


def _shares(own: Sheet, groups: Sequence[Sequence[Scene]]) -> str:
    """Return Markdown: accuracy by who opts out of how much, and how far the mixture is ahead."""
    lines = []
    for split, protocol in PROTOCOLS.items():
        for scene in (scene for group in groups for scene in group):
            values = {way.variant: _mean(own, scene, way, split) for way in WAYS}
            gaps = [values[MIXTURE] - values[other] for other in (TUNED, LOCAL)]
            who, out = WHO[scene.by] if scene.q else "nobody", f"{100 * share(scene):.0f} %"
            numbers = [*map(_points, values.values()), *(_points(gap, "+.1f") for gap in gaps)]
            lines.append((protocol, f"p = {scene.p:g}", who, out, *numbers))
    gaps_of = [f"Mixture − {other.name}, points" for other in (TUNED, LOCAL)]
    columns = (
        "protocol",
        "",
        "who or what is out",
        "share of images",
        *(f"{v.name}, %" for v in PAPER),
        *gaps_of,
    )
    return to_markdown(TextTable(columns, tuple(lines), left=3))


def _kinds(own: Sheet, groups: Sequence[Sequence[Scene]]) -> str:
    """Return Markdown: local experts of one kind on all clients, and of all kinds in turn."""
    lines = []
    for split, protocol in PROTOCOLS.items():
        for scene, *_ in groups:
            columns_of = []
            for name, ways in ALIKE.items():
                turn = several(own, scene, name, split).value
                columns_of.append(
                    [*(_mean(own, scene, way, split) for way in ways), math.nan if turn is None else turn]
                )
            for kind, alone, joint in zip((*ARCHITECTURES, "several kinds"), *columns_of, strict=True):
                numbers = (_points(alone), _points(joint), _points(joint - alone, "+.1f"))
                lines.append((protocol, f"p = {scene.p:g}", kind, *numbers))
    columns = ("protocol", "", "local experts", *(f"{name}, %" for name in ALIKE), "Mixture − Local, points")
    return to_markdown(TextTable(columns, tuple(lines), left=3))
