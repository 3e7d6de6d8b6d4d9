"""What a comparison of methods says in words, tables and CSV rows."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.metrics.worth.best import Standing, best_of, standings
from fedkeep.metrics.worth.gains import Paired
from fedkeep.metrics.worth.intervals import Interval
from fedkeep.report.drawing import to_svg
from fedkeep.report.standings import (
    Compared,
    FoundComparison,
    beating,
    compared,
    gains_table,
    not_beating,
    p_text,
    plain_gains,
    plain_rows,
    ranks_figure,
    said,
    table,
)
from fedkeep.report.text_tables import to_csv
from fedkeep.report.worth_page import Comparison
from fedkeep.tasks import MULTICLASS, REGRESSION
from fedkeep.tasks.kind import COUNTING
from tests.report.test_worth import comparison


def made(*right: list[int], seeds: int = 1, unit: str = "points") -> Compared:
    """Methods that get so many of each client's ten examples right; losses are 1 − right, with the sign changed."""
    users = len(right[0])
    results = [np.array([[int(i < n) for n in own for i in range(10)]] * seeds) for own in right]
    if unit != "points":
        results = [(own - 1).astype(np.float64) for own in results]
    models = [
        Paired(
            clients=tuple(map(str, range(users))),
            seeds=tuple(range(seeds)),
            client=np.repeat(np.arange(users), 10),
            ours=own,
            theirs=own,
        )
        for own in results
    ]
    return Compared(
        task=None,
        kind=REGRESSION if unit == "in squared error" else MULTICLASS,
        metric="accuracy" if unit == "points" else "loss",
        unit=unit,
        labels=tuple("abcdef"[: len(right)]),
        standings=tuple(standings(models)),
        users=users,
        seeds=models[0].seeds,
        models=tuple(models),
    )


def against(c: Comparison, ours: str, theirs: str, reference: str = "") -> Comparison:
    return Comparison(
        ours=ours,
        theirs=theirs,
        task=None,
        metric="accuracy",
        unit="points",
        found=c.found,
        pooled=(),
        reference="counting" if theirs == COUNTING else reference,
    )


def test_the_best_and_what_cannot_be_told_from_it() -> None:
    c = made([8] * 12, [8] * 11 + [7], [4, 5] * 6)
    assert said(c) == (
        "Best: a, 80.0 % (accuracy, mean over users). Not distinguishable from it: b. 1 of the others is worse than the best "
        "for users like these."
    )
    shown = table(c, [["1 kB"], ["2 kB"], ["3 kB"]], ["up"])
    assert shown.columns == (
        "method",
        "Accuracy, mean over users",
        "difference to the best (points)",
        "p (corrected)",
        "up",
    )
    assert shown.rows[0] == ("a", "80.0 %", "best", "", "1 kB")
    # one client of twelve has one example of ten less: −0.1 / 12, and t.975 with 11 degrees, of two comparisons, is 2.593
    assert shown.rows[1] == ("b", "79.2 %", "−0.8 (−3.0 to 1.3)", "0.68", "2 kB")
    assert all(fact in shown.note for fact in ("97.5 %", "for users like these", "multiplied by 2"))
    assert shown.bold == {(0, 1), (1, 1)}
    assert "these users" in said(made([8] * 5, [1] * 5))


def test_losses_are_lower_where_they_are_better() -> None:
    c = made([8] * 12, [4, 5] * 6, unit="in squared error")
    assert c.best == 0
    assert table(c).rows[0][:2] == ("a", "0.2")
    assert table(c).rows[1][1] == "0.55"
    assert c.name == "Squared error, mean over users"
    rows = plain_rows(c)
    assert [row["metric"] for row in rows] == ["squared_error"] * 2
    assert [row["mean"] for row in rows] == pytest.approx([0.2, 0.55])
    assert [row["seed_0"] for row in rows] == pytest.approx([0.2, 0.55])
    assert rows[1]["gain_to_best"] == pytest.approx(-0.35)


def test_rows_of_a_csv_file_hold_plain_numbers() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(plain_rows(made([8] * 12, [4, 5] * 6, seeds=2))))))
    assert float(rows[1]["mean"]) == pytest.approx(0.45)
    assert (rows[0]["bold"], rows[1]["bold"], rows[0]["p_corrected"]) == ("yes", "no", "")
    assert float(rows[1]["seed_1"]) == pytest.approx(0.45)
    assert (rows[0]["users"], rows[0]["seeds"]) == ("12", "2")


def test_a_row_for_each_method_seed_and_user() -> None:
    found = FoundComparison(
        title="", groups=(), compared=(made([8, 2], [1, 5], seeds=2, unit="in nats"),), gains=()
    )
    rows = found.clients_frame().to_pylist()
    assert [(r["method"], r["seed"], r["client"]) for r in rows][:3] == [
        ("a", 0, "0"),
        ("a", 0, "1"),
        ("a", 1, "0"),
    ]
    assert [round(r["value"], 9) for r in rows] == [0.2, 0.8, 0.2, 0.8, 0.9, 0.5, 0.9, 0.5]  # losses
    assert {(r["examples"], r["task"], r["metric"]) for r in rows} == {(10, None, MULTICLASS.loss_name)}


def test_the_figure_has_the_best_first_and_fills_what_is_not_told_apart() -> None:
    figure = ranks_figure(made([4, 5] * 6, [8] * 12))
    assert [one["method"] for one in figure.data] == ["b", "a"]
    (chart,) = figure.panels
    assert [(r.label, r.filled, r.slot) for r in chart.ranks] == [("b", True, "0"), ("a", False, "x")]


def test_a_method_that_does_not_beat_what_needs_no_federation_is_named() -> None:
    better = comparison([10] * 9 + [0], [0] * 9 + [10], same=30, seeds=3)
    same, worse = comparison([3] * 7 + [0] * 5, [0] * 7 + [3] * 5), comparison([0] * 12, [5, 6] * 6)
    found = [
        against(better, "good", COUNTING),
        against(same, "idle", COUNTING),
        against(worse, "bad", COUNTING),
        against(same, "idle", "FedAvg"),
    ]
    (line,) = not_beating(found)
    spans = [c.interval(c.found.headline, unit=False) for c in (worse, same)]
    assert line == (
        f"2 of 3 methods do not beat counting each user's labels, which needs no federation. Worse than it, as the whole "
        f"95 % interval lies below 0: bad {spans[0]}. Not better for certain, as the 95 % interval holds 0: idle {spans[1]}."
    )
    assert list(not_beating([against(better, "good", COUNTING)])) == []
    assert beating(found) == ""
    shown = gains_table(found)
    assert [row[0] for row in shown.rows] == ["good", "idle", "bad"]
    assert shown.bold == {(0, 1)}
    assert shown.rows[0] == ("good", "20.0 (8.7 to 31.3)", "–")
    assert [row["helps"] for row in plain_gains(found)] == ["yes", "no", "no", "no"]


def test_only_what_was_tested_is_said_to_be_beaten_by_name() -> None:
    """A second configuration of local training has a name of its own, and is to be beaten too."""
    better = comparison([10] * 9 + [0], [0] * 9 + [10], same=30, seeds=3)
    same, alone = comparison([3] * 7 + [0] * 5, [0] * 7 + [3] * 5), "local training alone (alone)"
    found = [
        against(better, "a", COUNTING),
        against(better, "b", COUNTING),
        against(better, "a", alone, "local"),
    ]
    assert beating(found[:1]) == "a beats counting each user's labels: all 95 % intervals lie above 0."
    assert beating(found) == (
        "a and b beat counting each user's labels and local training alone (alone): all 95 % intervals lie above 0."
    )
    found.append(against(same, "b", alone, "local"))
    assert beating(found) == ""
    assert [line.partition(",")[0] for line in not_beating(found)] == [
        f"1 of 2 methods does not beat {alone}"
    ]
    assert beating([against(better, "a", "FedAvg", "fedavg")]) == ""


def test_without_an_interval_a_method_is_named_as_not_tested() -> None:
    unknown = against(comparison([2] * 3, [0] * 3, same=0), "a", COUNTING)
    (line,) = not_beating([unknown])
    assert line.startswith(
        "1 of 1 method does not beat counting each user's labels, which needs no federation."
    )
    assert line.endswith(" Not tested, as no interval is known: a 100.0 (–).")
    (line,) = not_beating([replace(unknown, theirs="counting what all users took")])
    assert line.startswith("1 of 1 method does not beat counting what all users took, which trains nothing. ")
    assert gains_table([unknown]).rows == (("a", "100.0 (–)"),)
    assert plain_gains([unknown])[0]["gain"] == 1.0


def test_chances_are_written_with_two_digits() -> None:
    assert [p_text(p) for p in (0.0001, 0.0123, 0.5, 1.0, math.nan)] == [
        "< 0.001",
        "0.012",
        "0.50",
        "1.00",
        "–",
    ]


def test_the_best_of_rankings_is_told_by_the_metrics_own_name() -> None:
    c = replace(made([8] * 12, [8] * 12), metric="hr10")
    assert said(c).startswith("Best: a, 80.0 % (HR@10, mean over users).")


def test_one_method_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match=r"^A comparison wants two methods at least; got none\.$"):
        next(compared([]))


def test_no_dash_is_bold() -> None:
    nobody = Standing(mean=math.nan, by_seed=(math.nan,), behind=None, p=1.0, is_best=True)
    assert not nobody.close
    c = replace(made([5, 6]), labels=("a", "b"), standings=(nobody, replace(nobody, is_best=False)))
    assert table(c).rows[0][1] == "–"
    assert table(c).bold == frozenset()
    assert best_of([np.array([math.nan]), np.array([math.inf]), np.array([0.1])]) == 2


def test_without_an_interval_nothing_is_told_apart() -> None:
    unknown = Standing(mean=0.5, by_seed=(0.5,), behind=None, p=math.nan, is_best=False)
    best = Standing(mean=1.0, by_seed=(1.0,), behind=Interval(0.0, 0.0, 0.0), p=1.0, is_best=True)
    c = Compared(
        task="topic",
        kind=MULTICLASS,
        metric="accuracy",
        unit="points",
        labels=("a", "b"),
        standings=(unknown, best),
        users=2,
        seeds=(0,),
    )
    assert table(c).rows[0] == ("a", "50.0 %", "−50.0 (–)", "–")
    assert table(c).bold == {(1, 1)}
    why = "Not tested against the best, as some users have one test example, or all examples of a user differ alike: a."
    assert said(c) == f"Best: b, 100.0 % (accuracy, mean over users, topic). {why}"
    assert table(c).note.endswith(f"best on valid by the first one. {why}")
    assert [row["bold"] for row in plain_rows(c)] == ["", "yes"]
    assert [row["p_corrected"] for row in plain_rows(c)] == [None, None]
    assert [row["gain_to_best"] for row in plain_rows(c)] == [-0.5, 0.0]
    assert [one["told_apart"] for one in ranks_figure(c).data] == [False, None]
    assert [one["gain"] for one in ranks_figure(c).data] == [0.0, -0.5]  # it was drawn at 0
    assert c.name == "Accuracy, mean over users, topic"
    assert to_svg(ranks_figure(c))
