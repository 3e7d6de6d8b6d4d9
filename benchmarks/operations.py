"""How many operations a round of a workload takes, counted by hand: a multiply-add is two, other arithmetic is left
out.

A product of (m × k) and (k × n) costs 2·m·k·n forwards and twice that backwards (for either factor's gradient); the
first convolution has no gradient towards the images. Two counts:

- ``needed``: the least that gives the result exactly. "Embedding, then linear" multiplies each row of the table
  that a mini-batch uses once (and so backwards, after its gradients are summed): 6·D·K·H·(S·H + R·I) a mini-batch
  of S steps and R rows in use, with D directions, K gates (LSTM 4, GRU 3), H hidden units and I inputs. Padding
  costs nothing.
- ``dense``: the same with every step's input multiplied, as ``torch.nn`` does: 6·D·K·H·S·(H + I).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.workloads import Columns, Workload

HIDDEN, DIRECTIONS = 64, 2


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
                total += (images(len(chosen)),) * 2
            else:
                total += documents(of, columns, chosen.numpy())
    return total


def documents(of: Workload, columns: Columns, chosen: np.ndarray) -> Operations:
    """Return the operations of a step on these texts: the recurrent layer and the MLP behind it."""
    ends = np.cumsum(columns["text_length"])
    pieces = [columns["text"][ends[i] - columns["text_length"][i] : ends[i]] for i in chosen]
    steps, rows = sum(map(len, pieces)), len(np.unique(np.concatenate(pieces)))
    gates, inputs = (3, 200) if of.name == "W2" else (4, 32)
    mlp = 128 * 64 + 64 * 2 if of.name == "W2" else 160 * 64 + 64 * 64
    unit = 6 * DIRECTIONS * gates * HIDDEN
    behind = 6 * len(chosen) * mlp
    return Operations(
        unit * (steps * HIDDEN + rows * inputs) + behind, unit * steps * (HIDDEN + inputs) + behind
    )


def images(count: int) -> float:
    """Return the operations of W3's network on a mini-batch of images."""
    first = 2 * 32 * 32 * 32 * (3 * 25)  # outputs × inputs of one
    second = 2 * 64 * 16 * 16 * (32 * 25)
    linear = 2 * (64 * 8 * 8 * 512 + 512 * 10)
    return float(count * (2 * first + 3 * second + 3 * linear))
