"""The benchmark of users' own models: its table of cases, its page, and when it fails."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.own_cases import CASES
from benchmarks.own_models import apart, check, contender, page
from tests.refusals import raises


def row(name: str, ratio: float, error: float = 1e-8) -> dict[str, Any]:
    return {
        "model": name,
        "claimed": CASES[name].claimed,
        "engines": {"fedkeep": "sequential"},
        "ratio_to_plain": {"fedkeep": {"median": ratio, "low": ratio, "high": ratio}},
        "state_error": {"fedkeep": error},
    }


def test_the_page_names_what_was_not_measured() -> None:
    first, second, *others = CASES
    lines = page([row(first, 1.5), row(second, 2.5)]).splitlines()
    assert lines[2] == f"| {first} | sequential | 1.50 (1.50, 1.50) | 1e-08 |"
    assert [line for line in lines if "not measured" in line] == [
        f"| not measured: {n} | | | |" for n in others
    ]
    assert lines[-1] == "| median | | 2.00 | |"


def test_a_slow_model_a_low_median_and_other_results_are_told() -> None:
    assert len(CASES) == 12
    assert all(case.claimed >= 0.95 for case in CASES.values())
    check([row(name, 3.0) for name in CASES])
    with raises(
        AssertionError,
        text=(
            "the median is 0.95 x; claimed 1.5; embedding bag: 0.90 x; claimed 0.95; "
            "MLP, 0.2 M, fedkeep: results are nan apart"
        ),
    ):
        check([row("embedding bag", 0.9), row("MLP, 0.2 M", 1.0, float("nan"))])


@pytest.mark.parametrize("name", ["small ResNet, BatchNorm", "embedding bag"])
def test_both_contenders_end_a_round_with_the_same_values(name: str) -> None:
    case = CASES[name]
    federation = case.data()
    plain, ours = (contender(who, case, federation) for who in ("plain", "fedkeep"))
    start = {n: v.clone() for n, v in plain.start.items()}  # type: ignore[union-attr]
    for run in (plain, ours):
        run.round(0, [0, 1])
    assert apart(ours, plain) < 1e-6  # type: ignore[arg-type]
    assert any(not v.equal(start[n]) for n, v in plain.start.items())  # type: ignore[union-attr]
