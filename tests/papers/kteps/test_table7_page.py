"""The page of KTEPS shows Table 7 as it was measured, and how many directions are left."""

from __future__ import annotations

import json

import pytest

from fedkeep_papers.kteps import published
from tests.test_measured import DOCS, check, results, table

ROUNDS = 50


def test_table_7() -> None:
    rows = {row["method"]: row for row in results("kteps-table7") if row["metric"] == "accuracy_ag"}
    body = table(
        DOCS / "measured" / "kteps.md", lambda t: t[0][1:] == [f"d_s = {s}" for s in published.STARTS]
    )
    assert [row[0] for row in body] == [f"d_e = {end}" for end in published.ENDS]
    for end, (_, *cells) in zip(published.ENDS, body, strict=True):
        for start, cell in zip(published.STARTS, cells, strict=True):
            row, left = rows[f"components {start} to {end}"], max(0, end - ROUNDS * (start - 1))
            check(f"{start} to {end}", cell, [100 * row["value"], 100 * row["published"], left])
            assert (row["value"] < 0.55) == (left == 0), (
                "it predicts next to nothing where no direction is left"
            )


@pytest.mark.parametrize(("end", "last"), [(200, 40), (150, 30)])
def test_accuracy_falls_in_the_round_that_takes_the_last_direction(end: int, last: int) -> None:
    """Components 6 to ``end`` take five directions a round, so that none is left after ``end / 5``."""
    assert end - 5 * last == 0
    (file,) = (DOCS.parent / "results" / "kteps").glob(f"fdu-kteps-star-end-{end}-start-6-full-0-*.json")
    curve = dict(map(tuple, json.loads(file.read_text(encoding="utf-8"))["shared_curve"]))
    before, after = (100 * curve[round] for round in (last, last + 1))
    page = (DOCS / "measured" / "kteps.md").read_text(encoding="utf-8")
    assert f"{before:.1f} % after round {last} and {after:.1f} % after round {last + 1}" in page.replace(
        "\n", " "
    )
    assert before > 80 > 60 > after
