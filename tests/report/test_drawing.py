"""Figures as matplotlib draws them: on the page and in files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from fedkeep.core.errors import RunError
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import (
    COLOURS,
    GAINS_LEGEND,
    GREY,
    Bar,
    Bars,
    Chart,
    Curve,
    Gainer,
    Gains,
    Grid,
    Legend,
    Lines,
    Point,
    Rank,
    Ranks,
    Spread,
    Strip,
    UserMapChart,
    mark_of,
)
from fedkeep.report.drawing import NARROW, WIDE, Drawing, to_svg, write_figure
from tests.tiny import fill_disk


def lines(*series: Curve, **more: Any) -> Lines:
    return Lines(
        series=series, **({"x_label": "epochs", "y_label": "Accuracy (%)", "metric": "accuracy"} | more)
    )


def drawn(*panels: Chart, width: float = WIDE, **more: Any) -> Drawing:
    made = Drawing(Figure("t", panels, **more), width)
    made.canvas.draw_without_rendering()
    return made


def tree(made: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(made.inline())  # noqa: S314  (our own output)


def titles(made: Drawing) -> list[str]:
    return [e.text or "" for e in tree(made).iter("title")]


def inside(axis: Any, place: float) -> bool:
    low, high = sorted(axis.get_view_interval())
    return bool(low <= place <= high)


def boxes(made: Drawing) -> list[tuple[str, float, float, float, float]]:
    """Return every text that is drawn: left, lower end, right and upper end in points."""
    made.canvas.draw_without_rendering()
    out = []
    hidden = {
        label
        for axes in made.canvas.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        if not inside(axis, at)
    }
    for text in made.canvas.findobj(mpl.text.Text):
        if text.get_visible() and text.get_text() and text not in hidden:
            box = text.get_window_extent()
            out.append((text.get_text(), *(72 / made.canvas.dpi * v for v in (*box.p0, *box.p1))))
    return out


SERIES = (
    Curve("a <b> & $x$", (0.0, 1.0), (0.1, 0.5), "1", low=(0.0, 0.4), high=(0.2, 0.6)),
    Curve("_c", (0.0, 1.0), (0.2, 0.4), "10", dashed=True),
)
EVERY: list[Chart] = [
    lines(*SERIES, references=((0.55, "best possible"),)),
    Spread((Strip("A", "0", (0.51, 0.52, 0.9, 0.9)),), "accuracy"),
    Bars((Bar("m", 0.3, 0.01, 0.6), Bar("not run", None, None, 0.5)), "accuracy"),
    Ranks((Rank("m", "1 %", 0.0, None, None, "o", True, "0", "m"),), "gain", str, "best"),
    Gains("against", (Gainer(0.1, 0.0, 0.2, "better", "u"),), (0.1, 0.0, 0.2), str, "Gain"),
    Grid(values=((0, 1), (5, 2)), rows=("u", "v"), columns=("a", "b"), heading="h", x_label="x", y_label="y"),
    UserMapChart(
        "map", (Point(0.0, 1.0, COLOURS[0], "o", "u", 0), Point(1.0, 1.0, GREY, "X", "v", 1)), "note"
    ),
]


@pytest.mark.parametrize("chart", EVERY, ids=lambda chart: type(chart).__name__)
def test_every_chart_is_the_same_each_time_and_leaves_matplotlib_as_it_was(
    chart: Chart, tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    figure = Figure("t", (chart,), legend=(Legend("_a", "0"),))
    kinds = ("svg", "pdf", "png") if isinstance(chart, Lines) else ("svg", "png")  # PDF's fonts take long
    paths = write_figure(figure, tmp_path, "f", kinds)
    assert [p.name for p in paths] == [f"f.{kind}" for kind in kinds]
    first = [p.read_bytes() for p in paths]
    page = to_svg(figure)
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "red", "lines.linewidth": 9}):  # a user's own
        assert [p.read_bytes() for p in write_figure(figure, tmp_path, "f", kinds)] == first
        assert to_svg(figure) == page
    starts = {"svg": b"<?xml", "pdf": b"%PDF-", "png": b"\x89PNG\r"}
    assert all(content.startswith(starts[kind]) for kind, content in zip(kinds, first, strict=True))
    assert dict(mpl.rcParams) == before
    assert page.count('role="img" ') == 2
    assert page.count('aria-label="t"') == 2


def test_the_page_has_its_own_colours_and_keeps_text_as_text() -> None:
    text = drawn(lines(*SERIES)).inline()
    assert "#" not in text.replace('"#', "").replace("url(#", "")
    assert "stroke: var(--c1)" in text
    assert "a &lt;b&gt; &amp; $x$ 50.0 %" in text
    assert "stroke-dasharray" in text
    assert ">40 %</text>" in text
    assert "<style" not in text


def test_a_name_in_a_script_that_the_font_lacks_is_no_warning() -> None:
    made = Drawing(Figure("t", (lines(*SERIES),), legend=(Legend("用户", "1"),)))
    assert ">用户</text>" in made.inline()
    assert made.file("png")


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("chart", EVERY, ids=lambda chart: type(chart).__name__)
def test_texts_stay_inside_the_drawing(chart: Chart, width: float) -> None:
    made = drawn(chart, width=width, legend=GAINS_LEGEND)
    wide, high = (72 * inches for inches in made.canvas.get_size_inches())
    for text, left, low, right, top in boxes(made):
        assert left >= -1, text
        assert right <= wide + 1, text
        assert low >= -1, text
        assert top <= high + 1, text


def test_x_ticks_do_not_overlap_on_a_phone() -> None:
    made = drawn(lines(Curve("a", (0.0, 123456.0), (1.0, 2.0), "0"), metric="loss"), width=NARROW)
    spans = sorted(
        (left, right) for text, left, low, right, _ in boxes(made) if low < 30 and text != "epochs"
    )
    assert len(spans) >= 3
    assert all(right < left for (_, right), (left, _) in pairwise(spans))


def ticks(axis: Any) -> list[str]:
    texts = [t.get_text() for t in axis.get_ticklabels()]
    return [text for text, at in zip(texts, axis.get_ticklocs(), strict=True) if inside(axis, at)]


@pytest.mark.parametrize(
    ("y", "metric", "wanted"),
    [
        ((1.0981, 1.0989), "loss", "1.0982"),
        ((100.0, 100.5), "loss", "100.2"),
        ((0.9001, 0.9004), "accuracy", "90.02 %"),
        ((0.0, 2e32), "loss", "1e+32"),
        ((0.0, 2e-14), "loss", "1e−14"),
    ],
)
def test_texts_of_an_axis_have_all_digits_of_its_ticks(
    y: tuple[float, float], metric: str, wanted: str
) -> None:
    made = drawn(lines(Curve("a", (1.0, 2.0), y, "0"), metric=metric))
    found = ticks(made.canvas.axes[0].yaxis)
    assert wanted in found
    assert len(set(found)) == len(found) >= 3


def test_one_point_flat_and_log_curves_can_be_drawn() -> None:
    for chart in (
        lines(Curve("a", (3.0,), (0.0,), "0"), metric=""),
        lines(Curve("a", (1.0, 2.0), (5.0, 5.0), "0"), metric=""),
        lines(Curve("a", (1.0, 1000.0), (0.001, 0.4), "0"), log=True),
        lines(
            Curve("", (0.0, 2.0), (0.1, 0.2), "0", False, (0.0, 0.1), (0.2, 0.3)), x_names=("0", "1", "all")
        ),
    ):
        for width in (WIDE, NARROW):
            assert "nan" not in drawn(chart, width=width).inline()


def test_a_band_does_not_reach_beyond_the_axis() -> None:
    """A mean of 9 % ± 16 % has a lower end that is no share."""
    chart = lines(Curve("s", (0.0, 1.0), (0.09, 0.4), "0", low=(-0.07, 0.3), high=(0.25, 0.5)))
    (axes,) = drawn(chart).canvas.axes
    assert axes.get_ylim()[0] == 0
    assert all(c.get_clip_on() for c in axes.collections)


@pytest.mark.parametrize("count", [2, 8, 12])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_curve_is_named_once_and_no_name_lies_over_another(count: int, width: float) -> None:
    series = [Curve(f"method {i}", (0.0, 1.0), (0.1, 0.2 + 0.02 * i), str(i)) for i in range(count)]
    legend = tuple(Legend(s.label, s.slot, mark=mark_of(s.slot)) for s in series)
    named = [
        box
        for box in boxes(drawn(lines(*series), width=width, legend=legend))
        if box[0].startswith("method ")
    ]
    assert sorted(box[0] for box in named) == sorted(s.label for s in series)
    for i, (_, left, low, right, top) in enumerate(named):
        for _, a, b, c, d in named[:i]:
            assert right <= a or c <= left or top <= b + 2 or d <= low + 2


def test_more_curves_than_colours_have_marks_and_no_bands() -> None:
    series = [
        Curve(str(i), (0.0, 1.0), (0.1, 0.5), str(i), low=(0.0, 0.4), high=(0.2, 0.6)) for i in range(12)
    ]
    for count, bands in ((12, 0), (8, 8)):
        (axes,) = drawn(lines(*series[:count])).canvas.axes
        assert len([c for c in axes.collections if c.get_alpha() == 0.16]) == bands
        curves = [line for line in axes.lines if len(line.get_xdata()) == 2]
        assert len({(c.get_color(), str(c.get_linestyle()), c.get_marker()) for c in curves}) == count
        assert all((c.get_marker() not in ("None", "none", "")) == (count == 12) for c in curves)


def test_what_was_published_has_the_marks_of_what_it_is_beside() -> None:
    series = [
        Curve(f"{i} {dashed}", (0.0, 1.0), (0.1, 0.5), str(i), dashed=dashed)
        for i in range(6)
        for dashed in (False, True)
    ]
    (axes,) = drawn(lines(*series, marks=True)).canvas.axes
    marks: dict[object, set[object]] = {}
    for line in axes.lines:
        if len(line.get_xdata()) == 2:
            marks.setdefault(line.get_color(), set()).add(line.get_marker())
    assert [len(found) for found in marks.values()] == [1] * 6
    assert "none" not in set.union(*marks.values())


def test_spread_says_how_many_users() -> None:
    assert titles(drawn(EVERY[1])) == [
        "A\n50 % to 55 %\n2 users (50.0 %)",
        "A\n90 % to 95 %\n2 users (50.0 %)",
        "A\nmean 70.8 %",
    ]


@pytest.mark.parametrize("share", [1, 2, 5, 7, 9, 10])
def test_shares_of_users_have_a_tick_that_is_not_zero(share: int) -> None:
    values = (0.52,) * share + tuple(i / 100 for i in range(10 - share))
    (tick,) = ticks(drawn(Spread((Strip("A", "0", values),), "accuracy")).canvas.axes[0].yaxis)
    assert 0 < float(tick.removesuffix(" %")) <= 100


def test_bars_start_at_zero_and_are_in_proportion() -> None:
    made = drawn(EVERY[2])
    (bars,) = made.canvas.axes[0].collections
    ends = [path.get_extents().get_points()[:, 0].tolist() for path in bars.get_paths()]
    assert ends == [[0, 0.3], [0, 0.6], [0, 0.5]]
    assert titles(made)[0] == "m\nours: 30.0 ± 1.0 %"


def test_ours_alone_has_no_empty_place_beside_it() -> None:
    both, alone = (Drawing(Figure("t", (Bars((Bar("m", 0.3, None, p),), "accuracy"),))) for p in (0.6, None))
    assert [len(d.canvas.axes[0].texts) for d in (both, alone)] == [3, 2]
    assert alone.canvas.get_size_inches()[1] < both.canvas.get_size_inches()[1]


@pytest.mark.parametrize(("rows", "written"), [(2, ["1", "5", "2"]), (60, [])])
def test_numbers_stand_in_their_cells_where_there_is_room(rows: int, written: list[str]) -> None:
    values = ((0, 1), (5, 2)) * (rows // 2)
    chart = Grid(values=values, rows=tuple(map(str, range(rows))), columns=("a", "b"))
    assert [text.get_text() for text in drawn(chart).canvas.axes[0].texts] == written


def test_ranks_name_every_method_and_draw_its_interval() -> None:
    ranks = (
        Rank("best", "60.0 %", 0.0, 0.0, 0.0, "o", True, "0", "best\n60.0 %"),
        Rank("other", "50.0 %", -0.1, -0.2, 0.0, "o", False, "x", "other\n50.0 %"),
        Rank("unknown", "40.0 %", -0.2, None, None, "o", False, "x", "unknown"),
    )
    for width in (WIDE, NARROW):
        made = drawn(Ranks(ranks, "points", lambda v: f"{100 * v:.0f}", "best method"), width=width)
        texts = [box[0] for box in boxes(made)]
        assert {"best", "other", "unknown", "60.0 %", "points", "best method"} <= set(texts)
        filled, hollow = made.canvas.axes[0].collections[2:]
        assert filled.get_offsets().tolist() == [[0.0, 0.0]]
        assert hollow.get_offsets().tolist() == [[-0.1, 1.0], [-0.2, 2.0]]
        assert titles(made) == ["best\n60.0 %", "other\n50.0 %", "unknown"]


def test_panels_stand_side_by_side_or_below_one_another_on_a_phone() -> None:
    for width, below in ((WIDE, False), (NARROW, True)):
        first, second = (
            axes.get_position() for axes in drawn(EVERY[6], EVERY[6], width=width, columns=2).canvas.axes
        )
        assert (second.y1 < first.y0) == below
        assert (second.x0 > first.x1) != below


def test_a_user_has_one_number_on_all_maps() -> None:
    root = tree(drawn(EVERY[6], EVERY[6], columns=2))
    assert [e.get("data-u") for e in root.iter() if e.get("data-u")] == ["0", "1", "0", "1"]


def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.svg").write_text("old")
    fill_disk(monkeypatch, "replace")
    with pytest.raises(RunError, match=r"f\.svg"):
        write_figure(Figure("t", (EVERY[0],)), tmp_path, "f")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"f.svg": "old"}
