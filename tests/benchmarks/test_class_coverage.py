"""The simulated federations behind what docs say of intervals of macro-F1."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.class_coverage import SCENES, Scene, covered, drawn, missed
from benchmarks.measure import RESULTS
from fedkeep.metrics import CLASS_METRICS


def test_users_and_models_are_as_they_are_said() -> None:
    scene = Scene(classes=3, rare=0.2)
    client, label, guesses = drawn(scene, 4000, 1, np.random.default_rng(0))
    assert set(np.unique(client)) == set(range(4000))
    assert np.mean(label > 0) == pytest.approx(0.2, abs=0.01)
    first, second = (CLASS_METRICS["balanced_accuracy"](label, g) for g in guesses[0])
    assert second > first + 0.05
    assert drawn(scene, 5, 3, np.random.default_rng(0))[2].shape[:2] == (3, 2)


@pytest.mark.slow
def test_what_is_refused_is_left_out() -> None:
    found = covered(SCENES["10 classes"], 9, 1, 3, np.random.default_rng(0))
    assert found == {"tried": 0}


def test_a_claim_that_fails_is_told() -> None:
    cell = {"scene": "2 classes", "clients": 20, "seeds": 1, "balanced_accuracy": 0.95, "macro_f1": 0.89}
    assert missed([{**cell, "tried": 99}]) == []
    assert missed([{**cell, "tried": 100}]) == ["2 classes, 20 clients, 1 seeds, macro_f1: 0.890"]


def test_the_results_hold_what_is_claimed() -> None:
    found = json.loads((RESULTS / "class-coverage.json").read_text(encoding="utf-8"))
    assert found["claims_that_failed"] == missed(found["coverage"]) == []
    assert found["replicates"] >= 1000
