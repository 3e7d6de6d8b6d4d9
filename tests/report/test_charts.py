"""What charts show, before anything is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeep.report.charts import (
    COLOURS,
    DASHES,
    GREY,
    LOOKS,
    RAMP,
    SHAPES,
    SLOTS,
    Curve,
    Lines,
    apart,
    bin_edges,
    in_bins,
    mark_of,
    palette_of,
    thinned,
    user_maps,
)
from tests.report.run_folders import HOSTILE, map_of


def lines(*series: Curve, **more: Any) -> Lines:
    return Lines(series=series, x_label="rounds", y_label="Loss", **more)


def test_hover_names_every_curve_best_first() -> None:
    chart = lines(
        Curve("low", (0.0, 1.0), (0.1, 0.2), "0"),
        Curve("high", (0.0, 1.0), (0.3, 0.4), "1", dashed=True, low=(0.2, 0.3), high=(0.4, 0.5)),
        metric="accuracy",
        hover_x="epoch",
    )
    assert chart.hover() == [
        (0.0, "epoch 0\nhigh 30.0 % (20.0 % to 40.0 %)\nlow 10.0 %"),
        (1.0, "epoch 1\nhigh 40.0 % (30.0 % to 50.0 %)\nlow 20.0 %"),
    ]


def test_curves_at_other_places_share_a_hover_only_when_near() -> None:
    chart = lines(Curve("a", (0.0, 60.0), (1.0, 2.0), "0"), Curve("b", (0.5, 30.0), (3.0, 4.0), "1"))
    said = dict(chart.hover())
    assert said[0.0] == "rounds 0\nb 3\na 1"
    assert said[30.0] == "rounds 30\nb 4"


def test_long_curves_are_shown_by_means_of_equal_parts() -> None:
    n = 1000
    series = Curve("a", tuple(map(float, range(n))), tuple(float(i % 2) for i in range(n)), "0")
    thin = thinned(series)
    assert len(thin.x) == 200
    assert thin.x[0] == 2.0  # the mean of 0..4
    assert thin.y[0] == pytest.approx(0.4)


def test_bins_by_hand() -> None:
    edges = bin_edges([0.2], fraction=True)
    assert len(edges) == 21
    counts = in_bins([0.0, 0.05, 0.1499, 0.15, 1.0], edges)
    assert (counts[0], counts[1], counts[2], counts[3], counts[19]) == (1, 1, 1, 1, 1)
    assert bin_edges([2.0, 2.0], fraction=False) == [1.5, 2.5]
    assert bin_edges([1.0, 5.0], fraction=False, about=5) == [1, 2, 3, 4, 5]
    assert sum(in_bins([1.0, 5.0, 9.0], bin_edges([1.0, 5.0, 9.0], fraction=False))) == 3


def test_maps_name_user_trait_metric_and_examples() -> None:
    analysis = map_of(3, 0, ["Server", "FL"])
    first = analysis["panels"][0]["points"][0]
    server, fl = user_maps(analysis, palette_of(analysis))
    assert server.heading == "Server"
    assert server.points[0].tip == (
        f"{HOSTILE}\nmost used label: {first['trait']}\naccuracy: {100 * first['value']:.1f} %\n{first['n']} examples"
    )
    assert server.points[0].user == fl.points[0].user == 0
    assert server.note == "k-NN agreement 71.2 % · agreement by chance 20.4 % · silhouette 0.31 · 3 users"


def test_rare_categories_are_grey() -> None:
    points = [{"client": f"u{i}", "x": i, "y": 0, "trait": i // 2} for i in range(20)] + [
        {"client": "none", "x": 1, "y": 1, "trait": None}
    ]
    palette = palette_of({"panels": [{"name": "p", "points": points}]})
    assert len(palette.places) == 7
    assert palette.look(0) == (COLOURS[0], "o")
    assert palette.look(9) == (GREY, "o")
    assert palette.look(None) == (GREY, "o")
    assert [e.label for e in palette.legend(others=True)] == ["0", "1", "2", "3", "4", "5", "6", "other"]


def test_a_continuous_trait_has_a_ramp() -> None:
    palette = palette_of(map_of(60, 0, ["Server"], continuous=True))
    assert palette.ramp() == ("click-through rate", "5.0 %", "45.0 %")
    assert palette.look(0.05)[0] == RAMP[0]
    assert palette.look(0.45)[0] == RAMP[-1]
    assert palette.look(None)[0] == GREY


def test_too_many_users_are_said() -> None:
    points = [{"client": str(i), "x": i, "y": i, "trait": "a"} for i in range(3500)]
    analysis = {"panels": [{"name": "p", "points": points}]}
    (chart,) = user_maps(analysis, palette_of(analysis))
    assert chart.note == "3,000 of 3,500 users drawn"
    assert len(chart.points) == 3000


def test_no_two_looks_are_alike() -> None:
    looks = [(i % SLOTS, DASHES[i // SLOTS], mark_of(str(i))) for i in range(LOOKS)]
    assert len({(colour, dashes) for colour, dashes, _ in looks}) == LOOKS
    assert len({(colour, mark) for colour, _, mark in looks}) == LOOKS  # where dashes don't show
    assert len(set(SHAPES)) == SLOTS  # of a map's categories


def test_names_are_moved_as_little_as_needed() -> None:
    assert apart([10.0, 12.0, 50.0], 10, 0, 100) == [10, 20, 50]
    assert apart([95.0, 96.0, 97.0], 10, 0, 100) == [80, 90, 100]
    assert apart([0.0] * 5, 10, 0, 20) == [0, 5, 10, 15, 20]
    assert apart([], 10, 0, 20) == []
