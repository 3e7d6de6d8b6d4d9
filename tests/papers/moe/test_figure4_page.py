"""The page of the mixture shows Figure 4 with most clients opted out as it was measured."""

from __future__ import annotations

import re

from tests.test_measured import MIXTURE, by_scene, check, percent, tables

ROWS = by_scene("moe-figure4")
P = [f"p = {p / 10:g}" for p in range(2, 11)]
PAGE = MIXTURE.read_text(encoding="utf-8").replace("\n", " ")


def row(p: str, method: str) -> dict[str, object]:
    return ROWS[f"Fashion-MNIST, 5 × 600, {p}, q = 0.9, clean protocol", method]


def ahead(of: str) -> list[float]:
    """Return how many points the mixture is ahead of a method, by p."""
    found = []
    for p in P:
        ours, theirs = row(p, "Mixture")["value"], row(p, of)["value"]
        assert isinstance(ours, float)
        assert isinstance(theirs, float)
        found.append(round(100 * (ours - theirs), 1))
    return found


def test_the_table() -> None:
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "Fashion-MNIST, q = 0.9, %"]
    assert [label for label, *_ in body] == P
    for label, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            check(f"{method}, {label}", cell, percent(row(label, method)))


def test_what_is_said_of_it() -> None:
    found = re.search(
        r"here it is (\S+) to (\S+) points ahead of fine-tuning, and (\S+) to (\S+) of local", PAGE
    )
    assert found is not None
    told = [float(number.replace("−", "-")) for number in found.groups()]
    tuned, local = ahead("Fine-tuned"), ahead("Local")
    assert told == [min(tuned), max(tuned), min(local), max(local)]
    behind = {p: t - u for p, t, u in zip(P, local, tuned, strict=True)}  # fine-tuning over local training
    assert [p for p in P if behind[p] < -0.5] == [*P[:5], "p = 0.9"]
    assert all(abs(behind[p]) <= 0.2 for p in P if behind[p] >= -0.5)
    assert "within 0.2 points of it at the others" in PAGE
