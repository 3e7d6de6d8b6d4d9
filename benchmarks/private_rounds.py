"""Claim: a round of W1 with differential privacy costs at most 1.15 × a round without.

    python -m benchmarks.private_rounds [--turns N]

Both take the same cohorts in turn, on one thread; seconds are the processor's, so other work on the machine counts in
neither. One round is of W1's 10 clients. Writes ``results/private-rounds.json``.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.contenders.ours import federated, method_of, model_of
from benchmarks.faults import commit
from benchmarks.measure import interleaved, ratio, write
from benchmarks.rounds import Rounds
from benchmarks.workloads import W1
from fedkeep.core.net import Net
from fedkeep.engines import Sequential
from fedkeep.methods import WeightedMean, differentially_private
from fedkeep.privacy import DifferentialPrivacy

LIMIT = 1.15


def main() -> None:
    """Measure, write the result, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    plain = method_of(W1).on_server(reduce=WeightedMean(by="uniform"))
    noisy = differentially_private(plain, DifferentialPrivacy(noise=1.0, clip=0.5, delta=1e-3), W1.cohort)
    data = federated(W1.data())
    made = {
        name: Rounds(method, Net(model_of(W1, W1.initial())), data, Sequential())
        for name, method in (("plain", plain), ("private", noisy))
    }
    count = iter(range(10**6))

    def run(rounds: Rounds) -> None:
        rounds(W1.cohort_of(next(count) // 2))  # the same cohort for both
        rounds.device.committed()

    contenders = {name: lambda r=rounds: run(r) for name, rounds in made.items()}
    seconds = interleaved(contenders, turns, clock=time.process_time)
    found = ratio(seconds, "private", "plain")
    numbers = sum(v.numel() for v in made["plain"].server.params.values())
    about = {"cohort": W1.cohort, "federated_numbers": numbers, "turns": turns, "commit": commit()}
    write("private-rounds", {"private_over_plain": found, "cpu_seconds": seconds, **about})
    assert found["median"] <= LIMIT, f"a private round costs {found['median']:.3f}; claimed {LIMIT}"


if __name__ == "__main__":
    main()
