"""What a run with differential privacy may cost, checked before it starts."""

from __future__ import annotations

from fedkeep.core.errors import ConfigError
from fedkeep.engines import Sampler
from fedkeep.privacy import DifferentialPrivacy, Terms, epsilon


def terms_of(privacy: DifferentialPrivacy, sampler: Sampler, pooled: bool = False) -> Terms:
    """Return what a run's rounds cost.

    Raises:
        ConfigError: rounds are not such that their cost is known, δ is not below 1 / N, or accounting isn't installed.
    """
    if pooled:
        raise ConfigError(
            "Differential privacy wants cohorts of clients, and centralised training has none: all data are in one "
            "place. Take another engine."
        )
    if sampler.mode != "poisson":
        raise ConfigError(
            f"A budget wants a cohort that is drawn client by client: sampling must be 'poisson'; got "
            f"{sampler.mode!r}. No other sampling has an ε that is known to hold."
        )
    privacy.check_clients(sampler.count)
    if privacy.budget is not None:
        epsilon({}, privacy.delta)  # says now if the package is missing
    return Terms(
        clients=sampler.count, cohort=sampler.cohort, release=privacy.release(sampler.rate), delta=privacy.delta,
        budget=privacy.budget, accountant=privacy.accountant, repeatable=privacy.noise_seed is not None,
    )  # fmt: skip
