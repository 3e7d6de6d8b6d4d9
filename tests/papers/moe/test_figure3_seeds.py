"""The page of the mixture shows Figure 3 with three seeds, each difference paired by seed."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev

import pytest

from tests.test_measured import MIXTURE, ROOT, check, tables

PAGE = " ".join(MIXTURE.read_text(encoding="utf-8").split())
P, Q, SEEDS = ("0.2", "0.4", "0.6", "0.8", "1"), ("0", "0.5", "0.9"), (0, 1, 2)


def accuracy(p: str, q: str, seed: int, method: str) -> float:
    """Return the mean over clients of a cell's accuracies on images that did not stop training, in percent."""
    run = f"s{seed}-local" if method == "Local" else f"q{q}-s{seed}-r300"
    cells = json.loads((ROOT / f"results/moe/cifar10-n5-N500-p{p}-{run}.json").read_text())
    (cell,) = [cell for cell in cells if cell["name"] == method]
    return 100 * mean(cell["test"])


def ahead(p: str, q: str, method: str) -> list[float]:
    return [accuracy(p, q, seed, "Mixture") - accuracy(p, q, seed, method) for seed in SEEDS]


def lost(p: str, method: str) -> float:
    return mean(accuracy(p, "0", seed, method) - accuracy(p, "0.9", seed, method) for seed in SEEDS)


def test_the_table() -> None:
    ((_, *body),) = [t for t in tables(MIXTURE) if t[0][1] == "of fine-tuning, q = 0"]
    assert [label for label, *_ in body] == [f"p = {p}" for p in P]
    for p, (label, *cells) in zip(P, body, strict=True):
        asked = [(method, q) for method in ("Fine-tuned", "Local") for q in Q]
        for (method, q), cell in zip(asked, cells, strict=True):
            gaps = ahead(p, q, method)
            check(f"{method}, q = {q}, {label}", cell, [mean(gaps), stdev(gaps)])


def test_what_opting_out_costs() -> None:
    found = re.search(
        r"By q = 0.9 fine-tuning loses (\S+) to (\S+) points, and the mixture (\S+) at p = 0.2 and less with every p, "
        r"down to (\S+)\. ",
        PAGE,
    )
    assert found is not None
    tuned, mixed = ([lost(p, method) for p in P] for method in ("Fine-tuned", "Mixture"))
    check("losses", " ".join(found.groups()), [min(tuned), max(tuned), mixed[0], mixed[-1]])
    assert mixed == sorted(mixed, reverse=True)


@pytest.mark.parametrize("q", ["0.5", "0.9"])
def test_where_somebody_opts_out_the_mixture_is_ahead(q: str) -> None:
    assert "Wherever somebody opts out, the mixture is ahead of fine-tuning by every seed." in PAGE
    assert all(gap > 0 for p in P for gap in ahead(p, q, "Fine-tuned"))
