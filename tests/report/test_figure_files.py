"""Figures as files: the same drawing as SVG without a style sheet, PDF and PNG."""

from __future__ import annotations

import builtins
import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedkeep.core.errors import RunError
from fedkeep.report import figure_files
from fedkeep.report.blocks import Drawing, Figure, Legend
from fedkeep.report.charts import MARKS, SLOTS, mark_of
from fedkeep.report.charts.lines import Axes, Series, line_chart
from fedkeep.report.figure_files import COLOURS, write_figure
from fedkeep.report.svg import Canvas
from tests.tiny import fill_disk

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figure() -> Figure:
    series = [Series("a <b> & $x$", (0.0, 1.0), (0.1, 0.5), "1"), Series("c", (0.0, 1.0), (0.2, 0.4), "10")]
    return Figure("t", tuple(line_chart("t", series, Axes("epochs", "Accuracy (%)", "accuracy"))))


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    known, imported = importlib.util.find_spec, builtins.__import__

    def no(name: str, *given: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *given, **named)

    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else known(name)
    )
    monkeypatch.setattr(builtins, "__import__", no)


def test_svg_stands_alone(figure: Figure, tmp_path: Path, without_matplotlib: None) -> None:
    assert write_figure(figure, tmp_path / "figures", "curves") == [tmp_path / "figures" / "curves.svg"]
    root = ElementTree.parse(tmp_path / "figures" / "curves.svg").getroot()  # noqa: S314
    assert root.tag == f"{SVG}svg"
    assert (root.attrib["width"], root.attrib["height"]) == ("900", "340")  # the wide one
    parts = list(root.iter())
    assert not any("class" in e.attrib or e.tag == f"{SVG}title" for e in parts)
    lines = [e.attrib for e in root.iter(f"{SVG}path") if e.attrib.get("fill") == "none"]
    assert [(a["stroke"], a.get("stroke-dasharray")) for a in lines] == [
        (COLOURS[1], None),
        (COLOURS[2], "8 4"),
    ]
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"Accuracy (%)", "epochs", "40 %"} <= set(texts)


def test_pdf_and_png_are_drawn_from_it_and_are_the_same_each_time(figure: Figure, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [path.name for path in write_figure(figure, tmp_path, "one")]
    assert names == ["one.svg", "one.pdf", "one.png"]
    write_figure(figure, tmp_path, "two")
    for kind, begins in (("svg", b"<svg"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        content = (tmp_path / f"one.{kind}").read_bytes()
        assert content.startswith(begins)
        assert content == (tmp_path / f"two.{kind}").read_bytes()


def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    figure: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("f.pdf", "f.png"):
        (tmp_path / name).write_text("old")
    fill_disk(monkeypatch, "replace")
    root = ElementTree.fromstring(figure.drawings[0].svg)  # noqa: S314  (our own output)
    with pytest.raises(RunError, match=r"^Cannot write .*f\.pdf: No space left on device"):
        figure_files._with_matplotlib(root, tmp_path / "f")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"f.pdf": "old", "f.png": "old"}


def test_every_mark_and_line_is_drawn_where_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    canvas = Canvas(90, 20, "t")
    for i, shape in enumerate(("circle", *MARKS)):
        canvas.mark(6 + 10 * i, 10, 4, shape, f"tip fill s{i}", tip="said")
    canvas.add("rect", cls="fill s0", x=82, y=2, width=6, height=16)
    figure = Figure("t", panel(canvas.svg()))
    *_, png = write_figure(figure, tmp_path, "marks")
    with image.open(png) as opened:
        picture = opened.convert("RGB")
    scale = picture.width / 90
    for i in range(8):
        wanted = tuple(int(COLOURS[i][j : j + 2], 16) for j in (1, 3, 5))
        assert picture.getpixel((round((6 + 10 * i) * scale), round(10 * scale))) == wanted
    assert picture.getpixel((round(85 * scale), round(4 * scale))) == (0, 114, 178)
    assert picture.getpixel((1, 1)) == (255, 255, 255)


def panel(svg: str) -> tuple[Drawing, ...]:
    return (Drawing(svg, "panel"),)


def test_panels_are_files_of_their_own(tmp_path: Path, without_matplotlib: None) -> None:
    canvas = Canvas(90, 20, "t")
    two = Figure("t", panel(canvas.svg()) * 2)
    assert [path.name for path in write_figure(two, tmp_path, "p")] == ["p-1.svg", "p-2.svg"]


def curves(count: int, form: str = "wide") -> Figure:
    series = [Series(f"method {i}", (0.0, 1.0), (0.1, 0.2 + 0.02 * i), str(i)) for i in range(count)]
    many = count > SLOTS
    legend = tuple(Legend(s.label, s.slot, "line", False, mark_of(s.slot) if many else "") for s in series)
    axes = Axes("epochs", "Accuracy (%)", "accuracy")
    return Figure("t", tuple(line_chart("t", series, axes, (form,))), legend=legend)


@pytest.mark.parametrize("form", ["wide", "panel"])
@pytest.mark.parametrize("count", [2, 4, 8, 12])
def test_every_curve_is_named_once_and_no_name_lies_over_another(
    count: int, form: str, tmp_path: Path, without_matplotlib: None
) -> None:
    (path,) = write_figure(curves(count, form), tmp_path, "curves")
    root = ElementTree.parse(path).getroot()  # noqa: S314
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    named = [e for e in root.iter(f"{SVG}text") if str(e.text).startswith("method ")]
    assert sorted(str(e.text) for e in named) == sorted(f"method {i}" for i in range(count))
    boxes = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in named]
    assert all(
        x + 7.6 * len(str(e.text)) <= width and y < height for e, (x, y) in zip(named, boxes, strict=True)
    )
    for i, (x, y) in enumerate(boxes):
        assert all(abs(y - b) >= 13 or abs(x - a) >= 7.6 * 9 + 34 for a, b in boxes[:i])


def test_a_legend_shows_each_look_and_only_what_is_drawn(tmp_path: Path, without_matplotlib: None) -> None:
    canvas = Canvas(200, 20, "t")
    canvas.mark(5, 5, 4, "circle", "fill s1")
    canvas.add("path", cls="line s2 dashed", d="M0,0L1,1")
    canvas.mark(15, 5, 4, "square", "hollow s3")
    long = "a name that is longer than the drawing is wide"
    entries = (
        Legend("dot", "1", "circle"),
        Legend("pooled <b>", "2", "line", True),
        Legend(long, "3", "hollow"),
        Legend("not here", "4"),
    )
    (path,) = write_figure(Figure("t", panel(canvas.svg()), legend=entries), tmp_path, "keys")
    root = ElementTree.parse(path).getroot()  # noqa: S314
    parts = [(e.tag.removeprefix(SVG), e.attrib, e.text) for e in list(root)[4:]]
    assert [text for _, _, text in parts if text] == [
        "dot",
        "pooled <b>",
        "a name that is",
        "longer than the",
        "drawing is wide",
    ]
    looks = [(tag, a.get("stroke"), a.get("fill")) for tag, a, text in parts if not text]
    assert looks == [
        ("circle", None, COLOURS[1]),
        ("path", COLOURS[2], "none"),
        ("path", COLOURS[3], "#ffffff"),
    ]
    assert parts[2][1]["stroke-dasharray"] == "7 5"
    assert float(root.attrib["height"]) == 20 + 19 * 6  # five lines, two of them of one entry, and one below
