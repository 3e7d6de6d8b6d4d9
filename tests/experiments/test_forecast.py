"""Forecasts by a made clock: methods of unlike cost, seeds of one method, workers, and what is not known yet."""

from __future__ import annotations

import itertools

import pytest

from fedkeep.experiments.forecast import Forecast

COSTS = {
    "fedavg": 9.0,
    "furl": 14.0,
    "ditto": 19.0,
    "fedrep": 18.0,
    "fedper": 10.0,
    "knn_per": 16.0,
    "apfl": 26.0,
    "pfedme": 141.0,
}
"""Seconds that eight methods took with one seed."""


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_said_of_the_time_left_is_within_a_factor_of_one_and_a_half() -> None:
    """Three seeds that take 10 % more or less; before each method has run once, it is the least that is said."""
    clock, seeds = Clock(), (1.0, 1.1, 0.9)
    jobs = [(f"{m}-{i}", m, cost * f) for i, f in enumerate(seeds) for m, cost in COSTS.items()]
    forecast, known = Forecast([kind for _, kind, _ in jobs], clock=clock), 0
    for n, (name, kind, takes) in enumerate(jobs):
        truth = sum(t for *_, t in jobs[n:])
        seconds, sure = forecast.left()
        assert sure == (n >= len(COSTS))
        if sure:
            known += 1
            assert truth / 1.5 < seconds < truth * 1.5
        else:
            assert seconds < truth
        forecast.begun(name, kind)
        clock.now += takes
        forecast.over(name)
    assert known == 2 * len(COSTS)
    assert forecast.left() == (0.0, True)


def test_words() -> None:
    clock = Clock()
    forecast = Forecast(["a", "b", "a", "b"], clock=clock)
    assert forecast.words() == ""  # nothing is known
    forecast.begun("a-0", "a")
    clock.now = 30.0
    forecast.over("a-0")
    assert forecast.words() == ", more than 1 min 30 s left"  # b takes as long at least
    forecast.begun("b-0", "b")
    clock.now = 90.0
    forecast.over("b-0")
    assert forecast.words() == ", about 1 min 30 s left"  # 30 s and 60 s
    for name, takes in (("a", 30.0), ("b", 51.0)):
        forecast.begun(f"{name}-1", name)
        clock.now += takes
        forecast.came(f"{name}-1", 0.85, "rounds")
        if name == "a":
            forecast.over("a-1")
    assert forecast.words() == ""  # 9 s


def test_what_runs_counts_by_its_share_once_that_tells_and_of_its_first_part_alone() -> None:
    clock = Clock()
    forecast = Forecast(["a"], clock=clock)
    forecast.begun("a-0", "a")
    clock.now = 40.0
    forecast.came("a-0", 0.1, "rounds")
    assert forecast.left() == (0.0, False)
    forecast.came("a-0", 0.5, "rounds")
    assert forecast.left() == (40.0, True)
    forecast.came("a-0", 0.3, "clients")
    assert forecast.left()[1] is False
    forecast.came("b-0", 0.5, "rounds")  # comes late
    forecast.over("a-0", finished=False)
    assert (forecast.took, forecast.left()) == ({}, (0.0, True))


@pytest.mark.parametrize("workers", [2, 4])
def test_side_by_side_work_is_shared_and_the_longest_job_is_the_least_that_is_left(workers: int) -> None:
    clock = Clock()
    kinds = [*COSTS] * 3
    forecast = Forecast(kinds, workers, clock)
    for kind in COSTS:
        forecast.begun(f"{kind}-0", kind)
    for kind, takes in sorted(COSTS.items(), key=lambda one: one[1]):
        clock.now = takes
        forecast.over(f"{kind}-0")
    seconds, sure = forecast.left()
    assert sure
    ends = [0.0] * workers
    for takes in itertools.chain([*COSTS.values()], [*COSTS.values()]):
        first = ends.index(min(ends))
        ends[first] += takes
    assert max(ends) / 1.5 < seconds < max(ends) * 1.5
