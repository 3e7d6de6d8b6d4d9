"""Mini-batches of a client: which examples, in which order, as tensors on the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedkeep.core.params import Batch
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import Ragged
from fedkeep.data.columns import Column
from fedkeep.engines.tables.local_rows import ExampleRows, LocalTable, allowed
from fedkeep.methods import Phase
from fedkeep.tasks import tasks_in

WINDOW_BYTES = 256 << 10
"""Mini-batches of this size together are gathered at once."""


@dataclass(frozen=True)
class Stream:
    """Names the random streams of one local run; every draw depends on these alone.

    Attributes:
        seed, client, round: the names.
        who: who trains, in messages; by default the client and the round.
    """

    seed: int
    client: str
    round: int = 0
    who: str = ""

    def __str__(self) -> str:
        return self.who or f"Client {self.client!r}, round {self.round}"


@dataclass(frozen=True)
class LoadedBatch:
    """A mini-batch among others that were gathered with it.

    Attributes:
        columns: its rows of all that were gathered.
        longest: by ragged column, the length of its longest row.
        lanes: the only one there is.
    """

    lanes: ClassVar = (0,)
    columns: Batch
    longest: Mapping[str, int]

    def batch(self) -> Batch:
        """Return the mini-batch, its own each time: a model may change what it is given."""
        cut = {n: self.columns[n][:, :longest] for n, longest in self.longest.items()}
        return {n: cut.get(n, v).clone() for n, v in self.columns.items()}


def batches(
    data: ExampleRows,
    rows: np.ndarray,
    phase: Phase,
    draws: Stream,
    number: int,
    owners: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[np.ndarray]:
    """Yield the row numbers of each mini-batch: shuffled passes over the examples that the phase may use.

    Args:
        data: the data set.
        rows: the client's examples in it.
        phase: says how many a mini-batch and how many passes or mini-batches.
        draws: names the random stream.
        number: the phase's.
        owners: gives a number for the client of each row, if a mini-batch shall hold one client's examples.
    """
    rows = usable(data, rows, phase, draws)
    if not len(rows):
        return
    rng = numpy_generator(draws.seed, f"batches/{number}", draws.client, draws.round)
    whose = None if owners is None else owners(rows)
    left = phase.steps
    for _ in itertools.count() if left is not None else range(phase.epochs):
        for chosen in _one_pass(rows, whose, phase, rng):
            if left is not None:
                left -= 1
                if left < 0:
                    return
            yield chosen


def _one_pass(
    rows: np.ndarray, owners: np.ndarray | None, phase: Phase, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the mini-batches of one pass; with ``owners``, one client's each, in mixed order."""
    if owners is None:
        return _cut(rng.permutation(rows), phase)
    each = [rng.permutation(rows[owners == owner]) for owner in np.unique(owners)]
    chunks = [chunk for mine in each for chunk in _cut(mine, phase)]
    return [chunks[place] for place in rng.permutation(len(chunks))]


def _cut(order: np.ndarray, phase: Phase) -> list[np.ndarray]:
    size, number = phase.batch_size, steps_per_pass(len(order), phase)
    return [order[k * size : (k + 1) * size if k + 1 < number else None] for k in range(number)]


def steps_per_pass(examples: int, phase: Phase) -> int:
    """Return how many mini-batches one pass over this many examples makes."""
    full, left = divmod(examples, phase.batch_size)
    merged = phase.merge_single and full and left == 1
    return full + (left > 0 and not merged)


def planned_steps(phase: Phase, examples: Iterable[int]) -> int:
    """Return how many mini-batches a phase makes of clients with so many examples each, unless it stops early."""
    if phase.steps is not None:
        return phase.steps
    return phase.epochs * sum(steps_per_pass(count, phase) for count in examples)


def gathered(
    data: ExampleRows,
    steps: Iterator[np.ndarray],
    device: str,
    kind: torch.dtype,
    tables: Sequence[LocalTable],
) -> Iterator[LoadedBatch]:
    """Yield mini-batches, gathered several at a time: it is the calls that cost, not the rows."""
    ragged = {name: column for name, column in data.columns.items() if isinstance(column, Ragged)}
    at_once = 0
    while (first := next(steps, None)) is not None:
        at_once = at_once or max(1, WINDOW_BYTES // batch_bytes(data.columns, first))
        chosen = [first, *itertools.islice(steps, at_once - 1)]
        rows, sizes = np.concatenate(chosen), list(map(len, chosen))
        starts = [0, *itertools.accumulate(sizes[:-1])]
        columns = {
            n: v.split_with_sizes(sizes) for n, v in load_batch(data, rows, device, kind, tables).items()
        }
        longest = {n: np.maximum.reduceat(c.lengths(rows), starts).clip(1) for n, c in ragged.items()}
        for k in range(len(chosen)):
            mine = {n: each[k] for n, each in columns.items()}
            yield LoadedBatch(mine, {n: int(each[k]) for n, each in longest.items()})


def usable(data: ExampleRows, rows: np.ndarray, phase: Phase, draws: Stream) -> np.ndarray:
    """Return the rows that a phase may use and whose half it asks for."""
    rows = allowed(data, rows, phase.examples)
    if phase.examples not in ("support", "query"):
        return rows
    order = numpy_generator(draws.seed, "halves", draws.client).permutation(rows)
    half = len(rows) // 2
    return order[:half] if phase.examples == "support" else order[half:]


def batch_bytes(columns: Mapping[str, Column], rows: np.ndarray) -> int:
    """Return about how many bytes the rows of a mini-batch take, at least 1."""
    seen = [column for name, column in columns.items() if not name.startswith("_")]
    wide = sum(
        int(c.lengths(rows).max()) * 8 * math.prod(c.values.shape[1:])
        if isinstance(c, Ragged)
        else c[:1].nbytes
        for c in seen
    )
    return max(1, len(rows) * wide)


def load_batch(
    data: ExampleRows, rows: np.ndarray, device: str, kind: torch.dtype, tables: Sequence[LocalTable] = ()
) -> Batch:
    """Return the examples' columns on the device; floats take the model's type, ids of local tables their positions.

    What tasks name as labels is no model's input: it has 32 bits at least, as a label rounded to fewer is another one.
    """
    batch = data.batch(rows)
    for column, table in {t.column: t for t in tables}.items():
        batch[column] = table.local(batch[column])
    if device != "cpu":
        batch = {name: value.to(device) for name, value in batch.items()}
    kinds = dict.fromkeys(batch, kind)
    if kind.itemsize < 4:
        kinds |= {task.label: torch.float32 for task in tasks_in(data.meta)}
    cast = [n for n, v in batch.items() if v.is_floating_point() and v.dtype != kinds[n]]
    return {**batch, **{n: batch[n].to(kinds[n]) for n in cast}}
