"""ε by the package against its own numbers, against a formula, and the number of rounds that fit."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from fedkeep.core.errors import ConfigError, installing
from fedkeep.privacy import Release, epsilon
from fedkeep.privacy.accounting import rounds_within
from tests.refusals import raises

ROUND = Release(rate=0.5, noise=4.0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_rounds_cost_what_the_package_says_of_them_one_by_one(accountant: Any) -> None:
    theirs = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
    for _ in range(3):
        theirs.compose(dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(4.0)))
    theirs.compose(dp_accounting.PoissonSampledDpEvent(1.0, dp_accounting.GaussianDpEvent(3.0)))
    ours = epsilon({ROUND: 3, Release(rate=1.0, noise=3.0): 1}, 1e-5, accountant)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), abs=1e-6)
    assert 0.5 < ours < 5


def test_a_round_of_all_clients_costs_what_the_formula_says() -> None:
    """Rényi: ε = min_a T a / (2 z²) + ln(1 − 1/a) − ln(δ a) / (a − 1), over all orders a > 1."""
    rounds, noise, delta = 7, 3.0, 1e-6
    orders = [1 + k / 100 for k in range(1, 20000)]
    formula = min(
        rounds * a / (2 * noise**2) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders
    )
    found = epsilon({Release(rate=1.0, noise=noise): rounds}, delta, "rdp")
    assert formula <= found <= formula + 0.02  # the package tries fewer orders
    tight = epsilon({Release(rate=1.0, noise=noise): rounds}, delta, "pld")
    assert gaussian_delta(tight, math.sqrt(rounds) / noise) == pytest.approx(delta, rel=0.02)


def gaussian_delta(eps: float, shift: float) -> float:
    """Return δ(ε) of one Gaussian mechanism (Balle and Wang, 2018, theorem 5)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(shift / 2 - eps / shift) - math.exp(eps) * below(-shift / 2 - eps / shift)


def test_nothing_costs_nothing_and_no_noise_costs_all() -> None:
    assert epsilon({}, 1e-5) == 0.0
    assert epsilon({Release(rate=0.5, noise=0.0): 0}, 1e-5) == 0.0
    assert epsilon({ROUND: 3, Release(rate=0.5, noise=0.0): 1}, 1e-5) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("delta", [math.nan, -1.0, 0.0, 1.0, 2.0])
def test_a_delta_that_promises_nothing_is_refused(accountant: Any, delta: float) -> None:
    """The package makes ε = 0 of some of these."""
    with pytest.raises(ConfigError, match=r"delta must be in \(0, 1\); got"):
        epsilon({ROUND: 3}, delta, accountant)


@pytest.mark.parametrize(
    ("rate", "noise", "message"),
    [
        (0.0, 1.0, "The rate of a release must be in (0, 1]; got 0.0."),
        (2.0, 1.0, "The rate of a release must be in (0, 1]; got 2.0."),
        (math.nan, 1.0, "The rate of a release must be in (0, 1]; got nan."),
        (0.5, -1.0, "The noise of a release must be at least 0; got -1.0."),
        (0.5, math.nan, "The noise of a release must be at least 0; got nan."),
        (0.5, math.inf, "The noise of a release must be finite; got inf."),
    ],
)
def test_a_release_that_no_round_is(rate: float, noise: float, message: str) -> None:
    with raises(ConfigError, text=message):
        Release(rate=rate, noise=noise)


def test_bad_numbers_of_rounds_and_accountants() -> None:
    for count in (-3, 10.5):
        with pytest.raises(ConfigError, match="must be a whole number of at least 0; got"):
            epsilon({ROUND: count}, 1e-5)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="accountant must be 'pld' or 'rdp'; got 'renyi'"):
        epsilon({ROUND: 3}, 1e-5, "renyi")  # type: ignore[arg-type]


def test_what_an_accountant_has_no_room_for_is_said() -> None:
    with pytest.raises(ConfigError, match="'pld' can't say what noise of 1e-08 costs: .*'rdp'"):
        epsilon({Release(rate=1.0, noise=1e-8): 1}, 1e-5)
    assert epsilon({Release(rate=1.0, noise=1e-8): 1}, 1e-5, "rdp") > 1e15


@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_how_many_rounds_fit(accountant: Any) -> None:
    budget = epsilon({ROUND: 5}, 1e-5, accountant) + 1e-9
    assert rounds_within(budget, ROUND, {}, 1e-5, accountant, 8) == 5
    assert rounds_within(budget, ROUND, {}, 1e-5, accountant, 4) == 4
    assert rounds_within(budget, ROUND, {ROUND: 3}, 1e-5, accountant, 8) == 2
    assert rounds_within(budget, ROUND, {ROUND: 6}, 1e-5, accountant, 2) == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=re.escape(installing("privacy"))):
        epsilon({ROUND: 1}, 1e-5)
