"""PyTorch data sets, one a client, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, warn
from fedkeep.data.columns import Column, Ragged, offsets_of
from fedkeep.data.ids import group_rows
from fedkeep.data.splits import SPLITS, bounds_of, divide, order_within

PAIR = ("x", "label")
"""What an example of two values without names holds."""
EMPTY = "No client's data set holds an example."


class Examples(Protocol):
    """What ``torch.utils.data.Dataset`` is to a reader: examples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


OfClient = Examples | Mapping[str, Examples]
"""A client's examples, or those of each of its splits."""


def columns_of_datasets(
    datasets: Mapping[str | int, OfClient], names: Sequence[str] | None
) -> tuple[list[str | int], dict[str, Column], list[str] | None]:
    """Read every example once; return whose each is, the columns, and each one's split where splits are given.

    Raises:
        DataError: a client has no data set, only some clients are split, or an example is not like the first.
    """
    clients: list[str | int] = []
    splits: list[str] = []
    rows: dict[str, list[NDArray[Any]]] = {}
    divided = _are_divided(datasets)
    for client, split, number, example in _examples(datasets, divided):
        place = f"Example {number} of client {client!r}" + (f", {split}" if split else "")
        values = _named(example, names, place)
        if rows and values.keys() != rows.keys():
            raise _unlike(place, values, rows)
        for name, value in values.items():
            rows.setdefault(name, []).append(_array(value, f"{place}, {name!r},"))
        clients.append(client)
        splits.append(split)
    if not clients:
        raise DataError(EMPTY)
    columns = {name: _column(name, values, clients) for name, values in rows.items()}
    for row, (client, _, number, example) in enumerate(islice(_examples(datasets, divided), 4)):
        again = {n: _array(value, "") for n, value in _named(example, names, "").items()}
        if any(not np.array_equal(value, rows[name][row]) for name, value in again.items()):
            _warn_of_draws(client, number)
            break
    return clients, columns, splits if divided else None


def _warn_of_draws(client: str | int, number: int) -> None:
    warn(
        f"Example {number} of client {client!r} differs each time that it is read. Every example is read once, so what its "
        f"data set draws at random stays as it is now. Leave random transforms out; methods.augment.Augmented shifts and "
        f"mirrors images in training."
    )


@contextmanager
def on_disk(
    datasets: Mapping[str | int, OfClient], names: Sequence[str] | None, folder: Path
) -> Iterator[tuple[dict[str, Column], NDArray[np.int64], list[str], NDArray[np.int64]]]:
    """Read every example once, and give columns that are files in ``folder``, offsets, ids and bounds while they are needed.

    Where no splits are given, examples are divided as ``split_per_user`` does by default.

    Raises:
        DataError: as of `columns_of_datasets`; or examples differ in length.
    """
    divided = _are_divided(datasets)
    given = {client: _parts(client, one, divided) for client, one in datasets.items()}
    given = {client: parts for client, parts in given.items() if any(map(len, parts.values()))}
    if not given:
        raise DataError(EMPTY)
    ids, number = group_rows(list(given))
    if len(ids) < len(given):
        raise DataError(
            "Wanted a data set of each client; got {got} of {ids} ids.", got=len(given), ids=len(ids)
        )
    clients = [list(given)[place] for place in np.argsort(number).tolist()]
    whole = np.asarray([sum(map(len, given[client].values())) for client in clients])
    offsets = offsets_of(whole)
    if divided:
        order = np.arange(offsets[-1])
        counts = np.asarray([[len(given[c].get(part, ())) for part in SPLITS] for c in clients])
    else:
        order, counts = order_within({}, offsets, ids, "random", 0), divide(whole, (0.8, 0.1, 0.1))
    with TemporaryDirectory(dir=folder, prefix=".fedkeep-") as place:
        columns: dict[str, NDArray[Any]] = {}
        for row, wanted in enumerate(order.tolist()):
            at = int(np.searchsorted(offsets, wanted, side="right")) - 1
            client, local = clients[at], int(wanted - offsets[at])
            split, dataset, local = _found(given[client], local)
            said = f"Example {local} of client {client!r}" + (f", {split}" if split else "")
            values = {
                name: _array(value, f"{said}, {name!r},")
                for name, value in _named(dataset[local], names, said).items()
            }
            if not columns:
                columns = {
                    name: npy.open_memmap(
                        Path(place, f"{n}.npy"), "w+", value.dtype, (len(order), *value.shape)
                    )
                    for n, (name, value) in enumerate(values.items())
                }
                again = {n: _array(value, "") for n, value in _named(dataset[local], names, "").items()}
                if any(not np.array_equal(value, values[name]) for name, value in again.items()):
                    _warn_of_draws(client, local)
            _check_like(said, values, columns)
            for name, value in values.items():
                columns[name][row] = value
        yield dict(columns), offsets, ids, bounds_of(counts)


def _are_divided(datasets: Mapping[str | int, OfClient]) -> bool:
    """Tell whether clients' data sets are given by splits, as the first one's is."""
    if not isinstance(datasets, Mapping) or not datasets:
        raise DataError(
            "Wanted a data set for each client, as {{id: dataset}}; got {got}.", got=type(datasets).__name__
        )
    return isinstance(next(iter(datasets.values())), Mapping)


def _found(parts: Mapping[str, Examples], number: int) -> tuple[str, Examples, int]:
    """Return of a client's example its split, the data set that has it, and its number there."""
    for split in sorted(parts, key=(*SPLITS, "").index):
        if number < len(parts[split]):
            return split, parts[split], number
        number -= len(parts[split])
    raise IndexError(number)


def _unlike(place: str, got: Iterable[str], wanted: Iterable[str]) -> DataError:
    return DataError(
        "{place} holds {got}; the first one of all holds {wanted}.",
        place=place,
        got=sorted(got),
        wanted=sorted(wanted),
    )


def _check_like(said: str, values: Mapping[str, NDArray[Any]], columns: Mapping[str, NDArray[Any]]) -> None:
    """Raise DataError unless an example's values fit into columns whose rows are like the first one."""
    if values.keys() != columns.keys():
        raise _unlike(said, values, columns)
    for name, value in values.items():
        column = columns[name]
        if value.shape != column.shape[1:] or not np.can_cast(value.dtype, column.dtype):
            raise DataError(
                "{place}: {name!r} is {got} of the shape {shape}; in the first one that was read it is {type} of "
                "{wanted}. In a folder all are alike: bring them to one, e.g. by the data set's transform.",
                place=said,
                name=name,
                got=value.dtype,
                shape=value.shape,
                type=column.dtype,
                wanted=column.shape[1:],
            )


def _examples(
    datasets: Mapping[str | int, OfClient], divided: bool
) -> Iterator[tuple[str | int, str, int, Any]]:
    for client, given in datasets.items():
        for split, dataset in _parts(client, given, divided).items():
            for number in range(len(dataset)):
                yield client, split, number, dataset[number]


def _parts(client: str | int, given: OfClient, divided: bool) -> dict[str, Examples]:
    """Return a client's data sets by their splits; one alone has the name ""."""
    if isinstance(given, Mapping) != divided or (
        isinstance(given, Mapping) and not set(given) <= set(SPLITS)
    ):
        raise DataError(
            "Wanted a data set of each client, or of each of its splits {splits}, and the same for all; "
            "got {got} of client {client!r}.",
            splits=SPLITS,
            got=list(given) if isinstance(given, Mapping) else type(given).__name__,
            client=client,
        )
    parts: dict[str, Examples] = dict(given) if isinstance(given, Mapping) else {"": given}
    for dataset in parts.values():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DataError(
                "Wanted a data set with a length and numbered examples of client {client!r}; got {got}.",
                client=client,
                got=type(dataset).__name__,
            )
    return parts


def _named(example: Any, names: Sequence[str] | None, place: str) -> dict[str, Any]:
    """Return an example's values by the names of their columns."""
    if isinstance(example, Mapping):
        return {str(name): value for name, value in example.items()}
    values = tuple(example) if isinstance(example, tuple | list) else (example,)
    wanted = names or (PAIR if len(values) == 2 else None)
    if wanted is None or len(wanted) != len(values):
        raise DataError(
            "{place} holds {got} values and {wanted} names. Pass names=..., one for each: those of forward's "
            'arguments, and "label".',
            place=place,
            got=len(values),
            wanted="no" if wanted is None else len(wanted),
        )
    return dict(zip(wanted, values, strict=True))


def _array(value: Any, place: str) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
    array = np.asarray(value)
    if (
        hasattr(value, "getbands") and array.dtype == np.uint8
    ):  # an image of Pillow: channels first, as models want
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    if array.dtype.kind not in "biuf":
        raise DataError(
            "{place} is {got}; wanted a tensor or numbers. Let the data set turn it into one, e.g. by its transform.",
            place=place,
            got=type(value).__name__,
        )
    return array.astype(np.float32) if isinstance(value, float) else array


def _column(name: str, values: Sequence[NDArray[Any]], clients: Sequence[str | int]) -> Column:
    """Return values as one array; sequences of whole numbers, and series, of different lengths as a ragged column."""
    shapes = [value.shape for value in values]
    if all(shape == shapes[0] for shape in shapes):
        return np.stack(values)
    if all(value.ndim == 1 and value.dtype.kind in "iu" for value in values):
        return Ragged.from_rows(values)
    if (
        all(value.ndim == 2 and value.dtype.kind == "f" for value in values)
        and len({s[1] for s in shapes}) == 1
    ):
        return Ragged.from_rows(values, "float32")
    other = next(row for row, shape in enumerate(shapes) if shape != shapes[0])
    raise DataError(
        "{name!r} has the shape {got} in an example of client {client!r}, and {wanted} in the first of client "
        "{first!r}. Bring them to one shape, e.g. by the data set's transform.",
        name=name,
        got=shapes[other],
        client=clients[other],
        wanted=shapes[0],
        first=clients[0],
    )
