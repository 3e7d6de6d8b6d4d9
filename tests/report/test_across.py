"""Several data sets in one table: ranks by hand, methods that are not in every column, and files for papers."""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fedkeep.report.across import average_ranks, by_group, plain_side_by_side, ranks, side_by_side
from fedkeep.report.standings import in_paper, write_document, write_table
from tests.report.test_standings import made


def test_ranks_by_hand() -> None:
    assert ranks([0.5, 0.9, 0.5, math.nan, 0.1]) == [2.5, 1.0, 2.5, 5.0, 4.0]
    assert ranks([]) == []


def test_average_ranks_are_of_the_methods_that_every_column_has() -> None:
    """First: a 8, b 4, c 6 of ten; second: a 5, c 5, d 1. In both are a and c: ranks 1 and 2, then 1.5 and 1.5."""
    first = made([8] * 12, [4] * 12, [6] * 12)
    second = replace(made([5] * 12, [5] * 12, [1] * 12), labels=("c", "a", "d"))
    assert average_ranks([first, second]) == {"a": 1.25, "c": 1.75}
    shown = side_by_side({"x": first, "y_1": second})
    assert shown.columns == ("method", "x", "y_1", "average rank")
    assert [(row[0], row[3]) for row in shown.rows] == [("a", "1.25"), ("b", "–"), ("c", "1.75"), ("d", "–")]
    assert [row[1] for row in shown.rows] == ["80.0 %", "40.0 %", "60.0 %", "–"]
    assert "2 methods" in shown.note
    assert {shown.rows[i][0] for i, j in shown.bold if j == 2} == {"a", "c"}
    assert side_by_side({"x": first, "y_1": second}, rank=False).columns == ("method", "x", "y_1")
    rows = plain_side_by_side({"x": first, "y_1": second})
    assert [(r["column"], r["method"], r["rank"], r["average_rank"]) for r in rows][2:5] == [
        ("x", "c", 2.0, 1.75),
        ("y_1", "c", 1.5, 1.75),
        ("y_1", "a", 1.5, 1.25),
    ]


def test_columns_of_unlike_numbers_say_which_they_are() -> None:
    """A smaller error is better: b's is 0.2, a's 0.6."""
    error = made([4] * 12, [8] * 12, unit="in squared error")
    shown = side_by_side({"x": made([8] * 12, [4] * 12), "y": error})
    assert "accuracy" in shown.columns[1].lower()
    assert "squared error" in shown.columns[2].lower()
    assert average_ranks([error]) == {"a": 2.0, "b": 1.0}
    means = {r["method"]: r["mean"] for r in plain_side_by_side({"y": error})}
    assert means == pytest.approx({"a": 0.6, "b": 0.2})


def test_groups_of_users_by_hand() -> None:
    """Of users 0 and 2 a has 8 and 4 of ten right, so 60 %; of user 1 2 of ten. User 3 has no group."""
    c = made([8, 2, 4, 9], [1, 5, 2, 9], seeds=2)
    groups = by_group(c, {"0": "x", "1": "y", "2": "x", "9": "z"})
    assert list(groups) == ["x (2 users)", "y (1 user)"]
    x, y = groups.values()
    assert [round(s.mean, 9) for s in x.standings] == [0.6, 0.15]
    assert [round(s.mean, 9) for s in y.standings] == [0.2, 0.5]
    assert (x.users, y.users) == (2, 1)
    assert x.models[0].clients == ("0", "2")
    assert [s.is_best for s in y.standings] == [False, True]


def write(folder: Path) -> None:
    labels = ("fedrep", "50% & [a]_b ≤ ε", "kteps_star")
    compared = replace(made([8] * 12, [4] * 12, [6] * 12, seeds=2), labels=labels)
    several = {f"a data set of a long name, number {n} of nine": compared for n in range(9)}
    table = side_by_side(several)
    names = {"fedrep": "FedRep", "kteps_star": "KTEPS⋆"}
    write_table(folder, "data-sets", table, plain_side_by_side(several), in_paper(table, names))
    write_document(folder)


def test_tables_of_a_paper_have_published_names_and_as_many_cells_as_columns(tmp_path: Path) -> None:
    write(tmp_path)
    lines = (tmp_path / "data-sets.tex").read_text(encoding="utf-8").splitlines()
    assert sum(line.count("{") - line.count("}") for line in lines if not line.startswith("%")) == 0
    rows = [line for line in lines if line.endswith(r" \\")]
    assert [row.replace(r"\&", "").count("&") for row in rows] == [10] * 4
    assert [row.partition(" &")[0] for row in rows[1:]] == [
        "FedRep",
        r"50\% \& {[}a]\_b $\leq$ $\varepsilon$",
        r"KTEPS$\star$",
    ]
    assert r"\columnwidth" in lines[next(i for i, line in enumerate(lines) if "tabular" in line) - 1]
    whole = (tmp_path / "all.tex").read_text(encoding="utf-8")
    assert r"\input{data-sets}" in whole
    assert r"\usepackage{booktabs,graphicx}" in whole
    with (tmp_path / "data-sets.csv").open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["method"] == "fedrep"  # programs read the names of --methods


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_takes_the_tables_as_they_are_and_none_is_wider_than_a_column(tmp_path: Path) -> None:
    write(tmp_path)
    found = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout
    assert "Overfull \\hbox" not in found.stdout
    assert (tmp_path / "all.pdf").exists()
