"""The page of KTEPS shows Table 8 as it was measured, and how Ag went from round to round."""

from __future__ import annotations

import json
from statistics import mean

from tests.test_measured import DOCS, ROOT, check, results, table

PAGE = DOCS / "measured" / "kteps.md"


def shown(column: str) -> dict[str, list[float]]:
    """Return a column's numbers by metric, in percent, each as the page has it."""
    rows = {(row["method"], row["metric"]): row for row in results("kteps-table8")}
    body = table(PAGE, lambda t: t[0][0] == f"column {column}")
    found: dict[str, list[float]] = {"accuracy_ag": [], "accuracy_ap": []}
    for name, *cells in body:
        for metric, cell in zip(found, cells, strict=True):
            row = rows[f"{column}, {name}", metric]
            check(f"{column}, {name}, {metric}", cell, [100 * row["value"], 100 * row["published"]])
            found[metric].append(100 * row["value"])
    assert len(body) == 4
    return found


def ag(pattern: str) -> list[dict[int, float]]:
    """Return Ag by round, in percent, of each cell of seed 0 whose file's name begins so."""
    cells = [
        json.loads(f.read_text())
        for f in sorted((ROOT / "results/kteps").glob(f"fdu-{pattern}full-0-*.json"))
    ]
    return [{round: 100 * value for round, value in cell["shared_curve"]} for cell in cells]


def test_column_a_overfits() -> None:
    first = shown("A")["accuracy_ag"]
    page = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    cells, (plain,) = ag("kteps-architecture-A-*"), ag("fedavg-")
    assert len(cells) == 4
    assert (
        f"After 20 rounds their Ag is {mean(c[20] for c in cells):.1f} %, where FedAvg's with this seed is {plain[20]:.1f}"
        in page
    )
    assert (
        f"After 30 it is {mean(c[30] for c in cells):.1f} against {plain[30]:.1f}, after 50 it is {mean(first):.1f} against "
        f"{plain[50]:.1f}." in page
    )
    best = [max(c, key=c.__getitem__) for c in cells]
    top = [max(c.values()) for c in cells]
    assert f"The best rounds, {min(best)} to {max(best)}, have {min(top):.1f} to {max(top):.1f} %" in page
    rows = [
        r for r in results("kteps-table8") if r["method"].startswith("A,") and r["metric"] == "accuracy_ag"
    ]
    published = [100 * r["published"] for r in rows]
    assert f"and the paper has {min(published):.1f} to {max(published):.1f}." in page
    (same,) = ag("kteps-diversity-0.0-transfer-0.0-")
    four = next(
        r for r in results("kteps-table4") if r["method"] == "λ1 = 0, λ2 = 0" and r["metric"] == "accuracy_ag"
    )
    assert (
        f"it ends at {same[50]:.1f} % with this seed, and at {100 * four['value']:.1f} ± {100 * four['std']:.1f} % over three"
        in page
    )
    below = [p - 100 * r["value"] for p, r in zip(published, rows, strict=True)]
    assert f"Column A is {min(below):.1f} to {max(below):.1f} points of Ag below" in page
    assert max(plain, key=plain.__getitem__) == 30
    assert {max(c, key=c.__getitem__) for c in ag("kteps-architecture-C-*")} == {30}
    moves = max(first) - min(first), max(published) - min(published)
    assert f"λ2 moves Ag by {moves[0]:.1f} points in column A, in the paper by {moves[1]:.1f}." in page


def test_columns() -> None:
    both, whole = shown("B"), shown("C")
    assert max(whole["accuracy_ag"]) - min(whole["accuracy_ag"]) < 1e-9, "nothing flows back"
    page = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    mine, other = (column["accuracy_ap"] for column in (whole, both))
    assert f"gains {mine[-1] - mine[0]:.1f} points of Ap here" in page
    assert f"the embedding alone, it gains {other[-1] - other[0]:.1f} points" in page
    apart = mean(whole["accuracy_ag"]) - mean(both["accuracy_ag"])
    assert f"There Ag is {apart:.1f} points below column C's" in page
