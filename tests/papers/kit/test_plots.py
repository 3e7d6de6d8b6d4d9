"""What the papers' figures show; how charts are drawn has its tests in ``tests.report.test_drawing``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedkeep.report.blocks import Figure
from fedkeep.report.charts import Lines
from fedkeep.report.drawing import Drawing
from fedkeep_papers.kit import plots

CURVES = {"Local": [(10.0, 0.3), (500.0, 0.1)], "FedAvg": [(10.0, 0.5), (500.0, 0.2)]}
SWEPT = {
    "q = 0": {
        "Local": [(0.2, 0.3, 0.02), (1.0, 0.8, 0.01)],
        "Mixture": [(1.0, 0.85, None), (0.2, 0.35, None)],
    },
    "q = 0.9": {"Local": [(0.2, 0.3, None), (0.6, math.nan, None)], "Mixture": []},
}


def lines_of(figure: Figure) -> list[Lines]:
    return [chart for chart in figure.panels if isinstance(chart, Lines)]


def test_a_figure_is_written_as_svg_pdf_and_png(tmp_path: Path) -> None:
    figure = plots.learning_curves({**CURVES, "not run": []}, metric="accuracy", title="t")
    assert [s.label for s in lines_of(figure)[0].series] == ["Local", "FedAvg"]
    assert plots.write(figure, tmp_path / "new", "f") == tmp_path / "new" / "f.png"
    assert {p.name for p in (tmp_path / "new").iterdir()} == {"f.svg", "f.pdf", "f.png"}


def test_a_curve_looks_alike_in_all_panels_and_cases_are_apart_alike() -> None:
    panels = [("k", "server", CURVES), ("k", "none", {}), ("k", "mean", {"FedAvg": CURVES["FedAvg"]})]
    figure = plots.panels_of_curves(panels, "accuracy", "t", (10, 100, 500))
    first, second = lines_of(figure)
    assert (first.y_label, second.y_label) == ("server (%)", "mean (%)")
    assert first.series[1] == second.series[0]
    assert first.series[0].x == (0.0, 2.0)
    assert first.x_names == ("10", "100", "500")
    assert [(e.label, e.slot, e.mark) for e in figure.legend] == [("Local", "0", "o"), ("FedAvg", "1", "s")]


def test_a_distribution_leaves_out_what_is_no_number() -> None:
    figure = plots.client_distribution({"FL": [0.5, math.nan], "none": [math.nan]}, metric="accuracy")
    (chart,) = figure.panels
    assert [(s.label, s.values) for s in chart.strips] == [("FL", (0.5,))]


def test_a_sweep_has_bands_the_published_beside_it_and_one_scale() -> None:
    published = {"q = 0": {"Local": [(0.2, 0.31), (1.0, 0.79)], "other": [(0.2, 0.1)]}}
    figure = plots.sweep_panels(SWEPT, metric="accuracy", setting="p", published=published)
    local, mixture, beside = lines_of(figure)[0].series
    assert (local.low, local.high) == (pytest.approx((0.28, 0.79)), pytest.approx((0.32, 0.81)))
    assert (mixture.x, mixture.y) == ((0.2, 1.0), (0.35, 0.85))
    assert (beside.y, beside.slot, beside.dashed) == ((0.31, 0.79), local.slot, True)
    assert [s.x for s in lines_of(figure)[1].series] == [(0.2,)]
    assert [e.label for e in figure.legend] == ["Local", "Mixture", "published"]
    first, second = Drawing(figure).canvas.axes
    assert first.get_ylim() == second.get_ylim()


def test_differences_are_written_in_their_cells_and_a_missing_one_has_no_box() -> None:
    maps = {
        "CIFAR-10": {("10", "0.2"): -0.012, ("10", "1"): 0.034, ("500", "1"): -1e-4},
        "Fashion": {("500", "0.2"): 0.0},
    }
    figure = plots.difference_maps(maps, metric="accuracy", across="p", down="images", label="a − b")
    first, second = Drawing(figure).canvas.axes
    assert [text.get_text() for text in first.texts] == ["−1.2", "+3.4", "0.0"]
    assert [text.get_text() for text in second.texts] == ["0.0"]
    assert len(second.collections[0].get_paths()) == 1
    below, above = (Drawing(figure).canvas.axes[0].collections[0].get_facecolors()[i] for i in (0, 1))
    assert below[0] > below[2]  # orange
    assert above[2] > above[0]  # blue
    assert figure.panels[0].tell(0.034) == "+3.4 points"
