"""The page of the mixture shows Figures 3 and 4 with three seeds, each difference paired by seed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from statistics import mean, stdev

import pytest

from tests.test_measured import MIXTURE, ROOT, by_scene, check, tables

PAGE = " ".join(MIXTURE.read_text(encoding="utf-8").split())
P, SEEDS = ("0.2", "0.4", "0.6", "0.8", "1"), (0, 1, 2)


@dataclass
class Figure:
    head: str
    """The first cell of its table."""
    scene: str
    q: tuple[str, ...]

    def accuracy(self, p: str, q: str, seed: int, method: str) -> float:
        """Return the mean over clients of a cell's accuracies on images that did not stop training, in percent."""
        run = f"s{seed}-local" if method == "Local" else f"q{q}-s{seed}-r300"
        cells = json.loads((ROOT / f"results/moe/{self.scene}-p{p}-{run}.json").read_text())
        (cell,) = [cell for cell in cells if cell["name"] == method]
        return 100 * mean(cell["test"])

    def ahead(self, p: str, q: str, method: str) -> list[float]:
        """Return the points by which the mixture is ahead of a method, by seed."""
        return [self.accuracy(p, q, seed, "Mixture") - self.accuracy(p, q, seed, method) for seed in SEEDS]

    def lost(self, p: str, method: str) -> float:
        return mean(
            self.accuracy(p, "0", seed, method) - self.accuracy(p, "0.9", seed, method) for seed in SEEDS
        )

    def losses(self, text: str) -> tuple[str, ...]:
        """Return the numbers of the sentence on what opting out costs, asked for as a regular expression."""
        found = re.search(text, PAGE)
        assert found is not None
        return found.groups()


FIGURE3 = Figure("CIFAR-10, points", "cifar10-n5-N500", ("0", "0.5", "0.9"))
FIGURE4 = Figure("Fashion-MNIST, points", "fashion_mnist-n5-N600", ("0", "0.9"))


@pytest.mark.parametrize("figure", [FIGURE3, FIGURE4], ids=lambda figure: figure.head)
def test_the_table(figure: Figure) -> None:
    ((_, *body),) = [t for t in tables(MIXTURE) if t[0][0] == figure.head]
    assert [label for label, *_ in body] == [f"p = {p}" for p in P]
    for p, (label, *cells) in zip(P, body, strict=True):
        asked = [(method, q) for method in ("Fine-tuned", "Local") for q in figure.q]
        for (method, q), cell in zip(asked, cells, strict=True):
            gaps = figure.ahead(p, q, method)
            check(f"{method}, q = {q}, {label}", cell, [mean(gaps), stdev(gaps)])


def test_what_opting_out_costs() -> None:
    told = FIGURE3.losses(
        r"By q = 0.9 fine-tuning loses (\S+) to (\S+) points, and the mixture (\S+) at p = 0.2 and less with every p, "
        r"down to (\S+)\. "
    )
    tuned, mixed = ([FIGURE3.lost(p, method) for p in P] for method in ("Fine-tuned", "Mixture"))
    check("losses", " ".join(told), [min(tuned), max(tuned), mixed[0], mixed[-1]])
    assert mixed == sorted(mixed, reverse=True)


@pytest.mark.parametrize("q", ["0.5", "0.9"])
def test_where_somebody_opts_out_the_mixture_is_ahead_on_cifar(q: str) -> None:
    assert "Wherever somebody opts out, the mixture is ahead of fine-tuning by every seed." in PAGE
    assert all(gap > 0 for p in P for gap in FIGURE3.ahead(p, q, "Fine-tuned"))


def test_on_fashion_mnist_it_is_level_with_fine_tuning() -> None:
    (most,) = FIGURE4.losses(r"no mean difference is above (\S+) points\.")
    gaps = [abs(mean(FIGURE4.ahead(p, q, "Fine-tuned"))) for p in P for q in FIGURE4.q]
    assert f"{max(gaps):.1f}" == most


def test_what_opting_out_costs_on_fashion_mnist() -> None:
    told = FIGURE4.losses(
        r"By q = 0.9 fine-tuning loses (\S+) points at p = 0.2, the mixture (\S+), both at most (\S+) at p = 1, and FedAvg "
        r"(\S+) to (\S+)\. "
    )
    tuned, mixed, shared = (
        [FIGURE4.lost(p, method) for p in P] for method in ("Fine-tuned", "Mixture", "FedAvg")
    )
    last = max(abs(tuned[-1]), abs(mixed[-1]))
    check("losses", " ".join(told), [tuned[0], mixed[0], last, min(shared), max(shared)])


def test_fine_tuning_loses_by_a_longer_start() -> None:
    told = FIGURE4.losses(
        r"fine-tuning has (\S+) % after 300 rounds and (\S+) after 1500, the mixture (\S+) and (\S+)\."
    )
    found = []
    for method in ("Fine-tuned", "Mixture"):
        long = by_scene("moe-figure4")["Fashion-MNIST, 5 × 600, p = 0.2, q = 0.9, clean protocol", method][
            "value"
        ]
        found += [FIGURE4.accuracy("0.2", "0.9", 0, method), 100 * long]
    check("p = 0.2, q = 0.9", " ".join(told), found)
    (tuned, tuned_long, mixed, mixed_long) = found
    assert mixed - tuned < (mixed_long - tuned_long) / 2, "most of the lead is the longer start's"
