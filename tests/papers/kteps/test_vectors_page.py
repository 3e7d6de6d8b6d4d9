"""The page of KTEPS says what other word vectors change as it was measured."""

from __future__ import annotations

import json
from typing import Any

from tests.test_measured import DOCS, ROOT, check, results, table

PAGE = DOCS / "measured" / "kteps.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())
LONGER, GLOVE = "vectors twice as long", "GloVe, 150 numbers"


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

    behind = [of("FedAvg", way) - of("KTEPS", way) for way in (LONGER, "as configured")]
    assert f"by {behind[0]:.1f} points of Ag here and {behind[1]:.1f} as configured" in TEXT
    full = [of("KTEPS", f"{way}, ratio 1", "accuracy_ap") for way in (LONGER, "as configured")]
    published = 100 * rows["KTEPS, as configured, ratio 1", "accuracy_ap"]["published"]
    assert (
        f"Ap is {full[0]:.1f} % from longer vectors, {full[1]:.1f} as configured and {published:.1f} in the paper"
        in TEXT
    )


def cell(name: str) -> dict[str, Any]:
    (file,) = (ROOT / "results/kteps").glob(f"fdu-{name}full-0-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_the_table_of_gloves_vectors() -> None:
    rows = {(r["method"], r["metric"]): r for r in results("kteps-vectors")}
    body = table(PAGE, lambda t: t[0][1:] == ["published", "our vectors", "GloVe, 150 numbers"])
    metrics = {"Ag": "accuracy_ag", "Ap": "accuracy_ap", "Ap at the full rate": "accuracy_ap"}
    assert len(body) == 7
    for title, *cells in body:
        method, what = title.split(", ")
        ratio = ", ratio 1" if "full" in what else ""
        ours, glove = (rows[f"{method}, {way}{ratio}", metrics[what]] for way in ("as configured", GLOVE))
        for shown, number in zip(cells, (ours["published"], ours["value"], glove["value"]), strict=True):
            check(title, shown, [100 * number])

    def of(method: str, metric: str, way: str = GLOVE) -> Any:
        return {k: 100 * (rows[f"{method}, {way}", metric][k] or 0) for k in ("value", "published")}

    as_large = of("Indiv", "accuracy_ag", "ours, 150 numbers")["value"]
    assert f"150 numbers and as long, Indiv has {as_large:.1f} %" in TEXT
    for each in (of("Indiv", "accuracy_ag"), of("LG-FedAvg", "accuracy_ap")):
        assert abs(each["value"] - each["published"]) < 0.3
    ahead = [of("KTEPS", m)["value"] - of("FedAvg", m)["value"] for m in ("accuracy_ag", "accuracy_ap")]
    usual = [
        of(m, a, "as configured")["published"]
        for a in ("accuracy_ag", "accuracy_ap")
        for m in ("KTEPS", "FedAvg")
    ]
    assert (
        f"by {ahead[0]:.1f} points of Ag and {ahead[1]:.1f} of Ap, where the paper has {usual[0] - usual[1]:.1f} and "
        f"{usual[2] - usual[3]:.1f}" in TEXT
    )
    text = " ".join((DOCS / "measured.md").read_text(encoding="utf-8").split())
    assert f"KTEPS is {ahead[1]:.1f} points of Ap ahead of FedAvg (seed 0)" in text
    full = 100 * rows[f"KTEPS, {GLOVE}, ratio 1", "accuracy_ap"]["value"]
    published = [rows["KTEPS, as configured" + r, "accuracy_ap"]["published"] for r in ("", ", ratio 1")]
    assert (
        f"costs {of('KTEPS', 'accuracy_ap')['value'] - full:.1f} points then, and "
        f"{100 * (published[0] - published[1]):.1f} in the paper" in TEXT
    )


def test_kteps_from_gloves_vectors_does_not_overfit() -> None:
    glove, ours = (dict(cell(f"kteps-{way}")["shared_curve"]) for way in ("glove-150-numbers-", ""))
    assert f"{100 * glove[30]:.1f}" == f"{100 * glove[50]:.1f}"
    assert (
        f"after 50, {100 * glove[50]:.1f} %, where from ours it falls from {100 * ours[30]:.1f} to {100 * ours[50]:.1f}"
        in TEXT
    )
    losses = [cell(f"kteps-{way}")["loss"][-1] for way in ("glove-150-numbers-", "")]
    assert f"training loss ends at {losses[0]:.2f}, from ours at {losses[1]:.2f}" in TEXT


def test_how_they_stand_after_ten_rounds() -> None:
    def after(name: str, curve: str) -> float:
        return 100 * float(dict(cell(name)[curve])[10])

    indiv = [after(f"indiv-{way}", "test_curve") for way in ("vectors-twice-as-long-", "")]
    kteps = [after(f"kteps-{way}", "shared_curve") for way in ("vectors-twice-as-long-", "")]
    assert (
        f"after 10 rounds Indiv has {indiv[0]:.1f} % instead of {indiv[1]:.1f}, KTEPS an Ag of {kteps[0]:.1f} instead of "
        f"{kteps[1]:.1f}" in TEXT
    )
