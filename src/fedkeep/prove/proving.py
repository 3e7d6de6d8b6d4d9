"""``prove``: what must stay reaches what leaves by declared channels alone, or by a path that is named.

A few rounds of two clients run under a tracer (``labels``, ``rounds``) whose labels say what each number may depend on.
A falsifier then changes what must stay, and looks whether anything that was proved changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import nn

from fedkeep.audit.bench import quiet
from fedkeep.audit.canaries import OUT, opted_out, small, with_opt_out
from fedkeep.audit.findings import PROTOCOL, Allowed
from fedkeep.data import FederatedData
from fedkeep.methods import Method
from fedkeep.methods.reveals import revealed
from fedkeep.prove.falsifier import falsified
from fedkeep.prove.findings import Proof
from fedkeep.prove.rounds import run
from fedkeep.prove.verdicts import Judge

CLIENTS, PASSES = 2, 2
BATCHES = (6, 5, 4, 7)
"""Sizes of mini-batches, so that a pass has several; the first that leaves no example alone, for batch statistics."""


def prove(
    model: nn.Module, method: Method, data: FederatedData, *, seed: int = 0, allow: Sequence[str] = PROTOCOL,
    name: str = "",
) -> Proof:  # fmt: skip
    """Follow what must stay through a client's round, and say by which ways it reaches what leaves.

    Args:
        model: the module; it is not changed.
        method: the method. Long phases and large mini-batches are cut; rounds go on until no label spreads further.
        data: the data set; a few examples of two clients are used.
        seed: of the run, and of the falsifier's values.
        allow: as for ``fedkeep.audit.audit``: what may tell of what stays beside gradients.
        name: for the report.

    Raises:
        FedkeepError: model, method and data do not fit.
    """
    began = time.perf_counter()
    some, notes = small(data, CLIENTS), list[str]()
    if OUT not in some.columns:
        some = with_opt_out(some)
        notes.append("No example is opted out, so some were, to follow these too.")
    cut = _cut(method, [len(some.rows(c, "train")) - len(opted_out(some, c)) for c in range(len(some))])
    if cut != method:
        notes.append(f"Phases were cut to {PASSES} passes, mini-batches to {max(BATCHES)} examples at most.")
    with quiet():
        made = run(model, cut, some, seed)
        found = falsified(made, seed)
    judge = Judge(made, Allowed(revealed(method), tuple(allow)), found)
    return Proof(
        name=name or method.name, items=tuple(judge.items()), claims=judge.claims(), notes=tuple(notes),
        rounds=len(made.taken) // len(some), clients=len(some), storages=made.tracer.storages,
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def _cut(method: Method, counts: Sequence[int]) -> Method:
    """Return the method with short phases of small mini-batches."""
    size = next((b for b in BATCHES if all(c % b != 1 for c in counts)), max(np.max(counts), 1))
    phases = tuple(
        p.but(
            epochs=min(p.epochs, PASSES), steps=None if p.steps is None else min(p.steps, 4 * PASSES),
            batch_size=min(p.batch_size, int(size)),
        )
        for p in method.client.phases
    )  # fmt: skip
    return method.on_client(phases=phases)
