"""The page of KTEPS says of stopping early, and of reviews that stand in training, what was measured."""

from __future__ import annotations

import json
import re
from statistics import mean, stdev
from typing import Any

from fedkeep.metrics import ap
from fedkeep_papers.kteps import published
from tests.papers.kteps.test_table4_page import PAGE, SEEDS, TEXT
from tests.test_measured import DOCS, check, percent, results, table

RULE = "variant-linear-schedule"
RULED = "variant-fedavg-linear-schedule"


def cell(name: str, seed: int) -> dict[str, Any]:
    (file,) = (DOCS.parent / "results" / "kteps").glob(f"fdu-{name}-full-{seed}-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def ag(name: str, seed: int) -> float:
    return 100 * mean(cell(name, seed)["shared"].values())


def tuned(name: str, seed: int) -> float:
    return 100 * mean(ap(cell(name, seed)["curves"]["0.01"]["own"]).clients.values())


def over(values: list[float], digits: int = 2) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}".replace("-", "−")


def test_the_rule_helps_kteps_alone() -> None:
    def gaps(one: str, two: str) -> list[str]:
        return [over([of(one, s) - of(two, s) for s in SEEDS]) for of in (ag, tuned)]

    worse, (whole, fine) = (
        gaps("fedavg", RULED),
        (over([of(RULED, s) for s in SEEDS], 1) for of in (ag, tuned)),
    )
    assert f"by {worse[0]} points of Ag and {worse[1]} of Ap: {whole} and {fine} %" in TEXT
    losses = [[cell(name, s)["loss"][-1] for s in SEEDS] for name in (RULED, "fedavg")]
    (low, high), (least, most) = ((min(each), max(each)) for each in losses)
    assert f"ends at {low:.2f} to {high:.2f}, as configured at {least:.2f} to {most:.2f}" in TEXT
    ahead, level = gaps(RULE, RULED), gaps(RULE, "fedavg")
    assert f"{ahead[0]} points of Ag and {ahead[1]} of Ap ahead of it" in TEXT
    assert f"({level[0]} points of Ag, {level[1]} of Ap)" in TEXT
    page = " ".join((DOCS / "measured.md").read_text(encoding="utf-8").split())
    assert f"It is {float(ahead[1].split()[0]):.1f} points of Ap ahead of FedAvg by the same rule" in page


def test_what_trains_in_one_place_overfits() -> None:
    def after(name: str, round: int) -> list[float]:
        return [100 * dict(map(tuple, cell(name, s)["test_curve"]))[round] for s in SEEDS]

    rows = {r["method"]: r for r in results("kteps-table2") if r["metric"] == "accuracy_ag"}
    theirs = {name: 100 * rows[name]["published"] for name in ("ASP-MTL", "FS")}
    asp, best, end = after("asp-mtl", 50), after("asp-mtl", 10), after("fs", 50)
    assert f"has Ag {over(asp, 1)} %, {theirs['ASP-MTL'] - mean(asp):.1f} points below" in TEXT
    assert f"it has {over(best, 1)} % after 20 epochs, and the paper {theirs['ASP-MTL']:.1f}." in TEXT
    early = mean(after("fs", 3))
    assert (
        f"has {early:.1f} % after six epochs and {mean(end):.1f} after all, where the paper has {theirs['FS']:.1f}"
        in TEXT
    )
    for name in ("asp-mtl", "fs"):
        assert {cell(name, s)["settings"]["config"]["method"]["epochs"] for s in SEEDS} == {2}, "of a round"


def test_repeats() -> None:
    known, ruled = [cell("asp-mtl", s) for s in (1, 2)], [cell(RULED, s) for s in SEEDS]
    counts = known[0]["repeats"]
    assert all(each["repeats"] == counts for each in (*known, *ruled))
    names = ("magazines", "video", "camera_photo", "software")
    assert f"Of the 6,400 test reviews {sum(counts.values())} have" in TEXT
    assert (
        "training review: " + ", ".join(f"{counts[n]} in {n}" for n in names) + ", none in imdb and MR"
        in TEXT
    )
    assert list(names) == sorted(counts, key=lambda n: -counts[n])[:4]
    assert not {"imdb", "MR"} & counts.keys()

    def shares(cells: list[dict[str, Any]], model: str) -> tuple[float, float]:
        again = [
            sum(c["again"][model][n] * k for n, k in counts.items()) / sum(counts.values()) for c in cells
        ]
        return 100 * mean(again), 100 * mean(mean(c["rest"][model].values()) for c in cells)

    again, rest = shares(known, "own")
    every = 100 * mean(mean(c["test"].values()) for c in known)
    assert f"tells {again:.1f} % of them right and {rest:.1f} % of the others, {every:.1f} % of all" in TEXT
    again, rest = shares(ruled, "shared")
    assert f"FedAvg by the rule above tells {again:.1f} % of them and {rest:.1f} % of the others" in TEXT
    theirs = published.of_scene(published.AG, "FDU") and {
        m: 100 * v for m, v in published.of_scene(published.AG, "FDU")["magazines"].items() if m != "Indiv"
    }
    assert f"the published ones {min(theirs.values()):.1f} to {max(theirs.values()):.1f}" in TEXT
    here = 100 * mean(c["shared"]["magazines"] for c in ruled)
    assert f"has {here:.1f} % there, and FedAvg in the paper {theirs['FedAvg']:.1f}" in TEXT
    table = (DOCS.parent / "results" / "kteps-table2.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| magazines \|.*$", table, re.MULTILINE)
    ours = [float(part.split()[0]) for part in row.split("|")[3:-1]]  # after the client and Indiv
    assert f"our shared models have {min(ours):.1f} to {max(ours):.1f} %" in TEXT


GLOVE, BY_ADAM = "GloVe, 150 numbers", "tuned by Adam"
BRIEFLY = f"{BY_ADAM} for 100 steps"


def rates_from_glove() -> dict[tuple[Any, str], Any]:
    """Return the rows of KTEPS from GloVe's vectors as the page names them."""
    found: dict[tuple[Any, str], Any] = {}
    for row in results("kteps-vectors"):
        label = f"KTEPS, {GLOVE}"
        if row["metric"] == "accuracy_ap" and row["method"].startswith(label):
            what, _, ratio = row["method"].removeprefix(label).partition(", ratio ")
            method, kind = ("the same", what.removeprefix(", ")) if what else ("KTEPS", GLOVE)
            found[kind, f"{method}, ratio {ratio or '0.01'}"] = row
    return found


def test_the_rate_of_fine_tuning() -> None:
    rows = {
        (scale, r["method"]): r
        for scale, name in ((50, "kteps-table5"), (15, "kteps-table5-medium"))
        for r in results(name)
        if r["metric"] == "accuracy_ap"
    }
    rows |= rates_from_glove()
    body = table(PAGE, lambda t: t[0][1:] == ["ratio 1", "0.1", "0.01", "0.001"])
    assert len(body) == 9
    values = {}
    for name, *shown in body:
        method, _, what = name.partition(", ")
        for ratio, text in zip(("1", "0.1", "0.01", "0.001"), shown, strict=True):
            kind = what if what in (GLOVE, BY_ADAM, BRIEFLY) else 15 if what == "15 rounds" else 50
            row = rows[kind, f"{method}, ratio {ratio}"]
            value = 100 * row["published"] if what == "published" else percent(row)
            check(f"{name}, {ratio}", text, [value] if what == "published" else value)  # type: ignore[list-item]
            values[name, ratio] = float(text.split()[0]) if what == "published" else 100 * row["value"]
    for name, lost in (("published", 6.8), ("50 rounds", 0.3), ("15 rounds", 0.6), (GLOVE, 0.7)):
        assert f"{values[f'KTEPS, {name}', '0.01'] - values[f'KTEPS, {name}', '1']:.1f}" == f"{lost}"
    adam = [values[f"the same, {BY_ADAM}", ratio] for ratio in ("1", "0.1", "0.01", "0.001")]
    assert (
        f"lose {adam[2] - adam[0]:.1f} points at the full rate, {adam[2] - adam[1]:.1f} at a tenth of it"
        in TEXT
    )
    assert abs(adam[3] - adam[2]) < 0.05
    assert 0.4 < (adam[2] - adam[0]) / 6.8 < 0.6  # half
    briefly = [values[f"the same, {BRIEFLY}", ratio] for ratio in ("1", "0.1", "0.01")]
    brief = cell("kteps-glove-150-numbers-tuned-by-adam-for-100-steps", 0)
    full, usual = (
        [100 * mean(at) for at in zip(*brief["curves"][ratio]["own"].values(), strict=True)]
        for ratio in ("1.0", "0.01")
    )
    tenth = brief["steps"].index(20) + 1
    first = mean(full[:tenth])
    assert (
        f"lose {briefly[2] - briefly[0]:.1f} points over 100 steps at the full rate and "
        f"{mean(usual[:tenth]) - first:.1f} over the first 20, where they have {first:.1f} % and the paper's "
        f"{values['KTEPS, published', '1']:.1f}. At a tenth they lose {briefly[2] - briefly[1]:.1f}." in TEXT
    )
    assert brief["loss"] == cell("kteps-glove-150-numbers", 0)["loss"]
    sgd, by_adam = (cell(f"kteps-glove-150-numbers{n}", 0) for n in ("", "-tuned-by-adam"))
    assert sgd["loss"] == by_adam["loss"]
    assert sgd["shared"] == by_adam["shared"]
    near = [abs(values["KTEPS, 15 rounds", r] - values["KTEPS, published", r]) for r in ("0.01", "0.001")]
    assert max(near) <= 0.2
    losses = [cell("kteps", s)["loss"][-1] for s in SEEDS]
    assert f"the training loss is {min(losses):.2f} to {max(losses):.2f} for KTEPS" in TEXT
    (file,) = (DOCS.parent / "results" / "kteps").glob("fdu-kteps-medium-0-*.json")
    assert f"it is {json.loads(file.read_text(encoding='utf-8'))['loss'][-1]:.2f}." in TEXT
