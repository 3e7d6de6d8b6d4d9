"""Intervals of what attacks find: clients whose number is made of one sum are not independent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedkeep.experiments.attack import AttackRequest, attack
from fedkeep.experiments.attack_measures import against, mean, share
from fedkeep.experiments.config import parse_config
from fedkeep.metrics.worth.intervals import Interval

T_1 = 12.706205
"""Of Student's T with one degree of freedom, 97.5 %."""


def test_a_share_over_sums_counts_each_sum_once() -> None:
    """Wilson by hand, n = 2 and p = ½: ½ ± z √(1/8 + z²/16) / (1 + z²/2)."""
    z = 1.959964
    half = z * math.sqrt(1 / 8 + z * z / 16) / (1 + z * z / 2)
    found = share([True, True, False, False], 2)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


def test_a_mean_leaves_out_sums() -> None:
    """Without the one sum the mean is 3.5, without the other 1.5: the variance is ½ (1 + 1)."""
    found = mean([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1])
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - T_1, 2.5 + T_1), rel=1e-5)
    assert mean([1.0, 2.0, 4.0]) == mean([1.0, 2.0, 4.0], [2, 0, 1])


def test_one_sum_has_no_interval() -> None:
    found = mean([1.0, 2.0], [0, 0])
    assert found.mean == 1.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.filterwarnings("error")
def test_one_client_with_a_vector_has_a_cosine_without_interval_and_guess() -> None:
    true = {"a": torch.tensor([1.0, 0.0]), "b": torch.zeros(2), "c": torch.zeros(2)}
    found, guess = against(dict.fromkeys(true, torch.tensor([3.0, 4.0])), true)
    assert found.mean == pytest.approx(0.6)
    assert math.isnan(found.low)
    assert guess is None


def test_intervals_of_shared_guesses_hold() -> None:
    """Cosines of one noisy sum with vectors that have something in common: 95 % of intervals hold the mean of all."""
    draw, found = np.random.default_rng(0), []
    for _ in range(400):
        vectors, values, of = draw.normal(size=(40, 8)) + np.eye(8)[0] * 8**0.5, list[float](), list[int]()
        for number, some in enumerate(vectors.reshape(10, 4, 8)):
            seen = some.mean(0) + 2 * draw.normal(size=8)
            values += list(some @ seen / np.linalg.norm(some, axis=1) / np.linalg.norm(seen))
            of += [number] * 4
        found.append(mean(values, of))
    true = float(np.mean([f.mean for f in found]))
    held = float(np.mean([f.low <= true <= f.high for f in found]))
    assert 0.92 <= held <= 0.98


CONFIG = """
data = { reader = "many_user_text", users = 12, examples = 24, classes = 5 }
model = { kind = "document", user_dim = 6, embedding_dim = 6, hidden = 6, mlp = 12 }
run = { rounds = 2, cohort = 4, engine = "sequential" }
[method]
kind = "furl"
private = "user"
batch_size = 4
optimizer = { learning_rate = 0.2, rates = { user = 1.0 } }
"""


def test_what_is_found_in_sums_has_intervals_over_sums() -> None:
    """12 clients are in 3 sums, and of as many uploads."""
    found = attack(parse_config(CONFIG), AttackRequest(attacks=("label", "words"), epsilons=())).findings
    labels = {f.protection: f for f in found if f.measure == "most frequent class right"}
    for name, guesses in (("split", 12), ("secure", 3)):
        right = [True] * round(labels[name].value * 12) + [False] * round((1 - labels[name].value) * 12)  # type: ignore[operator]
        wanted = share(right, guesses)
        assert Interval(labels[name].value, labels[name].low, labels[name].high) == wanted  # type: ignore[arg-type]
    shares = [f for f in found if f.measure.startswith("F1") and f.low is not None]
    assert shares
    assert all(f.low >= 0 and f.high <= 1 for f in shares)  # type: ignore[operator]
