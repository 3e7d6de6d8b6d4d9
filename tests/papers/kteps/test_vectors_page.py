"""The page of KTEPS says what longer word vectors change as it was measured."""

from __future__ import annotations

import json

from tests.test_measured import DOCS, ROOT, check, results, table

PAGE = DOCS / "measured" / "kteps.md"
LONGER = "vectors twice as long"


def test_the_table_of_longer_vectors() -> None:
    rows = {(r["method"], r["metric"]): r for r in results("kteps-vectors")}
    body = table(PAGE, lambda t: t[0][1] == "Ag, as configured" and "twice" in t[0][2])
    assert [method for method, *_ in body] == ["Indiv", "FedAvg", "KTEPS"]
    for method, *cells in body:
        wanted = [(w, m) for m in ("accuracy_ag", "accuracy_ap") for w in ("as configured", LONGER)]
        for cell, (way, metric) in zip(cells, wanted, strict=True):
            check(f"{method}, {way}", cell, [100 * rows[f"{method}, {way}", metric]["value"]])

    def of(method: str, way: str, metric: str = "accuracy_ag") -> float:
        return 100 * float(rows[f"{method}, {way}", metric]["value"])

    page = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    behind = [of("FedAvg", way) - of("KTEPS", way) for way in (LONGER, "as configured")]
    assert f"by {behind[0]:.1f} points of Ag here and {behind[1]:.1f} as configured" in page
    full = [of("KTEPS", f"{way}, ratio 1", "accuracy_ap") for way in (LONGER, "as configured")]
    published = 100 * rows["KTEPS, as configured, ratio 1", "accuracy_ap"]["published"]
    assert (
        f"Ap is {full[0]:.1f} % from longer vectors, {full[1]:.1f} as configured and {published:.1f} in the paper"
        in page
    )
    assert f"published one ({100 * rows['Indiv, as configured', 'accuracy_ag']['published']:.1f} %)" in page


def test_how_they_stand_after_ten_rounds() -> None:
    def after(name: str, curve: str) -> float:
        (file,) = (ROOT / "results/kteps").glob(f"fdu-{name}full-0-*.json")
        return 100 * float(dict(json.loads(file.read_text(encoding="utf-8"))[curve])[10])

    indiv = [after(f"indiv-{way}", "test_curve") for way in ("vectors-twice-as-long-", "")]
    kteps = [after(f"kteps-{way}", "shared_curve") for way in ("vectors-twice-as-long-", "")]
    page = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    assert (
        f"after 10 rounds Indiv has {indiv[0]:.1f} % instead of {indiv[1]:.1f}, KTEPS an Ag of {kteps[0]:.1f} instead of "
        f"{kteps[1]:.1f}" in page
    )
