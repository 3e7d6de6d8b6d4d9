"""The page of KTEPS shows column C of Table 8 as it was measured."""

from __future__ import annotations

from tests.test_measured import DOCS, check, results, table


def test_column_c() -> None:
    rows = {(row["method"], row["metric"]): row for row in results("kteps-table8")}
    body = table(DOCS / "measured" / "kteps.md", lambda t: t[0][0] == "column C")
    shown = {"accuracy_ag": [], "accuracy_ap": []}  # type: dict[str, list[float]]
    for name, *cells in body:
        for metric, cell in zip(shown, cells, strict=True):
            row = rows[f"C, {name}", metric]
            check(f"{name}, {metric}", cell, [100 * row["value"], 100 * row["published"]])
            shown[metric].append(100 * row["value"])
    assert len(body) == 4
    assert max(shown["accuracy_ag"]) - min(shown["accuracy_ag"]) < 1e-9, "nothing flows back"
    page = (DOCS / "measured" / "kteps.md").read_text(encoding="utf-8").replace("\n", " ")
    own = shown["accuracy_ap"]
    assert f"gains {own[-1] - own[0]:.1f} points of Ap here" in page
