"""What there is before the first round: at the server, at a client that was never trained, and what clients send along."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Params, prefixed, to
from fedkeep.methods import Global, Kept, Method, Roster, WeightedMean
from fedkeep.methods.hook_checks import UPLOAD, as_state
from fedkeep.store import Default, PrivateStore


def first_global(method: Method, net: Net, data: Roster, population: int | None = None) -> Global:
    """Return what a server has before the first round, on the CPU; cohorts are drawn from ``population`` clients, or
    from all.
    """
    params = to(method.split.halves(net.module).federated(net.initial()), "cpu")
    state = to(as_state(f"server's state of {method.name!r}", lambda: method.server.state(net, data)), "cpu")
    links = to(method.chain().server_state({**params, **to(declared(method, net), "cpu")}), "cpu")
    return Global(
        params=params,
        state=state,
        links=links,
        trainable=net.trainable(),
        clients=data,
        population=len(data) if population is None else population,
    )


def trained_initial(net: Net) -> Params:
    """Return the module's own values of what requires gradients."""
    trained = net.trainable()
    return {n: v for n, v in net.initial().items() if n in trained}


def first_kept(method: Method, net: Net) -> Params:
    """Return what a new client keeps before ``Init`` has its say, state under ``client/NAME``."""
    halves, initial = method.split.halves(net.module), net.initial()
    links = method.chain().client_state({**halves.federated(initial), **declared(method, net)})
    own = as_state(f"client's state of {method.name!r}", lambda: method.client.state(net))
    state = {**own, **prefixed(UPLOAD, links)}
    return Kept(params=halves.private(initial), state=state).flat


def first_default(method: Method, net: Net, seed: int) -> Default:
    """Return what clients keep that were never trained, each its own draw where the method says so."""
    return Default(first_kept(method, net), method.client.keep.value, seed, net.buffers())


def declared(method: Method, net: Net) -> Params:
    """Return zeros of what clients send along, under ``server/NAME``: names, shapes and types that may leave.

    Raises:
        MethodError: they are no tensors, or no floating numbers, and the server takes a mean.
    """
    who = f"sends of {method.name!r}"
    along = as_state(who, lambda: method.client.sends(net))
    whole = [n for n, v in along.items() if not v.is_floating_point()]
    if whole and type(method.server.reduce) is WeightedMean:
        raise MethodError(
            "The {hook} declares {name!r} as {got}, of which the server's mean takes the first client's. Send floats, "
            "or reduce otherwise (Server.reduce).",
            hook=who,
            name=whole[0],
            got=along[whole[0]].dtype,
        )
    return prefixed(SERVER, along)


def defaults(store: PrivateStore, clients: Sequence[int] | np.ndarray) -> Params:
    """Return the values of clients that were never seen, stacked."""
    rows = [store.default(store.ids[int(c)]) for c in clients]
    return {name: torch.stack([row[name] for row in rows]) for name in store.default.initial}
