"""Claim: in 9 of 10 federations the model of costs tells whether clients are trained 1.5 times faster as one tensor
program than one after the other, which is when ``auto`` does that; where it errs, the measured ratio is within a fifth
of 1.5.

    python -m benchmarks.costs [--turns N]

Sixteen models of 330 to 536,000 parameters (linear layers, convolutions, attention, word vectors), cohorts of 10, 40
and 160 clients, mini-batches of 8 and 32, SGD; processor time of rounds in turns, one thread. The coefficients of
``engines/vectorised/costs.py`` are fitted to these times.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import write
from benchmarks.rounds import Rounds
from fedkeep import FederatedData, Phase, methods, sgd
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.net import Net
from fedkeep.engines import Sequential, Vectorised
from fedkeep.engines.auto import WORTHWHILE
from fedkeep.engines.vectorised.costs import StepCost, room, step_cost, times_faster

COHORTS, BATCHES, STEPS = (10, 40, 160), (8, 32), 4
WRONG = 1.2


def layers(*sizes: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])


class Columns(nn.Module):
    """Gives ``forward`` the name of the data's column."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10)."""
        out: torch.Tensor = self.inner(x)
        return out


class Words(nn.Module):
    """The mean of words' vectors, after ``encoder``, and a linear layer."""

    def __init__(self, width: int, encoder: nn.Module) -> None:
        super().__init__()
        self.embedding, self.encoder, self.out = nn.Embedding(WORDS, width), encoder, nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) for ids (B, L)."""
        out: torch.Tensor = self.out(self.encoder(self.embedding(x)).mean(1))
        return out


def attention(width: int, depth: int) -> nn.Module:
    """Return layers of a transformer."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return Words(width, nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))


def normed() -> nn.Module:
    """Return linear layers with layer norm and dropout."""
    pairs = [
        (nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), nn.Dropout(0.1))
        for a, b in itertools.pairwise((64, 128, 64))
    ]
    return nn.Sequential(*itertools.chain(*pairs), nn.Linear(64, 10))


def images(*layers: nn.Module, flat: int) -> nn.Module:
    """Return layers for images, and a linear one."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 10))


def signals(*channels: int) -> nn.Module:
    """Return convolutions over time, half of it behind each but the last, then their mean."""
    pairs = [(nn.Conv1d(a, b, 5), nn.ReLU(), nn.MaxPool1d(2)) for a, b in itertools.pairwise(channels)]
    return images(*list(itertools.chain(*pairs))[:-1], nn.AdaptiveAvgPool1d(1), flat=channels[-1])


def filters(a: int, b: int, size: int) -> tuple[nn.Module, ...]:
    """Return a convolution, ReLU and pooling."""
    return nn.Conv2d(a, b, size), nn.ReLU(), nn.MaxPool2d(2)


WORDS = 1000
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 32": (lambda: layers(32, 10), (32,)),
    "linear 784": (lambda: layers(784, 10), (784,)),
    "32-64-10": (lambda: layers(32, 64, 10), (32,)),
    "784-64-10": (lambda: layers(784, 64, 10), (784,)),
    "784-256-10": (lambda: layers(784, 256, 10), (784,)),
    "784-512-256-10": (lambda: layers(784, 512, 256, 10), (784,)),
    "six layers of 32": (lambda: layers(32, 32, 32, 32, 32, 32, 10), (32,)),
    "64-128-64-10, normed": (normed, (64,)),
    "convolution over time": (lambda: signals(8, 16), (8, 64)),
    "two over time": (lambda: signals(3, 16, 32), (3, 128)),
    "small CNN": (lambda: images(*filters(1, 8, 3), *filters(8, 16, 3), flat=400), (1, 28, 28)),
    "LeNet": (
        lambda: nn.Sequential(*filters(3, 6, 5), *filters(6, 16, 5), nn.Flatten(), layers(400, 120, 84, 10)),
        (3, 32, 32),
    ),
    "GroupNorm": (
        lambda: images(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), flat=256
        ),
        (3, 16, 16),
    ),
    "attention, 32": (lambda: attention(32, 1), (16,)),
    "attention, twice 64": (lambda: attention(64, 2), (32,)),
    "mean of words": (lambda: Words(16, nn.Identity()), (20,)),
}


def measured(name: str, cohort: int, batch: int, turns: int) -> dict[str, Any]:
    """Return what a step costs a client with either engine, in microseconds, and what there is to do."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    rng, rows = np.random.default_rng(0), cohort * batch * STEPS
    module = make()
    words = isinstance(module, Words)
    x = rng.integers(0, WORDS, (rows, *shape)) if words else rng.standard_normal((rows, *shape)).astype("f4")
    columns = {"x": x, "label": rng.integers(0, 10, rows)}
    owner = np.repeat(np.arange(cohort), batch * STEPS)
    data = FederatedData.from_columns(owner, columns, ["train"] * rows, {"task": "multiclass", "classes": 10})
    method = methods.fedavg(local=Phase(batch_size=batch, optimizer=sgd(0.01)))
    net = Net(Columns(module))
    rounds = {
        "sequential": Rounds(method, net, data, Sequential()),
        "vectorised": Rounds(method, net, data, Vectorised()),
    }
    taken: dict[str, list[float]] = {n: [] for n in rounds}
    for turn in range(turns + 1):
        for engine, each in rounds.items():
            began = time.process_time()
            each(range(cohort))
            if turn:
                taken[engine].append(1e6 * (time.process_time() - began) / (cohort * STEPS))
    job = rounds["vectorised"].device.job
    work, together = step_cost(job, 0), min(cohort, room(job))
    ratio = statistics.median(a / b for a, b in zip(taken["sequential"], taken["vectorised"], strict=True))
    return {
        "model": name,
        "cohort": cohort,
        "batch": batch,
        "work": asdict(work),
        "together": together,
        **{n: min(values) for n, values in taken.items()},
        "sequential_over_vectorised": ratio,
    }


def fitted(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return coefficients of both engines, by least squares of the logarithms: of both times and, as it decides, four
    times that of their ratio.
    """
    names, together = ("kept", "moved", "flops", "convolved"), np.array([row["together"] for row in rows])
    calls = np.array([row["work"]["calls"] for row in rows])
    rest = [np.array([row["work"][name] for row in rows]) / 1e6 for name in names]
    tasks = [np.stack([np.ones(len(rows)), each, *rest], 1) for each in (calls, calls / together)]
    times = [np.log([row[engine] for row in rows]) for engine in ("sequential", "vectorised")]
    ratios = np.log([row["sequential_over_vectorised"] for row in rows])

    def errors(logs: np.ndarray) -> np.ndarray:
        alone, stacked = (np.log(t @ np.exp(x)) for t, x in zip(tasks, np.split(logs, 2), strict=True))
        return np.concatenate([alone - times[0], stacked - times[1], 4 * (alone - stacked - ratios)])

    from scipy.optimize import least_squares  # others take this file's models alone

    found = np.exp(least_squares(errors, np.zeros(12)).x).reshape(2, 6).round(3).tolist()
    return {
        engine: dict(zip(("alone", "call", *names), values, strict=True))
        for engine, values in zip(("sequential", "vectorised"), found, strict=True)
    }


def wrong(row: dict[str, Any]) -> float:
    """Return how far a measured ratio is on the other side of 1.5 than the coefficients in use have it, else 1."""
    measured = row["sequential_over_vectorised"] / WORTHWHILE
    return float(max(measured, 1 / measured)) if (row["predicted"] > WORTHWHILE) != (measured > 1) else 1.0


def main() -> None:
    """Measure, write ``results/costs.json``, and fail if the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    cases = itertools.product(MODELS, COHORTS, BATCHES)
    rows = [measured(*case, options.turns) for case in cases]
    for row in rows:
        row["predicted"] = times_faster(StepCost(**row["work"]), row["together"])
        row["wrong"] = wrong(row)
    right = sum(row["wrong"] == 1 for row in rows)
    write("costs", {"seed": 0, "turns": options.turns, "right": right, "fitted": fitted(rows), "cases": rows})
    assert right >= 0.9 * len(rows), (
        f"the better engine was chosen in {right} of {len(rows)} cases; claimed 9 of 10"
    )
    worst = max(rows, key=lambda row: row["wrong"])
    assert worst["wrong"] <= WRONG, (
        f"{worst} is {worst['wrong']:.2f} times past {WORTHWHILE}; claimed {WRONG}"
    )


if __name__ == "__main__":
    main()
