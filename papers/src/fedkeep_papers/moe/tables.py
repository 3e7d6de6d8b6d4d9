"""Federated mixture of experts, Table 2 and Figures 2-5: from cells that all of them share.

Both protocols come from the same cells: "paper" reports the validation images that also decide when training stops,
"clean" a disjoint test set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep.report.charts import Bar
from fedkeep.report.text_tables import mean_std
from fedkeep_papers.kit import plots
from fedkeep_papers.kit.results import write_results
from fedkeep_papers.moe.scene import Scene, changed, varied
from fedkeep_papers.moe.sheet import (
    FIGURE2,
    FIGURE2_P,
    METRIC,
    PROTOCOLS,
    SIZES,
    TABLE2,
    Sheet,
    Way,
    differences,
    falls,
    has_test_images_alone,
    paired,
    partitions,
    preamble,
    result_name,
    row,
    scene_name,
    sheet,
)
from fedkeep_papers.moe.variants import (
    AUTHORS,
    FEDAVG,
    LOCAL,
    MIXTURE,
    PAPER,
    TUNED,
)

TEST_IMAGES_ALONE = {
    "data.partition.valid": "40",
    "data.partition.test": "50",
    "data.partition.test_from": '"train"',
}
"""How 50 clients share CIFAR-100's official test images, where there are no others: with 100 to train it is 9,500."""

Part = tuple[str, Sequence[Scene], Sequence[Way]]  # a panel


def table2(request: Request) -> Path:
    """Table 2: CIFAR-10, 5 clients of 500 images, p = 0.8, 0.9, 1.0."""
    scenes = [changed(Scene(p=p), request.changes) for p in TABLE2]
    ways = [Way(v) for v in (*PAPER, AUTHORS)]
    own = sheet(request, scenes, ways)
    own.run()
    rows = []
    for split in PROTOCOLS:
        for scene in scenes:
            published = TABLE2[scene.p] if split == "valid" and not request.changes else {}
            rows += [row(own, scene, w, split, published.get(w.name, (None, None))[0]) for w in ways]
    name = result_name("moe-table2", request.scale)
    figures = []
    for scene in scenes:
        here = [r for r in rows if r.scene == scene_name(scene, "valid") and r.published is not None]
        bars = [Bar(r.method, r.value, r.std, r.published) for r in here if r.value is not None]
        if bars:
            title = f"{scene.title}, p = {scene.p:g}, {PROTOCOLS['valid']}"
            drawn = plots.bars_figure(title, bars, METRIC, title)
            figures.append(plots.write(drawn, request.out / name, f"p{scene.p:g}"))
    figures += partitions(own, request.out / name)
    gaps = paired(own, scenes, [(Way(MIXTURE), Way(TUNED)), (Way(MIXTURE), Way(LOCAL))])
    text = "\n\n".join([preamble(own), "" if request.changes else _published_deviations(), gaps])
    title = "Federated mixture of experts, Table 2"
    return write_results(request.out, name, rows, title=title, preamble=text, figures=figures)[1]


def variants(request: Request) -> Path:
    """Variants of the mixture on Table 2's scenes: other ways of adapting, augmented images, other FedAvg settings."""
    scenes = [changed(Scene(p=p), request.changes) for p in TABLE2]
    usual, size = SIZES[request.scale].federation, SIZES[request.scale]
    ways = [Way(v) for v in (*PAPER, *size.variants)]
    for changes, label, more in size.federations:
        ways += [Way(v, replace(usual, **changes), label) for v in more]
    own = sheet(request, scenes, ways)
    own.run()
    rows = [row(own, scene, way, split) for split in PROTOCOLS for scene in scenes for way in ways]

    best = _best(own, scenes, [w for w in ways if w.variant.kind == "mixture"])
    pairs = [(Way(MIXTURE), Way(TUNED))]
    note = "Which mixture is best is told once all have run on the same scenes and seeds."
    if best is not None:
        pairs = [*((best, Way(v)) for v in (MIXTURE, TUNED, LOCAL)), *pairs]
        pairs += [(best, w) for w in ways if w.variant.kind in ("local", "fine_tuned") and w.variant.augment]
        note = f"The best mixture by the validation images, over these p together: {best.name}."
    extra = (
        "Augmented images are shifted by up to 4 pixels each way and mirrored at random, on the devices alone unless a "
        "row says FedAvg. Differences on the clean protocol are of the variant chosen on validation images."
    )
    name = result_name("moe-variants", request.scale)
    text = "\n\n".join([preamble(own), extra, paired(own, scenes, pairs, note)])
    title = "Variants of the federated mixture of experts"
    return write_results(request.out, name, rows, title=title, preamble=text)[1]


def _best(own: Sheet, scenes: Sequence[Scene], ways: Sequence[Way]) -> Way | None:
    """Return the way with the best mean on validation images; None: not all ran on the same scenes and seeds."""
    found = {
        way: {(s, seed): v for s in scenes for seed, v in own.values(s, way, "valid").items()} for way in ways
    }
    first = found[ways[0]].keys()
    if not first or any(values.keys() != first for values in found.values()):
        return None
    return max(ways, key=lambda way: sum(found[way].values()))


def figure2(request: Request) -> Path:
    """Figure 2: CIFAR-100, 50 clients of 100 images, all of them in each round or a tenth."""
    size = SIZES[request.scale]
    usual = [Scene("cifar100", p, clients=50, train=100, test=150) for p in size.p]
    alone = "data.reader" not in request.changes and has_test_images_alone(usual[0], request)
    changes = {**(TEST_IMAGES_ALONE if alone else {}), **request.changes}
    scenes = [changed(scene, changes) for scene in usual]
    federations = [size.federation, replace(size.federation, fraction=0.1)]
    published = {name: list(zip(FIGURE2_P, values, strict=True)) for name, values in FIGURE2.items()}
    published[AUTHORS.name] = published[MIXTURE.name]
    variants = (*PAPER, AUTHORS)
    own = sheet(request, scenes, [Way(v, f) for f in federations for v in variants])
    parts: list[Part] = [
        (f"fraction of clients {f.fraction:g}", scenes, [Way(v, f) for v in variants]) for f in federations
    ]
    extra = (
        "The published numbers are a plot in the authors' repository, read by eye to about a point, not certain to be "
        "the printed figure; they are dashed in the figure. The plot's mixture is of that code, which mixes "
        f"log-probabilities, and stands beside both mixtures. Test images are {scenes[0].test} a client."
    )
    if alone:
        extra += (
            "\n\n**Data.** Of CIFAR-100 the official test images alone are at hand, 9,999 of them, about 100 a class. "
            f"All of a client's images are drawn from these, none twice: {scenes[0].train} to train, "
            f"{scenes[0].valid} to validate and {scenes[0].test} to test. The paper has 50,000 training images to draw "
            "from, and 400 validation images a client."
        )
    own.run()
    beside = {} if request.changes else {parts[0][0]: published}
    return _sweep(own, "moe-figure2", parts, beside, "" if request.changes else extra)


def figure3(request: Request) -> Path:
    """Figure 3: CIFAR-10, 5 clients of 500 images; q = 0, 0.5, 0.9."""
    return _against_p(request, "moe-figure3", "cifar10", 500, (0.0, 0.5, 0.9))


def figure4(request: Request) -> Path:
    """Figure 4: Fashion-MNIST, 5 clients of 600 images; q = 0, 0.9."""
    return _against_p(request, "moe-figure4", "fashion_mnist", 600, (0.0, 0.9))


def _against_p(request: Request, name: str, dataset: str, train: int, qs: Sequence[float]) -> Path:
    size = SIZES[request.scale]
    scenes = {q: [changed(Scene(dataset, p, q, train=train), request.changes) for p in size.p] for q in qs}
    ways = [Way(v) for v in (*PAPER, AUTHORS)]
    own = sheet(request, [s for group in scenes.values() for s in group], ways)
    parts: list[Part] = [(f"opt-out factor q = {q:g}", group, ways) for q, group in scenes.items()]
    own.run()
    extra = ["The paper prints curves without numbers."]
    pairs = [(Way(MIXTURE), Way(TUNED)), (Way(MIXTURE), Way(LOCAL))]
    for q, group in scenes.items():
        extra += [f"Opt-out factor q = {q:g}:", paired(own, group, pairs).rstrip()]
    extra.append(falls(own, scenes, [Way(v) for v in (FEDAVG, TUNED, MIXTURE)]))
    return _sweep(own, name, parts, {}, "\n\n".join(extra))


def _sweep(
    own: Sheet,
    name: str,
    parts: Sequence[Part],
    published: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    extra: str,
) -> Path:
    """Write a figure of accuracy against p, a panel a part."""
    result, rows, figures = result_name(name, own.request.scale), [], []
    for split in PROTOCOLS:
        panels: dict[str, dict[str, list[tuple[float, float, float | None]]]] = {}
        for title, scenes, ways in parts:
            for scene in scenes:
                for way in ways:
                    values = own.values(scene, way, split)
                    known = dict((published.get(title) or {}).get(way.name, ())) if split == "valid" else {}
                    rows.append(row(own, scene, way, split, known.get(scene.p), title=title))
                    curve = panels.setdefault(title, {}).setdefault(way.name, [])
                    if values:
                        curve.append((scene.p, *mean_std(values.values())))
        shown = published if split == "valid" else {}
        setting = "fraction p of majority classes"
        if any(points for curves in panels.values() for points in curves.values()):
            drawn = plots.sweep_panels(panels, metric=METRIC, setting=setting, published=shown)
            file = "paper" if split == "valid" else "clean"
            figures.append(plots.write(drawn, own.request.out / result, file))
    figures += partitions(own, own.request.out / result)
    title = f"Federated mixture of experts, {name.removeprefix('moe-').replace('figure', 'Figure ')}"
    text = f"{preamble(own)}\n\n{extra}"
    return write_results(own.request.out, result, rows, title=title, preamble=text, figures=figures)[1]


def figure5(request: Request) -> Path:
    """Figure 5: mixture minus fine-tuned over p and the training size, CIFAR-10 and Fashion-MNIST; a coarser grid."""
    size = SIZES[request.scale]
    every = [Scene(d, p, train=n) for d in ("cifar10", "fashion_mnist") for n in size.train for p in size.p5]
    scenes = list(dict.fromkeys(changed(scene, request.changes) for scene in every))
    if {s.train for s in scenes} != set(size.train):
        raise varied("data.partition.train")
    ways = [Way(v) for v in PAPER]
    own = sheet(request, scenes, ways, size.small)
    own.run()
    rows, figures, result = [], [], result_name("moe-figure5", request.scale)
    for split in PROTOCOLS:
        maps: dict[str, dict[tuple[str, str], float]] = {}
        for scene in scenes:
            rows += [row(own, scene, w, split) for w in ways]
            gaps = differences(own, scene, Way(MIXTURE), Way(TUNED), split)
            if gaps:
                cell = (f"{scene.train}", f"{scene.p:g}")
                maps.setdefault(scene.title, {})[cell] = mean_std(gaps)[0]
        if not maps:
            continue
        drawn = plots.difference_maps(
            maps,
            metric=METRIC,
            across="fraction p of majority classes",
            down="training images a client",
            label="mixture − fine-tuned",
        )
        figures.append(plots.write(drawn, request.out / result, "paper" if split == "valid" else "clean"))
    extra = (
        f"The paper's grid has nine fractions and ten sizes from 5 to 500; here p is {_listed(size.p5)} and the size "
        f"{_listed(size.train)}. Blue: the mixture is ahead of the fine-tuned model."
    )
    title = "Federated mixture of experts, Figure 5"
    text = f"{preamble(own)}\n\n{extra}"
    return write_results(request.out, result, rows, title=title, preamble=text, figures=figures)[1]


def _published_deviations() -> str:
    lines = [
        f"- p = {p:g}: "
        + ", ".join(f"{name} {100 * mean:.2f} ± {100 * std:.2f}" for name, (mean, std) in row.items())
        for p, row in TABLE2.items()
    ]
    return "Published means and deviations over four runs (%):\n\n" + "\n".join(lines)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)
