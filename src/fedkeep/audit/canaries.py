"""Canaries: other values in the place of what must stay on a device, and fewer examples where no number may leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.params import CLIENT, Params, is_state
from fedkeep.core.seeds import generator, numpy_generator
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import Column, Rows, offsets_of
from fedkeep.data.federated import take
from fedkeep.data.splits import SPLITS, bounds_of

TRAIN, OTHER = 12, 4
"""Examples of a client that an audit trains on at most, and judges of each other partition."""
MOST = 10
"""Sources that are looked at one by one; more are put together by their layer, then by the first part of their name."""
OUT = "opted_in"
MORE = (0, -1, 0, 1, 0)
"""By how many opted-out examples a client has more, where these are drawn of its own: see ``resampled``."""


@dataclass(frozen=True)
class CanarySource:
    """Something that must stay on its device.

    Attributes:
        kind: ``"private parameter"``, ``"private buffer"`` or ``"kept state"``.
        label: what it is called in the report: a name, or ``own.body.*`` for several.
        names: the names of the values, as they are kept.
    """

    kind: str
    label: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.label}"

    @property
    def declared(self) -> list[str]:
        """Its names as declarations have them, see ``methods.hook_declarations.Reveal``."""
        return [
            f"{'kept' if is_state(name) else 'private'} {name.removeprefix(CLIENT)}" for name in self.names
        ]


def sources(kept: Mapping[str, Tensor], trainable: Iterable[str]) -> list[CanarySource]:
    """Return what a client keeps, by kind and name; many names are put together."""
    trained, found = set(trainable), dict[str, list[str]]()
    for name in kept:
        buffer = "private buffer" if name not in trained else "private parameter"
        found.setdefault("kept state" if is_state(name) else buffer, []).append(name)
    made = []
    for kind, names in found.items():
        for depth in ("name", "layer", "part"):
            groups: dict[str, list[str]] = {}
            for name in names:
                ends = {"name": name, "layer": name.rpartition(".")[0], "part": name.partition(".")[0]}
                groups.setdefault(ends[depth], []).append(name)
            if len(groups) <= MOST:
                break
        for group, inside in groups.items():
            label = inside[0] if len(inside) == 1 else f"{group}.*" if group else ", ".join(inside)
            made.append(CanarySource(kind, label.removeprefix("client/"), tuple(inside)))
    return made


def planted(
    kept: Mapping[str, Tensor], names: Iterable[str], trainable: Iterable[str], seed: int, scale: float = 1.0
) -> Params:
    """Return what a client keeps with canaries in some names: normal noise is added; whole numbers move to 0 or 1."""
    values, trained = dict(kept), set(trainable)
    for name in names:
        draw, old = generator(seed, f"audit/{name}"), kept[name]
        if not old.is_floating_point():
            values[name] = torch.where(old == 0, torch.ones_like(old), torch.zeros_like(old))
            continue
        moved = old + scale * torch.randn(old.shape, generator=draw, dtype=torch.float64).to(old)
        positive = name not in trained and bool((old >= 0).all()) and bool((old > 0).any())
        values[name] = moved.abs() if positive else moved  # a variance or a number of examples stays one
    return values


def drawn(
    kept: Mapping[str, Tensor], trainable: Iterable[str], seed: int, sign: int = 0, scale: float = 1.0
) -> Params:
    """Return what a client keeps with canaries in all of it: of a scale, and with ``sign`` all of it that is trained.

    So sums, largest and smallest values have either sign, and norms several sizes.
    """
    trained = set(trainable)
    values = planted(kept, kept, trained, seed)
    return {
        n: v if n not in trained or not v.is_floating_point() else scale * (sign * v.abs() if sign else v)
        for n, v in values.items()
    }


def small(data: FederatedData, clients: int) -> FederatedData:
    """Return a few examples of a few clients, who shows most in front: of each partition some, spread evenly over it.

    The first trains, if anybody does: at best on two examples or more, and it has some opted out, and others to judge.
    Kinds of examples that none of the first two has come with more clients, right behind them.
    """
    data = data if data.bounds is not None else data.split_per_user()
    train, valid, test = (data.counts(part) for part in SPLITS)
    out = out_counts(data)
    judged = (valid > 0) * 1 + (test > 0)
    order = np.lexsort((np.arange(len(data)), -judged, train < 3, out == 0, -np.minimum(train - out, 2)))
    first = order[: min(clients, 2)]
    more = {order[(n[order] > 0).argmax()] for n in (valid, test, out) if n.any() and not n[first].any()}
    chosen = list(dict.fromkeys([*first, *sorted(more), *order]))[: clients + len(more)]
    some, keep = data.select(chosen), list[Rows]()
    for client in range(len(some)):
        left_out = opted_out(some, client)
        inside = np.setdiff1d(some.split_rows("train", [client]), left_out)
        keep += [_spread(inside, TRAIN), _spread(left_out, OTHER)]
        keep += [_spread(some.split_rows(part, [client]), OTHER) for part in ("valid", "test")]
    return kept_rows(some, np.concatenate(keep))


def _spread(rows: Rows, most: int) -> Rows:
    """Return some of the rows, evenly spread."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), most)).round()
    some: Rows = rows[np.unique(places.astype(int))]
    return some


def kept_rows(data: FederatedData, rows: Rows) -> FederatedData:
    """Return the data with some rows alone, with each as often as it is named; all clients stay."""
    rows = np.sort(rows)
    assert data.bounds is not None
    part = (rows[:, None] >= data.bounds[data.clients_of(rows)][:, 1:3]).sum(1)
    counts = np.bincount(3 * data.clients_of(rows) + part, minlength=3 * len(data)).reshape(-1, 3)
    columns = take(data.columns, rows)
    return FederatedData(
        columns, offsets_of(counts.sum(1)), data.ids, bounds_of(counts), data.meta, check=False
    )


def resampled(data: FederatedData, rows: Rows, seed: int) -> list[FederatedData]:
    """Return data where each client's examples of ``rows`` are drawn of these, with replacement: some come twice, others
    no more; and by ``MORE`` more or fewer. In the last one none is left. Data without any example are not there.
    """
    draw, owner = numpy_generator(seed, "audit/examples"), data.clients_of(rows)
    rest, found = np.setdiff1d(np.arange(data.examples), rows), list[FederatedData]()
    for more in (*MORE, -len(rows)):
        own = [rows[owner == client] for client in np.unique(owner)]
        kept = np.concatenate([rest, *(draw.choice(each, max(len(each) + more, 0)) for each in own)])
        found += [kept_rows(data, kept)] if len(kept) else []
    return found


def side_by_side(datas: Sequence[FederatedData], client: int) -> FederatedData:
    """Return one client's examples in several data sets, each with as many, as those of several clients."""
    first, last = datas[0].offsets[client : client + 2].tolist()
    rows, size = np.arange(first, last), last - first
    parts = [take(data.columns, rows) for data in datas]
    columns = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    starts = size * np.arange(len(datas))
    assert datas[0].bounds is not None
    return FederatedData(
        columns,
        offsets_of(np.full(len(datas), size)),
        [f"{datas[0].ids[client]} {k}" for k in range(len(datas))],
        datas[0].bounds[client] - first + starts[:, None],
        {name: value for name, value in datas[0].meta.items() if name != "traits"},
        check=False,
    )


def _joined(columns: Sequence[Column]) -> Column:
    texts = [column for column in columns if isinstance(column, Ragged)]
    if not texts:
        return np.concatenate([np.asarray(column) for column in columns])
    lengths = np.concatenate([np.diff(text.offsets) for text in texts])
    return Ragged(np.concatenate([text.values for text in texts]), offsets_of(lengths))


def with_opt_out(data: FederatedData) -> FederatedData:
    """Return the data with every third training example opted out of each client that has opted out none."""
    inside = np.array(data.columns.get(OUT, np.ones(data.examples, bool)), bool)
    for client in range(len(data)):
        if not len(opted_out(data, client)):
            inside[list(data.rows(client, "train"))[1::3]] = False
    return _with(data, {**data.columns, OUT: inside})


def opted_out(data: FederatedData, client: int | None = None) -> Rows:
    """Return the training examples that are opted out, of a client or of all."""
    rows = data.split_rows("train", None if client is None else [client])
    out: Rows = rows[~np.asarray(data.columns[OUT])[rows].astype(bool)] if OUT in data.columns else rows[:0]
    return out


def out_counts(data: FederatedData) -> Rows:
    """Return how many training examples each client has opted out."""
    return np.bincount(data.clients_of(opted_out(data)), minlength=len(data))


def replaced(data: FederatedData, rows: Rows, seed: int, sign: int = 0) -> FederatedData:
    """Return the data with other values in some rows: normal noise is added to numbers, which with ``sign`` are all of
    one; whole numbers and tokens become others that stand in the column. A label of one class alone becomes 0 or 1.
    """
    draw = numpy_generator(seed, "audit/examples")
    columns = {
        name: column if name == OUT or name.startswith("_") else _changed(name, column, rows, draw)
        for name, column in data.columns.items()
    }
    for name, column in columns.items() if sign else ():
        if name not in number_columns(data):
            continue
        if isinstance(column, Ragged):
            places = _places(column, rows)
            column.values[places] = sign * np.abs(column.values[places])
        else:
            column[rows] = sign * np.abs(column[rows])
    return _with(data, columns)


def numbers_replaced(data: FederatedData, rows: Rows, seed: int) -> FederatedData:
    """Return the data with other numbers in some rows, and the same labels, whole numbers and tokens."""
    other = replaced(data, rows, seed).columns
    return _with(
        data, {name: other[name] if name in number_columns(data) else c for name, c in data.columns.items()}
    )


def number_columns(data: FederatedData) -> list[str]:
    """Return the columns of numbers that are no labels."""
    own = {n: c for n, c in data.columns.items() if n != "label" and not n.startswith("_")}
    return [n for n, c in own.items() if _values(c).dtype.kind == "f"]


def _values(column: Column) -> np.ndarray[Any, Any]:
    return column.values if isinstance(column, Ragged) else np.asarray(column)


def _places(column: Ragged, rows: Rows) -> Rows:
    """Return where the values of some rows stand."""
    return np.concatenate([np.arange(column.offsets[r], column.offsets[r + 1]) for r in rows] or [rows])


def with_lengths(data: FederatedData, rows: Rows, *, longer: bool | int) -> FederatedData:
    """Return the data with texts of other lengths in some rows: of one token each, or longer than any by their own; of
    a whole number, longer by it.
    """
    ragged = {n: c for n, c in data.columns.items() if isinstance(c, Ragged)}
    most = max((int(np.diff(c.offsets).max(initial=0)) for c in ragged.values()), default=0)
    more = most + 1 if longer is True else int(longer)
    chosen, columns = {int(row) for row in rows}, dict(data.columns)
    for name, column in ragged.items():
        texts = [column.values[a:b] for a, b in pairwise(column.offsets.tolist())]
        texts = [
            text
            if row not in chosen
            else np.resize(text, (len(text) + more, *text.shape[1:]))
            if longer
            else text[:1]
            for row, text in enumerate(texts)
        ]
        columns[name] = Ragged.from_rows(texts, column.values.dtype.name)
    return _with(data, columns)


def _with(data: FederatedData, columns: Mapping[str, Column]) -> FederatedData:
    return FederatedData(dict(columns), data.offsets, data.ids, data.bounds, data.meta, check=False)


def single(data: FederatedData) -> list[str]:
    """Return the columns of whole numbers and tokens that have one value alone, so that there is no other to put in."""
    own = {n: _values(c) for n, c in data.columns.items()}
    own = {n: c for n, c in own.items() if n not in (OUT, "label") and not n.startswith("_")}
    return [n for n, c in own.items() if c.dtype.kind in "biu" and len(np.unique(c)) < 2]


def _changed(name: str, column: Column, rows: Rows, draw: np.random.Generator) -> Column:
    if isinstance(column, Ragged):
        values, places = np.array(column.values), _places(column, rows)
        if column.holds_ids:
            values[places] = _others(values, values[places], draw)
        else:
            values = _changed(name, values, places, draw)  # type: ignore[assignment]
        return Ragged(values, column.offsets)
    made = np.array(column)
    if made.dtype.kind == "f":
        some = made[rows]
        made[rows] = some + (made.std() or 1.0) * draw.standard_normal(some.shape).astype(made.dtype)
    elif made.dtype.kind in "biu":
        one_class = name == "label" and len(np.unique(made)) < 2
        made[rows] = _others(np.arange(2) if one_class else made, made[rows], draw)
    return made


def _others(column: np.ndarray[Any, Any], values: np.ndarray[Any, Any], draw: np.random.Generator) -> Any:
    """Return for each value another one that stands in the column."""
    known = np.unique(column)
    if len(known) < 2:
        return values
    moved = np.searchsorted(known, values) + draw.integers(1, len(known), values.shape)
    return known[moved % len(known)]


def floats_of(data: FederatedData, rows: Rows) -> np.ndarray[Any, Any]:
    """Return the numbers of some rows, (rows, width); of examples without any, none."""
    found = [
        (c.padded(rows)[0] if isinstance(c, Ragged) else np.asarray(c)[rows])
        .reshape(len(rows), -1)
        .astype(np.float64)
        for name, c in data.columns.items()
        if not name.startswith("_") and _values(c).dtype.kind == "f"
    ]
    return np.concatenate(found, 1) if found else np.zeros((len(rows), 0))


def tokens_of(data: FederatedData, rows: Rows) -> np.ndarray[Any, Any]:
    """Return the whole numbers and tokens of some rows as one row of numbers; labels are none of them."""
    found = [np.zeros(0)]
    for name, c in data.columns.items():
        if name in (OUT, "label") or name.startswith("_"):
            continue
        if isinstance(c, Ragged) and c.holds_ids:
            found += [c.values[c.offsets[r] : c.offsets[r + 1]].astype(np.float64) for r in rows]
        elif not isinstance(c, Ragged) and np.asarray(c).dtype.kind in "iu":
            found.append(np.asarray(c)[rows].reshape(-1).astype(np.float64))
    return np.concatenate(found)
