"""Finds embedding tables that a column of ids looks up, and that nothing else reads.

A loss is computed once, as in training, while all that PyTorch is called with is looked at. A column of which the model
uses nothing but views, comparisons with 0 (padding) and lookups may be renumbered, and a table that is only looked up
may be cut to the rows in use: a step gives the same numbers. Where the model turns tensors into numbers of Python, it
may do something else with other examples, and nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedkeep.core.draws import forked
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params

LOOKS = {"__get__", "size", "dim", "numel", "__len__", "is_floating_point", "ndimension"}
"""What tells nothing of values."""
ROWS = {"shape", "size", "numel", "__len__", "nbytes"}
"""Of these what tells how many rows a table has: fewer where it is cut."""
VIEWS = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "__getitem__",
    "select",
    "narrow",
    "transpose",
    "permute",
    "contiguous",
    "expand",
    "expand_as",
    "unbind",
    "split",
    "chunk",
    "clone",
    "detach",
    "long",
    "int",
    "to",
}
"""What gives some of a column's ids, or all of them, in another form."""
PADDING = {"eq", "ne", "gt", "__eq__", "__ne__", "__gt__"}
"""Comparisons that see no more than padding if they are made with 0: row 0 stays row 0."""
NUMBERS = {
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "data_ptr",
}


@dataclass
class Found:
    """What was seen.

    Attributes:
        lookups: the columns that look up each table.
        otherwise: by table or column, the function that uses it otherwise; empty for a lookup of or by something else.
        numbers: whether the model turned a tensor into numbers of Python.
    """

    lookups: dict[str, set[str]] = field(default_factory=dict)
    otherwise: dict[str, str] = field(default_factory=dict)
    numbers: bool = False

    def columns(self) -> dict[str, str]:
        """Return the tables that one column looks up, whatever else reads them, with the column."""
        return {table: min(columns) for table, columns in self.lookups.items() if len(columns) == 1}


class Watching(TorchFunctionMode):
    """Notes in ``found`` what becomes of columns and of tables.

    Args:
        tables, columns: the tensors, by name; a table may have several (as received, as trained).
    """

    def __init__(self, tables: Iterable[tuple[str, Tensor]], columns: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found, self.inside = Found(), False
        self._tables = {_place(v): name for name, v in tables}
        self._columns = {_place(v): name for name, v in columns.items()}
        self._held: list[Any] = []  # what was freed could give its place to another tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call, and look at what with."""
        given, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        out = func(*args, **given)
        self._held.append(out)
        if name in LOOKS:
            if self.inside and (look := _look(func, name, args)) in ROWS:
                self.found.otherwise |= dict.fromkeys(self._among(args[:1], self._tables), look)
            return out
        if func in (F.embedding, F.embedding_bag):
            self._looked_up(func, args, given)
            return out
        columns, tables = self._among((args, given), self._columns), self._among((args, given), self._tables)
        # torch's LSTM asks on CUDA where its own weights lie.
        self.found.numbers |= (
            self.inside and name in NUMBERS and (name != "data_ptr" or bool(columns or tables))
        )
        if columns and not self._harmless(name, args, given):
            self.found.otherwise |= dict.fromkeys(columns, name)
        elif columns and name in VIEWS:
            self._columns |= {_place(v): columns[0] for v in tensors_in(out)}
        if self.inside:
            self.found.otherwise |= dict.fromkeys(tables, name)
        return out

    def _looked_up(self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        if func is F.embedding_bag:
            names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq")
        how = {**dict(zip(names, args, strict=False)), **given}
        tables, columns = self._among(how["weight"], self._tables), self._among(how["input"], self._columns)
        others = {n: v for n, v in how.items() if n not in ("input", "weight")}
        self.found.otherwise |= dict.fromkeys(self._among(others, self._columns), func.__name__)
        if not tables or not columns:
            self.found.otherwise |= dict.fromkeys(
                (*tables, *columns), ""
            )  # something else looks up or is looked up
            return
        (table,) = tables
        self.found.lookups.setdefault(table, set()).update(columns)
        reasons = {
            "max_norm": how.get("max_norm") is not None,
            "scale_grad_by_freq": bool(how.get("scale_grad_by_freq")),
            "padding_idx other than 0": how.get("padding_idx") not in (None, 0),
        }
        self.found.otherwise |= {t: reason for t in tables for reason, there in reasons.items() if there}

    def _harmless(self, name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
        first = bool(args) and bool(self._among(args[0], self._columns))
        others = self._among((args[1:], given), self._columns)
        with_zero = len(args) == 2 and not isinstance(args[1], Tensor) and args[1] == 0
        return first and not others and (name in VIEWS or (name in PADDING and with_zero))

    def _among(self, values: Any, known: Mapping[int, str]) -> list[str]:
        return [known[place] for v in tensors_in(values) if (place := _place(v)) in known]


class Watched(Net):
    """A net that says when the model is computed."""

    watching: Watching

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        """Return what a method of the module returns."""
        before, self.watching.inside = self.watching.inside, True
        try:
            return super().call(method, params, batch)
        finally:
            self.watching.inside = before


def traced(
    net: Net,
    losses: Sequence[Callable[[Net, Params, Batch, Params], Tensor]],
    trained: Sequence[Sequence[str]],
    tables: Sequence[str],
    params: Params,
    received: Params,
    batch: Batch,
    columns: Sequence[str],
    device: str = "cpu",
) -> Found:
    """Compute losses once, and return what becomes of tables and columns.

    Args:
        net: the model.
        losses: of all phases.
        trained: the names of what each of them trains, which requires gradients.
        tables: names of parameters.
        params, received: what the losses are given; ``params`` may be changed.
        batch: a mini-batch.
        columns: names of columns of ids.
        device: where all of these are.
    """
    watched = Watched(net.module)
    whole = [(n, v[n]) for v in (params, received) for n in tables if n in v]
    watching = watched.watching = Watching(whole, {n: batch[n] for n in columns})
    watched.train()
    with forked(device), torch.enable_grad():
        for loss, names in zip(losses, trained, strict=True):
            for name in params.keys() & names:
                params[name].requires_grad_()
            with watching:
                loss(watched, params, batch, received)
            for name in params.keys() & names:
                params[name].requires_grad_(False)
    return watching.found


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in what a function is given or gives."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [t for v in values for t in tensors_in(v)] if isinstance(values, tuple | list) else []


def _look(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> str:
    """Return what is asked of a tensor: an attribute's name for ``__get__``, nothing for the size of a row's axis."""
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return "" if name == "size" and args[1:] in ((1,), (-1,)) else name


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
