"""The page of KTEPS says what other word vectors change as it was measured."""

from __future__ import annotations

import json
from statistics import mean, stdev
from typing import Any

import pytest

from tests.documents import ROOT
from tests.test_measured import DOCS, check, percent, results, table

PAGE = DOCS / "measured" / "kteps.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())
LONGER, GLOVE = "vectors twice as long", "GloVe, 150 numbers"


def cell(name: str, seed: int = 0) -> dict[str, Any]:
    """Return a cell: ``kteps-`` is KTEPS as configured."""
    (file,) = (ROOT / "results/kteps").glob(f"fdu-{name}full-{seed}-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def measured(name: str, seed: int = 0, ratio: float = 0.01) -> dict[str, float]:
    """Return Ag and Ap in percent."""
    found = cell(name, seed)
    ag = 100 * mean((found["shared"] or found["test"]).values())
    curves = found["curves"].get(str(ratio), {"own": {"all": [ag / 100]}})["own"].values()
    return {"accuracy_ag": ag, "accuracy_ap": 100 * mean(mean(curve) for curve in curves)}


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["method"], r["metric"]): r for r in results("kteps-vectors")}


def test_the_table_of_longer_vectors() -> None:
    body = table(PAGE, lambda t: t[0][1] == "Ag, as configured" and "twice" in t[0][2])
    assert [method for method, *_ in body] == ["Indiv", "FedAvg", "KTEPS"]
    ways = ("", "vectors-twice-as-long-")
    for method, *cells in body:
        wanted = [(w, m) for m in ("accuracy_ag", "accuracy_ap") for w in ways]
        for shown, (way, metric) in zip(cells, wanted, strict=True):
            number = measured(f"{method.lower()}-{way}")[metric]
            check(f"{method}, {way}", shown, [number])
            if way:
                assert 100 * rows()[f"{method}, {LONGER}", metric]["value"] == pytest.approx(number, abs=1e-4)
    behind = [measured(f"fedavg-{w}")["accuracy_ag"] - measured(f"kteps-{w}")["accuracy_ag"] for w in ways]
    assert f"by {behind[1]:.1f} points of Ag here and {behind[0]:.1f} as configured" in TEXT
    full = [measured(f"kteps-{w}", ratio=1.0)["accuracy_ap"] for w in ways]
    published = 100 * rows()["KTEPS, as configured, ratio 1", "accuracy_ap"]["published"]
    assert (
        f"Ap is {full[1]:.1f} % from longer vectors, {full[0]:.1f} as configured and {published:.1f} in the paper"
        in TEXT
    )


def test_the_table_of_gloves_vectors() -> None:
    found = rows()
    body = table(PAGE, lambda t: t[0][1:] == ["published", "our vectors", "GloVe, 150 numbers"])
    metrics = {"Ag": "accuracy_ag", "Ap": "accuracy_ap", "Ap at the full rate": "accuracy_ap"}
    assert len(body) == 12
    for title, *cells in body:
        method, what = title.split(", ")
        ratio = ", ratio 1" if "full" in what else ""
        ours, glove = (found[f"{method}, {way}{ratio}", metrics[what]] for way in ("as configured", GLOVE))
        for shown, numbers in zip(
            cells, ([100 * ours["published"]], percent(ours), percent(glove)), strict=True
        ):
            check(title, shown, numbers)
        assert ours["seeds"] == [0, 1, 2]
        assert glove["seeds"] == ([0, 1, 2] if "±" in cells[2] else [0])
    for method, metric in (("Indiv", "accuracy_ag"), ("LG-FedAvg", "accuracy_ap")):
        row = found[f"{method}, {GLOVE}", metric]
        assert abs(row["value"] - row["published"]) < 0.003
    as_large = 100 * found["Indiv, ours, 150 numbers", "accuracy_ag"]["value"]
    own = measured("indiv-")["accuracy_ag"]
    assert (
        f"150 numbers and as long, Indiv has {as_large:.1f} % (seed 0; from ours as they are {own:.1f})"
        in TEXT
    )


def ahead(metric: str) -> list[float]:
    """Return KTEPS minus FedAvg from GloVe's, a number a seed."""
    pairs = [[measured(f"{m}-glove-150-numbers-", s)[metric] for m in ("kteps", "fedavg")] for s in range(3)]
    return [ours - theirs for ours, theirs in pairs]


def test_kteps_from_gloves_vectors_is_level_with_fedavg() -> None:
    gaps = {metric: ahead(metric) for metric in ("accuracy_ag", "accuracy_ap")}
    ag, ap = (f"{mean(v):.2f} ± {stdev(v):.2f}" for v in gaps.values())
    assert all(abs(mean(v)) < stdev(v) / 3 for v in gaps.values())
    assert all(sum(gap > 0 for gap in v) == 2 for v in gaps.values())
    usual = {m: rows()[f"{m}, as configured", "accuracy_ag"]["published"] for m in ("KTEPS", "FedAvg")}
    tuned = {m: rows()[f"{m}, as configured", "accuracy_ap"]["published"] for m in ("KTEPS", "FedAvg")}
    theirs = [f"{100 * (known['KTEPS'] - known['FedAvg']):.1f}" for known in (usual, tuned)]
    assert (
        f"Paired by seed, it is {ag} points of Ag and {ap} of Ap ahead, in two of three seeds; the paper has "
        f"{theirs[0]} and {theirs[1]}." in TEXT
    )
    text = " ".join((DOCS / "measured.md").read_text(encoding="utf-8").split())
    assert f"KTEPS is level with FedAvg, {ap} points of Ap ahead over three seeds" in text
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    both = [rows()[f"{m}, {GLOVE}", "accuracy_ap"] for m in ("KTEPS", "FedAvg")]
    told = [f"{100 * row['value']:.1f} ± {100 * row['std']:.1f}" for row in both]
    assert f"{told[0]} against {told[1]} %." in readme


def test_what_gloves_vectors_do_not_explain() -> None:
    below = [
        100 * (rows()[f"PFL-DA, {way}", "accuracy_ag"][key] - rows()[f"PFL-DA, {way}", "accuracy_ap"][key])
        for way, key in ((GLOVE, "value"), ("as configured", "value"), (GLOVE, "published"))
    ]
    text = "PFL-DA's Ap is {:.1f} points below its Ag, from ours {:.1f} and in the paper {:.1f}"
    assert text.format(*below) in TEXT
    above = [
        100
        * (
            rows()[f"FedFusion, {GLOVE}", "accuracy_ap"][key]
            - rows()[f"FedFusion, {GLOVE}", "accuracy_ag"][key]
        )
        for key in ("value", "published")
    ]
    text = "FedFusion's Ap is {:.1f} points above its Ag, in the paper {:.1f} below"
    assert text.format(above[0], -above[1]) in TEXT
    lost = [
        measured("pfl-da-")[m] - measured("pfl-da-glove-150-numbers-")[m]
        for m in ("accuracy_ap", "accuracy_ag")
    ]
    over = measured("pfl-da-")["accuracy_ap"] - 100 * rows()[f"PFL-DA, {GLOVE}", "accuracy_ap"]["published"]
    assert (
        f"Our word vectors make {lost[0]:.1f} of the {over:.1f} points by which its Ap, as configured, is above the "
        "paper's (seed 0), and take as much from its Ag" in TEXT
    )
    assert f"{lost[0]:.1f}" == f"{lost[1]:.1f}"
    star, kteps = (rows()[f"{m}, {GLOVE}", "accuracy_ag"] for m in ("KTEPS⋆", "KTEPS"))
    assert f"in the paper it loses {100 * (kteps['published'] - star['published']):.1f} points of Ag" in TEXT
    assert star["value"] > measured("kteps-glove-150-numbers-")["accuracy_ag"] / 100
    ag = [cell(f"{m}-glove-150-numbers-")["shared"] for m in ("pfl-da", "fedavg")]
    assert ag[0] == ag[1]


def test_kteps_from_gloves_vectors_does_not_overfit() -> None:
    glove, ours = ([cell(f"kteps-{way}", s) for s in range(3)] for way in ("glove-150-numbers-", ""))

    def after(cells: list[dict[str, Any]], number: int) -> float:
        return 100 * mean(float(dict(each["shared_curve"])[number]) for each in cells)

    assert (
        f"its Ag is {after(glove, 30):.1f} % after 30 rounds and {after(glove, 50):.1f} after 50, from ours "
        f"{after(ours, 30):.1f} and {after(ours, 50):.1f}" in TEXT
    )
    losses = [mean(each["loss"][-1] for each in cells) for cells in (glove, ours)]
    assert f"training loss ends at {losses[0]:.2f}, from ours at {losses[1]:.2f}" in TEXT
    best = mean(row["published"] for row in results("kteps-table4") if row["metric"] == "accuracy_ag")
    here = 100 * rows()[f"KTEPS, {GLOVE}", "accuracy_ag"]["value"]
    assert f"a mean Ag of {100 * best:.1f} %, which is {100 * best - here:.1f} points from here" in TEXT


def test_how_they_stand_after_ten_rounds() -> None:
    def after(name: str, curve: str) -> float:
        return 100 * float(dict(cell(name)[curve])[10])

    indiv = [after(f"indiv-{way}", "test_curve") for way in ("vectors-twice-as-long-", "")]
    kteps = [after(f"kteps-{way}", "shared_curve") for way in ("vectors-twice-as-long-", "")]
    assert (
        f"after 10 rounds Indiv has {indiv[0]:.1f} % instead of {indiv[1]:.1f}, KTEPS an Ag of {kteps[0]:.1f} instead of "
        f"{kteps[1]:.1f}" in TEXT
    )
