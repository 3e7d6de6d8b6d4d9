"""Which embedding tables may be cut to the rows that a client's examples use: declared by the module, or traced.

Losses are computed as in training, and all that PyTorch is called with is looked at: for one example and for a full
mini-batch of the first client, and in evaluation mode where phases stop early. A table may be cut if one column of ids
looks it up and nothing else reads it. A column may be renumbered if the model uses nothing of it but views, comparisons
with 0 (padding) and lookups. Then a step gives the same numbers. Where the model turns tensors into numbers of Python,
it may do something else with other examples, and nothing is found.

The same passes show whether a term reads a table other than through the model, where the term does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedkeep.core.declared import declared as of_module
from fedkeep.core.errors import FedkeepError, warn
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Batch, Params, clone, is_state, tensors_in, to
from fedkeep.core.seeds import forked
from fedkeep.data import FederatedData
from fedkeep.data.columns import Column
from fedkeep.engines.batches import load_batch
from fedkeep.engines.first_values import first_global, first_kept
from fedkeep.engines.tables import local_rows
from fedkeep.engines.tables.local_rows import allowed, bounded, holds_ids, ids_of
from fedkeep.methods import Method
from fedkeep.methods.client import nothing
from fedkeep.methods.server import no_state
from fedkeep.methods.terms import Term

SHAPES = {"shape", "size", "numel", "__len__", "nbytes"}
"""What tells how many rows a table has: fewer where it is cut."""
LOOKS = SHAPES | {"__get__", "dim", "is_floating_point", "ndimension"}
"""What tells nothing of values."""
VIEWS = frozenset(
    [
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
    ]
)
"""What gives some of a column's ids, or all of them, in another form."""
PADDING = {"eq", "ne", "gt", "__eq__", "__ne__", "__gt__"}
"""Comparisons that see no more than padding if they are made with 0: row 0 stays row 0."""
NUMBERS = frozenset(
    ["item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__", "__index__"]
)
"""What turns a tensor into numbers of Python."""
TRACE_FAILS = (FedkeepError, RuntimeError, ValueError, LookupError, TypeError)


@dataclass(frozen=True, kw_only=True)
class TracedTerm(Term):
    """A term, and whether it reads tables other than through the model's output."""

    term: Term
    reads_tables: bool

    @property
    def reads_parameters(self) -> bool:
        """As it was traced."""
        return self.reads_tables

    @property
    def reads_received(self) -> bool:
        """As the term says."""
        return self.term.reads_received

    @property
    def pull(self) -> float | None:
        """As the term says."""
        return self.term.pull

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value."""
        return self.term(net, params, batch, received)


def with_declared_tables(method: Method, net: Net, data: FederatedData, device: str = "cpu") -> Method:
    """Return the method as a device runs it, and tell the net which tables may be cut (``net.lookup``).

    What the module declares is taken at its word; other embeddings are found by a trace, and so is what
    terms read that say nothing of it. Hooks and state may look at whole tables, so a method that has them is not
    traced. Warns of tables that are trained and sent whole though a client's examples use few of their rows.
    """
    client = method.client
    columns = {n: c for n, c in data.columns.items() if holds_ids(c)}
    rows = next(
        (r for c in range(len(data)) if len(r := allowed(data, np.asarray(data.rows(c, "train"))))), None
    )
    declared = dict(of_module(net.module).lookup)
    seen = [Uses() for _ in client.phases]
    if rows is not None and not _is_stateful(method):
        seen = _traced(method, net, data, rows, device, declared)
    found = Uses.merged(seen)
    tables = {**({} if found.numbers else found.tables()), **declared}
    whole = {n: why for n in tables if (why := _dependent(net, n) or (n not in declared and found.reason(n)))}
    net.lookup = _renumbered(tables, whole.keys() | (found.otherwise.keys() - declared.keys()))
    if client.tables == "exact":
        _warn(_moved_by_optimiser(method, tables) | whole, columns, tables, rows)
        if not method.chain().rowwise:
            # A row that stays as it was is changed by the upload chain (noise, a projection), so it has to be sent.
            return method.on_client(tables="whole")
    cut = _cut(net, columns)
    if not cut or client.tables != "exact" or rows is None:
        return method
    phases = []
    for phase, uses in zip(client.phases, seen, strict=True):
        if phase.loss.reads_parameters is None and uses.outside is not None:
            phase = phase.but(loss=TracedTerm(term=phase.loss, reads_tables=bool(uses.outside & cut.keys())))
        if phase.loss.reads_parameters is not False:
            why = (
                f"{type(phase.loss).__name__} reads parameters, or does not say that it reads the model's output "
                f"alone. If it doesn't, give the term `reads_parameters = False`; to send the client's own rows "
                f"anyway, use method.on_client(tables='local')"
            )
            _warn(dict.fromkeys(cut, why), columns, cut, rows)
        phases.append(phase)
    return method.on_client(phases=tuple(phases))


def _is_stateful(method: Method) -> bool:
    client, server = method.client, method.server
    return bool(client.state is not nothing or server.state is not no_state or client.start is not None)


def _cut(net: Net, columns: Collection[str]) -> dict[str, str]:
    """Return the tables that are large enough to be cut, with the column of ids that looks each up."""
    values = tensors_of(net.module)
    return {
        n: c
        for n, c in net.lookup.items()
        if n in values and len(values[n]) >= local_rows.SMALL and c in columns
    }


def _renumbered(tables: Mapping[str, str], out: Collection[str]) -> dict[str, str]:
    """Return the tables of those columns that may be renumbered: none that stays whole, or whose table does."""
    columns = set(tables.values()) - {tables.get(n, n) for n in out}
    return {n: c for n, c in tables.items() if c in columns}


def _dependent(net: Net, name: str) -> str:
    """Return why a table's rows are not independent, as far as its layer says; empty: they may be."""
    if name in net.aliases:
        return f"it is tied to {net.aliases[name][0]!r}"
    layer = net.module.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm is not None:
            return "max_norm changes rows as they are looked up"
        if layer.scale_grad_by_freq:
            return "scale_grad_by_freq divides gradients by how often a mini-batch uses a row"
        if layer.padding_idx not in (None, 0):
            return (
                f"padding_idx is {layer.padding_idx}, and rows are renumbered; only row 0 stays where it is"
            )
    return ""


def _moved_by_optimiser(method: Method, tables: Collection[str]) -> dict[str, str]:
    """Return tables of which the optimiser moves every row, each with the reason."""
    phases = method.client.phases
    found = {n: "the optimiser's bounds hold for every row" for n in tables if bounded(phases, n)}
    if any(phase.optimizer.weight_decay for phase in phases):
        found |= dict.fromkeys(tables, "weight decay moves every row in each step")
    return found


def _warn(
    why: Mapping[str, str], columns: Mapping[str, Column], tables: Mapping[str, str], rows: np.ndarray | None
) -> None:
    for name, reason in why.items():
        ids = columns.get(tables[name])
        if ids is not None and rows is not None:
            warn(
                f"The table {name!r} is trained and sent whole, though the first client's examples use "
                f"{len(np.unique(ids_of(ids, rows)))} of its rows: {reason}."
            )


@dataclass
class Uses:
    """What a loss does with tables and columns.

    Attributes:
        lookups: the columns that look up each table.
        otherwise: by table or column, the function that the model uses it in otherwise; empty for a lookup of or by
            something else.
        outside: the tables that the term reads other than through the model; None: that is not known.
        numbers: whether the model turned a tensor into numbers of Python.
    """

    lookups: dict[str, set[str]] = field(default_factory=dict)
    otherwise: dict[str, str] = field(default_factory=dict)
    outside: set[str] | None = None
    numbers: bool = False

    @classmethod
    def merged(cls, several: Sequence[Uses]) -> Uses:
        """Return all of several losses, or of one in several passes."""
        found = cls()
        for each in several:
            for table, columns in each.lookups.items():
                found.lookups.setdefault(table, set()).update(columns)
            found.otherwise |= each.otherwise
            found.numbers |= each.numbers
            if each.outside is not None:
                found.outside = (found.outside or set()) | each.outside
        return found

    def tables(self) -> dict[str, str]:
        """Return the tables that one column looks up, whatever else reads them, with the column."""
        return {table: min(columns) for table, columns in self.lookups.items() if len(columns) == 1}

    def reason(self, table: str) -> str:
        """Return why a table has to stay whole; empty: it need not."""
        return f"the model uses it in {function}, too" if (function := self.otherwise.get(table)) else ""


def _traced(
    method: Method,
    net: Net,
    data: FederatedData,
    rows: np.ndarray,
    device: str,
    declared: Mapping[str, str],
) -> list[Uses]:
    """Return what each phase's loss does with tables and columns, where that is not declared."""
    phases, found = method.client.phases, [Uses() for _ in method.client.phases]
    hooks = method.client.finish or method.server.send
    embeddings = [n for n in _embeddings(net) if n not in declared and not hooks]
    columns = [
        n for n, c in data.columns.items() if n[0] != "_" and holds_ids(c) and n not in declared.values()
    ]
    silent = any(phase.loss.reads_parameters is None for phase in phases)
    if not (embeddings and columns) and not (silent and declared):
        return found
    full = max(phase.batch_size for phase in phases)
    modes = (True, False) if any(phase.early_stopping for phase in phases) else (True,)
    names = {*embeddings, *declared}
    for size, training in product(sorted({1, min(full, len(rows), local_rows.SMALL)}), modes):
        try:
            received = to(first_global(method, net, data).params, device)
            kept = to({n: v for n, v in first_kept(method, net).items() if not is_state(n)}, device)
            start = {**received, **kept}
            batch = load_batch(data, rows[:size], device, net.float_type)
            trainable = [n for n in start if n in net.trainable()]
            for number, phase in enumerate(phases):
                trained = phase.trained_names(method.split, trainable)
                params, sent = clone(start), clone(received)
                whole = [(n, v[n]) for v in (params, sent) for n in names & v.keys()]
                mine = clone(batch)
                watching = Watching(whole, {n: mine[n] for n in columns})
                for name in params.keys() & trained:
                    params[name].requires_grad_()
                watched = Watched(net.module)
                watched.watching = watching
                watched.train(training)
                with forked(device), torch.set_grad_enabled(training), watching:
                    phase.loss(watched, params, mine, sent)
                found[number] = Uses.merged([found[number], watching.found])
        except TRACE_FAILS:
            continue  # the model does not fit these examples: training says so, and for which client
    return found


def _embeddings(net: Net) -> list[str]:
    """Return the names of trained tables of embeddings that are large enough to be cut."""
    return [
        name
        for prefix, layer in net.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and (name := f"{prefix}.weight") in net.trainable()
        and len(layer.weight) >= local_rows.SMALL
    ]


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


class Watching(TorchFunctionMode):
    """Notes in ``found`` what becomes of columns and of tables.

    Args:
        tables, columns: the tensors, by name; a table may have several (as received, as trained).
    """

    def __init__(self, tables: Sequence[tuple[str, Tensor]], columns: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found, self.inside = Uses(outside=set()), False
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
            if self.inside and (look := _look(func, name, args)) in SHAPES:
                self.found.otherwise |= dict.fromkeys(self._among(args[:1], self._tables), look)
            return out
        if func in (F.embedding, F.embedding_bag):
            self._looked_up(func, args, given)
            return out
        columns, tables = self._among((args, given), self._columns), self._among((args, given), self._tables)
        # torch's LSTM asks on CUDA where its own weights lie.
        asked = name in NUMBERS and (name != "data_ptr" or bool(columns or tables))
        self.found.numbers |= self.inside and asked
        if columns and not self._harmless(name, args, given):
            self.found.otherwise |= dict.fromkeys(columns, name)
        elif columns and name in VIEWS:
            self._columns |= {_place(v): columns[0] for v in tensors_in(out)}
        self._read(tables, name)
        return out

    def _read(self, tables: Collection[str], name: str) -> None:
        if self.inside:
            self.found.otherwise |= dict.fromkeys(tables, name)
        elif self.found.outside is not None:
            self.found.outside |= {*tables}

    def _looked_up(self, func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        third = "offsets" if func is F.embedding_bag else "padding_idx"
        names = ("input", "weight", third, "max_norm", "norm_type", "scale_grad_by_freq")
        how = {**dict(zip(names, args, strict=False)), **given}
        tables, columns = self._among(how["weight"], self._tables), self._among(how["input"], self._columns)
        others = {n: v for n, v in how.items() if n not in ("input", "weight")}
        self.found.otherwise |= dict.fromkeys(self._among(others, self._columns), func.__name__)
        if not tables or not columns:
            # something else looks up or is looked up
            self.found.otherwise |= dict.fromkeys((*tables, *columns), "")
            return
        (table,) = tables
        self.found.lookups.setdefault(table, set()).update(columns)
        if how.get("max_norm") is not None:
            self.found.otherwise[table] = "max_norm"
        if how.get("scale_grad_by_freq"):
            self.found.otherwise[table] = "scale_grad_by_freq"
        if how.get("padding_idx") not in (None, 0):
            self.found.otherwise[table] = "padding_idx other than 0"

    def _harmless(self, name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
        first = bool(args) and bool(self._among(args[0], self._columns))
        others = self._among((args[1:], given), self._columns)
        with_zero = len(args) == 2 and not isinstance(args[1], Tensor) and args[1] == 0
        return first and not others and (name in VIEWS or (name in PADDING and with_zero))

    def _among(self, values: Any, known: Mapping[int, str]) -> list[str]:
        return [known[place] for v in tensors_in(values) if (place := _place(v)) in known]


def _look(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> str:
    """Return what is asked of a tensor: an attribute's name for ``__get__``, nothing for the size of a row's axis."""
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return "" if name == "size" and args[1:] in ((1,), (-1,)) else name


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
