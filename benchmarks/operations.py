"""How many operations a round of a workload takes, and how many bytes it moves, counted by hand.

Operations: a multiply-add is two, other arithmetic is left out. A product of (m × k) and (k × n) costs 2·m·k·n
forwards and twice that backwards (for either factor's gradient); the first convolution has no gradient towards the
images. Two counts:

- ``needed``: the least that gives the result exactly. "Embedding, then linear" multiplies each row of the table that
  a mini-batch uses once (and so backwards, after its gradients are summed): 6·D·K·H·(S·H + R·I) a mini-batch of S
  steps and R rows in use, with D directions, K gates (LSTM 4, GRU 3), H hidden units and I inputs. Padding costs
  nothing.
- ``dense``: the same with every step's input multiplied, as ``torch.nn`` does: 6·D·K·H·S·(H + I).

Bytes, four a number, each tensor read or written once where it is used:

- forward: weights read; of a step the K gates and two states written, its projected input read; of an image every
  layer's output written and read.
- backward: the same read again, gradients of the same size written and read; the weights read, their gradients written.
- optimiser: of each number the value and the gradient read and the value written (SGD: 3), a momentum read and written
  (5), two moments read and written (Adam: 7). Rows of W2's table count under "table rows", those in use alone.
- upload and mean: of each number uploaded the trained and the received value read and the change written, the change
  read and added to a sum in double precision (read and written): 8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.workloads import Columns, Workload

HIDDEN, DIRECTIONS = 64, 2
IMAGE_NUMBERS = {  # of an image, by workload
    "W3": 3 * 32 * 32 + 2 * (32 * 32 * 32 + 32 * 16 * 16 + 64 * 16 * 16 + 64 * 8 * 8 + 512),
    "W4": 3 * 32 * 32 + 2 * (6 * 28 * 28 + 6 * 14 * 14 + 16 * 10 * 10 + 16 * 5 * 5 + 120 + 84),
}


class Operations(NamedTuple):
    """Floating-point operations of a round."""

    needed: float
    dense: float

    def __add__(self, other: tuple[float, ...]) -> Operations:  # type: ignore[override]
        return Operations(self.needed + other[0], self.dense + other[1])


def operations(of: Workload, data: list[Columns], clients: list[int], turn: int) -> Operations:
    """Return the operations of a round."""
    total = Operations(0.0, 0.0)
    for client in clients:
        columns = data[client]
        for chosen in of.batches(client, turn, len(columns["label"])):
            if "image" in columns:
                total += (images(of, len(chosen)),) * 2
            else:
                total += documents(of, columns, chosen.numpy())
    return total


def bytes_moved(of: Workload, data: list[Columns], clients: list[int], turn: int) -> dict[str, float]:
    """Return the bytes that each part of a round moves."""
    sizes = {n: p.numel() for n, p in of.initial().named_parameters()}
    table = sizes.pop("embedding.weight") if of.name == "W2" else 0
    weights, per_row = sum(sizes.values()), 200 if table else 0
    each = 7 if of.optimizer == "adam" else 5 if of.momentum else 3
    total = dict.fromkeys(("forward", "backward", "optimiser", "table rows", "upload and mean"), 0.0)
    for client in clients:
        columns = data[client]
        own = len(np.unique(columns["text"])) if table else 0  # rows of the table that the client uses
        for chosen in of.batches(client, turn, len(columns["label"])):
            if "image" in columns:
                activity, rows = len(chosen) * IMAGE_NUMBERS[of.name], 0
            else:
                steps, rows = used(columns, chosen.numpy())
                gates = 3 if of.name == "W2" else 4
                activity = steps * DIRECTIONS * HIDDEN * (2 * gates + 2)
            total["forward"] += weights + activity
            total["backward"] += 2 * weights + 2 * activity
            total["optimiser"] += each * weights
            total["table rows"] += each * rows * per_row
        total["table rows"] += 2 * own * per_row
        total["upload and mean"] += 8 * (weights + own * per_row)
    return {part: 4 * numbers for part, numbers in total.items() if numbers}


def used(columns: Columns, chosen: np.ndarray) -> tuple[int, int]:
    """Return the steps of these texts, and how many rows of the table they use."""
    ends = np.cumsum(columns["text_length"])
    pieces = [columns["text"][ends[i] - columns["text_length"][i] : ends[i]] for i in chosen]
    return sum(map(len, pieces)), len(np.unique(np.concatenate(pieces)))


def documents(of: Workload, columns: Columns, chosen: np.ndarray) -> Operations:
    """Return the operations of a step on these texts: the recurrent layer and the MLP behind it."""
    steps, rows = used(columns, chosen)
    gates, inputs = (3, 200) if of.name == "W2" else (4, 32)
    mlp = 128 * 64 + 64 * 2 if of.name == "W2" else 160 * 64 + 64 * 64
    unit = 6 * DIRECTIONS * gates * HIDDEN
    behind = 6 * len(chosen) * mlp
    return Operations(
        unit * (steps * HIDDEN + rows * inputs) + behind, unit * steps * (HIDDEN + inputs) + behind
    )


def images(of: Workload, count: int) -> float:
    """Return the operations of a step of W3 or W4 on a mini-batch of images."""
    if of.name == "W3":
        first, second = 2 * 32 * 32 * 32 * (3 * 25), 2 * 64 * 16 * 16 * (32 * 25)  # outputs × inputs of one
        linear = 2 * (64 * 8 * 8 * 512 + 512 * 10)
    else:
        first, second = 2 * 6 * 28 * 28 * (3 * 25), 2 * 16 * 10 * 10 * (6 * 25)
        linear = 2 * (400 * 120 + 120 * 84 + 84 * 10)
    return float(count * (2 * first + 3 * second + 3 * linear))
