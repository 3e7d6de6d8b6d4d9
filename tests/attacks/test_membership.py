"""Membership by loss, on a linear model that knows its examples by heart, and on one that never saw any."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.attacks import guessed_tpr, lira, membership, tpr_at

EXAMPLES, FEATURES, MODELS = 200, 1000, 12


def models(own: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return confidences, who was inside, and clients: least squares on random labels, on the half or on other data."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((EXAMPLES, FEATURES)), draw.choice([-1.0, 1.0], EXAMPLES)
    inside = draw.random((MODELS, EXAMPLES)) < 0.5
    scores = np.zeros(inside.shape)
    for k in range(MODELS):
        a, b = x[inside[k]], y[inside[k]]
        if not own:
            a, b = draw.standard_normal((100, FEATURES)), draw.choice([-1.0, 1.0], 100)
        weight = a.T @ np.linalg.solve(a @ a.T + 100 * np.eye(len(a)), b)  # ridge regression
        scores[k] = y * (x @ weight)
    return scores, inside, np.arange(EXAMPLES) % 10


def test_a_model_that_knows_its_examples_by_heart() -> None:
    found = membership(*models(own=True))
    assert found["threshold AUC"].low > 0.9
    assert found["LiRA AUC"].low > 0.95
    assert found["LiRA TPR"].low > 0.2


def test_a_model_that_never_saw_them() -> None:
    """Guessing, and no attack below it either: LiRA is the same for members and others."""
    found = membership(*models(own=False))
    for way in ("threshold", "LiRA"):
        auc = found[f"{way} AUC"]
        assert auc.low < 0.5 < auc.high, way
        assert abs(auc.mean - 0.5) < 0.04
        assert found[f"{way} TPR"].mean < 0.04


def test_tpr_by_hand() -> None:
    """200 others from 0 to 199: at most 2 may be called, so members above 197 are found: 2 of 4."""
    score = np.concatenate([np.arange(200.0), [198.5, 197.5, 197.0, 3.0]])
    assert tpr_at(score, np.repeat([0.0, 1.0], [200, 4])) == 0.5
    assert np.isnan(tpr_at(score, np.ones(204)))
    assert np.isnan(tpr_at(score, np.zeros(204)))


def test_guessing_finds_more_than_one_percent_where_others_are_few() -> None:
    assert guessed_tpr(np.array([10])) == 1 / 11
    assert guessed_tpr(np.array([99, 100])) == pytest.approx((1 / 100 + 2 / 101) / 2)
    draw = np.random.default_rng(0)
    found = [tpr_at(draw.normal(size=40), np.repeat([1.0, 0.0], 20)) for _ in range(2000)]
    assert np.mean(found) == pytest.approx(guessed_tpr(np.array([20])), abs=0.005)


def test_lira_by_hand() -> None:
    """In: 1, 3 (mean 2); out: −1, −3 (mean −2); variances 2, times 1 + ½. At 2: (16 − 0) / (2 · 3); at 0 nothing."""
    scores = np.array([[2.0, 0.0], [1.0, 1.0], [3.0, 3.0], [-1.0, -1.0], [-3.0, -3.0]])
    inside = np.array([[True] * 2, [True] * 2, [True] * 2, [False] * 2, [False] * 2])
    assert lira(scores, inside, 0) == pytest.approx([16 / 6, 0.0])
    assert lira(scores[:3], inside[:3], 0).tolist() == [0.0, 0.0]  # the attacker has no model without them
