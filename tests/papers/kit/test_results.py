import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments.environment import commit
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.cells import Finished
from fedkeep_papers.kit.results import Row, over_seeds, published_table, read_results, write_results

GOOD: dict[str, Any] = {
    "scene": "zulip",
    "method": "furl",
    "metric": "accuracy",
    "value": 0.56,
    "std": 0.01,
    "seeds": [0, 1],
    "published": 0.6241,
    "scale": "quick",
    "commit": "abc",
    "numerics": [1, 3],
    "seconds": 0.5,
}


def cell(commit: str, numerics: int, seconds: float | None = None) -> Finished[Any]:
    return Finished(result=None, numerics=numerics, commit=commit, seconds=seconds)


def test_round_trip_and_markdown(tmp_path: Path) -> None:
    figure = tmp_path / "figures" / "bars one.png"
    figure.parent.mkdir()
    figure.write_bytes(b"")
    rows = [
        over_seeds(
            "zulip",
            "Personalized FL",
            "accuracy",
            {1: 0.57, 0: 0.55},
            [cell("b", 3, 1.5), cell("a", 1, 2.0)],
            published=0.6241,
            scale="full",
        ),
        over_seeds("zulip", "local", "accuracy", {0: 0.5}, [cell("c", 3)], scale="full"),
    ]
    text, markdown = write_results(
        tmp_path / "results",
        "furl-table3",
        rows,
        title="FURL, Table 3",
        preamble="Data *differ*.",
        figures=[figure],
    )
    assert json.loads(text.read_text())[0] == {
        "scene": "zulip",
        "method": "Personalized FL",
        "metric": "accuracy",
        "value": pytest.approx(0.56),
        "std": pytest.approx(0.0141421, abs=1e-6),
        "seeds": [0, 1],
        "published": 0.6241,
        "scale": "full",
        "commit": "a, b",
        "numerics": [1, 3],
        "seconds": 3.5,
    }
    assert read_results(text) == rows
    page = markdown.read_text()
    assert "# FURL, Table 3\n\nData *differ*.\n\n## zulip\n" in page
    assert "| Personalized FL | Accuracy | 56.00 ± 1.41 % | 62.41 % | −6.41 points | 2 |" in page
    assert "![bars one](../figures/bars%20one.png)" in page
    assert "Scale: full. Seeds: 0, 1. Commit: a, b, c." in page


def test_a_row_says_what_computed_its_cells() -> None:
    def row(values: dict[int, float], *cells: Finished[Any]) -> Row:
        return over_seeds("s", "m", "accuracy", values, cells, scale="full")

    both = row({0: 0.5, 1: math.nan}, cell("b", 3, 1.0), cell("", 3, None))  # the second broke down
    assert (both.value, both.seeds) == (0.5, (0,))
    assert (both.commit, both.numerics, both.seconds) == ("b", (3,), None)
    untrained = row({0: 0.5})
    assert (untrained.commit, untrained.numerics, untrained.seconds) == (commit() or "", (NUMERICS,), None)
    missing = row({})
    assert (missing.value, missing.commit, missing.numerics, missing.seconds) == (None, "", (), None)
    with pytest.raises(ConfigError, match="finite"):
        row({0: math.inf})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"value": 56.0}, None),
        ({"value": float("nan")}, None),
        ({"value": True}, "value"),
        ({"value": "0.5"}, "value"),
        ({"std": -0.1}, None),
        ({"std": None}, None),
        ({"seeds": [0, 0]}, None),
        ({"seeds": "01"}, "seeds"),
        ({"seeds": [0, 1.5]}, "seeds"),
        ({"seeds": []}, None),
        ({"scene": ""}, None),
        ({"commit": 3}, "commit"),
        ({"numerics": []}, None),
        ({"numerics": [3, 1]}, None),
        ({"numerics": [3, 3]}, None),
        ({"numerics": 3}, "numerics"),
        ({"seconds": -1.0}, None),
        ({"seconds": float("inf")}, None),
        ({"seconds": "1"}, "seconds"),
        ({"metrik": 1}, "metrik"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], field: str | None) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([GOOD | {"method": "other"}, GOOD | change]))
    with pytest.raises(RunError) as error:
        read_results(path)
    assert (error.value.facts["file"], error.value.facts["row"]) == (path, 2)
    assert error.value.facts["field"] == field


def test_a_percentage_is_told_from_a_fraction() -> None:
    with pytest.raises(ConfigError, match="Is it a percentage"):
        over_seeds("s", "m", "accuracy", {0: 62.4}, scale="full")


@pytest.mark.parametrize(
    ("content", "row", "field"),
    [
        ("[{", None, None),
        ("{}", None, None),
        ("[3]", 1, None),
        (json.dumps([{k: v for k, v in GOOD.items() if k != "std"}]), 1, "std"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: str, row: int | None, field: str | None) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(RunError) as error:
        read_results(path)
    assert [error.value.facts[k] for k in ("file", "row", "field")] == [path, row, field]


def test_a_file_that_is_missing_empty_or_doubled_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(RunError, match="Cannot read the results"):
        read_results(path)
    for content, message in (([], "no row"), ([GOOD, GOOD], "two rows for zulip, furl, accuracy, quick")):
        path.write_text(json.dumps(content))
        with pytest.raises(RunError, match=message):
            read_results(path)


def test_writing_refuses_what_reading_would_refuse(tmp_path: Path) -> None:
    row = Row(**{**GOOD, "seeds": (0, 1), "numerics": (1, 3)})
    with pytest.raises(ConfigError, match=r"^Results 'x': two rows for zulip, furl, accuracy, quick\.$"):
        write_results(tmp_path, "x", [row, row], title="t")
    with pytest.raises(ConfigError, match=r"got '\.\./x'"):
        write_results(tmp_path, "../x", [row], title="t")
    with pytest.raises(ConfigError, match=r"the figure .* doesn't exist"):
        write_results(tmp_path, "x", [row], title="t", figures=[tmp_path / "no.png"])
    assert list(tmp_path.iterdir()) == []


def test_published_beside_ours() -> None:
    rows = [
        Row("s", "Global FL", "accuracy", 0.1583, 0.008, (0, 1), 0.119, "full", "c", (3,), 1.0),
        Row("s", "local", "accuracy", 0.5, None, (0,), None, "full", "c", (3,), None),
        Row("s", "not run", "accuracy", None, None, (), 0.6241, "full", "", (), None),
    ]
    table = published_table(rows)
    assert table.columns == ("scene", "method", "metric", "ours", "published", "ours − published", "seeds")
    assert table.rows == (
        ("s", "Global FL", "Accuracy", "15.83 ± 0.80 %", "11.90 %", "+3.93 points", "2"),
        ("s", "local", "Accuracy", "50.00 %", "–", "–", "1"),
        ("s", "not run", "Accuracy", "–", "62.41 %", "–", "0"),
    )
