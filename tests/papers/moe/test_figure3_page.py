"""The page of the mixture shows Figure 3 as it was measured, and what it says of it follows from the numbers."""

from __future__ import annotations

import re

from tests.test_measured import MIXTURE, by_scene, check, percent, tables

ROWS = by_scene("moe-figure3")
P = [f"p = {p / 10:g}" for p in range(2, 11)]
PAGE = MIXTURE.read_text(encoding="utf-8").replace("\n", " ")


def row(p: str, column: str) -> dict[str, object]:
    """Return the result of a column's method, e.g. ``Mixture, q = 0.9``."""
    method, *q = column.split(", ")
    return ROWS[", ".join(["CIFAR-10, 5 × 500", p, *q, "clean protocol"]), method]


def points(p: str, one: str, other: str) -> float:
    first, second = (row(p, column)["value"] for column in (one, other))
    assert isinstance(first, float)
    assert isinstance(second, float)
    return 100 * (first - second)


def said(pattern: str) -> list[float]:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return [float(number.replace("−", "-")) for number in found.groups()]


def test_the_table() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "%" and "Mixture, q = 0.9" in t[0]]
    assert [label for label, *_ in body] == P
    for label, *cells in body:
        for column, cell in zip(head[1:], cells, strict=True):
            check(f"{column}, {label}", cell, percent(row(label, column)))


def test_where_most_opt_out() -> None:
    within, least, most = said(
        r"within (\S+) points of local training, and (\d+) to (\d+) points ahead of fine-tuning"
    )
    behind = [points(p, "Local, q = 0.9", "Mixture, q = 0.9") for p in P]
    ahead = [points(p, "Mixture, q = 0.9", "Fine-tuned, q = 0.9") for p in P]
    assert within - 0.1 < max(map(abs, behind)) <= within
    assert [round(min(ahead)), round(max(ahead))] == [least, most]
    lost, low, high = said(
        r"then loses (\d+) points at p = 0.2 and less with every p, down to none at p = 1; "
        r"fine-tuning loses (\d+) to (\d+)\."
    )
    losses = [points(p, "Mixture", "Mixture, q = 0.9") for p in P]
    assert losses == sorted(losses, reverse=True)
    assert [round(losses[0]), losses[-1] <= 0] == [lost, True]
    tuned = [points(p, "Fine-tuned", "Fine-tuned, q = 0.9") for p in P]
    assert [round(min(tuned)), round(max(tuned))] == [low, high]


def test_where_two_clients_of_five_opt_out() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "q = 0.5, %"]
    assert [label for label, *_ in body] == P
    for label, *cells in body:
        for column, cell in zip(head[1:], cells, strict=True):
            check(f"{column}, {label}", cell, percent(row(label, f"{column}, q = 0.5")))
    local, tuned, behind = (
        [points(p, f"{one}, q = 0.5", f"{other}, q = 0.5") for p in P]
        for one, other in (("Mixture", "Local"), ("Mixture", "Fine-tuned"), ("Fine-tuned", "Local"))
    )
    assert said(
        r"of local training by (\S+) points at p = 0.2 and (\S+) at p = 0.7, and level with it above "
        r"\((\S+), (\S+) and (\S+)\)\."
    ) == [round(x, 1) for x in (local[0], *local[5:])]
    assert said(r"It is (\S+) to (\S+) points ahead of fine-tuning up to p = 0.9 and (\S+) at p = 1\.") == [
        round(x, 1) for x in (min(tuned[:-1]), max(tuned[:-1]), tuned[-1])
    ]
    assert "Fine-tuning is behind local training from p = 0.3 on." in PAGE
    assert [gap < 0 for gap in behind] == [False, *[True] * 8]
    lost, of_tuned = (
        [points(p, method, f"{method}, q = 0.5") for p in P] for method in ("Mixture", "Fine-tuned")
    )
    assert said(
        r"it loses (\S+) to (\S+) points\. The mixture loses (\S+) at p = 0.2 and less with every p, down to none at p = 0.9\."
    ) == [round(x, 1) for x in (min(of_tuned), max(of_tuned), lost[0])]
    assert lost == sorted(lost, reverse=True)
    assert lost[6] > 0 >= lost[7]


def test_where_nobody_opts_out() -> None:
    told = said(
        r"of fine-tuning by (\S+) to (\S+) points up to p = 0.8 and level with it above \((\S+) and (\S+)\)"
    )
    gaps = [points(p, "Mixture", "Fine-tuned") for p in P]
    assert [round(x, 1) for x in (min(gaps[:7]), max(gaps[:7]), *gaps[7:])] == told
    local = [points(p, "Mixture", "Local") for p in P]
    assert said(r"of local training by (\S+) points at p = 0.2, which falls to (\S+) at p = 1\.") == [
        round(local[0], 1),
        round(local[-1], 1),
    ]
