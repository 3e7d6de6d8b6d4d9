"""The benchmarks of privacy on tiny sizes, and their arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from benchmarks import attacks, dp_audit, fault_budget, secure
from benchmarks.measure import RESULTS


def test_the_auditors_bound_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 that took part all are guessed, of 10 that did not none: P ≥ 0.0005^(1/10), P ≤ 1 − 0.0005^(1/10)."""
    monkeypatch.setattr(dp_audit, "TOOK_PART", 10)
    monkeypatch.setattr(dp_audit, "DID_NOT", 10)
    least = 5e-4**0.1
    assert dp_audit.lower_bound(10, 0) == max(0.0, math.log(max((least - 1e-6) / (1 - least), 1.0)))
    assert dp_audit.lower_bound(0, 0) == 0.0
    monkeypatch.setattr(dp_audit, "TOOK_PART", 1000)
    monkeypatch.setattr(dp_audit, "DID_NOT", 1000)
    wanted = math.log((stats.beta.ppf(5e-4, 900, 101) - 1e-6) / stats.beta.ppf(1 - 5e-4, 11, 990))
    assert dp_audit.lower_bound(900, 10) == pytest.approx(wanted)
    assert dp_audit.lower_bound(900, 10) > dp_audit.lower_bound(900, 20) > dp_audit.lower_bound(500, 20)


def test_an_auditor_finds_noise_that_is_far_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TOOK_PART": 400, "DID_NOT": 1600, "DIRECTIONS": 2000, "RATE": 0.5}.items():
        monkeypatch.setattr(dp_audit, name, value)
    found = dp_audit.trial(0, claimed=0.8, used=0.1)
    assert found["bound"] > dp_audit.CLAIM
    assert found["deviation_over_used"] == pytest.approx(1.0, abs=0.1)
    assert dp_audit.trial(0, claimed=0.8, used=3.0)["bound"] < dp_audit.CLAIM


def test_the_page_of_attacks_names_the_processor_of_each() -> None:
    cells = json.loads((RESULTS / "attacks.json").read_text(encoding="utf-8"))["attacked"]
    for name, cell in cells.items():
        assert set(cell["processors"]) == set(cell["commits"]) == {f["attack"] for f in cell["findings"]}, (
            name
        )
    assert attacks.page(cells) == (RESULTS / "attacks.md").read_text(encoding="utf-8")
    assert attacks.attacked_on({"who": "A", "label": "B", "image": "A"}) == [
        "attacked on A: who; image",
        "attacked on B: label",
    ]


@pytest.mark.slow
def test_a_killed_run_has_charged_what_it_released(tmp_path: Path) -> None:
    found = fault_budget.campaign(1, 0, tmp_path)
    assert found["kills"] == fault_budget.A_RUN
    assert found["runs"] == 1
    assert found["releases"] >= fault_budget.ROUNDS
    assert [found[fault] for fault in ("under", "over the budget", "ended wrongly")] == [0, 0, 0]


def test_a_ledger_that_was_cut_swapped_or_replayed_never_counts_too_little(tmp_path: Path) -> None:
    found = fault_budget.fuzz(40, 1, tmp_path)
    assert found["under-counts"] == 0
    assert found["refused"] > 60


def test_a_small_secure_sum_is_exact_and_counted() -> None:
    found = secure.measured(5, 50, 1)
    assert (found["steps_off"], found["threshold"], found["dropped_out"]) == (0, 4, 1)
    assert found["client_bytes_up"]["vector"] == 4 * 50
    assert secure.row_wise()["times"] == pytest.approx(36_000_000 / 2_416_000)
