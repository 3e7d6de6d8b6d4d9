"""Tallies by hand: tables of right and wrong, paired sums, and the AUC of binned scores within its stated bound."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError, NonFiniteError
from fedkeep.engines import Judged, Judgement, Tallies, to_records
from fedkeep.engines.tally import BINS, Leaves, bin_of, binned_auc, summed, tallied
from fedkeep.tasks import BINARY, MULTICLASS, REGRESSION, Task
from tests.refusals import raises

IDS = ("ann", "bob", "cem")
CLASSES, BINARY, NUMBERS = Task(MULTICLASS), Task(BINARY), Task(REGRESSION)


def judgement(task: Task, client: Any, loss: Any, score: Any, label: Any = None) -> Judgement:
    size = len(client)
    label = np.zeros(size, int) if label is None else np.array(label)
    return Judgement(
        task, np.array(client), np.array(loss, float), np.array(score, float), label, np.arange(size)
    )


CLIENT = [0, 0, 0, 2, 2]
OWN = judgement(CLASSES, CLIENT, [0.5, 1.0, 0.25, 2.0, 0.5], [1, 0, 1, 0, 1])
SHARED = judgement(CLASSES, CLIENT, [1.0, 0.5, 0.25, 1.0, 1.5], [0, 1, 1, 0, 0])
BOTH = tallied(CLASSES, ("own", "shared"), (OWN, SHARED), IDS)


def test_two_models_by_hand() -> None:
    """d = own − shared: ann −0.5, 0.5, 0; cem 1, −1."""
    assert BOTH.clients == ("ann", "cem")
    assert (BOTH.people.tolist(), BOTH.count.tolist()) == ([1, 1], [3, 2])
    assert BOTH.loss.tolist() == [[1.75, 1.75], [2.5, 2.5]]
    assert BOTH.right.tolist() == [[2, 2], [1, 0]]
    pair = BOTH.pair("own", "shared")
    assert pair.table.tolist() == [[[0, 1], [1, 1]], [[1, 0], [1, 0]]]  # [own right?][shared right?]
    assert pair.difference.tolist() == [0.0, 0.0]
    assert pair.square.tolist() == [0.5, 2.0]
    assert (pair.clients, pair.count.tolist()) == (("ann", "cem"), [3, 2])
    assert BOTH.per_client("own") == {"ann": (2 / 3, 3), "cem": (0.5, 2)}
    assert BOTH.metrics("own") == {"loss": 0.85, "accuracy": 0.6, "accuracy_user_mean": (2 / 3 + 0.5) / 2}


def test_a_pair_the_other_way_round() -> None:
    uneven = judgement(CLASSES, CLIENT, [1.0, 0.5, 0.25, 1.0, 2.5], [0, 1, 1, 0, 0])
    both = tallied(CLASSES, ("own", "shared"), (OWN, uneven), IDS)
    one, other = both.pair("own", "shared"), both.pair("shared", "own")
    assert one.difference.tolist() == [0.0, -1.0]
    assert other.difference.tolist() == [0.0, 1.0]
    assert other.table.tolist() == [[[0, 1], [1, 1]], [[1, 1], [0, 0]]]
    assert other.square.tolist() == one.square.tolist() == [0.5, 5.0]


def test_three_models_have_three_pairs() -> None:
    models = ("own", "shared", "default")
    perfect = judgement(CLASSES, CLIENT, [0, 0, 0, 0, 0], [1, 1, 1, 1, 1])
    three = tallied(CLASSES, models, (OWN, SHARED, perfect), IDS).total()
    found = {pair: three.pair(*pair).table[0].tolist() for pair in itertools.combinations(models, 2)}
    assert found == {
        ("own", "shared"): [[1, 1], [2, 1]],
        ("own", "default"): [[0, 2], [0, 3]],
        ("shared", "default"): [[0, 3], [0, 2]],
    }


def test_regression_by_hand() -> None:
    """Errors −2 and 1 of ann, −3 of bob."""
    errors = np.array([-2.0, 1.0, -3.0])
    own = judgement(NUMBERS, [0, 0, 1], errors**2, errors)
    none = judgement(NUMBERS, [0, 0, 1], [1, 1, 4], [1, 1, 2])
    both = tallied(NUMBERS, ("own", "local"), (own, none), IDS)
    assert both.metrics("own") == {"loss": 14 / 3, "rmse": math.sqrt(14 / 3), "mae": 2.0}
    assert both.per_client("own") == {"ann": (math.sqrt(2.5), 2), "bob": (3.0, 1)}
    pair = both.pair("own", "local")  # d = 3, 0 and 5
    assert (pair.difference.tolist(), pair.square.tolist()) == ([3.0, 5.0], [9.0, 25.0])
    assert not pair.table.any()


def same(a: Tallies, b: Tallies) -> bool:
    names = ("people", "count", "loss", "right", "absolute", "accuracy", "agreed", "difference", "scores")
    return all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in names)


def test_the_total_has_the_same_bits_for_any_order_and_grouping_by_clients() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for client in range(3):
        size = 5 + client
        label = rng.integers(0, 2, size)
        models = [
            judgement(
                BINARY, [client] * size, rng.exponential(10.0 ** (4 * k), size), rng.normal(size=size), label
            )
            for k in (-1, 1)
        ]
        rows.append(tallied(BINARY, ("own", "shared"), models, IDS))
    totals = [first.joined(rest).total() for first, *rest in itertools.permutations(rows)]
    assert all(same(total, totals[0]) for total in totals)
    assert totals[0].clients == ("",)
    assert (int(totals[0].people[0]), int(totals[0].count[0])) == (3, 18)
    assert totals[0].loss[0].tolist() == [math.fsum(r.loss[0, m] for r in rows) for m in (0, 1)]
    assert totals[0].per_client("own") == {}
    assert totals[0].metrics("own") == rows[0].joined(rows[1:]).metrics("own")


@pytest.mark.parametrize("task", [CLASSES, BINARY, NUMBERS])
@pytest.mark.parametrize("leaves", ["sums", "clients"])
def test_metrics_of_sums_are_those_of_examples(task: Task, leaves: Leaves) -> None:
    rng = np.random.default_rng(1)
    client, label = rng.integers(0, 3, 200), rng.integers(0, 2, 200)
    score = rng.integers(0, 2, 200) if task is CLASSES else rng.normal(size=200)
    own = judgement(task, client, score**2 + 0.5, score, label)
    exact = Judged(task=task, models=("own",), leaves="examples", examples=(own,), roster=IDS)
    rows = exact.tallies.total() if leaves == "sums" else exact.tallies
    coarse = Judged(task=task, models=("own",), leaves=leaves, table=rows)
    found, wanted = coarse.metrics("own"), exact.metrics("own")
    if task is BINARY:
        assert abs(found.pop("auc") - wanted.pop("auc")) <= found.pop("auc_error") < 0.05
    assert found == pytest.approx(wanted, abs=1e-13)
    assert exact.count == coarse.count == 200
    records = to_records([coarse], "own", 3, 1.5, "test", per_client=True)
    assert {r.client for r in records} == ({None} if leaves == "sums" else {None, *IDS})
    assert [r.metric for r in records if r.metric == "auc_error"] == ["auc_error"] * (task is BINARY)
    assert all((r.round, r.epoch, r.split) == (3, 1.5, "test") for r in records)


def exact_auc(positive: list[float], negative: list[float]) -> Fraction:
    twice = sum(2 * (p > n) + (p == n) for p in positive for n in negative)
    return Fraction(twice, 2 * len(positive) * len(negative))


EDGE = st.integers(-140, 140).map(lambda k: k / 8)
NEAR = st.tuples(EDGE, st.sampled_from([-1, 1])).map(lambda e: math.nextafter(e[0], e[1] * math.inf))
SCORES = st.lists(st.one_of(EDGE, NEAR, st.floats(allow_nan=False)), min_size=1, max_size=30)


@given(SCORES, SCORES)
@example([1e308], [17.0])
@example([math.inf], [-math.inf])
@example([0.01] * 9, [0.02] * 9)  # as wrong as it gets: the bound is reached
def test_the_binned_auc_is_within_its_bound(positive: list[float], negative: list[float]) -> None:
    bins = [np.bincount(bin_of(np.array(s)), minlength=BINS) for s in (positive, negative)]
    found, bound = binned_auc(*bins)
    tied = sum(int(p) * int(n) for p, n in zip(*bins, strict=True))
    assert bound == tied / (2 * len(positive) * len(negative))
    rounding = Fraction(1, 2**52)
    assert abs(Fraction(found) - exact_auc(positive, negative)) <= Fraction(bound) + rounding


def test_the_bound_is_reached_and_zero_where_bins_tell_all_apart() -> None:
    def of(*scores: float) -> np.ndarray:
        return np.bincount(bin_of(np.array(scores)), minlength=BINS)

    assert binned_auc(of(0.01), of(0.02)) == (0.5, 0.5)  # the exact one is 0
    assert binned_auc(of(0.5, -3.0), of(0.25)) == (0.5, 0.0)
    assert all(math.isnan(v) for v in binned_auc(of(0.5), np.zeros(BINS, int)))
    assert bin_of(np.array([-99.0, -16.0, -0.1, 0.0, 0.125, 15.9, 99.0])).tolist() == [
        0,
        0,
        127,
        128,
        129,
        255,
        255,
    ]
    with raises(NonFiniteError, said="auc: a score is NaN. Lower the learning rate"):
        bin_of(np.array([0.0, math.nan]))


def test_what_was_not_judged_or_may_not_leave_is_refused() -> None:
    sums = Judged(task=CLASSES, models=("own", "shared"), leaves="sums", table=BOTH.total())
    for wrong, message in (
        (lambda: BOTH.pair("own", "own"), "A pair wants two models; got 'own' twice."),
        (lambda: BOTH.metrics("local"), "'local' was not judged; there are ['own', 'shared']."),
        (
            lambda: BOTH.joined([tallied(CLASSES, ("own",), (OWN,), IDS)]),
            "Tallies of different tasks or models can't be joined.",
        ),
        (
            lambda: sums.of("own"),
            (
                "Wanted every example's result of 'own'; there are ['own', 'shared'], and the device's policy is "
                "'sums'. Only 'examples' lets them leave."
            ),
        ),
    ):
        with raises(ConfigError, text=message):
            wrong()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("column", [[math.inf, -math.inf, 1.0], [1.7e308, 1.7e308, 1.0]])
def test_a_sum_that_no_float_holds_is_no_number(column: list[float]) -> None:
    found = summed(np.array([[value, 2.0] for value in column]))
    assert repr(found.tolist()) == "[[nan, 6.0]]"


def test_of_nobody_there_are_no_metrics() -> None:
    nobody = Judgement.joined(CLASSES, [])
    assert (nobody.per_client(), nobody.metrics()) == ({}, {})
