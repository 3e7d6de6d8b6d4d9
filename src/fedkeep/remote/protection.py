"""Differential privacy of clients across machines: the server draws secret cohorts, clips and adds the noise.

Devices train as ever, and know nothing of it; the server is trusted with each upload.
"""

from __future__ import annotations

from fedkeep.core.errors import ConfigError
from fedkeep.engines.round import Sampler
from fedkeep.experiments.budget import terms_of
from fedkeep.methods import Method
from fedkeep.methods.private import differentially_private
from fedkeep.privacy import DifferentialPrivacy, Terms
from fedkeep.remote.policy import RoundPolicy


def protected(
    method: Method, privacy: DifferentialPrivacy, sampler: Sampler, policy: RoundPolicy
) -> tuple[Method, Terms]:
    """Return the method as the server runs it, and what its rounds cost.

    Raises:
        ConfigError: cohorts are not such that the cost of a round is known.
        MethodError: the method's reduction is no sum.
    """
    if policy.over_selection > 1 or policy.mode == "buffered":
        raise ConfigError(
            "Differential privacy counts on a coin for each client and round: the first answers of more are none. "
            "Leave out rounds.over_selection and rounds.mode."
        )
    terms = terms_of(privacy, sampler)
    return differentially_private(method, privacy, sampler.cohort), terms
