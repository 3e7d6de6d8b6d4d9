"""Whether a job's losses can be computed side by side, and depend on how far texts are padded: found out by trying.

Texts are padded to the longest of all clients who step at once; one after the other, to the client's own longest. That
changes nothing where a loss heeds lengths. Where it does not, it often shows in some examples and at some values only:
the largest of some words is seldom the padding's. So a few clients' losses and gradients are compared, where they
start from and with noise. It is added to rows of parameters that have a gradient: a row of padding that stays zero is
no fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.buffers import attributes, is_batched
from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params, nbytes
from fedkeep.data import Ragged
from fedkeep.engines.batches import batches
from fedkeep.engines.client_step import Job
from fedkeep.engines.vectorised.costs import CPU_BYTES, first_clients
from fedkeep.engines.vectorised.stacked_lanes import StackedPass, Together, lengthened, picked

CLIENTS, LANES, CANDIDATES, EXAMPLES = 4, 6, 64, 3
"""Of 64 clients at equal distances, the four whose longest texts differ most are tried on three examples; with other
noise each, in six lanes: enough for every odd loss of the tests, and a few milliseconds."""
EMPTY_COUNTS = 1 << 40
"""As how long an empty text counts where the shortest are chosen: it shows nothing of words."""

NOISE = 0.5
"""The noise's standard deviation, of a parameter's own root mean square: values change, their scale does not."""
ZEROS = 0.1
"""What counts as the root mean square of a parameter of zeros."""
APART = 4.0
"""How many standard deviations of the noise the row of padding is moved up, and all words' rows down (in every other
column the other way). Some words' largest value is seldom that of the padding; then it is, so a maximum that sees
padding shows."""

LOSS, SLOPE, ROUNDING = 1e-4, 1e-3, 1e-4
"""What rounding may do in single precision: to losses; to gradients, of their parameter's largest and of all largest."""

Found = tuple[Tensor, Params]
"""Losses and gradients, (lanes, *shape)."""


def runs_together(job: Job) -> bool:
    """Compute every phase's loss and gradient for clients side by side; tell whether padding leaves them as they are.

    Raises:
        MethodError: they cannot be computed so.
    """
    counts = job.data.counts("train")
    enough = np.flatnonzero(counts >= max(1, min(4, counts.max(initial=0))))
    if not len(enough):
        return True
    phases = range(len(job.method.client.phases))
    lanes = first_clients(job, [int(enough[0])] * 2)
    job.net.train()  # a start may have run the model in evaluation mode
    texts: dict[str, Ragged] = {}
    for number in phases:
        one, step = StackedPass(lanes, number), next(lanes.mini_batches(number), None)
        if step is not None and one.names:
            lanes.seed(number)
            batch = step.batch()
            texts |= {n: c for n, c in job.data.columns.items() if n in batch and isinstance(c, Ragged)}
            one.computed(step, lanes.pick(step.lanes), batch)
            left = Leftovers(job.net.module)
            try:
                one.computed(step, lanes.pick(step.lanes), batch)
            except (TypeError, AttributeError, MethodError) as error:
                left.refuse(error)
            left.check()
    if not texts:
        return True
    padding = Padding(job, chosen(job, enough, texts.values()), texts)
    return not any(padding.changes(number) for number in phases)


class Leftovers:
    """What a forward pass has left in attributes of the module: of several clients at once, nobody may read it.

    Several clients' tensors are taken away, so that it fails where the next pass reads one that it has not set.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = {each.name: each.value for each in attributes(module.named_modules())}
        several = [
            each
            for each in attributes(module.named_modules())
            if isinstance(each.value, Tensor) and is_batched(each.value)
        ]
        self.taken = [each.name for each in several]
        for each in several:
            each.owner[each.key] = object()

    def refuse(self, error: Exception) -> NoReturn:
        """Raise for a pass that failed; for what was taken away, if anything was."""
        if not self.taken:
            raise error
        self._raise(self.taken[0])

    def check(self) -> None:
        """Raise where the next pass has left something else, e.g. a counter: clients may have taken fewer steps."""
        for _, _, name, value in attributes(self.module.named_modules()):
            old = self.before.get(name)
            if isinstance(value, Tensor):
                if is_batched(value) or _same(old, value):
                    continue
            elif not isinstance(value, int | float | str) or value == old:
                continue
            self._raise(name)

    def _raise(self, name: str) -> NoReturn:
        error = MethodError("forward keeps {name!r} from one mini-batch to the next", name=name)
        raise error from RuntimeError(str(error))


def _same(old: object, value: Tensor) -> bool:
    """Tell whether an attribute holds what it held; torch compares no sparse tensors."""
    comparable = isinstance(old, Tensor) and old.layout is value.layout is torch.strided
    return old is value or (comparable and torch.equal(old, value))  # type: ignore[arg-type]


def chosen(job: Job, clients: np.ndarray, texts: Collection[Ragged]) -> list[int]:
    """Return clients whose longest texts differ most, each several times; fewer where the model is large."""
    some = _spread(clients, CANDIDATES)
    longest = [max(_longest(c, job.rows(int(k))) for c in texts) for k in some]
    most = max(2, min(LANES, CPU_BYTES // (8 * max(1, nbytes(job.net.initial())))))
    found: list[int] = _spread(some[np.argsort(longest, kind="stable")], min(CLIENTS, most)).tolist()
    return (found * most)[:most]


def _spread(values: np.ndarray, most: int) -> np.ndarray:
    return values[np.unique(np.linspace(0, len(values) - 1, min(most, len(values))).astype(np.int64))]


def _longest(column: Ragged, rows: np.ndarray) -> int:
    return int((column.offsets[rows + 1] - column.offsets[rows]).max(initial=1))


class Padding:
    """A few examples of clients' first mini-batches, padded no further than to their own longest text, and much.

    A position is a lane with the values that it starts from, or, behind these, a lane with noise.

    Args:
        job: what is trained.
        clients: whose lanes there are.
        texts: the data's columns of texts.
    """

    def __init__(self, job: Job, clients: Sequence[int], texts: Mapping[str, Ragged]) -> None:
        phases = tuple(phase.but(early_stopping=None) for phase in job.method.client.phases)
        job = replace(job, method=job.method.on_client(phases=phases))  # not all can stop early
        self.lanes, self.count = first_clients(job, clients), len(clients)
        job.net.train()
        self.passes = [StackedPass(self.lanes, number) for number in range(len(phases))]
        self.draws = self.lanes.draws
        self.lanes.draws = [*self.draws, *self.draws]  # of every position
        self.lengths = {name: np.diff(column.offsets) for name, column in texts.items()}
        self.generator = torch.Generator().manual_seed(0)

    def changes(self, number: int) -> bool:
        """Tell whether padding changes a phase's losses or gradients."""
        self.one = self.passes[number]
        self.rows = self._rows()
        groups: dict[tuple[int, ...], list[int]] = {}
        for lane, rows in self.rows.items():
            widths = (max(1, int(length[rows].max())) for length in self.lengths.values())
            groups.setdefault(tuple(widths), []).append(lane)
        if not groups or not self.one.names:
            return False
        # No further than to the longest text: a model may have no place for more.
        longest = [int(length.max()) for length in self.lengths.values()]
        wide = tuple(np.minimum(2 * np.max(list(groups), axis=0), longest).tolist())
        some = [lanes for widths, lanes in groups.items() if widths != wide]
        if not some:
            return False
        start = {n: self.lanes.params[n] for n in self.one.names}
        plain, tables = self._plain(start, wide)
        noisy = {n: torch.cat([v, self._shaken(n, v, plain[1], tables)]) for n, v in start.items()}
        try:
            behind = self._computed([self.count + k for k in self.rows], noisy, wide)
            return not all(self._alike(lanes, noisy, plain, behind) for lanes in some)
        except MethodError:  # there is a model that cannot be computed with noise
            twice = {n: torch.cat([v, v]) for n, v in start.items()}
            return not all(self._alike(lanes, twice, plain, plain) for lanes in some)

    def _rows(self) -> dict[int, np.ndarray]:
        """Return lanes' rows, equally many: the shortest texts of the first mini-batch, which show most."""
        each = zip(self.lanes.rows, self.draws, strict=True)
        first = [
            next(batches(self.lanes.data, rows, self.one.phase, draws, self.one.number), rows[:0])
            for rows, draws in each
        ]
        size = min(EXAMPLES, max(map(len, first)))
        order = [
            np.argsort(sum(v[rows] + EMPTY_COUNTS * (v[rows] == 0) for v in self.lengths.values()))
            for rows in first
        ]
        return {k: rows[order[k][:size]] for k, rows in enumerate(first) if len(rows) >= size > 0}

    def _plain(self, start: Params, wide: Sequence[int]) -> tuple[Found, dict[str, bool]]:
        """Return what is found for lanes without noise, and the tables that look texts up, with whether their first
        row has a gradient where a text is nothing but padding.
        """
        lanes, values = list(self.rows), {n: torch.cat([v, v]) for n, v in start.items()}
        empty = self.count + lanes[0]
        try:
            losses, grads = self._computed([*lanes, empty], values, wide, empty)
        except MethodError:
            return self._computed(lanes, values, wide), {}
        rest = {n: g[-1] for n, g in grads.items() if g.dim() > 2 and g.numel()}
        tables = {n: bool(g[0].any()) for n, g in rest.items() if not g[1:].any() and grads[n][:-1].any()}
        return (losses[:-1], {n: g[:-1] for n, g in grads.items()}), tables

    def _alike(self, lanes: list[int], values: Params, plain: Found, noisy: Found) -> bool:
        """Tell whether what is found for lanes, without noise and with it, is found with little padding too."""
        found = self._computed([*lanes, *(self.count + k for k in lanes)], values)
        at = torch.tensor([list(self.rows).index(k) for k in lanes], device=self.lanes.device)
        both = {n: torch.cat([g[at], noisy[1][n][at]]) for n, g in plain[1].items() if n in noisy[1]}
        return same(found, (torch.cat([plain[0][at], noisy[0][at]]), both))

    def _computed(
        self, positions: list[int], values: Params, wide: Sequence[int] | None = None, empty: int = -1
    ) -> Found:
        """Return what is found at some positions, with texts padded to these widths; at ``empty`` without a word."""
        lanes, whose = self.lanes, [p % self.count for p in positions]
        rows = np.stack([self.rows[k] for k in whose])
        batch = lanes.examples.batch(whose, rows)
        at = torch.tensor(positions, device=lanes.device)
        for name, width in zip(self.lengths, wide or (), strict=False):
            batch[name] = lengthened(batch[name], width)
            batch[name][at == empty] = 0
        lanes.seed(self.one.number)
        step, pick = Together(positions, rows, lanes.examples), at % self.count
        return self.one.computed(step, pick, batch, picked(values, at))[1:]

    def _shaken(self, name: str, value: Tensor, grads: Params, tables: Mapping[str, bool]) -> Tensor:
        """Return a parameter with noise in rows that have a gradient; of a table all words' rows, and apart from the
        row of padding.
        """
        if name not in grads or not value.is_floating_point() or not value.numel():
            return value
        by_row = value.reshape(*value.shape[:2], -1) if value.dim() > 1 else value.reshape(-1, 1, 1)
        noise = torch.randn(by_row.shape, generator=self.generator).to(value)
        moved = torch.zeros(by_row.shape[:2], dtype=torch.bool, device=value.device)
        moved[list(self.rows)] = grads[name].reshape(len(self.rows), *by_row.shape[1:]).ne(0).any(-1)
        if name in tables:
            lane, column = (torch.arange(size, device=value.device) for size in by_row.shape[::2])
            up = APART * (1 - 2 * ((lane[:, None] + column) % 2))
            noise[:, 0] += up
            noise[:, 1:] -= up.unsqueeze(1)
            moved[:, 0] |= tables[name]
            moved[:, 1:] = True
        size = value.square().mean().sqrt()
        noise *= NOISE * torch.where(size > 0, size, ZEROS) * moved.unsqueeze(-1)
        return value + noise.reshape(value.shape)


def same(ours: Found, theirs: Found) -> bool:
    """Tell whether losses and gradients are the same but for rounding."""
    (losses, grads), (others, slopes) = ours, theirs
    if grads.keys() != slopes.keys():
        return False
    if not torch.allclose(losses, others, rtol=max(LOSS, _rounding(losses)), atol=1e-6, equal_nan=True):
        return False
    pairs = [(g.reshape(len(g), -1), slopes[n].reshape(len(g), -1)) for n, g in grads.items() if g.numel()]
    if not pairs:
        return True
    tops = [g.abs().nan_to_num(0, 0, 0).amax(1, keepdim=True).double() for g, _ in pairs]
    whole = torch.stack(tops).amax(0)
    for (mine, other), top in zip(pairs, tops, strict=True):
        most = torch.maximum(max(SLOPE, _rounding(mine)) * top, ROUNDING * whole)
        near = (mine - other).abs() <= most
        if not (near | (mine == other) | (mine.isnan() & other.isnan())).all():
            return False
    return True


def _rounding(value: Tensor) -> float:
    return 10 * torch.finfo(value.dtype).eps
