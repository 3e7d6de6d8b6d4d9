import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from fedkeep.report.charts import DASHES, LOOKS, SLOTS, mark_of
from fedkeep.report.charts.bars import Bar, bar_chart
from fedkeep.report.charts.lines import Axes, Series, apart, line_chart, thinned
from fedkeep.report.charts.maps import palette_of, user_maps
from fedkeep.report.charts.ranks import Rank, ranks_chart
from fedkeep.report.charts.spread import Strip, bin_edges, in_bins, spread_chart
from fedkeep.report.svg import SHAPES, Scale, log_ticks, nice_ticks, shape_path, spaced
from tests.report.run_folders import HOSTILE, map_of


def tree(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)  # noqa: S314  (our own output)


def titles(svg: str) -> list[str]:
    return [e.text or "" for e in tree(svg).iter("title")]


def test_ticks_by_hand() -> None:
    assert nice_ticks(0, 0.68, 5) == [0, 0.2, 0.4, 0.6, 0.8]
    assert nice_ticks(3, 3) == [3]
    assert log_ticks(0.9, 1100, 5) == [1, 10, 100, 1000]
    assert log_ticks(10, 60) == [10, 20, 50]
    assert Scale(0, 0.68, 100, 0).ticks(5) == [0, 0.2, 0.4, 0.6]


def test_scales_by_hand() -> None:
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(3, 3, 0, 10)(3) == 5


def test_labels_that_would_overlap_are_left_out() -> None:
    assert spaced([1, 2, 3, 4], [0, 10, 20, 30], 15) == [1, 4]
    assert spaced([1, 2, 3], [0, 20, 40], 15) == [1, 2, 3]


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_shapes_stay_near_their_place(shape: str) -> None:
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", shape_path(shape, 100, 100, 10))]
    assert min(numbers) >= 85
    assert max(numbers) <= 115


def test_hover_names_every_curve_best_first() -> None:
    series = [
        Series("low", (0.0, 1.0), (0.1, 0.2), "0"),
        Series("high", (0.0, 1.0), (0.3, 0.4), "1", dashed=True),
    ]
    axes = Axes(
        "epochs", "Accuracy (%)", "accuracy", hover_x="epoch", references=((0.5, "best possible 50.0 %"),)
    )
    wide, narrow = line_chart("t", series, axes)
    for drawing in (wide, narrow):
        assert titles(drawing.svg) == ["epoch 0\nhigh 30.0 %\nlow 10.0 %", "epoch 1\nhigh 40.0 %\nlow 20.0 %"]
        assert "best possible 50.0 %" in drawing.svg
        assert "line s1 dashed" in drawing.svg


def test_labels_stay_inside_the_drawing() -> None:
    series = [Series("a", tuple(map(float, range(31))), tuple(i / 31 for i in range(31)), "0")]
    for drawing in line_chart("t", series, Axes("epochs", "Accuracy", "accuracy")):
        root = tree(drawing.svg)
        width = float(root.attrib["viewBox"].split()[2])
        for text in root.iter("text"):
            half = 3.3 * len(text.text or "")
            anchor = text.attrib.get("text-anchor", "start")
            left = float(text.attrib["x"]) - {"start": 0, "middle": half, "end": 2 * half}[anchor]
            assert left >= -4
            assert left + 2 * half <= width + 4


def test_x_ticks_do_not_overlap_on_a_phone() -> None:
    series = [Series("a", (0.0, 123456.0), (1.0, 2.0), "0")]
    narrow = line_chart("t", series, Axes("rounds", "Loss", "loss"))[1]
    texts = [e for e in tree(narrow.svg).iter("text") if e.attrib.get("y") == "254"]
    places = sorted((float(e.attrib["x"]), len(e.text or "")) for e in texts)
    assert len(places) >= 2
    assert all(b - a > 6 * n for (a, n), (b, _) in pairwise(places))


def axis_texts(y: tuple[float, ...], metric: str) -> list[str]:
    """Return the texts at the y axis of a curve, from below."""
    drawing = line_chart("t", [Series("a", (1.0, 2.0), y, "0")], Axes("rounds", "y", metric))[0]
    texts = [e for e in tree(drawing.svg).iter() if e.tag.endswith("text") and e.get("text-anchor") == "end"]
    return [str(e.text) for e in texts]


def test_texts_of_an_axis_have_all_digits_of_its_ticks() -> None:
    assert axis_texts((1.0981, 1.0989), "loss") == ["1.098", "1.0982", "1.0984", "1.0986", "1.0988"]
    assert axis_texts((100.0, 100.5), "loss") == ["99.8", "100", "100.2", "100.4"]
    assert axis_texts((0.9001, 0.9004), "accuracy") == ["90.00 %", "90.01 %", "90.02 %", "90.03 %", "90.04 %"]
    assert axis_texts((0.0, 2e32), "loss") == ["0", "5e+31", "1e+32", "1.5e+32", "2e+32"]
    assert axis_texts((0.0, 2e-14), "loss") == ["0", "5e−15", "1e−14", "1.5e−14", "2e−14"]


def test_curves_at_other_places_share_a_hover_only_when_near() -> None:
    series = [Series("a", (0.0, 60.0), (1.0, 2.0), "0"), Series("b", (0.5, 30.0), (3.0, 4.0), "1")]
    svg = line_chart("t", series, Axes("rounds", "Loss", "loss", hover_x="round"))[0].svg
    assert titles(svg)[0] == "round 0\nb 3\na 1"
    assert titles(svg)[2] == "round 30\nb 4"


def test_long_curves_are_shown_by_means_of_equal_parts() -> None:
    n = 1000
    series = Series("a", tuple(map(float, range(n))), tuple(float(i % 2) for i in range(n)), "0")
    thin = thinned(series)
    assert len(thin.x) == 200
    assert thin.x[0] == 2.0  # the mean of 0..4
    assert thin.y[0] == pytest.approx(0.4)


def test_one_point_flat_and_log_curves_can_be_drawn() -> None:
    for series, axes in (
        (Series("a", (3.0,), (0.0,), "0"), Axes("x", "y")),
        (Series("a", (1.0, 2.0), (5.0, 5.0), "0"), Axes("x", "y")),
        (Series("a", (1.0, 1000.0), (0.001, 0.4), "0"), Axes("x", "y", log=True)),
        (
            Series("", (0.0, 2.0), (0.1, 0.2), "0", False, (0.0, 0.1), (0.2, 0.3)),
            Axes("k", "y", x_names=("0", "1", "all")),
        ),
    ):
        for drawing in line_chart("t", [series], axes, ("wide", "narrow", "panel")):
            tree(drawing.svg)
            assert "nan" not in drawing.svg


def test_bins_by_hand() -> None:
    edges = bin_edges([0.2], fraction=True)
    assert len(edges) == 21
    counts = in_bins([0.0, 0.05, 0.1499, 0.15, 1.0], edges)
    assert (counts[0], counts[1], counts[2], counts[3], counts[19]) == (1, 1, 1, 1, 1)
    assert bin_edges([2.0, 2.0], fraction=False) == [1.5, 2.5]
    assert sum(in_bins([1.0, 5.0, 9.0], bin_edges([1.0, 5.0, 9.0], fraction=False))) == 3


def test_spread_says_how_many_users() -> None:
    svg = spread_chart("t", [Strip("A", "0", (0.51, 0.52, 0.9, 0.9))], "accuracy")[0].svg
    assert titles(svg) == [
        "A\n50 % to 55 %\n2 users (50.0 %)",
        "A\n90 % to 95 %\n2 users (50.0 %)",
        "A\nmean 70.8 %",
    ]


@pytest.mark.parametrize("share", [1, 2, 5, 7, 9, 10])
def test_shares_of_users_have_a_tick_that_is_not_zero(share: int) -> None:
    values = (0.52,) * share + tuple(i / 100 for i in range(10 - share))
    svg = spread_chart("t", [Strip("A", "0", values)], "accuracy")[0].svg
    (tick,) = [e.text or "" for e in tree(svg).iter("text") if e.attrib.get("x") == "42"]
    assert 0 < float(tick.removesuffix(" %")) <= 100


def test_maps_name_user_trait_metric_and_examples() -> None:
    analysis = map_of(3, 0, ["Server", "FL"])
    first = analysis["panels"][0]["points"][0]
    palette = palette_of(analysis)
    server, fl = user_maps(analysis, palette)
    assert server.heading == "Server"
    assert titles(server.svg)[0] == (
        f"{HOSTILE}\nmost used label: {first['trait']}\naccuracy: {100 * first['value']:.1f} %\n{first['n']} examples"
    )
    assert "<script" not in server.svg
    assert 'data-u="0"' in server.svg
    assert 'data-u="0"' in fl.svg
    assert server.note == "k-NN agreement 71.2 % · agreement by chance 20.4 % · silhouette 0.31 · 3 users"


def test_rare_categories_are_grey() -> None:
    points = [{"client": f"u{i}", "x": i, "y": 0, "trait": i // 2} for i in range(20)] + [
        {"client": "none", "x": 1, "y": 1, "trait": None}
    ]
    palette = palette_of({"panels": [{"name": "p", "points": points}]})
    assert len(palette.places) == 7
    assert palette.look(0) == ("s0", "circle")
    assert palette.look(9) == ("sx", "circle")
    assert palette.look(None) == ("sx", "circle")
    assert [e.label for e in palette.legend(others=True)] == ["0", "1", "2", "3", "4", "5", "6", "other"]


def test_a_continuous_trait_has_a_ramp() -> None:
    palette = palette_of(map_of(60, 0, ["Server"], continuous=True))
    assert palette.ramp() == ("click-through rate", "5.0 %", "45.0 %")
    assert palette.look(0.05)[0] == "q0"
    assert palette.look(0.45)[0] == "q8"
    assert palette.look(None)[0] == "sx"


def test_too_many_users_are_said() -> None:
    points = [{"client": str(i), "x": i, "y": i, "trait": "a"} for i in range(3500)]
    analysis = {"panels": [{"name": "p", "points": points}]}
    (drawing,) = user_maps(analysis, palette_of(analysis))
    assert drawing.note == "3,000 of 3,500 users drawn"
    assert len(titles(drawing.svg)) == 3000


def test_bars_start_at_zero_and_are_in_proportion() -> None:
    svg = bar_chart("t", [Bar("m", 0.3, 0.01, 0.6), Bar("not run", None, None, 0.5)], "accuracy")[0].svg
    widths = [float(e.attrib["width"]) for e in tree(svg).iter("rect")]
    assert widths[0] / widths[1] == pytest.approx(0.5, abs=0.001)
    assert len(widths) == 3
    assert titles(svg)[0] == "m\nours: 30.0 ± 1.0 %"


def test_no_two_looks_are_alike() -> None:
    looks = [(i % SLOTS, DASHES[i // SLOTS], mark_of(str(i))) for i in range(LOOKS)]
    assert len({(colour, dashes) for colour, dashes, _ in looks}) == LOOKS
    assert (
        len({(colour, mark) for colour, _, mark in looks}) == LOOKS
    )  # marks tell too, where dashes don't show


def test_more_curves_than_colours_have_marks_and_names_at_their_ends() -> None:
    names = [f"method {i}" for i in range(12)]
    series = [
        Series(n, (0.0, 1.0), (0.1, 0.5), str(i), low=(0.0, 0.4), high=(0.2, 0.6))
        for i, n in enumerate(names)
    ]
    wide, narrow = line_chart("t", series, Axes("epochs", "Accuracy (%)", "accuracy"))
    texts = [e.text for e in tree(wide.svg).iter("text")]
    assert [t for t in texts if t in names] == names
    places = sorted(float(e.attrib["y"]) for e in tree(wide.svg).iter("text") if e.text in names)
    assert all(b - a >= 13.9 for a, b in pairwise(places))
    for drawing in (wide, narrow):
        assert "band" not in drawing.svg
        found = [e.attrib["class"] for e in tree(drawing.svg).iter("path")]
        assert {f"line s{i}" for i in range(12)} <= set(found)
        assert all(f"fill s{i}" in found for i in range(12))
    few, _ = line_chart("t", series[:8], Axes("epochs", "Accuracy (%)", "accuracy"))
    assert "band s7" in few.svg
    assert not [e for e in tree(few.svg).iter("text") if e.text in names]


def test_a_whisker_ends_where_the_axis_does() -> None:
    """A mean of 9 % ± 16 % has a lower end that is no share."""
    series = [Series("s", (0.0, 1.0), (0.09, 0.4), "0", low=(-0.07, 0.3), high=(0.25, 0.5))]
    axes = Axes("k", "Accuracy (%)", "accuracy", x_names=("0", "1"))
    for drawing in line_chart("t", series, axes):
        lines = list(tree(drawing.svg).iter("line"))
        bottom = max(float(e.attrib["y1"]) for e in lines if e.attrib["class"] == "axis")
        ends = [float(e.attrib["y2"]) for e in lines if "whisker" in e.attrib["class"]]
        assert len(ends) == 2
        assert max(ends) == pytest.approx(bottom)


def test_names_are_moved_as_little_as_needed() -> None:
    assert apart([10.0, 12.0, 50.0], 10, 0, 100) == [10, 20, 50]
    assert apart([95.0, 96.0, 97.0], 10, 0, 100) == [80, 90, 100]
    assert apart([0.0] * 5, 10, 0, 20) == [0, 5, 10, 15, 20]
    assert apart([], 10, 0, 20) == []


def test_ranks_name_every_method_and_draw_its_interval() -> None:
    ranks = [
        Rank("best", "60.0 %", 0.0, 0.0, 0.0, "circle", True, "0", "best\n60.0 %"),
        Rank("other", "50.0 %", -0.1, -0.2, 0.0, "circle", False, "x", "other\n50.0 %"),
        Rank("unknown", "40.0 %", -0.2, None, None, "circle", False, "x", "unknown"),
    ]
    for drawing in ranks_chart("t", ranks, "points", lambda v: f"{100 * v:.0f}", "best method"):
        svg = tree(drawing.svg)
        texts = [e.text for e in svg.iter("text")]
        assert [t for t in texts if t in ("best", "other", "unknown")] == ["best", "other", "unknown"]
        assert {"60.0 %", "points", "best method"} <= set(texts)
        spans = [e.attrib for e in svg.iter("line") if "whisker" in e.attrib["class"]]
        assert len(spans) == 2
        zero = next(float(e.attrib["x1"]) for e in svg.iter("line") if e.attrib["class"] == "axis")
        marks = [float(e.attrib["cx"]) for e in svg.iter("circle")]
        assert marks[0] == pytest.approx(zero)
        assert zero - marks[2] == pytest.approx(2 * (zero - marks[1]), abs=0.2)
