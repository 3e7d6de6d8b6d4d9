"""``prove``: what must stay reaches what leaves by declared channels alone, or by a path that is named.

A few rounds of two clients run under a tracer (``labels``, ``rounds``) whose labels say what each number may depend on.
A falsifier then changes what must stay, and looks whether anything that was proved changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from fedkeep.audit.bench import quiet
from fedkeep.audit.canaries import opted_out, out_counts, small, with_opt_out
from fedkeep.audit.findings import PROTOCOL, Allowed
from fedkeep.data import FederatedData
from fedkeep.methods import Method
from fedkeep.methods.reveals import revealed
from fedkeep.prove.falsifier import falsified
from fedkeep.prove.findings import Proof
from fedkeep.prove.rounds import run
from fedkeep.prove.verdicts import Judge, joined, worst

CLIENTS, PASSES = 2, 2
BATCHES = (6, 5, 4, 7)
"""Sizes of mini-batches, so that a pass has several; the first that leaves no example alone, for batch statistics."""

PACKED = (
    "pack_padded_sequence takes lengths as numbers, which cannot be followed. Give them to fedkeep.nn.GRU or LSTM, "
    "layer(x, lengths)."
)


def prove(
    model: nn.Module,
    method: Method,
    data: FederatedData,
    *,
    seed: int = 0,
    allow: Sequence[str] = PROTOCOL,
    name: str = "",
) -> Proof:
    """Follow what must stay through a client's round, and say by which ways it reaches what leaves.

    Args:
        model: the module; it is not changed.
        method: the method. Long phases and large mini-batches are cut; rounds go on until no label spreads further.
        data: the data set; a few examples of two clients are used, or of some more where these lack a kind of examples.
        seed: of the run, and of the falsifier's values.
        allow: as for ``fedkeep.audit.audit``: what may tell of what stays beside gradients.
        name: for the report.

    Raises:
        FedkeepError: model, method and data do not fit.
    """
    began = time.perf_counter()
    some, notes, allowed = small(data, CLIENTS), list[str](), Allowed(revealed(method), tuple(allow))
    real, traced = out_counts(some), [with_opt_out(some)]
    if len(opted_out(traced[0])) > real.sum():
        who = "Some clients have opted no example out" if real.any() else "No example is opted out"
        notes.append(f"{who}, so some were, to follow these too.")
        if any(phase.examples == "all" for phase in method.client.phases):
            traced.append(some)
            notes.append(
                "The loss on all examples leaves where none is opted out, so rounds ran without, too."
            )
    judges, cut = list[Judge](), False
    with quiet():
        for each in traced:
            short = _cut(method, each)
            made, cut = run(model, short, each, seed), cut or short != method
            judges.append(Judge(made, allowed, falsified(made, seed)))
    if cut:
        notes.append(f"Phases were cut to {PASSES} passes, mini-batches to {max(BATCHES)} examples at most.")
    *claims, last = joined([judge.claims() for judge in judges])
    if not len(opted_out(traced[0])):
        last = replace(last, against=("none is there, and no client has two to train on", *last.against))
    items = worst([judge.items() for judge in judges])
    if any("_pack_padded_sequence" in step for one in items if one.verdict == "unknown" for step in one.path):
        notes.append(PACKED)
    return Proof(
        name=name or method.name,
        items=items,
        claims=(*claims, last),
        notes=tuple(notes),
        rounds=sum(len(judge.made.taken) for judge in judges) // len(some),
        clients=len(some),
        storages=sum(judge.tracer.storages for judge in judges),
        seconds=time.perf_counter() - began,
    )


def _cut(method: Method, data: FederatedData) -> Method:
    """Return the method with short phases of small mini-batches."""
    counts = data.counts("train") - out_counts(data)
    size = next((b for b in BATCHES if all(c % b != 1 for c in counts)), max(np.max(counts), 1))
    phases = tuple(
        p.but(
            epochs=min(p.epochs, PASSES),
            steps=None if p.steps is None else min(p.steps, 4 * PASSES),
            batch_size=min(p.batch_size, int(size)),
        )
        for p in method.client.phases
    )
    return method.on_client(phases=phases)
