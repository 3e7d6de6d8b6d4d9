"""The grid of clients × classes on the page: what is drawn, once for equal divisions, and refusals of damage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedkeep.report.blocks import Figure
from fedkeep.report.drawing import Drawing
from fedkeep.report.facts import partitions
from fedkeep.report.groups import configurations
from fedkeep.report.runs import read_run
from tests.report.run_folders import HOSTILE, write_run_folder

COUNTS: dict[str, Any] = {
    "clients": ["client-0", HOSTILE],
    "classes": ["cat", "dog", "a very long name"],
    "counts": [[40, 10, 0], [0, 25, 25]],
    "opted_out": [1],
}


def figures(tmp_path: Path, *entries: Any) -> list[Figure]:
    runs = [
        read_run(write_run_folder(tmp_path / f"run{i}", name=f"run {i}", partition_counts=entry))
        for i, entry in enumerate(entries)
    ]
    return list(partitions(configurations(runs)))


def test_the_grid_by_hand(tmp_path: Path) -> None:
    (figure,) = figures(tmp_path, COUNTS)
    assert figure.title == "Training examples of each class"
    assert figure.caption.endswith(" 1 client opted out.")
    assert figure.table.rows[0] == ("client-0", "40", "10", "0", "50")
    assert figure.table.rows[1][1:] == ("0", "25", "25", "50")
    grid = Drawing(figure).inline()
    # 40 of 40: the last of nine shades; 10 of 40: shade 9 · ¼ = 2; 25 of 40: shade 5; none: an empty cell
    shades = re.findall(r'style="fill: var\(--(\w+)\)[^>]*class="tip"', grid)
    assert shades == ["q8", "q2", "card", "card", "q5", "q5"]
    assert "a very long name" in grid
    assert "(out)" in grid
    assert HOSTILE not in grid


def test_one_grid_for_equal_divisions_and_none_without(tmp_path: Path) -> None:
    other = {**COUNTS, "opted_out": []}
    both, one = figures(tmp_path, COUNTS, COUNTS, other, None)
    assert both.title.endswith(" · run 0, run 1")
    assert one.title.endswith(" · run 2")
    assert "opted out" not in one.caption
