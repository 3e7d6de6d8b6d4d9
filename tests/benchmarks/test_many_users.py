"""The benchmark of many users, with few."""

from __future__ import annotations

from pathlib import Path

from benchmarks.many_users import COHORT, built, measured


def test_each_user_has_an_id_and_examples_of_its_own() -> None:
    data = built(5)
    assert len(set(data.ids)) == 5
    assert sorted(data.ids) != list(data.ids)
    assert data.counts("train").tolist() == [2] * 5
    assert data.counts("test").tolist() == [1] * 5


def test_a_run_is_built_trained_and_resumed(tmp_path: Path) -> None:
    found = measured(2 * COHORT, tmp_path)
    assert list(found["stages"]) == ["built", "five rounds", "resumed to ten"]
    assert 0 < found["folder_gb"] < found["peak_gb"] < 2
