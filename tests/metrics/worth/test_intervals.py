"""Intervals of a mean gain: numbers by hand, SciPy's t, and a plain loop over clients and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedkeep.metrics.worth.intervals import (
    chance_of_users,
    jackknife,
    t_inside,
    t_quantile,
    these_users,
    users_like_these,
)


@pytest.mark.parametrize("degrees", [1.0, 1.7, 2.0, 5.35, 30.0, 599.0])
def test_t_is_scipys(degrees: float) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-10)
    assert t_quantile(degrees, 0.8) == pytest.approx(stats.t.ppf(0.9, degrees), rel=1e-10)
    assert t_inside(1.5, degrees) == pytest.approx(1 - 2 * stats.t.sf(1.5, degrees), rel=1e-12)


@pytest.mark.parametrize("degrees", [50.0, 144.0, 1e4, 3e4, 1e5, 1e6])
def test_very_many_degrees_leave_nothing_in_the_tails(degrees: float) -> None:
    """Beyond t = 9 and so many degrees the tails are below 1e-11: of 1e6 degrees and t = 1000 it was 0.017."""
    t = np.array([0.5, 2.0, 5.0, 9.0, 50.0, 1000.0, 1e8])
    assert t_inside(t, np.full(7, degrees)) == pytest.approx(1 - 2 * stats.t.sf(t, degrees), abs=1e-8)
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-7)


def test_one_seed_is_the_t_interval_over_clients() -> None:
    found = users_like_these(np.array([[0.1, 0.2, 0.3, 0.4]]))
    # mean 0.25, variance 1/60, A = 1/240, t with 3 degrees 3.182446
    assert found == pytest.approx([0.25, 0.25 - 0.205426, 0.25 + 0.205426], abs=1e-6)


def test_seeds_add_their_own_variance() -> None:
    # Ȳ_k = (1, 3) and Ȳ_s = (1, 3): A = B = 1, nothing is left for C, f = 2, t = 4.302653
    found = users_like_these(np.array([[0.0, 2.0], [2.0, 4.0]]))
    assert found == pytest.approx([2.0, 2 - 6.084870, 2 + 6.084870], abs=1e-5)


def like_these_by_loops(y: np.ndarray) -> list[float]:
    seeds, clients = y.shape
    m = sum(y[s, k] for s in range(seeds) for k in range(clients)) / seeds / clients
    by_client = [sum(y[s, k] for s in range(seeds)) / seeds for k in range(clients)]
    by_seed = [sum(y[s, k] for k in range(clients)) / clients for s in range(seeds)]
    a = sum((v - m) ** 2 for v in by_client) / (clients - 1) / clients
    c = sum((y[s, k] - by_client[k] - by_seed[s] + m) ** 2 for s in range(seeds) for k in range(clients))
    c /= (clients - 1) * (seeds - 1) * clients * seeds
    b = max(0.0, sum((v - m) ** 2 for v in by_seed) / (seeds - 1) / seeds - c)
    f = (a + b) ** 2 / (a**2 / (clients - 1) + b**2 / (seeds - 1))
    half = stats.t.ppf(0.975, f) * (a + b) ** 0.5
    return [m, m - half, m + half]


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_users_like_these_is_the_formula(spread: float) -> None:
    """Without a spread of seeds B is 0, as C is more than their variance."""
    rng = np.random.default_rng(3)
    y = rng.normal(0.1, 0.2, (3, 7)) + spread * np.array([[-1.0], [0.0], [1.0]])
    if not spread:
        y -= y.mean(1, keepdims=True)
    assert users_like_these(y) == pytest.approx(like_these_by_loops(y), rel=1e-9)


def test_these_users_is_the_formula() -> None:
    rng = np.random.default_rng(4)
    y, variance, n = rng.normal(0.1, 0.2, (3, 4)), rng.uniform(0.1, 0.9, 4), np.array([2.0, 5.0, 9.0, 40.0])
    v = [variance[k] / (n[k] * 16) for k in range(4)]
    a, f_a = sum(v), sum(v) ** 2 / sum(v[k] ** 2 / (n[k] - 1) for k in range(4))
    by_seed = [sum(row) / 4 for row in y]
    m = sum(by_seed) / 3
    b = sum((s - m) ** 2 for s in by_seed) / 2 / 3
    half = stats.t.ppf(0.975, (a + b) ** 2 / (a**2 / f_a + b**2 / 2)) * (a + b) ** 0.5
    assert these_users(y, variance, n) == pytest.approx([m, m - half, m + half], rel=1e-9)
    half = stats.t.ppf(0.975, f_a) * a**0.5
    found = these_users(y[:1], variance, n)
    assert found[2] - found[0] == pytest.approx(half, rel=1e-9)  # one seed: nothing but the examples


def test_many_federations_at_once_are_one_after_the_other() -> None:
    rng = np.random.default_rng(5)
    y, variance, n = rng.normal(size=(6, 2, 5)), rng.uniform(0.1, 1, (6, 5)), rng.integers(2, 9, (6, 5))
    assert users_like_these(y) == pytest.approx(np.stack([users_like_these(one) for one in y]))
    each = np.stack([these_users(*one) for one in zip(y, variance, n, strict=True)])
    assert these_users(y, variance, n) == pytest.approx(each)


@pytest.mark.parametrize("gain", [0.5, 0.1])
def test_the_ends_of_equal_gains_are_the_mean(gain: float) -> None:
    mean, low, high = users_like_these(np.full((1, 13), gain))
    assert low == mean == high


def test_the_jackknife_of_a_mean_is_its_t_interval() -> None:
    x = np.array([0.0, 1.0, 5.0, 2.0])
    found = jackknife(float(x.mean()), [(x.sum() - v) / 3 for v in x])
    half = stats.t.ppf(0.975, 3) * x.std(ddof=1) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half), rel=1e-9)


def test_what_is_not_known_has_no_interval_and_no_p() -> None:
    found = jackknife(0.5, [0.4, np.nan, 0.6])
    assert found.mean == 0.5
    assert np.isnan([found.low, found.high]).all()
    y = np.array([[[0.1, 0.2, 0.4]], [[0.1, np.nan, 0.4]]])
    assert np.isnan(chance_of_users(y)).tolist() == [False, True]
    assert np.isnan(users_like_these(y)).all(-1).tolist() == [False, True]
