"""The recurrent layers against torch.nn, and against the most that a core can do.

    python benchmarks/kernels.py

For each shape: milliseconds of forward + backward on one core, torch.nn's over padded sequences, the ratio, and the
fraction of the multiply-add peak that our useful operations reach (the recurrence and the input projection; of
``ids`` only the table rows in use; no padding, no activations). The least of many repetitions, interleaved, as
other processes only ever add time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedkeep.kernels import native
from fedkeep.kernels.native import status
from fedkeep.nn import GRU, LSTM

SHAPES = {  # sequences, length, inputs, rows of the table, ragged
    "W1, 16 x 64": (16, 64, 32, 100, False),
    "W1 ragged, 16 x 10-160": (16, 160, 32, 100, True),
    "W1 ragged, 32 x 10-160": (32, 160, 32, 100, True),
    "W2, 8 x 200": (8, 200, 200, 2400, False),
}
HIDDEN, REPETITIONS = 64, 40


def keep_memory() -> None:
    """As the engines do: glibc shall not give memory back after every step (Linux with glibc only)."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-3, 1 << 30), (-1, 1 << 30), (-2, 64 << 20)):
            mallopt(parameter, value)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def step(layer: nn.Module, run: Callable[[], Tensor], others: list[Tensor]) -> Callable[[], object]:
    wanted = [*layer.parameters(), *others]

    def work() -> object:
        last = run()
        return torch.autograd.grad(last, wanted, torch.ones_like(last))

    return work


def measure(name: str, kind: str) -> None:
    sequences, length, inputs, rows, ragged = SHAPES[name]
    torch.manual_seed(0)
    ours = (LSTM if kind == "LSTM" else GRU)(inputs, HIDDEN, bidirectional=True)
    theirs = getattr(nn, kind)(inputs, HIDDEN, batch_first=True, bidirectional=True)
    theirs.load_state_dict(ours.state_dict())
    lengths = torch.randint(10, length + 1, (sequences,)) if ragged else torch.full((sequences,), length)
    ids = torch.randint(0, rows, (sequences, int(lengths.max())))
    table = torch.randn(rows, inputs, requires_grad=True)

    def torchs() -> Tensor:
        state = theirs(nn.functional.embedding(ids, table))[1]
        last: Tensor = state[0] if kind == "LSTM" else state
        return last

    ways = {
        "ids": step(ours, lambda: ours.forward_ids(ids, table, lengths)[1], [table]),
        "inputs": step(ours, lambda: ours(nn.functional.embedding(ids, table), lengths)[1], [table]),
        "torch": step(theirs, torchs, [table]),
    }
    times: dict[str, list[float]] = {way: [] for way in (*ways, "peak")}
    for _ in range(REPETITIONS):
        for way, work in ways.items():
            times[way].append(seconds(work))
        times["peak"].append(1 / native.peak())
    best = {way: min(found) for way, found in times.items()}
    steps = int(lengths.sum())
    used = len({i for row, n in zip(ids.tolist(), lengths.tolist(), strict=True) for i in row[:n]})
    gates = 4 if kind == "LSTM" else 3
    for way, projected in (("ids", used), ("inputs", steps)):
        operations = 3 * 2 * 2 * gates * HIDDEN * (steps * HIDDEN + projected * inputs)
        print(
            f"{name:24} {kind:4} {way:6} {best[way] * 1e3:7.2f} ms   torch {best['torch'] * 1e3:7.2f} ms   "
            f"{best['torch'] / best[way]:5.1f} x   {operations / best[way] * best['peak']:4.0%} of peak"
        )


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    print(status())
    if not status().native:
        return
    print(f"peak of one core: {max(native.peak() for _ in range(50)) / 1e9:.0f} GFLOP/s")
    for name in SHAPES:
        for kind in ("LSTM", "GRU"):
            measure(name, kind)


if __name__ == "__main__":
    main()
