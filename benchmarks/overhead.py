"""Claims: the sequential engine costs at most 5 % over a plain PyTorch loop on W1, with the same model and layers;
``import fedkeep`` costs at most 1.15 × ``import torch``.

    python -m benchmarks.overhead [--threads N] [--turns N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

from benchmarks.measure import interleaved, ratio, write
from benchmarks.workloads import PlainDocument, plain_round, w1_data
from fedkeep import methods, sgd
from fedkeep.core.net import Net
from fedkeep.engines import Job, Sampler, Sequential, Server, run_round
from fedkeep.store import Default, MemoryStore


def main() -> None:
    """Measure, write ``results/overhead.json``, and fail if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data, cohort = w1_data(), 10
    sampler = Sampler(len(data), cohort, "shuffled", 0)
    torch.manual_seed(0)
    plain, private = PlainDocument(), {}
    method = methods.furl("user", optimizer=sgd(0.1), batch_size=16)
    net = Net(PlainDocument())
    server = Server(method.split.federated(net.initial()))
    store = MemoryStore(Default(method.split.personal(net.initial()), 0.0))
    job = Job(method, net, data, store, seed=0)
    rounds = iter(range(10**6))
    seconds = interleaved(
        {
            "plain": lambda: plain_round(plain, private, data, sampler(next(rounds))),
            "fedkeep": lambda: run_round(job, Sequential(), server, sampler(next(rounds))),
        },
        options.turns,
    )
    code = {"torch": "import torch", "fedkeep": "import fedkeep"}
    imports = interleaved(
        {name: lambda c=c: subprocess.run([sys.executable, "-c", c], check=True) for name, c in code.items()}, 9
    )  # fmt: skip
    overhead, importing = ratio(seconds, "fedkeep", "plain"), ratio(imports, "fedkeep", "torch")
    write(
        "overhead",
        {
            "w1_round_over_plain": overhead,
            "import_over_torch": importing,
            "cohort": cohort,
            "turns": options.turns,
        },
    )
    assert overhead["median"] <= 1.05, (
        f"a round costs {overhead['median']:.3f} of the plain loop; claimed 1.05"
    )
    assert importing["median"] <= 1.15, f"import costs {importing['median']:.3f} of torch's; claimed 1.15"


if __name__ == "__main__":
    main()
