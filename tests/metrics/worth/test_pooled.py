"""Gains in pooled numbers: leaving out a client is computed anew in a loop."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.metrics import CLASS_METRICS, auc
from fedkeep.metrics.worth.intervals import jackknife, users_like_these
from fedkeep.metrics.worth.pooled_gains import (
    CLASSES_POOLED,
    auc_pooled,
    mean_pooled,
    pooled_gain,
    rmse_pooled,
    shares,
)

RNG = np.random.default_rng(2)
CLIENT = np.repeat(np.arange(5), (7, 3, 12, 6, 9))[RNG.permutation(37)]
LABEL = RNG.integers(0, 2, 37)
SCORE = np.round(RNG.normal(LABEL, 1.0), 1)  # some are equal
OTHERS = [np.flatnonzero(np.not_equal(CLIENT, k)) for k in range(5)]


def test_auc_without_each_client() -> None:
    whole, without = auc_pooled(CLIENT, SCORE, LABEL)
    assert whole == pytest.approx(auc(SCORE, LABEL), rel=1e-12)
    for k in range(5):
        assert without[k] == pytest.approx(auc(SCORE[OTHERS[k]], LABEL[OTHERS[k]]), rel=1e-12)


def test_auc_is_not_defined_where_one_client_has_all_of_a_class() -> None:
    _, without = auc_pooled(np.array([0, 0, 1]), np.array([0.1, 0.9, 0.5]), np.array([0, 1, 1]))
    assert np.isnan(without).tolist() == [True, False]


def test_a_gain_that_hangs_on_one_client_has_no_interval() -> None:
    client, label = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1])  # without client 0 there is no negative
    one, other = np.array([0.1, 0.9, 0.5, 0.3]), np.array([0.4, 0.9, 0.5, 0.3])
    found = pooled_gain(auc_pooled, client, [(one, label)], [(other, label)])
    assert found.mean == pytest.approx(1 - 2 / 3)
    assert np.isnan([found.low, found.high]).all()


def test_means_and_rmse_without_each_client() -> None:
    values = SCORE**2
    for number, after in ((mean_pooled, float), (rmse_pooled, np.sqrt)):
        whole, without = number(CLIENT, values)
        assert whole == pytest.approx(after(values.mean()))
        assert without == pytest.approx([after(values[OTHERS[k]].mean()) for k in range(5)])


def test_a_gain_is_the_mean_over_seeds() -> None:
    a, b, c, d = (RNG.random(37) for _ in range(4))
    found = pooled_gain(rmse_pooled, CLIENT, [(a,), (b,)], [(c,), (d,)], lower_is_better=True)

    def gain(rows: np.ndarray) -> float:
        root = [float(np.sqrt(v[rows].mean())) for v in (a, b, c, d)]
        return (root[2] - root[0] + root[3] - root[1]) / 2

    wanted = jackknife(gain(np.arange(37)), [gain(rows) for rows in OTHERS])
    assert (found.mean, found.low, found.high) == pytest.approx((wanted.mean, wanted.low, wanted.high))


def test_one_client_is_too_few() -> None:
    with pytest.raises(DataError, match="it wants two clients at least"):
        pooled_gain(mean_pooled, np.zeros(3, int), [(np.ones(3),)], [(np.zeros(3),)])


def test_no_gain_goes_beyond_all_examples_and_equal_ones_have_no_interval() -> None:
    client, right = np.array([0, 0, 1]), np.array([1.0, 1.0, 0.0])
    found = pooled_gain(mean_pooled, client, [(right,)], [(0 * right,)])
    assert (found.mean, found.low, found.high) == (pytest.approx(2 / 3), -1.0, 1.0)
    errors = pooled_gain(rmse_pooled, client, [(right,)], [(10 * right,)], lower_is_better=True)
    assert errors.low < -1
    same = pooled_gain(mean_pooled, client, [(right,)], [(right,)])
    assert same.mean == 0
    assert np.isnan([same.low, same.high]).all()


@pytest.mark.parametrize("name", CLASS_METRICS)
def test_classes_without_each_client(name: str) -> None:
    label = np.concatenate([np.arange(3), RNG.integers(0, 3, 34)])[np.argsort(RNG.random(37))]
    predicted = np.where(RNG.random(37) < 0.5, label, RNG.integers(-1, 3, 37))
    whole, without = CLASSES_POOLED[name](CLIENT, label, predicted)
    assert whole == pytest.approx(CLASS_METRICS[name](label, predicted), rel=1e-12)
    wanted = [CLASS_METRICS[name](label[rows], predicted[rows]) for rows in OTHERS]
    assert without == pytest.approx(wanted, rel=1e-12)


def test_a_class_that_is_predicted_alone_or_of_one_client_alone() -> None:
    """Class 7 is never a label, and 9 is one of client 2 alone. Recalls are 1/2, 1 and 1, F1 2/3, 2/3, 0 and 1."""
    client, label, predicted = np.array([0, 0, 1, 1, 2, 2]), [0, 1, 0, 1, 9, 1], [0, 1, 7, 1, 9, 0]
    args = client, np.array(label), np.array(predicted)
    whole, without = CLASSES_POOLED["balanced_accuracy"](*args)
    assert whole == pytest.approx((1 / 2 + 2 / 3 + 1) / 3)
    # without 0: class 0 is missed once, 1 found once of twice; without 1: 0 is found, 1 once of twice
    assert without == pytest.approx([(0 + 1 / 2 + 1) / 3, (1 + 1 / 2 + 1) / 3, np.nan], nan_ok=True)
    whole, without = CLASSES_POOLED["macro_f1"](*args)
    assert whole == pytest.approx((2 / 4 + 4 / 5 + 0 + 1) / 4)
    assert without == pytest.approx(
        [(0 + 2 / 3 + 0 + 1) / 4, (2 / 3 + 2 / 3 + 0 + 1) / 4, np.nan], nan_ok=True
    )


def test_shares_have_the_numbers_mean_and_the_jackknifes_interval() -> None:
    whole, without = 0.6, np.array([0.5, 0.7, 0.65, 0.4])
    found = shares((whole, without))  # the mean of the four is 0.5625
    assert found == pytest.approx([0.6 + 3 * gap for gap in (0.0625, -0.1375, -0.0875, 0.1625)])
    wanted = jackknife(whole, without)
    assert users_like_these(found[None]) == pytest.approx([wanted.mean, wanted.low, wanted.high])
