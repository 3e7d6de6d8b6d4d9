"""Which embedding tables may be cut to the rows that examples use: those a module names, and those a trace finds."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import numpy as np
from torch import nn

from fedkeep.core.errors import FedkeepError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, clone, is_state, to
from fedkeep.data import FederatedData
from fedkeep.engines.base import first_global, first_kept, train_rows
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.tables import local_rows
from fedkeep.engines.tables.differing import differing
from fedkeep.engines.tables.local_rows import allowed, bounded, holds_ids, ids_of
from fedkeep.engines.tables.trace import Found, traced
from fedkeep.methods import Method
from fedkeep.methods.client import nothing
from fedkeep.methods.server import no_state

EXAMPLES = 8
NONE = np.zeros(0, np.int64)


def looked_up(method: Method, net: Net, data: FederatedData, device: str = "cpu") -> dict[str, str]:
    """Return the tables that may be cut, with the column of ids that looks each up.

    What the module names in ``lookup`` is taken at its word. Other embeddings are looked for by a trace of the losses
    on the first client's examples, unless the method has hooks or state, which may look at whole tables. Warns of
    tables that are trained and sent whole because their rows are not independent.
    """
    declared: dict[str, str] = dict(getattr(net.module, "lookup", {}))
    rows = next((r for c in range(len(data)) if len(r := allowed(data, train_rows(data, c)))), NONE)
    found = _found(method, net, data, device, rows, declared)
    tables = {**found.columns(), **declared}
    whole = {n: why for n in tables if (why := _dependent(net, n) or _used(found, n))}
    cut = _renumbered(tables, whole.keys() | (found.otherwise.keys() - declared.keys()))
    tried = {n: c for n, c in cut.items() if n not in declared}
    differ = _differing(method, net, data, device, rows, tried) if tried else {}
    phases = method.client.phases
    decay = any(phase.optimizer.weight_decay for phase in phases)
    said = {n: "the optimiser's bounds hold for every row" for n in tables if bounded(phases, n)}
    said |= dict.fromkeys(tables if decay else (), "weight decay moves every row in each step")
    said |= {**whole, **differ}
    for name, why in said.items() if method.client.tables == "exact" else ():
        _warn(name, why, data, tables[name], rows)
    return _renumbered(cut, differ.keys())


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


def _used(found: Found, name: str) -> str:
    return f"the model uses it in {function}, too" if (function := found.otherwise.get(name)) else ""


def _found(
    method: Method, net: Net, data: FederatedData, device: str, rows: np.ndarray, declared: Mapping[str, str]
) -> Found:
    """Return what a trace shows of embeddings that are not declared."""
    client, server = method.client, method.server
    hooks = client.start or client.finish or server.send or client.state is not nothing
    tables = [n for n in _embeddings(net) if n not in declared]
    columns = [
        n for n, c in data.columns.items() if n[0] != "_" and holds_ids(c) and n not in declared.values()
    ]
    if hooks or server.state is not no_state or not tables or not columns or not len(rows):
        return Found()
    received, start = _values(method, net, data, device)
    batch = load_batch(data, rows[:EXAMPLES], device, float_type(start))
    losses = [phase.loss for phase in client.phases]
    try:
        trained = _trained(method, net, start)
        found = traced(net, losses, trained, tables, clone(start), clone(received), batch, columns, device)
    except (FedkeepError, RuntimeError, ValueError, IndexError, TypeError):
        return Found()  # the model does not fit the data: training says so, and for which client
    return Found() if found.numbers else found


def _differing(
    method: Method, net: Net, data: FederatedData, device: str, rows: np.ndarray, tables: Mapping[str, str]
) -> dict[str, str]:
    """Return found tables that may not be cut after all, each with the reason, by single examples and many."""
    phases, (_, start) = method.client.phases, _values(method, net, data, device)
    full, stops = max(phase.batch_size for phase in phases), any(phase.early_stopping for phase in phases)
    modes = (False, True) if stops else (True,)  # what is validated is cut, too
    trained = {frozenset(names) for names in _trained(method, net, start) if names}
    found = dict[str, str]()
    for size in {1, min(full, len(rows), local_rows.SMALL)}:
        batch = load_batch(data, rows[:size], device, float_type(start))
        found |= differing(Net(net.module), tables, start, batch, device, modes, trained)
    return found


def _trained(method: Method, net: Net, start: Params) -> list[list[str]]:
    """Return the names of what each phase trains."""
    names = [n for n in start if n in net.trainable()]
    return [phase.trained_names(method.split, names) for phase in method.client.phases]


def _values(method: Method, net: Net, data: FederatedData, device: str) -> tuple[Params, Params]:
    """Return what a client is sent first, and all that it has then."""
    received = to(first_global(method, net, data).params, device)
    kept = to({n: v for n, v in first_kept(method, net).items() if not is_state(n)}, device)
    return received, {**received, **kept}


def _embeddings(net: Net) -> list[str]:
    """Return the names of trained tables of embeddings that are large enough to be cut."""
    return [
        name
        for prefix, layer in net.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and (name := f"{prefix}.weight") in net.trainable()
        and len(layer.weight) >= local_rows.SMALL
    ]


def _warn(name: str, why: str, data: FederatedData, column: str, rows: np.ndarray) -> None:
    ids = data.columns.get(column)
    if ids is None or not holds_ids(ids) or not len(rows):
        return
    used = len(np.unique(ids_of(ids, rows)))
    warnings.warn(
        f"The table {name!r} is trained and sent whole, though the first client's examples use {used} of its rows: "
        f"{why}.",
        stacklevel=2,
    )
