"""Which methods do not differ significantly from the best."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedkeep.metrics.worth.best import Standing, best_of, level, standings
from fedkeep.metrics.worth.gains import Paired, worth
from fedkeep.metrics.worth.intervals import (
    Interval,
    chance_of_examples,
    chance_of_users,
    these_users,
    users_like_these,
)
from fedkeep.metrics.worth.signs import holm

Scores = list[list[int]]  # of each client, its examples


def paired(ours: list[Scores], theirs: list[Scores]) -> Paired:
    """For each seed the right answers of each client."""
    sizes = [len(own) for own in ours[0]]
    a, b = (
        np.array([[v for own in seed for v in own] for seed in side], dtype=np.int8)
        for side in (ours, theirs)
    )
    return Paired(
        clients=tuple(f"user-{k}" for k in range(len(sizes))),
        seeds=tuple(range(len(ours))),
        client=np.repeat(np.arange(len(sizes)), sizes),
        ours=a,
        theirs=b,
    )


def ranked(methods: list[list[Scores]]) -> list[Standing]:
    return standings([paired(m, methods[0]) for m in methods])


def test_holm_by_hand() -> None:
    # in order: 3 × 0.01, 2 × 0.03, and 0.04, which may not be below the one before it
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []
    found = holm([0.01, math.nan])
    assert found[0] == 0.02  # one that is not known counts as a test
    assert math.isnan(found[1])


def test_with_one_seed_the_chance_is_the_t_tests() -> None:
    y = np.random.default_rng(0).normal(0.03, 0.1, (5, 1, 20))
    wanted = [stats.ttest_1samp(own[0], 0).pvalue for own in y]
    assert chance_of_users(y) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_an_interval_leaves_0_out_where_the_chance_is_below_5_percent(seeds: int) -> None:
    random = np.random.default_rng(seeds)
    y = random.normal(0.05, 0.1, (300, seeds, 12)) + random.normal(0, 0.02, (300, seeds, 1))
    variance, examples = random.uniform(0.1, 0.3, (300, 12)), np.full((300, 12), 20.0)
    for span, p in (
        (users_like_these(y), chance_of_users(y)),
        (these_users(y, variance, examples), chance_of_examples(y, variance, examples)),
    ):
        outside = (span[:, 1] > 0) | (span[:, 2] < 0)
        assert 0 < outside.sum() < 300
        assert (outside == (p <= 0.05)).all()


def test_differences_without_any_spread_are_not_tested() -> None:
    """0.1 has no exact binary form: what rounding leaves is no variance."""
    assert chance_of_users(np.zeros((1, 12))) == 1.0
    assert np.isnan(chance_of_users(np.full((1, 12), 0.25)))
    assert np.isnan(chance_of_users(np.full((1, 12), 0.1)))
    assert np.isnan(chance_of_examples(np.full((1, 2), 0.5), np.zeros(2), np.full(2, 2)))


@pytest.mark.parametrize(("clients", "examples"), [(1, 2), (12, 10)])
def test_results_that_all_differ_alike_tell_no_models_apart(clients: int, examples: int) -> None:
    """Of two equally good models this was said in one of eight cases of one client with two examples."""
    found = ranked([[[[1] * examples] * clients], [[[0] * examples] * clients]])
    assert found[1].behind is None
    assert not found[1].told_apart
    assert not found[1].close
    assert found[0].close
    assert found[0].behind == Interval(0.0, 0.0, 0.0)


def test_no_distance_goes_beyond_all_answers() -> None:
    found = ranked([[[[1, 1, 1, 1], [1, 0, 1, 1]]], [[[0, 0, 0, 1], [0, 0, 0, 0]]]])
    assert found[1].behind.low == -1.0


def test_bold_is_what_cannot_be_told_from_the_best_not_the_largest_digit() -> None:
    best = [[[1] * 8 + [0] * 2 for _ in range(12)]]
    # 8 of 10 right too, but for two clients with one less: mean 0.783, t = −1.48 with 11 degrees
    close = [[[1] * (7 if k < 2 else 8) + [0] * (3 if k < 2 else 2) for k in range(12)]]
    # three or four less in every client
    far = [[[1] * (4 + k % 2) + [0] * (6 - k % 2) for k in range(12)]]
    found = ranked([close, best, far])
    assert [s.mean for s in found] == pytest.approx([0.8 - 2 / 120, 0.8, 0.45])
    assert [s.is_best for s in found] == [False, True, False]
    assert [s.told_apart for s in found] == [False, False, True]
    p = stats.ttest_1samp([-0.1] * 2 + [0.0] * 10, 0).pvalue
    assert found[0].p == pytest.approx(2 * p)  # one of two comparisons
    assert found[0].behind.low < 0 < found[0].behind.high  # bold, so the interval holds 0
    assert found[2].behind.high < 0
    assert found[0].behind.mean == pytest.approx(-2 / 120)
    assert found[1].p == 1.0
    # alone against the best it would be told apart, beside nine others it is not
    edge = [[[1] * (7 if k < 6 else 8) + [0] * (3 if k < 6 else 2) for k in range(12)]]
    assert ranked([best, edge])[1].told_apart
    assert not ranked([best, *[edge] * 9])[1].told_apart


def test_with_fewer_than_ten_clients_it_is_about_these_users() -> None:
    random = np.random.default_rng(1)
    one, other = ([random.integers(0, 2, 30).tolist() for _ in range(4)] for _ in range(2))
    found = ranked([[one], [other]])
    worse = found[1 - best_of([np.array(s.by_seed) for s in found])]
    d = np.array(one, float) - np.array(other, float)
    variance = sum(own.var(ddof=1) / (30 * 16) for own in d)
    t = abs(d.mean()) / math.sqrt(variance)
    degrees = variance**2 / sum((own.var(ddof=1) / (30 * 16)) ** 2 / 29 for own in d)
    assert worse.p == pytest.approx(2 * stats.t.sf(t, degrees), abs=1e-9)


@pytest.mark.parametrize("clients", [9, 10])
def test_from_ten_clients_on_it_is_about_users_like_these(clients: int) -> None:
    random = np.random.default_rng(3)
    one, other = (random.integers(0, 2, (clients, 30)) for _ in range(2))
    found = ranked([[one.tolist()], [other.tolist()]])
    d = (one - other).astype(float)
    y = d.mean(1)[None]
    few = chance_of_examples(y, d.var(1, ddof=1), np.full(clients, 30))
    wanted = chance_of_users(y) if clients == 10 else few
    assert min(s.p for s in found) == pytest.approx(float(wanted))


def test_with_single_examples_of_few_clients_nothing_is_known() -> None:
    found = ranked([[[[1], [0]]], [[[0], [0]]]])
    assert found[1].behind is None
    assert math.isnan(found[1].p)
    assert not found[1].told_apart


def test_seeds_are_kept() -> None:
    found = ranked([[[[1, 0]] * 12, [[1, 1]] * 12], [[[0, 0]] * 12, [[1, 0]] * 12]])
    assert found[0].by_seed == (0.5, 1.0)
    assert found[1].by_seed == (0.0, 0.5)


def test_two_models_are_compared_as_worth_compares_them() -> None:
    """One rule: the interval is that of ``worth``, and where it holds 0 both are bold."""
    random = np.random.default_rng(4)
    apart = []
    for _ in range(40):
        one = random.integers(0, 2, (12, 20))
        other = one * (random.random((12, 20)) < 0.96)
        both = paired([other.tolist()], [one.tolist()])
        found, headline = ranked([[one.tolist()], [other.tolist()]])[1], worth(both).headline
        assert (found.behind is None) == (headline is None)
        if headline is not None:
            assert found.behind == headline
            assert found.told_apart == (headline.high < 0)
            apart.append(found.told_apart)
    assert 0 < sum(apart) < len(apart)


def test_with_many_methods_the_level_is_of_comparisons_with_the_best_alone() -> None:
    """All pairs of 24 methods are 276, and left a method bold whose p alone is 0.0005."""
    assert level(2) == 0.95
    assert level(24) == pytest.approx(1 - 0.05 / 23)
    random = np.random.default_rng(5)
    best = [[[1] * 30 + [0] * 10 for _ in range(30)]]
    worse = [[[[1] * (30 - n) + [0] * (10 + n) for n in random.integers(-2, 5, 30)]] for _ in range(23)]
    found = ranked([best, *worse])
    assert found[0].is_best
    told = [s for s in found[1:] if s.told_apart]
    assert told
    assert any(s.p / 23 * 276 > 0.05 for s in told)
    assert all((s.behind is not None and s.behind.high < 0) == s.told_apart for s in found[1:])


def test_the_best_is_rarely_left_out() -> None:
    """Twelve models that are as good as equal: whichever seems best, the true best is bold in 95 % of tables."""
    random, models, users, tables = np.random.default_rng(0), 12, 20, 300
    right = random.normal(0.65, 0.12, (tables, 1, 1, users)) + random.normal(
        0, 0.04, (tables, models, 1, users)
    )
    y = random.binomial(40, np.clip(right, 0.02, 0.98)) / 40
    seems = y.mean((2, 3)).argmax(1)
    p = chance_of_users(y[np.arange(tables), seems] - y[:, 0])  # model 0 is the best by nothing
    assert (np.nan_to_num(p, nan=1.0) * (models - 1) <= 0.05).mean() <= 0.05
