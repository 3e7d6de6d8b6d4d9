"""Poisson cohorts: every client by a coin of its own, at a cost that grows with the cohort."""

from __future__ import annotations

import time

import numpy as np

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.engines import Sampler
from tests.tiny import Logits, classes, same_bits


def test_each_client_has_a_coin_of_its_own() -> None:
    """2000 rounds of 20 clients, rate 0.15: single rates, pairs and sizes are those of independent coins."""
    sampler = Sampler(20, 3, "poisson", 5)
    assert sampler.rate == 3 / 20
    assert sampler.rounds_per_epoch == 7
    inside = np.zeros((2000, 20))
    for round in range(2000):
        inside[round, sampler(round)] = 1
    assert np.abs(inside.mean(0) - 0.15).max() < 4 * np.sqrt(0.15 * 0.85 / 2000)
    correlation = np.corrcoef(inside.T) - np.eye(20)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(2000)
    sizes = inside.sum(1)
    assert sizes.min() == 0  # 0.85^20 = 4 % of the rounds are empty
    assert abs(sizes.var() - 20 * 0.15 * 0.85) < 0.4  # a cohort of fixed size has none


def test_a_cohort_depends_on_seed_and_round_alone_and_comes_once() -> None:
    clients = np.arange(100, 200)
    sampler = Sampler(clients, 10, "poisson", 1)
    drawn = [sampler(round) for round in range(50)]
    assert drawn == [Sampler(clients, 10, "poisson", 1)(round) for round in range(50)]
    assert drawn != [Sampler(clients, 10, "poisson", 2)(round) for round in range(50)]
    assert all(cohort == sorted(set(cohort)) and set(cohort) <= set(clients.tolist()) for cohort in drawn)
    assert len({tuple(cohort) for cohort in drawn}) == 50


def test_at_rate_one_everybody_is_in_every_round() -> None:
    assert Sampler(7, 9, "poisson", 0)(3) == list(range(7))


def test_a_cohort_among_a_billion_clients_costs_no_more() -> None:
    sampler = Sampler(10**9, 10, "poisson", 0)
    began = time.perf_counter()
    sizes = [len(sampler(round)) for round in range(400)]
    assert time.perf_counter() - began < 2  # a coin for each of a billion would take seconds a round
    assert abs(np.mean(sizes) - 10) < 4 * np.sqrt(10 / 400)


def test_an_empty_round_changes_nothing_and_counts() -> None:
    data = classes(counts=(4, 5, 6))
    sampler = Sampler(3, 1, "poisson", 0)
    empty = next(round for round in range(99) if not sampler(round))
    method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1)))

    def run(rounds: int) -> dict[str, object]:
        made = simulate(
            Logits().double(), method, data, rounds=rounds, cohort=1, sampling="poisson", evaluate_every=0
        )
        assert made.round == rounds
        return made.server  # type: ignore[return-value]

    assert same_bits(run(empty), run(empty + 1))  # type: ignore[arg-type]
    later = next(round for round in range(empty + 1, 99) if sampler(round))
    assert not same_bits(run(empty), run(later + 1))  # type: ignore[arg-type]
