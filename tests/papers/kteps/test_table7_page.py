"""The page of KTEPS shows Table 7 as it was measured, and how many directions are left."""

from __future__ import annotations

import json
from statistics import mean

import numpy as np
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


def test_what_is_left_if_published_components_count_from_0(page: str) -> None:
    """The text's row of 1 to 200 is KTEPS's own; all others lose ``start`` directions a round."""
    found = {(s, e): ag for (e, s), ag in published.COMPONENTS["FDU", "ag"].items() if (s, e) != (1, 200)}
    by_left: dict[int, list[str]] = {}
    for (start, end), ag in sorted(found.items(), key=lambda pair: -pair[1]):
        by_left.setdefault(end - ROUNDS * start, []).append(f"{100 * ag:.1f}")
    assert list(by_left) == sorted(by_left, reverse=True), "fewer directions, less accuracy"
    assert by_left[0] == ["61.6"]
    gone = {ag for left, ags in by_left.items() if left < 0 for ag in ags}
    assert gone == {"50.5"}
    told = [" and ".join(by_left[left]) for left in (100, 50)]
    assert (
        f"{told[0]} % with 100 directions, {told[1]} with 50, {by_left[0][0]} with none, {gone.pop()} where none was "
        f"left earlier" in page
    )
    assert len(found) == 7
    assert "a fit to seven numbers" in page
    rounds, fallen = 20, published.COMPONENTS["IYY", "ag"][150, 6]
    assert 150 - rounds * (6 - 1) == 150 - ROUNDS * (3 - 1) == 50
    assert f"6 to 150 leaves 50 after its 20 rounds: {100 * fallen:.1f} %" in page


def over_seeds(name: str) -> np.ndarray:
    """Return a row's Ag and Ap in percent with seeds 0 to 2, (2, seeds)."""
    found = []
    for seed in range(3):
        (file,) = (DOCS.parent / "results" / "kteps").glob(f"fdu-{name}-full-{seed}-*.json")
        numbers = json.loads(file.read_text(encoding="utf-8"))
        own = [mean(curve) for curve in numbers["curves"]["0.01"]["own"].values()]
        found.append([100 * mean(numbers["shared"].values()), 100 * mean(own)])
    return np.array(found).T


def spread(values: np.ndarray, digits: int) -> list[str]:
    """Return mean and deviation of each row as the page has them."""
    return [f"{v.mean():.{digits}f} ± {v.std(ddof=1):.{digits}f}".replace("-", "−") for v in values]


def behind(method: str, other: str) -> list[str]:
    """Return how far a method's published Ag and Ap are below another's."""
    lost = []
    for number, metric in ((2, "accuracy_ag"), (3, "accuracy_ap")):
        rows = results(f"kteps-table{number}")
        theirs = {r["method"]: r["published"] for r in rows if r["metric"] == metric}
        lost.append(f"{100 * (theirs[other] - theirs[method]):.1f}")
    return lost


@pytest.fixture
def page() -> str:
    return (DOCS / "measured" / "kteps.md").read_text(encoding="utf-8").replace("\n", " ")


def test_compression_costs_next_to_nothing_over_three_seeds(page: str) -> None:
    star, whole = over_seeds("kteps-star"), over_seeds("kteps")
    told, apart, lost = spread(star, 1), spread(star - whole, 2), behind("KTEPS⋆", "KTEPS")
    assert f"has Ag {told[0]} % and Ap {told[1]} %" in page
    assert f"Paired by seed these are {apart[0]} and {apart[1]} points from KTEPS's" in page
    assert f"In the paper it loses {lost[0]} and {lost[1]}." in page


def test_what_compression_costs_on_the_way(page: str) -> None:
    """KTEPS overfits, KTEPS⋆ does less: the gap of the middle rounds is gone at the end."""

    def runs(name: str, seeds: range) -> tuple[np.ndarray, list[float]]:
        """Return Ag in percent over rounds 21 to 30, the last ten and 6 to 10, (3, seeds), and last training losses."""
        cells = []
        for seed in seeds:
            (file,) = (DOCS.parent / "results" / "kteps").glob(f"fdu-{name}-full-{seed}-*.json")
            cells.append(json.loads(file.read_text(encoding="utf-8")))
        curves = [dict(map(tuple, cell["shared_curve"])) for cell in cells]
        spans = [
            [100 * mean(c[r] for r in range(a, b)) for c in curves] for a, b in ((21, 31), (41, 51), (6, 11))
        ]
        return np.array(spans), [cell["loss"][-1] for cell in cells]

    (whole, fit), (star, loose) = (runs(name, range(3)) for name in ("kteps", "kteps-star"))
    lost = spread(whole - star, 2)
    assert f"Early it is more, {lost[2]} over rounds 6 to 10." in page
    assert f"Its Ag is {lost[0]} points behind KTEPS's over rounds 21 to 30, paired by seed." in page
    assert f"Over the last ten it is {lost[1]}." in page
    first = (DOCS / "measured.md").read_text(encoding="utf-8").replace("\n", " ")
    gap = f"{(whole - star)[0].mean():.1f} points of Ag behind it over rounds 21 to 30"
    assert f"{gap}, before KTEPS overfits; in the paper {behind('KTEPS⋆', 'KTEPS')[0]}." in first
    for what, its in (("KTEPS", whole), ("KTEPS⋆", star)):
        first, last = its[:2].mean(1)
        assert f"{what} goes from {first:.1f} to {last:.1f}" in page
    told = [f"{min(losses):.2f} to {max(losses):.2f}" for losses in (loose, fit)]
    assert f"ends at {told[0]}, KTEPS's at {told[1]}" in page
    (by_three, _), (usual, _) = runs("table-7-3-to-150-3-a-round", range(1)), runs("kteps", range(1))
    assert f"as counted from 0, it is {(usual - by_three)[0, 0]:.1f} points over rounds 21 to 30" in page
    (uncentred, _), (centred, _) = runs("kteps-star-uncentred", range(1)), runs("kteps-star", range(1))
    (row,) = [
        r
        for r in results("kteps-baselines")
        if (r["method"], r["metric"]) == ("KTEPS⋆, uncentred", "accuracy_ag")
    ]
    gaps = [f"{(usual - its)[0, 0]:.1f}" for its in (uncentred, centred)]
    assert gaps[0] == gaps[1]
    assert (
        f"KTEPS⋆ has Ag {100 * row['value']:.1f} % after 50 rounds. Over rounds 21 to 30 it is {gaps[0]} points behind "
        f"KTEPS, as it is with this seed by ours." in page
    )
    share = (whole - star)[0].mean() / float(behind("KTEPS⋆", "KTEPS")[0])
    assert 0.35 < share < 0.45, "two fifths of the published gap"


def test_fedprox_is_fedavg(page: str) -> None:
    prox, plain = over_seeds("fedprox"), over_seeds("fedavg")
    told, apart, lost = spread(prox, 1), spread(prox - plain, 2), behind("FedProx", "FedAvg")
    assert f"has Ag {told[0]} and Ap {told[1]}, paired by seed {apart[0]} and {apart[1]} points" in page
    assert f"In the paper it is {lost[0]} and {lost[1]} points below." in page
