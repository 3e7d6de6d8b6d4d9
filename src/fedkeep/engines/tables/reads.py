"""Finds out what a term reads of embedding tables, where the term does not say.

A term that sees tables through the model's output alone has no gradient for a row that no example looks up; then a
client may train and send its own rows alone. A term that compares with what was received has one only for rows that
have moved; then rows cannot wait until they are looked up. Both are seen by gradients at some points, so a term that
reads rows only at other values is not found: let such a term say ``reads_parameters = True``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.draws import forked
from fedkeep.core.errors import FedkeepError
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Batch, Params, is_state, to
from fedkeep.data import FederatedData
from fedkeep.engines.base import first_global, first_kept, train_rows
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.local import slopes
from fedkeep.engines.tables.local_rows import SMALL, allowed, holds_ids, ids_of
from fedkeep.engines.tables.lookups import looked_up
from fedkeep.methods import Method, Phase
from fedkeep.methods.client import nothing
from fedkeep.methods.server import no_state
from fedkeep.methods.terms import Term

SCALES = (0.01, 0.1, 1.0)
"""How far values are moved from where they start, as standard deviations of noise."""
EXAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Seen(Term):
    """A term, and what was found of it.

    Attributes:
        term: the term.
        parameters: whether it reads tables other than through the model's output.
        compares: whether it compares tables with what was received.
    """

    term: Term
    parameters: bool
    compares: bool

    @property
    def reads_parameters(self) -> bool:
        """As it was found."""
        return self.parameters

    @property
    def reads_received(self) -> bool:
        """As it was found, or as the term says."""
        return self.compares or self.term.reads_received

    @property
    def pull(self) -> float | None:
        """None for a comparison: of what form it is, is not known."""
        return None if self.compares else self.term.pull

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value."""
        return self.term(net, params, batch, received)


def resolved(method: Method, net: Net, data: FederatedData, device: str = "cpu") -> Method:
    """Return the method as a device runs it: terms that say nothing of what they read are tried on the first client.

    The net is told which tables may be cut (``net.lookup``). Warns where a table is trained and sent whole because of a
    term. A method with state of its own keeps whole tables where its terms say nothing: state has no local rows.
    """
    net.lookup = looked_up(method, net, data, device)
    tables = tables_of(net, data)
    client = method.client
    if client.tables == "exact" and not method.chain().rowwise:
        # A row that stays as it was is changed by the upload chain (noise, a projection), so it has to be sent.
        return method.on_client(tables="whole")
    if not tables or client.tables != "exact":
        return method
    chosen = next((r for c in range(len(data)) if len(r := allowed(data, train_rows(data, c)))), None)
    stateful = client.state is not nothing or method.server.state is not no_state or client.start is not None
    if chosen is None:
        return method
    phases = []
    for phase in client.phases:
        if phase.loss.reads_parameters is None and not stateful:
            phase = phase.but(loss=_tried(method, phase, net, data, chosen[:EXAMPLES], tables, device))
        if phase.loss.reads_parameters is not False:
            _warn(phase, tables, data, chosen)
        phases.append(phase)
    return method.on_client(phases=tuple(phases))


def tables_of(net: Net, data: FederatedData) -> dict[str, str]:
    """Return the tables that could be trained by local rows, with the column that looks them up."""
    values, columns = tensors_of(net.module), {n for n, c in data.columns.items() if holds_ids(c)}
    return {n: c for n, c in net.lookup.items() if n in values and len(values[n]) >= SMALL and c in columns}


def _tried(
    method: Method,
    phase: Phase,
    net: Net,
    data: FederatedData,
    rows: np.ndarray,
    tables: Mapping[str, str],
    device: str,
) -> Term:
    try:
        found = [_reads(method, phase, net, data, rows, tables, device, scale) for scale in SCALES]
    except (FedkeepError, RuntimeError, ValueError, IndexError):
        return phase.loss  # the model does not fit the data: training says so, and for which client
    return Seen(
        term=phase.loss,
        parameters=any(still for still, _ in found),
        compares=any(moved for _, moved in found),
    )


def _reads(
    method: Method,
    phase: Phase,
    net: Net,
    data: FederatedData,
    rows: np.ndarray,
    tables: Mapping[str, str],
    device: str,
    scale: float,
) -> tuple[bool, bool]:
    """Tell whether rows that no example looks up have a gradient, where they are as received, and where they moved."""
    received = to(first_global(method, net, data).params, device)
    start = {**received, **{n: v for n, v in first_kept(method, net).items() if not is_state(n)}}
    batch = load_batch(data, rows, device, float_type(start))
    draw = torch.Generator().manual_seed(0)
    noise = {n: scale * torch.randn(start[n].shape, generator=draw, dtype=start[n].dtype) for n in tables}
    trained = phase.trained_names(method.split, [n for n in start if n in net.trainable()])
    others = {n: _not_looked_up(start[n], batch[c]) for n, c in tables.items()}
    found = []
    for moved in (False, True):
        values = {n: v.detach().clone().to(device) for n, v in start.items()}
        for name, free in others.items():
            values[name] += (noise[name] if moved else noise[name] * ~free.unsqueeze(1)).to(device)
        for name in {*trained, *tables}:
            values[name].requires_grad_()
        leaves = {n: values[n] for n in tables}
        net.train()
        with forked(device):
            grads = slopes(phase.loss(net, values, batch, received), leaves)
        found.append(any(bool((slope[others[n].to(device)] != 0).any()) for n, slope in grads.items()))
    return found[0], found[1]


def _not_looked_up(table: Tensor, ids: Tensor) -> Tensor:
    free = torch.ones(len(table), dtype=torch.bool)
    free[ids.reshape(-1).cpu()] = False
    free[0] = False  # padding
    return free


def _warn(phase: Phase, tables: Mapping[str, str], data: FederatedData, rows: np.ndarray) -> None:
    for name, column in tables.items():
        used = len(np.unique(ids_of(data.columns[column], rows)))
        warnings.warn(
            f"The table {name!r} is trained and sent whole, though the first client's examples use {used} of its rows: "
            f"{type(phase.loss).__name__} reads parameters, or does not say that it reads the model's output alone. If "
            f"it doesn't, give the term `reads_parameters = False`; to send the client's own rows anyway, use "
            f"method.on_client(tables='local').",
            stacklevel=2,
        )
