"""What opted-out examples may touch: nothing that a client uploads, not by values, not by a breakdown, not by a loss.

A private phase may train on all of a client's examples (``Phase.examples = "all"``). Where some of them are opted out,
federated phases must not see what such a phase made, and whether it broke down must not decide if the client uploads.
A private phase on opted-in examples whose loss reads what such a phase made passes it on: what it trains is hidden too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, clone, is_state
from fedkeep.core.seeds import forked
from fedkeep.engines.batches import Stream, float_type, load_batch, usable
from fedkeep.engines.tables.local_rows import Examples, LocalTable
from fedkeep.methods import Client, Phase
from fedkeep.split import Split

READS_HIDDEN = (
    "A phase that trains federated parameters reads private ones that another phase trains on opted-out "
    "examples too, so these would influence what leaves the client. Train that phase with "
    "examples='opted_in', or leave those parameters out of the federated phase's loss."
)
READS_EARLIER = (
    "{} private {}, which an earlier run that this one goes on with trained on opted-out examples too, so these would "
    "influence what leaves the client. Begin with new private values, or train that run with examples='opted_in'."
)


def reads_hidden(net: Net) -> MethodError:
    """Return the error of a federated phase that reads what opted-out examples made, in this run or before it."""
    what = READS_EARLIER.format(
        "A phase that trains federated parameters may not read", sorted(net.opted_out)
    )
    return MethodError(what if net.opted_out else READS_HIDDEN)


class Lanes(Protocol):
    """What is asked of a local run; see ``engines.local.Lanes``."""

    net: Net
    split: Split
    client: Client
    data: Examples
    rows: Sequence[np.ndarray]
    draws: Sequence[Stream]
    device: str
    params: Params
    trainable: frozenset[str]
    tables: Sequence[Sequence[LocalTable]]

    def lane(self, position: int) -> Params:
        """Return one lane's parameters."""
        ...

    def sent_to(self, position: int) -> Params:
        """Return what one lane received."""
        ...


@dataclass(frozen=True)
class Hidden:
    """What opted-out examples make in a local run.

    Attributes:
        names: the private parameters and buffers that they train or move.
        phases: the numbers of the phases that look at them, or at what is hidden.
    """

    names: frozenset[str] = frozenset()
    phases: frozenset[int] = frozenset()


def hidden(lanes: Lanes) -> Hidden:
    """Return what opted-out examples make: by phases on all examples, and by those that read what these made.

    Which phases read it is found by their losses on a mini-batch with NaN in its place, until nothing is added.

    Raises:
        MethodError: an earlier run made something of opted-out examples, and hooks see private values.
    """
    earlier = lanes.net.opted_out & lanes.params.keys()
    if earlier and (lanes.client.start or lanes.client.finish):
        raise MethodError(READS_EARLIER.format("Hooks (start, finish) see", sorted(earlier)))
    if "opted_in" not in lanes.data.columns and not earlier:
        return Hidden()
    split, trainable = lanes.split, sorted(lanes.trainable)
    trained = [p.trained_names(split, trainable) for p in lanes.client.phases]
    phases = {k for k, p in enumerate(lanes.client.phases) if p.examples == "all"}
    if not phases and not earlier:
        return Hidden()
    names = set(earlier) | {
        n
        for n, v in lanes.params.items()
        if phases
        and n not in lanes.trainable
        and not is_state(n)
        and split.is_private(n)
        and v.is_floating_point()
    }
    names |= {n for k in phases for n in trained[k] if split.is_private(n)}
    left = [k for k in range(len(trained)) if k not in phases and not trains_federated(trained[k], split)]
    while names and (found := [k for k in left if _reads(lanes, k, names)]):
        phases |= {*found}
        names |= {n for k in found for n in trained[k]}
        left = [k for k in left if k not in phases]
    return Hidden(frozenset(names), frozenset(phases))


def made_of_all(phases: Sequence[Phase], split: Split, net: Net, data: Examples) -> frozenset[str]:
    """Return the names of the private values that opted-out examples may train or move in these phases.

    What a federated phase trains too is none of them: it would be refused.
    """
    column = data.columns.get("opted_in")
    nobody = column is None or bool(np.asarray(column, bool).all())
    if nobody or all(phase.examples != "all" for phase in phases):
        return frozenset()
    trained = [p.trained_names(split, sorted(net.trainable())) for p in phases]
    alone = {n for names in trained if not trains_federated(names, split) for n in names}
    return frozenset(alone | {n for n in net.buffers() if split.is_private(n)})


def _reads(lanes: Lanes, number: int, names: AbstractSet[str]) -> bool:
    """Tell whether a phase's loss is NaN where some values are, and else is not; of the first lane with examples."""
    phase, net, device = lanes.client.phases[number], lanes.net, lanes.device
    every = zip(lanes.rows, lanes.draws, strict=True)
    each = [usable(lanes.data, rows, phase, draws)[: phase.batch_size] for rows, draws in every]
    lane = next((k for k, rows in enumerate(each) if len(rows)), None)
    if lane is None:
        return False
    as_is, losses = lanes.lane(lane), []
    for shown in (as_is, veiled(as_is, names, net.initial(), lanes.trainable)):
        batch = load_batch(lanes.data, each[lane], device, float_type(as_is), lanes.tables[lane])
        params = {n: v.requires_grad_(n in lanes.trainable) for n, v in clone(shown).items()}
        with forked(device), net.still():
            losses.append(phase.loss(net, params, batch, clone(lanes.sent_to(lane))).detach())
    return bool(losses[1].isnan() & ~losses[0].isnan())


def veiled(
    params: Params, hidden: AbstractSet[str], initial: Mapping[str, Tensor], trainable: frozenset[str]
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
