"""Sums of a round's uploads, made while they come in, so that one at a time has to be held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from fedkeep.core.errors import UploadError, refused_upload
from fedkeep.core.params import SERVER, Params, State, under
from fedkeep.core.tensor_file import Filed, TensorFile
from fedkeep.kernels.values import PIECE, Summand, exact, fold, fold_rows, mean, pieces
from fedkeep.privacy.dp import scaled
from fedkeep.split import Upload

BLOCK = 16
"""Clients of a block: uploads are summed within blocks of neighbours in the order of ids, and blocks in their order."""
LARGE = 16 << 20
"""Bytes of parameters above which a server's memory counts: its sums then lie in files, and pieces of them in memory."""
IN_FILES: ContextVar[bool] = ContextVar("sums of large models lie in files", default=False)


@contextmanager
def sums_in_files() -> Iterator[None]:
    """Let sums of large models lie in files, as on a server; where the clients train, too, it would only cost time."""
    before = IN_FILES.set(True)
    try:
        yield
    finally:
        IN_FILES.reset(before)


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What a reduction makes of a round's uploads.

    Attributes:
        changes: of federated parameters by name; a table may be cut to rows, see ``rows``.
        state: of what clients sent along (``Finished.sends``), by name.
        rows: by name, the numbers of the rows that ``changes`` holds of a table, ascending; others have not changed.
        tables: the tables that ``changes`` are cut from.
        weight: the sum of the uploads' weights.
        count: how many uploads there were.
    """

    changes: Params
    state: State = field(default_factory=dict)
    rows: Params = field(default_factory=dict)
    tables: Params = field(default_factory=dict)
    weight: float = 0.0
    count: int = 0

    @property
    def params(self) -> Params:
        """The changes, tables whole."""
        return {
            n: spread(v, self.rows[n], self.tables[n]) if n in self.rows else v
            for n, v in self.changes.items()
        }


class RunningMean:
    """The weighted mean of uploads (FURL eq. 4 and 5).

    Sums are in double precision, within fixed blocks of clients in the order of their ids and then over the blocks, so
    that they lose no digits of many clients and neither the order in which uploads come in nor who summed which block
    changes a bit. Integer tensors (counters) are taken from the first upload.

    Of a large model a server holds an upload; sums, which take twice as much, lie in temporary files (``sums_in_files``).

    A table of which clients hold different rows (KTEPS §4.2, Remark 3) is averaged row by row: a client that lacks a
    row counts with no change, or not at all (``"owners_only"``).

    Args:
        start: what uploads are changes of, by name; they give shapes and types.
        cohort: the ids of the clients that may upload; None: uploads are added in the order in which they come.
        missing_rows: as ``WeightedMean.missing_rows``.
    """

    held_bytes = 0

    def __init__(
        self, start: Params, cohort: Sequence[str] | None = None, missing_rows: str = "unchanged"
    ) -> None:
        self.start, self.owners_only = start, missing_rows == "owners_only"
        self.places = None if cohort is None else {client: k for k, client in enumerate(sorted(cohort))}
        self.large = IN_FILES.get() and sum(v.nbytes for v in start.values()) > LARGE
        self._total = self.empty()
        self._blocks: dict[int, Block] = {}
        self._next = 0  # the first block that is not in the total

    def empty(self) -> Sums:
        """Return the empty sums of a block, or of all."""
        return Sums(self.start, owners_only=self.owners_only, large=self.large)

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return what is summed of a client's upload; subclasses look at it first, or sum something else."""
        return upload

    def _factors(self, upload: Upload) -> Mapping[str, float]:
        """Return by name what a change is taken times before it is weighted; subclasses bound changes so."""
        return {}

    def add(self, client: str, upload: Upload) -> None:
        """Add a client's (decoded, checked) upload."""
        upload = self.seen(client, upload)
        self._settle(client, (upload, self._factors(upload)))

    def skip(self, client: str) -> None:
        """Note that a client's upload will not come."""
        self._settle(client, None)

    def _settle(self, client: str, one: Summed | None) -> None:
        if self.places is None:
            if one is not None:
                self._total.add(*one)
            return
        number, place = divmod(self.places[client], BLOCK)
        if number not in self._blocks:
            self._blocks[number] = Block(self.empty(), min(BLOCK, len(self.places) - number * BLOCK))
        self._blocks[number].settle(place, one)
        self._fold_complete()

    def _fold_complete(self) -> None:
        while (first := self._blocks.get(self._next)) is not None and first.done == first.members:
            self._total = self._total.merge(self._blocks.pop(self._next).sums)
            self._next += 1

    def merge(self, other: RunningMean) -> None:
        """Take over what another sum of the same cohort holds; each block must have been summed in one place.

        Raises:
            UploadError: the cohorts differ, or a block stands in both.
        """
        if self.places is None or self.places != other.places:
            raise UploadError("Partial means can be merged if they are of one and the same cohort.")
        mine, theirs = ({*range(each._next), *each._blocks} for each in (self, other))
        if both := mine & theirs:
            raise UploadError(
                "Partial means can be merged if each block of {size} clients was summed in one place; "
                "block {block} stands in both.",
                size=BLOCK,
                block=min(both),
            )
        if other._next:  # it has the first blocks
            self._total, self._next = other._total, other._next
        self._blocks |= other._blocks
        self._fold_complete()

    def value(self) -> Reduced:
        """Return the mean: tables cut to the rows that any client sent.

        Raises:
            UploadError: there was no upload, or the weights' sum is not positive.
        """
        return self.sums().mean()

    def sums(self) -> Sums:
        """Return the sums over all uploads; nothing is added afterwards."""
        for number in sorted(self._blocks):
            block = self._blocks.pop(number)
            block.close()
            self._total = self._total.merge(block.sums)
        return self._total


class MeansByGroup(RunningMean):
    """A mean for each group of clients; what a client sends along says which group it is of.

    Args:
        start, cohort, missing_rows: as for ``RunningMean``.
        group: the name, among an upload's changes, of the number of the client's group.
        groups: how many there are.
    """

    def __init__(
        self, start: Params, cohort: Sequence[str] | None, missing_rows: str, *, group: str, groups: int
    ) -> None:
        self.group, self.groups = group, groups
        super().__init__(start, cohort, missing_rows)

    def empty(self) -> Sums:
        """Return empty sums of each group."""
        return SumsByGroup(self.start, owners_only=self.owners_only, large=self.large, group=self.group)

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload.

        Raises:
            UploadError: there is no such group.
        """
        number = int(upload.deltas[self.group])
        if not 0 <= number < self.groups:
            raise refused_upload(
                client, "its group is {number}, of {groups}.", number=number, groups=self.groups
            )
        return upload


Summed = tuple[Upload, Mapping[str, float]]
"""An upload, and by name what its changes are taken times before they are weighted."""


class Block:
    """The uploads of some neighbours in the order of ids; one that comes too early waits."""

    def __init__(self, sums: Sums, members: int) -> None:
        self.sums, self.members, self.done = sums, members, 0
        self._early: dict[int, Summed | None] = {}

    def settle(self, place: int, one: Summed | None) -> None:
        """Add an upload, or note that there is none."""
        self._early[place] = one
        while self.done in self._early:
            self._take(self.done)
            self.done += 1

    def close(self) -> None:
        """Add what still waits for others, who will not come."""
        for place in sorted(self._early):
            self._take(place)

    def _take(self, place: int) -> None:
        if (ready := self._early.pop(place)) is not None:
            self.sums.add(*ready)


class Sums:
    """Weighted sums of uploads, in the order of ``add``.

    Args:
        start: what uploads are changes of, by name.
        owners_only: whether the weights of those who hold a row are summed row by row.
        large: whether memory counts more than steps: no upload is held, and sums on the CPU lie in a file.
    """

    def __init__(self, start: Params, *, owners_only: bool, large: bool = False) -> None:
        self.start, self.owners_only, self.large = start, owners_only, large
        self.weight, self.count = 0.0, 0
        self._sums: Params = {}
        self._filed: dict[str, Filed] = {}  # sums that lie in a file
        self._file: TensorFile | None = None  # theirs
        self._rows: dict[str, RowSums] = {}
        self._held: Params = {}
        self._first: dict[
            str, tuple[Tensor, float]
        ] = {}  # with its weight; the second is added in one go with it

    def add(self, upload: Upload, factors: Mapping[str, float] = {}) -> None:
        """Add an upload, some of its changes taken times a factor first."""
        more, weight = dict[str, Summand](), upload.weight
        for name, start in self.start.items():
            delta, rows = upload.deltas[name], upload.rows.get(name)
            if not (start.is_cpu and delta.is_cpu):
                delta = delta.to(start.device)
            if not start.is_floating_point():
                if name not in self._sums:
                    self._sums[name] = delta.clone()
            elif rows is not None:
                rows = rows.to(start.device)
                for some, part in by_rows(rows, delta):
                    if name in factors:
                        part = scaled(part, factors[name])
                    self._sum_rows(name, start, some, part, weight)
                if self.owners_only:
                    self._hold(name, start)
                    self._held[name][rows] += weight
            else:
                if name in self._held:
                    self._held[name] += weight
                if self.large and start.is_cpu:
                    self._add_to_file(name, delta, weight, factors.get(name))
                    continue
                if factors and name in factors:
                    if delta.numel() > PIECE:
                        for part, change in pieces(self.whole(name), delta):
                            fold([(part, scaled(change, factors[name]), weight, None, 0.0)])
                        continue
                    delta = scaled(delta, factors[name])
                if name in self._first:
                    more[name] = None, delta, weight, *self._first.pop(name)
                elif self._is_whole(name) or name in self._rows:
                    more[name] = self.whole(name), delta, weight, None, 0.0
                elif self.large:
                    more[name] = None, delta, weight, None, 0.0
                else:
                    self._first[name] = delta, weight
        self._sums.update(zip(more, fold(more.values()), strict=True))
        self.weight += weight
        self.count += 1

    def _add_to_file(self, name: str, delta: Tensor, weight: float, factor: float | None) -> None:
        """Add a change, some times a factor first, to a sum that lies in a file, piece by piece."""
        changes = parts_of(delta)
        if factor is not None:
            changes = (scaled(change, factor) for change in changes)
        if self._is_whole(name) or name in self._rows:
            parts: Iterable[Tensor | None] = self._in_file(name).pieces()
        else:
            self._filed[name], parts = self._room(name), repeat(None)
        self._filed[name].fill(
            fold([(part, change, weight, None, 0.0)])[0] for part, change in zip(parts, changes, strict=False)
        )

    def _in_file(self, name: str) -> Filed:
        """Return a sum that lies in a file from now on; zeros where nobody sent it."""
        if name not in self._filed:
            found = self._room(name)
            found.fill(parts_of(self.whole(name)))
            self._filed[name] = found
            del self._sums[name]
        return self._filed[name]

    def _room(self, name: str) -> Filed:
        self._file = self._file or TensorFile()
        return self._file.room(self.start[name], exact(self.start[name]))

    def merge(self, other: Sums) -> Sums:
        """Return both together, in place of this, whose clients come first; one that is empty changes nothing."""
        if not (self.count and other.count):
            return self if self.count else other
        for name, start in self.start.items():
            if not start.is_floating_point():
                self._sums.setdefault(name, other._sums[name])
                continue
            held = other._held.get(name)
            if self.owners_only and (held is not None or name in self._held):
                self._hold(name, start)
                self._held[name] += other.weight if held is None else held
            if name in other._rows:
                few = other._rows[name]
                for (some,) in by_rows(few.rows(), like=start):
                    self._sum_rows(name, start, some, few.values(some), 1.0)
            elif name in other._filed:
                self._in_file(name).add_(other._filed[name].pieces())
            elif other._is_whole(name):
                self.whole(name).add_(other.whole(name))
        self.weight += other.weight
        self.count += other.count
        return self

    def _is_whole(self, name: str) -> bool:
        """Whether there is a sum of all rows, not of some."""
        return name in self._sums or name in self._first or name in self._filed

    def _hold(self, name: str, start: Tensor) -> None:
        if name not in self._held:
            self._held[name] = torch.full((len(start),), self.weight, dtype=exact(start), device=start.device)

    def whole(self, name: str) -> Tensor:
        """Return the sum of a floating-point tensor, all rows of a table; zeros where nobody sent it."""
        if name in self._first:
            self._sums[name] = fold([(None, *self._first.pop(name), None, 0.0)])[0]
        if name in self._filed:
            self._sums[name] = self._filed.pop(name).load()
        if name not in self._sums:
            start = self.start[name]
            self._sums[name] = torch.zeros_like(start, dtype=exact(start))
            if name in self._rows:
                few = self._rows.pop(name)
                self._sums[name][few.rows()] = few.values()
        return self._sums[name]

    def made(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a function makes of every number of a floating-point tensor's sum, as the tensor's type.

        Args:
            name: the tensor's.
            make: is given the sum, or of a large one a piece after the other, (numbers,); it gives as many numbers.
        """
        start, filed = self.start[name], self._filed.get(name)
        if filed is None:
            total = self.whole(name)
            found = torch.empty_like(total, dtype=start.dtype)
            for part, piece in pieces(found, total):
                part.copy_(make(piece))
            return found
        found = torch.empty(start.shape, dtype=start.dtype)
        for (part,), piece in zip(pieces(found), filed.pieces(), strict=True):
            part.copy_(make(piece).view(part.shape))
        return found

    def _sum_rows(self, name: str, start: Tensor, rows: Tensor, change: Tensor, weight: float) -> None:
        if self._is_whole(name):
            fold_rows(self.whole(name), rows, change, weight, len(start))
        else:
            if name not in self._rows:
                self._rows[name] = RowSums(start)
            self._rows[name].add(rows, change, weight)

    def mean(self) -> Reduced:
        """Return the means, tables cut to the rows that any client sent.

        Raises:
            UploadError: there was no upload, or the weights' sum is not positive.
        """
        if not self.weight > 0:
            raise UploadError(
                "An average needs at least one upload of positive weight; got {count} of total {weight}.",
                count=self.count,
                weight=self.weight,
            )
        means, rows = Params(), {name: few.rows() for name, few in self._rows.items()}
        for name, start in self.start.items():
            if not start.is_floating_point():
                means[name] = self._sums[name]
            elif name in rows:
                few = self._rows[name]
                parts = [self._divided(name, few.values(r), r) for (r,) in by_rows(rows[name], like=start)]
                means[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
            elif name in self._filed and name not in self._held:
                means[name] = self.made(name, partial(mean, weight=self.weight, kind=start.dtype))
            else:
                means[name] = self._divided(name, self.whole(name))
        return Reduced(
            changes={n: v for n, v in means.items() if not n.startswith(SERVER)},
            state=under(SERVER, means),
            rows=rows,
            tables={n: self.start[n] for n in rows},
            weight=self.weight,
            count=self.count,
        )

    def _divided(self, name: str, total: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return a sum divided by its weight; ``rows`` are those that it is of."""
        kind = self.start[name].dtype
        if name not in self._held:
            return mean(total, self.weight, kind)
        held = self._held[name] if rows is None else self._held[name][rows]
        share = held.clamp_min(torch.finfo(total.dtype).tiny).reshape(-1, *[1] * (total.dim() - 1))
        return (total / share).to(kind)


class SumsByGroup(Sums):
    """Sums of each group of clients apart.

    Args:
        start, owners_only: as for ``Sums``.
        group: the name, among an upload's changes, of the number of the client's group.
    """

    def __init__(self, start: Params, *, owners_only: bool, large: bool = False, group: str) -> None:
        super().__init__(start, owners_only=owners_only, large=large)
        self.group, self.by_group = group, dict[int, Sums]()

    def _of(self, number: int) -> Sums:
        return self.by_group.get(number) or Sums(self.start, owners_only=self.owners_only, large=self.large)

    def add(self, upload: Upload, factors: Mapping[str, float] = {}) -> None:
        """Add an upload to its group."""
        number = int(upload.deltas[self.group])
        self.by_group[number] = self._of(number)
        self.by_group[number].add(upload, factors)

    def merge(self, other: Sums) -> Sums:
        """Return both together, group by group."""
        assert isinstance(other, SumsByGroup)
        for number, sums in other.by_group.items():
            self.by_group[number] = self._of(number).merge(sums)
        return self

    def mean(self) -> Reduced:
        """Return the changes of group 0, and as state ``K/NAME`` those of group K; a group of no weight has none."""
        found = {k: sums.mean() for k, sums in sorted(self.by_group.items()) if sums.weight > 0}
        state = {f"{k}/{n}": v for k, each in found.items() if k for n, v in each.params.items()}
        return replace(
            found.get(0, Reduced(changes={})),
            state=state,
            weight=sum(each.weight for each in found.values()),
            count=sum(each.count for each in found.values()),
        )


class RowSums:
    """Weighted sums of a table's rows, which takes memory for those rows alone that were added.

    Args:
        table: gives shape, device and type.
    """

    def __init__(self, table: Tensor) -> None:
        self.place = torch.full((len(table),), -1, device=table.device)
        self.count = 0
        self.sums = table.new_zeros((0, *table.shape[1:]), dtype=exact(table))

    def add(self, rows: Tensor, values: Tensor, weight: float) -> None:
        """Add rows; their numbers are all different."""
        places = self.place[rows]
        new = places < 0
        end = self.count + int(new.sum())
        if end > len(self.sums):
            before, size = self.sums, max(end, min(2 * end, len(self.place)))
            self.sums = before.new_empty((size, *before.shape[1:]))
            self.sums[: self.count] = before[: self.count]
        places[new] = torch.arange(self.count, end, device=places.device)
        self.place[rows] = places
        fold_rows(self.sums, places, values, weight, self.count)
        self.count = end

    def rows(self) -> Tensor:
        """Return the numbers of the rows, (rows,) int64, ascending."""
        return (self.place >= 0).nonzero().squeeze(1)

    def values(self, rows: Tensor | None = None) -> Tensor:
        """Return the sums, (rows, *shape), of some of the rows, or of all in the order of ``rows``."""
        return self.sums[self.place[self.rows() if rows is None else rows]]


def parts_of(value: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's numbers in the order of ``pieces``, each piece (numbers,)."""
    yield from (piece.reshape(-1) for (piece,) in pieces(value.contiguous()))


def by_rows(rows: Tensor, *others: Tensor, like: Tensor | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows' numbers after the others, and what other tensors hold of them, few enough to compute with at a time.

    Args:
        rows: (rows,) their numbers.
        others: (rows, *shape) each.
        like: a tensor whose rows are as large, where there is no other.
    """
    size = (others[0] if like is None else like)[:1].numel()
    step = max(1, PIECE // max(1, size))
    yield from zip(*(torch.split(t, step) for t in (rows, *others)), strict=True)


def spread(values: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    """Return a table of zeros, but for some rows."""
    return torch.zeros_like(table).index_copy_(0, rows, values)
