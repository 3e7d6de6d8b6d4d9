"""Claims: the sequential engine costs at most 5 % over a plain PyTorch loop on W1, with the same model and layers;
``import fedkeep`` costs at most 1.15 × ``import torch``.

    python -m benchmarks.overhead [--threads N] [--turns N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from benchmarks.contenders.ours import Ours
from benchmarks.contenders.plain import Plain
from benchmarks.measure import interleaved, ratio, write
from benchmarks.workloads import W1
from fedkeep.engines import Sequential


def main() -> None:
    """Measure, write ``results/overhead.json``, and fail if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain, ours = Plain(W1), Ours(W1, W1.initial(), Sequential())
    turns = iter(range(10**6))

    def run(contender: Plain | Ours) -> None:
        turn = next(turns)
        contender.round(turn, W1.cohort_of(turn))

    seconds = interleaved({"plain": lambda: run(plain), "fedkeep": lambda: run(ours)}, options.turns)
    code = {"torch": "import torch", "fedkeep": "import fedkeep"}
    imports = interleaved(
        {name: lambda c=c: subprocess.run([sys.executable, "-c", c], check=True) for name, c in code.items()},
        9,
    )
    overhead, importing = ratio(seconds, "fedkeep", "plain"), ratio(imports, "fedkeep", "torch")
    write(
        "overhead",
        {
            "w1_round_over_plain": overhead,
            "import_over_torch": importing,
            "cohort": W1.cohort,
            "turns": options.turns,
        },
    )
    assert overhead["median"] <= 1.05, (
        f"a round costs {overhead['median']:.3f} of the plain loop; claimed 1.05"
    )
    assert importing["median"] <= 1.15, f"import costs {importing['median']:.3f} of torch's; claimed 1.15"


if __name__ == "__main__":
    main()
