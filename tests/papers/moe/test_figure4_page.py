"""The page of the mixture shows Figure 4 as it was measured, and what it says of it follows from the numbers."""

from __future__ import annotations

import re

from tests.test_measured import MIXTURE, by_scene, check, percent, tables

ROWS = by_scene("moe-figure4")
P = [f"p = {p / 10:g}" for p in range(2, 11)]
PAGE = MIXTURE.read_text(encoding="utf-8").replace("\n", " ")
OUT = ", q = 0.9"


def row(p: str, column: str) -> dict[str, object]:
    """Return the result of a column's method, e.g. ``Mixture, q = 0.9``; local training is the same whatever q."""
    method, *q = column.split(", ")
    return ROWS[", ".join(["Fashion-MNIST, 5 × 600", p, *q, "clean protocol"]), method]


def gaps(one: str, other: str) -> list[float]:
    """Return how many points a column is ahead of another, by p."""
    found = []
    for p in P:
        ours, theirs = row(p, one)["value"], row(p, other)["value"]
        assert isinstance(ours, float)
        assert isinstance(theirs, float)
        found.append(round(100 * (ours - theirs), 1))
    return found


def said(pattern: str) -> list[float]:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return [float(number.replace("−", "-")) for number in found.groups()]


def test_the_table() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "Fashion-MNIST, %"]
    assert [label for label, *_ in body] == P
    for label, *cells in body:
        for column, cell in zip(head[1:], cells, strict=True):
            check(f"{column}, {label}", cell, percent(row(label, column)))


def test_where_nobody_opts_out() -> None:
    tuned, local, whole = (gaps("Mixture", other) for other in ("Fine-tuned", "Local", "FedAvg"))
    assert said(r"it is (\S+) to (\S+) points ahead of fine-tuning, and at most (\S+) of local training") == [
        min(tuned),
        max(tuned),
        max(local),
    ]
    assert said(r"best at every p but 0\.2, where FedAvg is (\S+) points ahead") == [-whole[0]]
    assert min(whole[1:]) > 0
    assert min(*tuned, *local) >= 0
    assert said(r"that falls to (\S+) at p = 1\.") == [local[-1]]
    assert local[1:] == sorted(local[1:], reverse=True)
    assert max(local) == local[1]


def test_where_most_opt_out() -> None:
    assert said(
        r"and there (\S+) to (\S+) points ahead of fine-tuning, and (\S+) to (\S+) of local training"
    ) == [
        extreme(gaps(f"Mixture{OUT}", other))
        for other in (f"Fine-tuned{OUT}", "Local")
        for extreme in (min, max)
    ]
    behind = dict(zip(P, gaps(f"Fine-tuned{OUT}", "Local"), strict=True))
    assert [p for p in P if behind[p] < -0.5] == [*P[:5], "p = 0.9"]
    assert all(abs(behind[p]) <= 0.2 for p in P if behind[p] >= -0.5)
    assert "within 0.2 points of it at the others" in PAGE
    lost, of_tuned = (gaps(method, f"{method}{OUT}") for method in ("Mixture", "Fine-tuned"))
    assert said(r"The mixture loses (\S+) to (\S+) points by it, fine-tuning (\S+) to (\S+), and FedAvg") == [
        min(lost),
        max(lost),
        min(of_tuned),
        max(of_tuned),
    ]
    assert said(r"and FedAvg (\S+) at p = 0\.2, more with nearly every p, and (\S+) at p = 1\.") == [
        gaps("FedAvg", f"FedAvg{OUT}")[0],
        gaps("FedAvg", f"FedAvg{OUT}")[-1],
    ]
