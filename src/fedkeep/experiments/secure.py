"""Whether every cohort of a run is large enough for a secure sum, checked before it starts."""

from __future__ import annotations

from fedkeep.core.errors import ConfigError
from fedkeep.engines import Sampler
from fedkeep.methods import Method, SecureMean
from fedkeep.privacy.secure.messages import LEAST


def check_cohorts(method: Method, sampler: Sampler) -> None:
    """Refuse a method that sums securely where a cohort may be of one client or none.

    Raises:
        ConfigError: says which cohorts there would be.
    """
    if not isinstance(method.server.reduce, SecureMean):
        return
    rest = sampler.count % sampler.cohort if sampler.mode == "shuffled" else 0
    if sampler.mode == "poisson" or (rest or sampler.cohort) < LEAST:
        raise ConfigError(
            f"Secure sums want at least {LEAST} clients in every cohort; of {sampler.count} clients, {sampler.cohort} "
            f"a round, with sampling {sampler.mode!r}, one may be smaller. Take another cohort, or sampling = "
            f"'independent'."
        )
