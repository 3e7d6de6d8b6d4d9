"""The page of KTEPS shows Table 8 as it was measured; of column A two cells."""

from __future__ import annotations

from statistics import mean

from tests.test_measured import DOCS, check, results, table

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
    assert len(body) == (2 if column == "A" else 4)
    return found


def test_columns() -> None:
    shown("A")
    both, whole = shown("B"), shown("C")
    assert max(whole["accuracy_ag"]) - min(whole["accuracy_ag"]) < 1e-9, "nothing flows back"
    page = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    mine, other = (column["accuracy_ap"] for column in (whole, both))
    assert f"gains {mine[-1] - mine[0]:.1f} points of Ap here" in page
    assert f"the embedding alone, it gains {other[-1] - other[0]:.1f} points" in page
    apart = mean(whole["accuracy_ag"]) - mean(both["accuracy_ag"])
    assert f"There Ag is {apart:.1f} points below column C's" in page
