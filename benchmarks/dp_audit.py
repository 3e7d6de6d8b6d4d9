"""Claims: ε is dp-accounting's own; the released noise has the declared size; an auditor finds no ε above the claim.

    python -m benchmarks.dp_audit [--trials 20]

*Accounting*: 50 settings, the ledger's ε beside the package's, composed there round by round or at once.

*Noise*: rounds that nobody is in; the standard deviation of what they release beside the declared one.

*Audit*: an auditor owns canaries, each a client with a direction of its own: a vector, no training. 10,000 of them take
part in the run, 200,000 do not; those that do are in a round by a coin of rate q. The auditor sees every released sum,
and guesses of a canary that it took part where the likelihood ratio over all rounds is beyond a threshold that was
fixed beforehand. At ε and δ, P(guess | took part) ≤ e^ε P(guess | did not) + δ; bounds of both probabilities (Clopper
and Pearson, together 99.9 %) give a lower bound of ε, whatever the mechanism. With the noise that is claimed it must
stay below the claim, with half of it exceed the claim.

Writes ``results/dp-audit.json``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import dp_accounting
import numpy as np
import torch
from dp_accounting import pld, rdp
from scipy import stats

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep import Split, WeightedMean
from fedkeep.core.params import Params
from fedkeep.engines import Sampler
from fedkeep.methods import Global, PrivateMean
from fedkeep.privacy import Adaptive, BudgetLedger, BudgetTerms, DifferentialPrivacy, Release
from fedkeep.privacy.accounting import Accountant

TOOK_PART, DID_NOT, RATE, ROUNDS, CLAIM, DELTA = 10_000, 200_000, 0.25, 4, 3.0, 1e-6
DIRECTIONS = TOOK_PART + DID_NOT
CLIP = 0.5
THRESHOLD = 1.2 * CLAIM
"""Of the log likelihood ratio, fixed before any trial."""


def accounting() -> dict[str, Any]:
    """Return the largest difference of ε over 50 settings."""
    worst, settings = 0.0, 0
    kinds: tuple[Accountant, ...] = ("pld", "rdp")
    for rate, noise, rounds, accountant in itertools.product(
        (0.01, 0.05, 0.2, 0.5, 1.0), (1.5, 3.0), (1, 20, 100), kinds
    ):
        if settings == 50:
            break
        settings += 1
        delta = (1e-5, 1e-7)[settings % 2]
        release = Release(rate=rate, noise=noise)
        terms = BudgetTerms(
            clients=1000, cohort=1000 * rate, release=release, delta=delta, budget=None, accountant=accountant
        )
        ledger = BudgetLedger(terms)
        for round in range(rounds):
            ledger.charge(round)
        worst = max(worst, abs(ledger.spent() - package(rate, noise, rounds, delta, accountant)))
    return {"settings": settings, "largest_difference": worst}


def package(rate: float, noise: float, rounds: int, delta: float, accountant: Accountant) -> float:
    """Return the package's own ε of rounds as one event."""
    found = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
    once = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    found.compose(dp_accounting.SelfComposedDpEvent(once, rounds))
    return float(found.get_epsilon(delta))


def noise_for(claim: float) -> float:
    """Return the noise multiplier at which the audited rounds cost ε = ``claim``."""
    low, high = 0.5, 20.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        over = package(RATE, middle, ROUNDS, DELTA, "pld") > claim
        low, high = (middle, high) if over else (low, middle)
    return high


def released(privacy: DifferentialPrivacy, start: Params, expected: float) -> Params:
    """Return what a round that nobody is in releases."""
    state = {} if privacy.adaptive is None else {"clip_bound": torch.tensor(CLIP, dtype=torch.float64)}
    rule = PrivateMean(mean=WeightedMean(by="uniform"), privacy=privacy, cohort=expected)
    return rule.begin(Global(params=start, state=state), start, ()).value().changes


def noise() -> dict[str, Any]:
    """Return measured over declared standard deviations, with their 99.9 % intervals, and tests of the shape."""
    start = {"a": torch.zeros(1_000_000), "b": torch.zeros(500, 2000)}
    lines = {}
    cases = {
        "flat": (DifferentialPrivacy(noise=1.3, clip=CLIP), {"a": 1.3 * CLIP, "b": 1.3 * CLIP}),
        "by pattern": (
            DifferentialPrivacy(noise=1.3, clip={"a": 0.2, "*": CLIP}),
            {"a": 1.3 * math.sqrt(2) * 0.2, "b": 1.3 * math.sqrt(2) * CLIP},
        ),
        "adaptive": (
            DifferentialPrivacy(noise=1.3, clip=CLIP, adaptive=Adaptive(noise=2.0)),
            dict.fromkeys("ab", CLIP / math.sqrt(1 / 1.3**2 - 1 / 4.0**2)),
        ),
    }
    half = float(stats.norm.ppf(0.9995)) / math.sqrt(2 * 1_000_000)
    for name, (privacy, declared) in cases.items():
        found = released(privacy, start, 50.0)
        for tensor, wanted in declared.items():
            values = found[tensor].double().numpy().ravel() * 50.0 / wanted
            neighbours = float(np.corrcoef(values[:-1], values[1:])[0, 1])
            shape = float(stats.kstest(values, "norm").pvalue)
            lines[f"{name}, {tensor}"] = {
                "measured_over_declared": float(values.std()),
                "interval": [1 - half, 1 + half],
                "mean_in_deviations": float(values.mean()),
                "neighbours": neighbours,
                "kolmogorov_smirnov_p": shape,
            }
    return lines


def trial(seed: int, claimed: float, used: float) -> dict[str, float]:
    """Return the lower bound that an auditor finds where the noise multiplier is ``used``, and what it is made of."""
    torch.set_num_threads(1)
    took_part = np.zeros(DIRECTIONS, bool)
    took_part[np.random.default_rng(seed).choice(DIRECTIONS, TOOK_PART, replace=False)] = True
    start = {"canaries": torch.zeros(DIRECTIONS, 1, dtype=torch.float64)}
    expected = RATE * TOOK_PART
    rule = PrivateMean(
        mean=WeightedMean(by="uniform"), privacy=DifferentialPrivacy(noise=used, clip=CLIP), cohort=expected
    )
    sampler = Sampler(np.flatnonzero(took_part), round(expected), "poisson", seed)
    far = {"canaries": torch.full((1, 1), 5 * CLIP, dtype=torch.float64)}
    nowhere = {"canaries": torch.zeros(1, 1, dtype=torch.float64)}
    upload = Split().upload(nowhere, far, 1.0, {"canaries": torch.zeros(1, dtype=torch.int64)})
    places = torch.arange(DIRECTIONS).unsqueeze(1)
    evidence, alone = np.zeros(DIRECTIONS), list[float]()
    for number in range(ROUNDS):
        cohort = sampler(number)
        found = rule.begin(Global(params=start, round=number), start, [f"{c:06}" for c in cohort])
        for client in cohort:
            found.add(f"{client:06}", upload.but(upload.deltas, {"canaries": places[client]}))
        seen = found.value().changes["canaries"].numpy().ravel() * expected / CLIP
        alone.append(float(seen[~took_part].std()))
        # what the auditor takes for the noise: half of what is claimed, the fault that it looks for
        evidence += np.log1p(RATE * np.expm1((2 * seen - 1) / (2 * (claimed / 2) ** 2)))
    guessed = evidence > THRESHOLD
    right, wrong = int(guessed[took_part].sum()), int(guessed[~took_part].sum())
    return {
        "bound": lower_bound(right, wrong),
        "right": right,
        "wrong": wrong,
        "deviation_over_used": float(np.mean(alone)) / used,
    }


def lower_bound(right: int, wrong: int) -> float:
    """Return the lower bound of ε, with 0.05 % of doubt on each of the two probabilities."""
    if not right:
        return 0.0
    least = stats.beta.ppf(5e-4, right, TOOK_PART - right + 1)
    most = stats.beta.ppf(1 - 5e-4, wrong + 1, DID_NOT - wrong)
    return math.log(max((least - DELTA) / most, 1.0))


def main() -> None:
    """Measure, write ``results/dp-audit.json``, and fail if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    torch.set_num_threads(1)
    settings, sizes, claimed = accounting(), noise(), noise_for(CLAIM)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(trial, seed, claimed, claimed) for seed in range(trials)]
        weak = [pool.submit(trial, 1000 + seed, claimed, claimed / 2) for seed in range(trials)]
        whole, halved = ([run.result() for run in some] for some in (runs, weak))
    below, above = sum(t["bound"] < CLAIM for t in whole), sum(t["bound"] > CLAIM for t in halved)
    audit = {
        "took_part": TOOK_PART,
        "did_not": DID_NOT,
        "rate": RATE,
        "rounds": ROUNDS,
        "claimed_epsilon": CLAIM,
        "delta": DELTA,
        "noise_multiplier": claimed,
        "epsilon_of_half_the_noise": package(RATE, claimed / 2, ROUNDS, DELTA, "pld"),
        "confidence": 0.999,
        "below_the_claim": below,
        "above_it_with_half_the_noise": above,
        "trials": trials,
        "whole": whole,
        "halved": halved,
    }
    write("dp-audit", {"accounting": settings, "noise": sizes, "audit": audit, "commit": commit()})
    assert settings["largest_difference"] < 1e-6, settings
    off = {
        n: s
        for n, s in sizes.items()
        if not s["interval"][0] < s["measured_over_declared"] < s["interval"][1]
    }
    assert not off, off
    assert below == trials, f"{below} of {trials} below the claim"
    assert above >= 0.95 * trials, f"{above} of {trials} above the claim with half the noise"


if __name__ == "__main__":
    main()
