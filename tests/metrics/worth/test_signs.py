"""Tests of single clients and of all together: by hand, by every choice of signs, and against SciPy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fedkeep.metrics.worth.signs import at_least, examples_needed, false_discovery, sign_flips


def test_right_and_wrong_is_the_sign_test() -> None:
    found = sign_flips(np.array([1] * 9 + [-1] * 2 + [0] * 20))
    assert found.better == pytest.approx(67 / 2048, rel=1e-12)  # (1 + 11 + 55) / 2^11
    assert found.worse == pytest.approx(stats.binom.sf(1, 11, 0.5), rel=1e-12)
    assert found.attainable == pytest.approx(0.5)
    assert found.differing == 11


def test_an_even_number_of_differences_attains_less_than_a_half() -> None:
    found = sign_flips(np.array([1, 1]))
    assert (found.better, found.worse, found.attainable) == pytest.approx((0.25, 1.0, 0.25))


def test_seeds_make_differences_of_several_sizes() -> None:
    found = sign_flips(np.array([2, -1]))  # the sums are 3, 1, −1, −3
    assert (found.better, found.worse, found.attainable) == pytest.approx((0.5, 0.75, 0.5))


def by_every_sign(x: np.ndarray) -> tuple[float, float, float]:
    sums = [
        sum(s * abs(v) for s, v in zip(signs, x, strict=True)) for signs in product((-1, 1), repeat=len(x))
    ]
    tails = [sum(other >= one - 1e-12 for other in sums) / len(sums) for one in sums]
    total = sum(x)
    better = sum(one >= total - 1e-12 for one in sums) / len(sums)
    worse = sum(one <= total + 1e-12 for one in sums) / len(sums)
    return better, worse, max((t for t in tails if t <= 0.5), default=math.nan)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["whole", "losses", "equal losses"])
def test_every_choice_of_signs(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, 9) if kind == "whole" else rng.normal(0.3, 1, 9)
    if kind == "equal losses":
        x = np.sign(x) * 0.1
    found = sign_flips(x)
    assert (found.better, found.worse, found.attainable) == pytest.approx(by_every_sign(x[x != 0]))


def test_losses_are_tested_as_scipy_does() -> None:
    rng = np.random.default_rng(8)
    for n in (12, 60):  # all signs, and 9,999 random ones
        x = rng.normal(0.3, 1, n)
        wanted = stats.permutation_test(
            (x,),
            lambda v, axis: v.sum(axis),
            permutation_type="samples",
            vectorized=True,
            alternative="greater",
            n_resamples=40_000,
            rng=1,
        ).pvalue
        assert sign_flips(x).better == pytest.approx(wanted, rel=1e-12 if n == 12 else 0.2)
        assert n == 12 or 0.001 < wanted < 0.1
    assert sign_flips(np.ones(200) * 0.3).better == 1e-4  # the least that random signs can say


def test_a_client_without_differences_says_nothing() -> None:
    found = sign_flips(np.zeros(5, np.int64))
    assert (found.better, found.worse, found.differing) == (1.0, 1.0, 0)
    assert math.isnan(found.attainable)


def test_thousands_of_examples_give_a_p_above_0() -> None:
    assert 0 < sign_flips(np.ones(3000, np.int64)).better < 1e-300


def test_false_discoveries_are_scipys() -> None:
    p = np.random.default_rng(0).uniform(size=40) ** 3
    assert false_discovery(p) == pytest.approx(stats.false_discovery_control(p), rel=1e-12)
    assert false_discovery([0.04, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])


def at_least_by_loops(p: np.ndarray, h: np.ndarray) -> int:
    q = sorted((a / b for a, b in zip(p, h, strict=True) if a <= b), reverse=True)
    kept = 0
    for j in range(1, len(q) + 1):
        if -2 * sum(math.log(v) for v in q[:j]) <= stats.chi2.ppf(0.95, 2 * j):
            kept = j
    return len(q) - kept


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_at_least_is_the_formula(share: float) -> None:
    rng = np.random.default_rng(int(10 * share))
    p = np.where(rng.random(80) < share, rng.uniform(0, 0.01, 80), rng.random(80))
    h = np.where(np.arange(80) % 3, 0.5, 0.36)
    h[5] = math.nan
    found = at_least(p, h)
    assert found == at_least_by_loops(p, h)
    assert (found > 0) == (share > 0)


def test_at_least_by_hand() -> None:
    # q = 0.8, 0.004: −2 ln 0.8 = 0.45 ≤ 5.99, and with ln 0.004 11.5 > 9.49: one is left
    assert at_least([0.4, 0.002, 0.9], [0.5, 0.5, 0.5]) == 1
    assert at_least([0.9], [0.5]) == 0


def test_examples_needed_by_hand() -> None:
    # (2.65 √0.3 + 0.84 √0.29)² / 0.01 = 1.903820² / 0.01
    assert examples_needed(0.3) == 363
    assert examples_needed(0.02) == examples_needed(0.1) == 119
