"""The page of KTEPS says which readings have the paper's Ap of PFL-DA, FedFusion and Table 8, as they were measured."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

from tests.test_measured import DOCS, ROOT, check, results, table

PAGE = DOCS / "measured" / "kteps.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split())


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(r["method"], r["metric"]): r for r in results("kteps-baselines")}


def test_extractors_that_are_never_set_back() -> None:
    ag, ap = (rows()["FedFusion, never set back", f"accuracy_{m}"] for m in ("ag", "ap"))
    assert (
        f"never set back its Ap is the paper's**: {100 * ap['value']:.1f} %, published {100 * ap['published']:.1f}."
        in TEXT
    )
    assert abs(ap["value"] - ap["published"]) < 0.005
    assert f"Ag is {100 * ag['value']:.1f} % then, published {100 * ag['published']:.1f}:" in TEXT
    conv, one, conv_back, one_back = (
        [100 * rows()[f"FedFusion, {how}", f"accuracy_{m}"]["value"] for m in ("ag", "ap")]
        for how in ("never set back, conv", "never set back, single", "conv", "single")
    )
    assert (
        f"Fused by a linear layer it has {conv[0]:.1f} and {conv[1]:.1f} %, by one weight for all features "
        f"{one[0]:.1f} and {one[1]:.1f}. Set back and fused by a linear layer it has {conv_back[0]:.1f} and "
        f"{conv_back[1]:.1f}, and by one weight {one_back[0]:.1f} and {one_back[1]:.1f}." in TEXT
    )
    both = [rows()["FedFusion, both trained", f"accuracy_{m}"]["value"] for m in ("ag", "ap")]
    assert f"own never leaves, it has {100 * both[0]:.1f} and {100 * both[1]:.1f}." in TEXT
    (file,) = (ROOT / "results/kteps").glob("fdu-fedfusion-never-set-back-full-0-*.json")
    losses = json.loads(file.read_text())["loss"]
    after = next(k for k, value in enumerate(losses, start=1) if value < 0.001)
    assert f"the training loss is below 0.001 after {after} rounds" in TEXT
    usual = rows()["FedFusion, as configured", "accuracy_ag"]
    assert abs(usual["value"] - usual["published"]) < abs(ag["value"] - ag["published"])


def test_how_far_the_server_moves_gamma() -> None:
    whole = [rows()["FedFusion, gamma averaged whole", f"accuracy_{m}"]["value"] for m in ("ag", "ap")]
    usual = rows()["FedFusion, as configured", "accuracy_ag"]
    last = []
    for name in ("gamma-averaged-whole-", ""):
        (file,) = (ROOT / "results/kteps").glob(f"fdu-fedfusion-{name}full-0-*.json")
        last.append(json.loads(file.read_text())["loss"][-1])
    assert (
        f"FedFusion has Ag {100 * whole[0]:.1f} and Ap {100 * whole[1]:.1f} %: the training loss then ends at "
        f"{last[0]:.2f}, by a tenth at {last[1]:.2f}." in TEXT
    )
    assert whole[0] < usual["published"] < usual["value"]
    assert (
        f"The paper's Ag of {100 * usual['published']:.1f} lies between {100 * whole[0]:.1f} and the "
        f"{100 * usual['value']:.1f} of the same seed by a tenth." in TEXT
    )


def test_branches_alone() -> None:
    body = table(PAGE, lambda t: t[0][:2] == ["λ2 = 0.01", "both"])
    assert [name for name, *_ in body] == ["column B", "column C"]
    for name, *cells in body:
        found = [rows()[f"Table 8, {name[-1]}, λ2 = 0.01, {how}", "accuracy_ap"] for how in ("sp", "s", "p")]
        for cell, row in zip(cells, found, strict=False):
            check(name, cell, [100 * row["value"]])
        check(name, cells[3], [100 * found[0]["published"]])


def test_the_private_branch_of_column_c_is_indiv() -> None:
    (file,) = (ROOT / "results/kteps").glob("fdu-indiv-full-0-*.json")
    indiv = 100 * mean(json.loads(file.read_text())["test"].values())
    private = 100 * rows()["Table 8, C, λ2 = 0.01, p", "accuracy_ap"]["value"]
    assert f"{private:.1f}" == f"{indiv:.1f}"
    assert f"{private:.1f} % is what Indiv has with this seed" in TEXT
    both = {(r["method"], r["metric"]): r for r in results("kteps-table3") if r["scene"] == "FDU"}
    theirs = 100 * both["Indiv", "accuracy_ap"]["published"]
    column = [
        100 * r["published"] - theirs
        for r in results("kteps-table8")
        if r["method"].startswith("C,") and r["metric"] == "accuracy_ap"
    ]
    assert len(column) == 4
    alone, together = (
        [
            100 * (row["value"] - row["published"])
            for row in (rows()[f"Table 8, {a}, λ2 = 0.01, {how}", "accuracy_ap"] for a in "BC")
        ]
        for how in ("p", "sp")
    )
    assert {f"{gap:.1f}" for gap in alone} == {"1.0"}
    assert f"and both together are {together[0]:.1f} and {together[1]:.1f} above it." in TEXT
    assert f"Indiv is {indiv - theirs:.1f} above its own" in TEXT
    assert f"whose column is {min(column):.1f} to {max(column):.1f} points above Indiv" in TEXT
    own, row = both["Indiv", "accuracy_ap"], both["PFL-DA", "accuracy_ap"]
    assert (
        f"Indiv, which has {100 * own['value']:.1f} ± {100 * own['std']:.1f} % here, where the paper has "
        f"{100 * row['published']:.1f} % for PFL-DA" in TEXT
    )


def test_components_counted_from_0_fall_one_round_after_the_last_direction_went() -> None:
    name = "Table 7, 3 to 150, 3 a round"
    before, after, ap = (
        rows()[name + more, f"accuracy_{m}"]
        for more, m in (("", "ag"), (", 1 more", "ag"), (", 1 more", "ap"))
    )
    assert (
        f"Ag is {100 * before['value']:.1f} % after 50 rounds and {100 * after['value']:.1f} % after the 51st"
        in TEXT
    )
    assert f"an Ap of {100 * ap['value']:.1f} % then, the paper's {100 * ap['published']:.1f}." in TEXT
    assert f"The paper's Ag, {100 * before['published']:.1f} %, lies between ours" in TEXT
    assert after["value"] < before["published"] < before["value"]
    assert 150 - 50 * 3 == 0
    (file,) = (ROOT / "results/kteps").glob("fdu-table-7-3-to-150-3-a-round-full-0-*.json")
    curve = dict(map(tuple, json.loads(file.read_text())["shared_curve"]))
    assert min(curve[round] for round in range(30, 51)) > 0.8


def percent_of(method: str) -> tuple[float, float]:
    """Return Ag and Ap in percent."""
    ag, ap = (100 * rows()[method, f"accuracy_{m}"]["value"] for m in ("ag", "ap"))
    return ag, ap


def test_a_gated_mixture_leaves_its_general_model_at_chance() -> None:
    gated, own = percent_of("PFL-DA, gated"), percent_of("PFL-DA, gated, with a loss of its own")
    assert (
        f"PFL-DA has Ag {gated[0]:.1f} and Ap {gated[1]:.1f} % (seed 0): the general model falls to chance"
        in TEXT
    )
    assert abs(gated[0] - 50) < 1
    assert f"With a loss of its own beside the mixture's it has {own[0]:.1f} and {own[1]:.1f} %." in TEXT


def test_fedprox_that_is_held_nearer() -> None:
    ag, ap = percent_of("FedProx, mu 0.1")
    (file,) = (ROOT / "results/kteps").glob("fdu-fedavg-full-0-*.json")
    plain = json.loads(file.read_text())
    usual = mean(plain["shared"].values()), mean(map(mean, plain["curves"]["0.01"]["own"].values()))
    apart = [f"{100 * theirs - own:.1f}" for own, theirs in zip((ag, ap), usual, strict=True)]
    assert (
        f"With μ = 0.1 in place of 0.01 it has {ag:.1f} and {ap:.1f} %, {apart[0]} and {apart[1]} points below FedAvg's "
        f"with the same seed (0)." in TEXT
    )
    row = rows()["FedProx, mu 0.1", "accuracy_ag"]
    assert row["value"] < row["published"] < usual[0], "the paper's lies between the two"
