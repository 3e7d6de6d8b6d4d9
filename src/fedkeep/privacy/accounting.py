"""What rounds cost in ε, by the package dp-accounting (the extra ``privacy``).

A round takes each client with the probability q, sums clipped changes, and adds Gaussian noise of z times what one
client can change in the sum: a Poisson-sampled Gaussian mechanism. Neighbours differ by one whole client, added or
removed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal, get_args

from fedkeep.core.errors import ConfigError, check_choice, check_range, needing

Accountant = Literal["pld", "rdp"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """One round, as accounting sees it.

    Attributes:
        rate: q, the probability that a client is in it, (0, 1].
        noise: z, the noise multiplier; 0: none.

    Raises:
        ConfigError: the rate is not in (0, 1], or the noise no number of at least 0.
    """

    rate: float
    noise: float

    def __post_init__(self) -> None:
        check_range("(0, 1]", **{"The rate of a release": self.rate})
        check_range("[0, inf)", **{"The noise of a release": self.noise})


def epsilon(releases: Mapping[Release, int], delta: float, accountant: Accountant = "pld") -> float:
    """Return ε at δ of rounds, given how many there are of each kind; infinite where one has no noise.

    Raises:
        ConfigError: the accountant is unknown, δ does not lie between 0 and 1, a number of rounds is no whole number of
            at least 0, the package dp-accounting is not installed, or the noise is too little for the accountant.
    """
    check_choice("accountant must be", accountant, get_args(Accountant))
    check_range("(0, 1)", delta=delta)
    for count in releases.values():
        if not (isinstance(count, Integral) and count >= 0):
            raise ConfigError(
                "A number of rounds must be a whole number of at least 0; got {got!r}.",
                got=count,
            )
    dp: Any = _package()
    used = {release: count for release, count in releases.items() if count}
    if any(release.noise == 0 for release in used):
        return math.inf
    if not used:
        return 0.0
    try:
        with _quiet():
            if accountant == "rdp":
                cost = sum(int(count) * _renyi(release).rdp for release, count in used.items())
                return float(dp.rdp.compute_epsilon(_renyi(next(iter(used))).orders, cost, delta)[0])
            found = dp.pld.PLDAccountant()
            for release, count in used.items():
                found.compose(_event(release), int(count))
            return float(found.get_epsilon(delta))
    except (MemoryError, ValueError, OverflowError) as error:
        least = min(release.noise for release in used)
        raise ConfigError(
            "The accountant {accountant!r} can't say what noise of {least:g} costs: {why}. Take more "
            "noise, or the accountant 'rdp'.",
            accountant=accountant,
            least=least,
            why=error,
        ) from error


def _event(release: Release) -> Any:
    dp = _package()
    return dp.PoissonSampledDpEvent(release.rate, dp.GaussianDpEvent(release.noise))


@lru_cache(maxsize=32)
def _renyi(release: Release) -> Any:
    """Return an accountant of one round. Rounds add up by Rényi orders; one round takes a tenth of a second."""
    accountant = _package().rdp.RdpAccountant()
    accountant.compose(_event(release))
    return accountant


def rounds_within(
    budget: float,
    release: Release,
    spent: Mapping[Release, int],
    delta: float,
    accountant: Accountant,
    most: int,
) -> int:
    """Return how many more rounds of a kind fit in a budget, at most ``most``."""

    def fits(count: int) -> bool:
        rounds = {**spent, release: spent.get(release, 0) + count}
        return epsilon(rounds, delta, accountant) <= budget

    if fits(most):
        return most
    low, high = -1, most  # low fits (no round at all counts as fitting), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the package's notes on Rényi orders that it leaves out; without them ε is larger, never smaller."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _package() -> Any:
    with needing("Accounting for differential privacy", "dp-accounting", "privacy"):
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    return dp_accounting
