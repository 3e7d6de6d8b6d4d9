"""Runs whose clients have adapted after federation: by the run's method, or by another one that starts from its values.

One FedAvg run serves many methods of personalisation: local training, fine-tuning, mixtures. ``rooted`` puts its
federated values under another method and model; ``adapt_clients`` runs the method's adaptation on each client. Nothing is
uploaded, and the run is not changed. Source: FURL, §6 (future work).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, misfit
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Adaptation, first_default, first_global
from fedkeep.experiments.personalize.adapting import fits_in, let_adapt
from fedkeep.methods import Method
from fedkeep.nn.accelerate import swaps_of
from fedkeep.store import MemoryStore

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run


def adapt_clients(
    run: Run,
    clients: Iterable[str | int] | None = None,
    *,
    begin: Literal["kept", "default", "initial"] = "kept",
    examples: int | None = None,
    start: Mapping[str, Params] | Mapping[int, Params] | None = None,
    workers: int = 1,
    progress: bool | None = None,
) -> Run:
    """Adapt clients on their own training examples, each from its own values.

    A client that took part in federation starts from its kept private values (from default ones, if the method's start
    anew in every round), and whatever is its own while it adapts beyond these from what it is sent.

    Args:
        run: a finished run; nothing of it is changed.
        clients: their ids; by default of all of the data.
        begin: ``"default"``: everyone starts as a new client does; ``"initial"``: from the model's values.
        examples: how many of a client's training examples, the first in a seeded order; None: all.
        start: by client's id, values to start from instead.
        workers: processes side by side; results don't depend on it.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to adapt, or ``begin`` or ``examples`` is wrong.
        DataError: there is no such client.
        MethodError: the method has no adaptation, or its adaptation trains federated parameters.
    """
    everyone = SomeIds(run.data.ids, np.arange(len(run.data)))
    chosen = everyone if clients is None else run.members(clients)
    given = {str(run.data.ids[run.data.index(c)]): values for c, values in (start or {}).items()}
    device, how = run.local_device(fits_in(workers)), Adaptation(begin=begin, examples=examples)
    found = replace(run, clients=chosen)
    found.fitted, found.stopped = let_adapt(
        device, run.orders(chosen), chosen, how, start=given, progress=progress
    )
    return found


def rooted(run: Run, model: nn.Module, method: Method, prefix: str = "") -> Run:
    """Return a run of another method and model that starts from a run's federated values.

    Args:
        run: gives data, seed, clients and federated values.
        model: the other method's model; its values are the initial private ones.
        method: the other method.
        prefix: what stands before the run's names in ``model``, e.g. ``"global_expert."``.

    Raises:
        MethodError: the run's federated values are not those that the method federates (a method that federates
            nothing takes none).
    """
    module = method.made_for(model, bool(swaps_of(run.net.module).swapped))
    net = Net(module.to(run.device))
    initial = net.initial()
    wanted = method.split.halves(module).federated(initial)
    server = {prefix + name: value for name, value in run.server.items()} if wanted else {}
    fault = misfit(wanted, server)
    if fault:
        raise MethodError(
            "The federated values of this run of {trained!r} don't fit {method!r} on "
            "{module}: {fault}. Take the model that the run was made with, and the prefix of its names.",
            trained=run.method.name,
            method=method.name,
            module=type(module).__name__,
            fault=fault,
        )
    default = first_default(method, net, run.private.default.seed)
    first = first_global(method, net, run.data)
    base = run.base.but(links=first.links, optimizer=first.optimizer)
    return replace(
        run,
        net=net,
        method=method,
        server=server,
        state=first.state,
        base=base,
        private=MemoryStore(default, run.data.ids),
        history=[],
        folder=None,
        examples=None,
    )
