"""How many instructions a client costs beside a plain PyTorch loop, counted by ``valgrind --tool=callgrind``.

    python -m benchmarks.client_cost [--before CHECKOUT] [--jobs 2]

Clients with 32 examples to train on, of 32 features, mini-batches of 8, one epoch of SGD, one after the other in one process with one
thread, 10 a round: an MLP of 10 tensors, one of 60, and a model with private values and an embedding table. Instructions
do not depend on what else the machine does. CHECKOUT is a clone of another commit whose kernels are built. It writes
``results/client-cost.json``: thousands of instructions a client, and their ratios.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
USERS, EXAMPLES, COHORT, ROUNDS, BATCH, RATE = 20, 40, 10, 3, 8, 0.05
KINDS = ("mlp10", "mlp60", "furl")
MARKS = """#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


class MLP(nn.Module):
    """Linear layers with ReLU between them: ``layers`` of them have twice as many tensors."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        sizes = [32, *[width] * (layers - 1), 10]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(layer(x))
        out: Tensor = last(x)
        return out


class Personal(nn.Module):
    """The mean of embedded ids, beside a private vector ``user``, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(100, 32), nn.Linear(48, 64), nn.Linear(64, 10)
        self.user = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.embed(x).mean(1)
        out: Tensor = self.last(
            torch.relu(self.first(torch.cat([pooled, self.user.expand(len(pooled), -1)], 1)))
        )
        return out


def loops(kind: str) -> dict[str, Callable[[Sequence[int]], object]]:
    """Return what runs a round with some clients: a plain loop, and fedkeep's."""
    from benchmarks.rounds import Rounds
    from fedkeep import FederatedData, Phase, methods, sgd
    from fedkeep.core.allocator import tune_allocator
    from fedkeep.core.net import Net
    from fedkeep.engines import Sequential

    tune_allocator()
    rng, ids = np.random.default_rng(0), [f"u{k // EXAMPLES:02d}" for k in range(USERS * EXAMPLES)]
    x = rng.integers(0, 100, (len(ids), 20)) if kind == "furl" else rng.normal(size=(len(ids), 32))
    x, label = x if kind == "furl" else x.astype(np.float32), rng.integers(0, 10, len(ids))
    data = FederatedData.from_columns(ids, {"x": x, "label": label}).split_per_user()
    phase = Phase(batch_size=BATCH, epochs=1, optimizer=sgd(RATE))
    torch.manual_seed(0)
    module: nn.Module = {"mlp10": lambda: MLP(5, 64), "mlp60": lambda: MLP(30, 32), "furl": Personal}[kind]()
    method, private = methods.fedavg(local=phase), set[str]()
    if kind == "furl":
        method, private = methods.furl("user", local=phase), {"user"}
    model, generator = copy.deepcopy(module), torch.Generator().manual_seed(0)
    batches = [data.batch(np.asarray(data.rows(client, "train"))) for client in range(USERS)]
    examples = [(batch["x"], batch["label"]) for batch in batches]
    users = [{n: p.detach().clone() for n, p in module.named_parameters() if n in private} for _ in examples]
    server = {n: p.detach().clone() for n, p in module.named_parameters() if n not in private}

    def plain(clients: Sequence[int]) -> None:
        total = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in server.items()}
        for client in clients:
            own_x, own_label = examples[client]
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(users[client][n] if n in private else server[n])
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for chosen in torch.randperm(len(own_x), generator=generator).split(BATCH):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                F.cross_entropy(model(own_x[chosen]), own_label[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                for n, p in model.named_parameters():
                    users[client][n].copy_(p) if n in private else total[n].add_(p, alpha=len(own_x))
        for n, value in total.items():
            server[n].copy_(value / sum(len(examples[c][0]) for c in clients))

    rounds = Rounds(method, Net(module), data, Sequential())

    def ours(clients: Sequence[int]) -> None:
        rounds(clients)
        rounds.device.committed()

    return {"plain": plain, "fedkeep": ours}


def count(kind: str, library: str) -> None:
    """Run both loops under callgrind, with a dump of the counts after each."""
    torch.set_num_threads(1)
    marks, clients, both = ctypes.CDLL(library), list(range(COHORT)), loops(kind)
    for _ in range(2):
        for run in both.values():
            run(clients)
    gc.disable()
    marks.begin()
    for name, run in both.items():
        run(clients)
        marks.zero()
        for _ in range(ROUNDS):
            run(clients)
        marks.dump(name.encode())


def counted(checkout: Path, kind: str) -> dict[str, float]:
    """Return thousands of instructions a client, of a checkout's fedkeep and of the plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        marks, out = Path(folder) / "marks.so", Path(folder) / "out"
        (source := Path(folder) / "marks.c").write_text(MARKS)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", marks, source], check=True)
        paths = [str(checkout / "src"), str(checkout / "papers" / "src"), str(checkout)]
        fixed = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        words = [*tool, sys.executable, "-P", __file__, "--count", kind, str(marks)]
        subprocess.run(words, env=os.environ | fixed, cwd=folder, check=True, capture_output=True)
        found = {}
        for dump in Path(folder).glob("out.*"):
            text = dump.read_text(errors="replace")
            name = re.search(r"^desc: Trigger: Client Request: (\w+)", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if name and total:
                found[name[1]] = round(int(total[1]) / (1000 * ROUNDS * COHORT), 1)
    return found


def main() -> None:
    """Count, and write ``results/client-cost.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a clone of another commit")
    parser.add_argument("--jobs", type=int, default=2, help="counts at a time")
    parser.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        return count(*options.count)
    from benchmarks.measure import write
    from benchmarks.versions import commit

    checkouts = [c.resolve() for c in (options.before, ROOT) if c is not None]
    with ThreadPoolExecutor(options.jobs) as pool:
        each = {(c, kind): pool.submit(counted, c, kind) for c in checkouts for kind in KINDS}
        counts = {place: one.result() for place, one in each.items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (checkout, kind), both in counts.items():
        ratio = round(both["fedkeep"] / both["plain"], 3)
        found.setdefault(commit(checkout), {})[kind] = {**both, "ratio": ratio}
    write("client-cost", {"thousands of instructions a client": found})


if __name__ == "__main__":
    main()
