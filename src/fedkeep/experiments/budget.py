"""What a run with differential privacy may cost, checked before it starts."""

from __future__ import annotations

import secrets

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.engines import Sampler
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.privacy import DifferentialPrivacy, Ledger, Terms, epsilon
from fedkeep.privacy.ledger import FILE


def terms_of(privacy: DifferentialPrivacy, sampler: Sampler, centralised: bool = False) -> Terms:
    """Return what a run's rounds cost.

    Raises:
        ConfigError: rounds are not such that their cost is known, δ is not below 1 / N, or accounting isn't installed.
    """
    if centralised:
        raise ConfigError(
            "Differential privacy wants cohorts of clients, and centralised training has none: all data are in one "
            "place. Leave out centralised=True."
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
        clients=sampler.count,
        cohort=sampler.cohort,
        release=privacy.release(sampler.rate),
        delta=privacy.delta,
        budget=privacy.budget,
        accountant=privacy.accountant,
        repeatable=privacy.noise_seed is not None,
    )


def ledger_of(terms: Terms | None, directory: RunDirectory | None) -> Ledger | None:
    """Return the ledger of a run, to go on with or begun; None without differential privacy.

    Raises:
        RunError: the ledger of a run that goes on is missing, damaged, or older than its last commit.
    """
    if terms is None or directory is None:
        return None if terms is None else Ledger(terms)
    known = directory.extra.get("ledger")
    if directory.round and not known:
        raise RunError(f"{directory.folder / 'commit.json'} knows of no ledger. Restore the run from a copy.")
    return Ledger.open(directory.folder / FILE, directory.id, terms, known)


def secret_seed() -> int:
    """Return what cohorts are drawn by that nobody can know."""
    return secrets.randbits(63)


def draw_anew(sampler: Sampler, ledger: Ledger | None, directory: RunDirectory) -> None:
    """Draw cohorts by a new secret where rounds that may have been released are run again.

    One cohort that is released twice costs more than two, each by coins of its own, which is what is charged. Noise
    from a seed comes again too, and then nothing new is released.
    """
    if ledger is not None and ledger.uncommitted and not ledger.terms.repeatable:
        sampler.seed = secret_seed()
        directory.write_info({**directory.read_info(), "cohort_seed": sampler.seed})
