"""A data set that belongs to many clients: columns of examples, and where each client's rows lie.

Rows are sorted by client and, inside a client, by split. Client c owns rows ``offsets[c]:offsets[c + 1]``; its
training rows are ``bounds[c, 0]:bounds[c, 1]``, its validation rows ``bounds[c, 1]:bounds[c, 2]``, its test rows
``bounds[c, 2]:bounds[c, 3]``. So one client among a million costs two look-ups, and a data set can stay on disk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError, check_choice, did_you_mean, some_of
from fedkeep.core.files import expanded
from fedkeep.core.params import Batch
from fedkeep.data import disk, splits
from fedkeep.data.columns import (
    AS_READ,
    Column,
    Ragged,
    Rows,
    as_offsets,
    check_offsets,
    offsets_of,
    stable_order,
)
from fedkeep.data.data_checks import as_columns, as_split, check_columns, check_labels, completed
from fedkeep.data.datasets import OfClient, columns_of_datasets, on_disk
from fedkeep.data.ids import RangeIds, as_id, check_ids, group_rows
from fedkeep.tasks import KINDS, Kind

SPLITS = splits.SPLITS
"""The names of the parts that examples are divided into: train, valid, test."""

__all__ = ["SPLITS", "FederatedData", "Ragged", "RangeIds"]


class FederatedData:
    """Examples of many clients, as columns.

    Most callers want :meth:`from_columns`, which sorts; this constructor takes rows already in order.

    Args:
        columns: by name, a dense array (first axis examples) or a :class:`Ragged` one. Names are the parameter
            names of a model's ``forward``; ``label`` is the target; a name that begins with an underscore stays
            out of batches. Ragged columns named ``text`` appear in a batch as ``text`` and ``text_length``.
        offsets: int64 (clients + 1,), where each client's rows start and the last ends.
        ids: one per client, unique: a text of 1 to 200 printable characters (kept in Unicode's normal form C), or an
            integer, which becomes its decimal digits; :class:`RangeIds` is free.
        bounds: int64 (clients, 4), row numbers where train, valid and test start and test ends; None: not split.
        meta: what is known of the data: name, task ("multiclass", "binary" or "regression"), classes,
            vocabulary, label_names, best, source, and traits (name -> one value per client). ``task`` and
            ``classes`` are inferred from the labels where absent.
        check: look at every value (NaN, label range). False for data that were checked before.

    Raises:
        DataError: lengths disagree, a value is NaN or infinite, a label is out of range, an id is not allowed,
            or there is no row at all.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        offsets: ArrayLike,
        ids: Sequence[str | int],
        bounds: NDArray[np.int64] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        check: bool = True,
    ) -> None:
        self.columns = as_columns(columns)
        self.ids = check_ids(ids)
        self.offsets = as_offsets(offsets, "the clients' offsets")
        self.bounds = None if bounds is None else as_offsets(bounds, "the clients' bounds")
        self.examples = len(next(iter(self.columns.values())))
        if self.offsets.shape != (len(self.ids) + 1,):
            raise DataError(
                "Wanted {wanted} offsets, one more than client ids; got the shape {got}.",
                wanted=len(self.ids) + 1,
                got=self.offsets.shape,
            )
        check_offsets(self.offsets, self.examples, "the clients' offsets", "examples")
        self._check_bounds()
        self.meta: dict[str, Any] = completed(self.columns, dict(meta or {}), len(self.ids), self._owner)
        if check:
            check_columns(self.columns, self._owner)
            check_labels(self.columns, self.meta, self._owner)

    @classmethod
    def from_columns(
        cls,
        client: ArrayLike,
        columns: Mapping[str, Column],
        split: ArrayLike | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> FederatedData:
        """Sort rows by client, inside a client by split, and otherwise keep their order.

        Args:
            client: one id per row, texts or integers. Clients are ordered by id (integers by value), so how a file
                mixes clients changes nothing; the order of a client's own rows does: random divisions and batches
                draw their places. An integer id n becomes the text ``"n"``.
            columns: by name, one entry per row.
            split: "train", "valid" or "test" per row; None: not split, see :meth:`split_per_user`.
            meta: as for the constructor.

        Raises:
            DataError: as for the constructor; rows are named as they were given.
        """
        return cls.from_groups(*group_rows(client), columns, split, meta)

    @classmethod
    def from_datasets(
        cls,
        datasets: Mapping[str | int, OfClient],
        names: Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> FederatedData:
        """Take the examples of PyTorch data sets, one a client; each is read once, into memory or a folder.

        Args:
            datasets: by client id, a data set with a length and numbered examples (``torch.utils.data.Dataset``), or
                a mapping from "train", "valid" and "test" to data sets. An example is a mapping from columns to
                values, or a tuple. Values are tensors, arrays or numbers of one shape, or Pillow's images; sequences of whole numbers, and series of
                floats (steps, values a step), may have different lengths (:class:`Ragged`).
            names: of a tuple's values: names of ``forward``'s arguments, and "label". Two are "x" and "label".
            meta: as for the constructor.
            folder: a new one, for data larger than memory: examples are written there one by one, and looked up as needed.
                All are of one shape then, and without splits are divided as ``split_per_user`` does by default;
                :meth:`load` reads them again. None: all are in memory.

        Raises:
            DataError: as for the constructor; an example is not like the first of all, and is named; or the folder holds
                something.
        """
        if folder is not None:
            place = expanded(folder)
            disk.check_new(place)
            with on_disk(datasets, names, disk.parent_of(place)) as (columns, offsets, ids, bounds):
                cls(columns, offsets, ids, bounds, meta).save(place)
            return cls.load(place)
        return cls.from_columns(*columns_of_datasets(datasets, names), meta)

    @classmethod
    def from_frame(
        cls, frame: Any, *, client: str = "client", label: str | Sequence[str] = "label", **options: Any
    ) -> FederatedData:
        """Take the rows of a data frame of pandas, polars or pyarrow as examples.

        Args:
            frame: one example a row.
            client: name of the column of client ids.
            label: name of the column of labels, which may be texts.
            options: further arguments of :func:`fedkeep.data.read_table`. Without ``features`` and ``text``, all other
                columns of numbers are features, in the frame's order.

        Raises:
            DataError: as of ``read_table``; or a column that nobody named is no feature.
            ConfigError: the column of clients, which is there, is given as ``user``, as of ``read_table``.
        """
        from fedkeep.data.readers.tables import data_of_frame  # readers make what this file defines

        return data_of_frame(frame, client, label, options)

    @classmethod
    def from_groups(
        cls,
        names: Sequence[str],
        number: NDArray[np.int64],
        columns: Mapping[str, Column | Callable[[Rows], Column]],
        split: ArrayLike | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> FederatedData:
        """Do what :meth:`from_columns` does, where clients are known: their ids, and the number of each row's.

        Of ``columns`` some may be functions that give finite numbers of rows in the order in which they are asked for.
        """
        if not isinstance(columns, Mapping):
            as_columns(columns)  # which says what is wanted
        late = {name: column for name, column in columns.items() if callable(column)}
        given = as_columns({n: c for n, c in columns.items() if not callable(c)}, rows=len(number))
        parts = np.zeros(len(number), np.int64) if split is None else as_split(split, len(number))

        def owner(row: int) -> str:
            return names[int(number[row])]

        completed_meta = completed(given, dict(meta or {}), len(names), owner)
        check_columns(given, owner)
        check_labels(given, completed_meta, owner)
        place = number * 3 + parts  # by client, then split
        order = stable_order(place)
        counts = np.bincount(place, minlength=3 * len(names)).reshape(-1, 3)
        taken = take(given, order) | {name: give(order) for name, give in late.items()}
        return cls(
            {name: taken[name] for name in columns},
            offsets_of(counts.sum(axis=1)),
            names,
            None if split is None else splits.bounds_of(counts),
            completed_meta,
            check=False,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        name = f"{self.meta['name']!r}, " if self.meta.get("name") else ""
        return f"FederatedData({name}{len(self):,} clients, {self.examples:,} examples, columns {sorted(self.columns)})"

    def rows(self, client: int, split: str = "all") -> range:
        """Return the row numbers of a client's split ("train", "valid", "test" or "all").

        Args:
            client: its number in these data, which ``index`` returns for an id.
            split: which.

        Raises:
            DataError: no such client or split, or the data are not split yet.
        """
        if not isinstance(client, int | np.integer):
            raise self._no_number(client)
        if not 0 <= client < len(self.offsets) - 1:
            raise self._no_client(client)
        if split == "all":
            return range(int(self.offsets[client]), int(self.offsets[client + 1]))
        part, bounds = self._part(split)
        return range(int(bounds[client, part]), int(bounds[client, part + 1]))

    def count(self, client: int, split: str = "all") -> int:
        """Return how many examples a client has in a split."""
        return len(self.rows(client, split))

    def counts(self, split: str = "all") -> NDArray[np.int64]:
        """Return every client's number of examples in a split, int64 (clients,)."""
        if split == "all":
            return np.diff(self.offsets)
        part, bounds = self._part(split)
        return bounds[:, part + 1] - bounds[:, part]

    def split_rows(self, split: str, clients: Sequence[int] | Rows | None = None) -> Rows:
        """Return the row numbers of a split of many clients, client after client, int64.

        Args:
            split: which.
            clients: their numbers in these data, which ``index`` returns for an id; by default all.

        Raises:
            DataError: no such client or split, or the data are not split yet.
        """
        chosen = np.arange(len(self)) if clients is None else self._numbers(clients)
        if clients is not None and len(wrong := chosen[(chosen < 0) | (chosen >= len(self))]):
            raise self._no_client(wrong[0])
        if split == "all":
            start, length = self.offsets[chosen], self.offsets[chosen + 1] - self.offsets[chosen]
        else:
            part, bounds = self._part(split)
            start, length = bounds[chosen, part], bounds[chosen, part + 1] - bounds[chosen, part]
        return np.arange(length.sum()) + np.repeat(start - offsets_of(length)[:-1], length)

    def _numbers(self, clients: Sequence[int] | Rows) -> Rows:
        given = np.asarray(clients)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise self._no_number(given.tolist())
        return given.astype(np.int64)

    def _no_client(self, client: int | np.integer[Any]) -> DataError:
        return DataError(
            "There is no client {client}: clients are numbered 0 to {largest}.",
            client=int(client),
            largest=len(self) - 1,
        )

    def _no_number(self, given: object) -> DataError:
        return DataError(
            "These data number their clients 0 to {largest}; got {got!r}. data.index('ID') returns the number of an id.",
            largest=len(self) - 1,
            got=given,
        )

    def clients_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the client number of each row, int64."""
        return np.searchsorted(self.offsets, rows, side="right").astype(np.int64) - 1

    def batch(self, rows: Rows | range | Sequence[int]) -> Batch:
        """Gather rows into tensors, by column name; a ragged ``text`` also gives ``text_length``.

        Returns:
            Dense columns (B, ...) in their own type, integer labels as int64; ragged columns int64 (B, longest),
            of series (B, longest, values a step), padded with 0 behind, and their lengths int64 (B,), at least 1.
        """
        chosen = np.asarray(rows, dtype=np.int64)
        batch: Batch = {}
        for name, column in self.columns.items():
            if name.startswith("_"):
                continue
            if isinstance(column, Ragged):
                ids, length = column.padded(chosen)
                batch[name], batch[f"{name}_length"] = torch.from_numpy(ids), torch.from_numpy(length)
            else:
                batch[name] = torch.from_numpy(column.take(chosen, axis=0))
        return batch

    def index(self, client_id: str | int) -> int:
        """Return the number of the client of this id; an integer stands for its decimal digits.

        Raises:
            DataError: no client has it; the nearest id is suggested.
        """
        wanted = as_id(client_id)
        position = self.ids.position(wanted)
        if position < 0:
            near = did_you_mean(wanted, self.ids) if len(self) <= 10_000 else ""
            raise DataError(
                "No client of these data has the id {wanted!r}; there are {clients:,}, such as {some}.{near} All are in "
                "data.ids, in Python; of a run in run.data.ids.",
                wanted=wanted,
                clients=len(self),
                some=some_of(self.ids),
                near=near,
            )
        return position

    def select(self, clients: Sequence[int] | Rows) -> FederatedData:
        """Return the data of these clients alone, in this order; their rows are copied.

        ``meta["traits"]`` keeps the chosen clients' values, and the best possible result is computed again.

        Args:
            clients: their numbers in these data, which ``index`` returns for an id.

        Raises:
            DataError: no such client, one twice, or none at all.
        """
        chosen = self._numbers(clients)
        wrong = chosen[(chosen < 0) | (chosen >= len(self))]
        if not len(chosen) or len(wrong) or len(np.unique(chosen)) < len(chosen):
            got = f"client {wrong[0]}" if len(wrong) else "a client twice" if len(chosen) else "none"
            raise DataError(
                "Wanted different clients between 0 and {largest}; got {got}.", largest=len(self) - 1, got=got
            )
        traits = self.meta.get("traits")
        meta = self.meta
        if traits:
            meta = meta | {"traits": {name: [values[c] for c in chosen] for name, values in traits.items()}}
        counts = None if self.bounds is None else np.diff(self.bounds, axis=1)[chosen]
        return FederatedData(
            take(self.columns, self.split_rows("all", chosen)),
            offsets_of(np.diff(self.offsets)[chosen]),
            self.ids
            if len(chosen) == len(self) and (np.diff(chosen) == 1).all()
            else [self.ids[c] for c in chosen],
            None if counts is None else splits.bounds_of(counts),
            meta,
            check=False,
        ).with_best()

    def split_per_user(
        self, fractions: Sequence[float] = (0.8, 0.1, 0.1), order: str = "random", seed: int = 0
    ) -> FederatedData:
        """Return the data with every client's rows divided again into train, valid and test.

        Of n rows, test gets n·f rounded (a half upwards), at least one if n ≥ 2; valid gets n·f rounded; train
        gets the rest and at least one. So one example goes to train, two give one train and one test
        (FURL, §4.2: 0.8/0.1/0.1 per user).

        Args:
            fractions: of train, valid and test; they sum to 1.
            order: "random" (a client's division depends on the seed, its id and its number of rows alone: it draws
                their places) or "chronological" (by the column ``time``; the earliest rows train, and of one time
                those that stand first).
            seed: of the random order.

        Raises:
            DataError: fractions that are no fractions, an unknown order, or no column ``time``.
        """
        within = splits.order_within(self.columns, self.offsets, self.ids, order, seed)
        counts = splits.divide(np.diff(self.offsets), fractions)
        return FederatedData(
            take(self.columns, within),
            self.offsets,
            self.ids,
            splits.bounds_of(counts),
            self.meta,
            check=False,
        ).with_best()

    def fingerprint(self) -> dict[str, Any]:
        """Return sha256 hashes of every column and of the partition, and the counts: what a run writes down."""
        partition = hashlib.sha256()
        for array in (self.offsets, self.bounds):
            partition.update(b"none" if array is None else np.ascontiguousarray(array).data)
        for client_id in self.ids:
            partition.update(client_id.encode("utf-8") + b"\0")
        return {
            "columns": {n: _sha256(c) for n, c in sorted(self.columns.items()) if not n.startswith(AS_READ)},
            "partition": partition.hexdigest(),
            "clients": len(self),
            "examples": self._totals(),
        }

    def summary(self) -> dict[str, Any]:
        """Return what a table of data sets shows: clients, examples per split and per client, task, classes."""
        each = self.counts()
        return {
            "name": self.meta.get("name"),
            "task": self.meta.get("task"),
            "classes": self.meta.get("classes"),
            "clients": len(self),
            "examples": self._totals(),
            "per_client": {"min": int(each.min()), "median": float(np.median(each)), "max": int(each.max())},
            "best": self.meta.get("best"),
        }

    def save(self, folder: str | Path) -> None:
        """Write the data as npy files and a JSON file into a new folder; nothing is pickled.

        Raises:
            DataError: the folder holds something already, the disk refuses, or meta is more than JSON can hold.
        """
        disk.save(expanded(folder), self.columns, self.offsets, self.ids, self.bounds, self.meta)

    @classmethod
    def load(cls, folder: str | Path, mmap: bool = True) -> FederatedData:
        """Read what :meth:`save` wrote; with ``mmap`` the columns stay on disk until they are touched.

        Raises:
            DataError: the folder is missing, incomplete or damaged. NaN in columns is looked for without ``mmap`` only.
        """
        columns, offsets, ids, bounds, meta = disk.load(expanded(folder), mmap)
        try:
            data = cls(columns, offsets, ids, bounds, meta, check=not mmap)
            check_labels(data.columns, data.meta, data._owner)  # a small column, read in passing
            return data
        except DataError as error:
            raise disk.damaged(folder, error) from error

    def _part(self, split: str) -> tuple[int, NDArray[np.int64]]:
        check_choice("Wanted the split", split, (*SPLITS, "all"), DataError)
        if self.bounds is None:
            raise DataError(
                "Wanted the {split} examples of data that are not split yet. Call data.split_per_user() "
                "first.",
                split=split,
            )
        return SPLITS.index(split), self.bounds

    def _check_bounds(self) -> None:
        if self.bounds is None:
            return
        if self.bounds.shape != (len(self), 4):
            raise DataError(
                "Wanted bounds of shape ({clients}, 4), a row per client; got {got}.",
                clients=len(self),
                got=self.bounds.shape,
            )
        outside = (self.bounds[:, 0] != self.offsets[:-1]) | (self.bounds[:, 3] != self.offsets[1:])
        wrong = np.flatnonzero(outside | (np.diff(self.bounds, axis=1) < 0).any(axis=1))
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                "Wanted the bounds of client {client!r} to rise from {start} to {end}; got {got}.",
                client=self.ids[first],
                start=self.offsets[first],
                end=self.offsets[first + 1],
                got=self.bounds[first].tolist(),
            )

    def _owner(self, row: int) -> str:
        return self.ids[int(self.clients_of(np.asarray([row]))[0])]

    def _totals(self) -> dict[str, int]:
        parts = {} if self.bounds is None else {name: int(self.counts(name).sum()) for name in SPLITS}
        return parts | {"total": self.examples}

    def with_best(self) -> FederatedData:
        """Return these data with ``best`` of ``meta`` computed again, where the generator knew it."""
        if "_best" in self.columns:
            self.meta |= best_possible(self.columns, self.split_rows("test"), KINDS[self.meta["task"]])
        return self


def take(columns: Mapping[str, Column], rows: Rows) -> dict[str, Column]:
    """Return these rows of every column."""
    return {
        name: c.take(rows) if isinstance(c, Ragged) else c.take(rows, axis=0) for name, c in columns.items()
    }


def best_possible(columns: Mapping[str, Column], rows: Rows, task: Kind) -> dict[str, float | None]:
    """Return ``best`` and ``best_global`` over these rows: with the user known, and without.

    The columns ``_best`` and ``_best_global`` hold what the generator knew of every example: for a multiclass
    task the probability of its most probable label (their mean is the Bayes accuracy), for a binary task the
    probability of label 1 (their AUC against the drawn labels is the best one). So the best is in the metric that runs
    are judged by.
    """
    label = columns["label"]
    found: dict[str, float | None] = {"best": None, "best_global": None}
    for name in found:
        truth = columns.get(f"_{name}")
        if truth is None or isinstance(truth, Ragged) or isinstance(label, Ragged) or not len(rows):
            continue
        best = task.best(truth[rows], label[rows])
        found[name] = None if math.isnan(best) else best
    return found


def _sha256(column: Column) -> str:
    arrays = (column.values, column.offsets) if isinstance(column, Ragged) else (column,)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
