"""What opted-out examples may touch: nothing that a client uploads, not by values, not by a breakdown, not by a loss.

A private phase may train on all of a client's examples (``Phase.examples = "all"``). Where some of them are opted out,
federated phases must not see what such a phase made, and whether it broke down must not decide if the client uploads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.params import Params, is_state
from fedkeep.engines.tables.local_rows import Examples
from fedkeep.methods import Phase
from fedkeep.split import Split

READS_HIDDEN = (
    "A phase that trains federated parameters reads private ones that another phase trains on opted-out "
    "examples too, so these would influence what leaves the client. Train that phase with "
    "examples='opted_in', or leave those parameters out of the federated phase's loss."
)


def tainted(
    data: Examples,
    phases: Sequence[Phase],
    split: Split,
    params: Mapping[str, Tensor],
    trainable: frozenset[str],
) -> set[str]:
    """Return the private parameters and buffers that a phase on all examples trains or moves; none without opt-out."""
    if "opted_in" not in data.columns:
        return set()
    names = sorted(trainable)
    trained = {
        n for p in phases if p.examples == "all" for n in p.trained_names(split, names) if split.is_private(n)
    }
    moves = any(p.examples == "all" for p in phases)
    buffers = {
        n
        for n, v in params.items()
        if moves and n not in trainable and not is_state(n) and split.is_private(n) and v.is_floating_point()
    }
    return trained | buffers


def veiled(
    params: Params, hidden: set[str], initial: Mapping[str, Tensor], trainable: frozenset[str]
) -> Params:
    """Return parameters with hidden ones shown as NaN, so that any use of them shows in the loss.

    A buffer is hidden where it has been moved from its initial value; what was never moved tells nothing.
    """
    out = dict(params)
    for name in hidden & params.keys():
        if name in trainable:
            out[name] = torch.full_like(params[name], torch.nan)
        else:
            start = initial[name].to(params[name].device)
            moved = params[name] != start
            if bool(moved.any()):
                out[name] = torch.where(moved, torch.nan, params[name])
    return out


def trains_federated(names: Sequence[str], split: Split) -> bool:
    """Tell whether a phase that trains ``names`` trains something that leaves the client."""
    return not all(split.is_private(n) for n in names)
