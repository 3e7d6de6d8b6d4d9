"""Figures of sweeps and maps of differences: drawn, the same bytes again, and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep_papers.kit.sweeps import _columns, difference_maps, sweep_panels

PANELS = {
    "q = 0": {
        "Local": [(0.2, 0.3, 0.02), (1.0, 0.8, 0.01)],
        "Mixture_$1$": [(1.0, 0.85, None), (0.2, 0.35, None)],
    },
    "q = 0.9": {"Local": [(0.2, 0.3, None), (0.6, math.nan, None)], "Mixture_$1$": []},
}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_panels_are_drawn_the_same_again(ending: str, tmp_path: Path) -> None:
    drawn = [
        sweep_panels(
            PANELS,
            tmp_path / f"{n}.{ending}",
            metric="accuracy",
            setting="p",
            published={"q = 0": {"Local": [(0.2, 0.31), (1.0, 0.79)], "other": [(0.2, 0.1)]}},
        ).read_bytes()
        for n in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 5_000


def test_an_svg_holds_the_words(tmp_path: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        text = sweep_panels(PANELS, tmp_path / "a.svg", metric="accuracy", setting="fraction p").read_text(
            "utf-8"
        )
    for word in ("q = 0.9", "Local", "Mixture_$1$", "fraction p", "Accuracy (%)"):
        assert word in text


def test_maps_of_differences(tmp_path: Path) -> None:
    import matplotlib as mpl

    maps = {
        "CIFAR-10": {("10", "0.2"): -0.012, ("10", "1"): 0.034, ("500", "1"): -1e-4},
        "Fashion": {("500", "0.2"): 0.02},
    }
    with mpl.rc_context({"svg.fonttype": "none"}):
        text = difference_maps(
            maps,
            tmp_path / "a.svg",
            metric="accuracy",
            across="p",
            down="images",
            label="mixture − fine-tuned",
        ).read_text("utf-8")
    for word in ("−1.2", "+3.4", ">0.0<", "+2.0", "CIFAR-10", "Fashion", "percentage points"):
        assert word in text
    again = [
        difference_maps(
            maps, tmp_path / f"{n}.png", metric="accuracy", across="p", down="n", label="d"
        ).read_bytes()
        for n in range(2)
    ]
    assert again[0] == again[1]


def test_all_differences_zero(tmp_path: Path) -> None:
    path = difference_maps(
        {"a": {("1", "2"): 0.0}}, tmp_path / "a.png", metric="accuracy", across="p", down="n", label="d"
    )
    assert path.exists()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^A sweep needs at least one point"):
        sweep_panels({"a": {"b": []}}, tmp_path / "a.png", metric="accuracy", setting="p")
    with pytest.raises(ConfigError, match="^A heat map needs at least one cell"):
        difference_maps({"a": {}}, tmp_path / "a.png", metric="accuracy", across="p", down="n", label="d")
    with pytest.raises(ConfigError, match="saved as .png or .svg; got 'a.pdf'"):
        sweep_panels(PANELS, tmp_path / "a.pdf", metric="accuracy", setting="p")


def test_a_legends_lines_are_alike_in_length() -> None:
    assert [_columns(entries) for entries in (1, 2, 4, 5, 6, 7, 8, 9)] == [1, 2, 4, 3, 3, 4, 4, 3]
