"""Adapting every client of a finished run, also by another method than it was trained with.

One FedAvg run serves many methods of personalisation: local training, fine-tuning, mixtures. ``rooted`` puts its
federated values under another method and model; ``adapt_clients`` runs the method's adaptation on each client, on all
of its training examples. Nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, misfit
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Adaptation, Adapted, Fitting, Job, LocalDevice, first_default, first_global, fit
from fedkeep.engines.adapt import Fits, one_by_one, own_default, own_split
from fedkeep.experiments.processes import processes
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run import Run
from fedkeep.methods import Adapt, Method, Sent
from fedkeep.nn.accelerate import swaps_of
from fedkeep.store import Default, MemoryStore, PrivateStore
from fedkeep.tasks.results import Model


@dataclass(kw_only=True, repr=False)
class AdaptedRun(Run):
    """A run whose clients have adapted: it is judged, written and predicts with what is each client's own since.

    Attributes:
        clients: the clients that adapted.
        private: what they kept in federation, as in the run that they adapted from.
        adapted: the store of what is each client's own now.
        stopped: by client's id, the pass that each phase with early stopping kept (0: none).
    """

    adapted: PrivateStore
    stopped: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, run: Run, clients: SomeIds, adapted: PrivateStore, stopped: Mapping[str, tuple[int, ...]]
    ) -> AdaptedRun:
        """Return a run with clients that have adapted; the run itself stays as it is."""
        known = {f.name: getattr(run, f.name) for f in fields(Run)} | {"clients": clients}
        return cls(**known, adapted=adapted, stopped=stopped)

    @property
    def personal(self) -> Model:
        """The model that is a client's own."""
        return "adapted"

    @property
    def before(self) -> Model:
        """The model that was a client's own before it adapted."""
        return super().personal

    def local_device(self, fits: Fits = one_by_one) -> LocalDevice:
        """Return the device of all clients, which holds what is each client's own."""
        device = super().local_device(fits)
        device.hold("adapted", self.adapted)
        return device

    def own(self, client: str | int) -> Params:
        """Return what is one client's own since it adapted, given its id."""
        return {n: v[0] for n, v in self.adapted.read([self.data.index(client)]).items()}

    def accuracies(self, split: str = "test") -> list[float]:
        """Return each client's accuracy on the first task (RMSE for regression), NaN without examples."""
        own = self.judge(("adapted",), split)[0].per_client("adapted")
        return [own[c][0] if c in own else float("nan") for c in self.clients]


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
            f"The federated values of this run of {run.method.name!r} don't fit {method.name!r} on "
            f"{type(module).__name__}: {fault}. Take the model that the run was made with, and the prefix of its names."
        )
    default = first_default(method, net, run.private.default.seed)
    first = first_global(method, net, run.data)
    last = run.last.but(links=first.links, optimizer=first.optimizer)
    return replace(
        run,
        net=net,
        method=method,
        server=server,
        state=first.state,
        last=last,
        private=MemoryStore(default, run.data.ids),
        history=[],
        folder=None,
        examples=None,
    )


def adapt_clients(
    run: Run,
    clients: Iterable[str | int] | None = None,
    *,
    begin: Literal["kept", "default", "initial"] = "kept",
    examples: int | None = None,
    start: Mapping[str, Params] | Mapping[int, Params] | None = None,
    workers: int = 1,
    progress: bool | None = None,
) -> AdaptedRun:
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
    if not len(chosen):
        raise ConfigError("There is no client to adapt.")
    given = {str(run.data.ids[run.data.index(c)]): values for c, values in (start or {}).items()}
    device = run.local_device(partial(_side_by_side, workers=workers) if workers > 1 else one_by_one)
    with make_progress(progress, f"adapting, {run.method.name}", len(chosen)) as bar:
        device.adapt(
            run.orders(chosen),
            Adaptation(begin=begin, examples=examples, split=""),
            start=given,
            done=lambda done: bar.update(done, {}),
        )
    stopped = {str(run.data.ids[c]): passes for c, passes in device.stopped.items()}
    return AdaptedRun.of(run, chosen, device.held("adapted"), stopped)


def own_store(run: Run) -> MemoryStore:
    """Return an empty store of what is a client's own while it adapts."""
    first = str(run.data.ids[0])
    default = own_default(run.job, own_split(run.method), run.sent(first), first)
    return MemoryStore(Default(default), run.data.ids)


def _side_by_side(job: Job, adapt: Adapt, fittings: Sequence[Fitting], workers: int) -> Iterator[Adapted]:
    """Fit clients in processes; results do not depend on how many there are."""
    if len(fittings) <= 1:
        yield from one_by_one(job, adapt, fittings)
        return
    # The stores' files stay with this process: clients' values travel with the task.
    bare = replace(job, store=MemoryStore(job.store.default, job.store.ids))
    first = fittings[0].sent
    alike = first if all(each.sent is first for each in fittings) else None
    threads = max(1, torch.get_num_threads() // workers)
    with processes(workers, threads, begin=_receive, given=(bare, adapt, alike)) as pool:
        tasks = [
            (
                each.client,
                each.rows,
                _arrays(each.start),
                None if alike is not None else _sent_arrays(each.sent),
            )
            for each in fittings
        ]
        for values, stopped in pool.map(_adapt, tasks):
            yield Adapted(_tensors(values), stopped)


_GIVEN: list[tuple[Job, Adapt, Sent | None]] = []  # of a worker process
_Arrays = dict[str, np.ndarray]  # tensors would travel as open files
_Task = tuple[int, np.ndarray, _Arrays, tuple[_Arrays, _Arrays] | None]


def _receive(job: Job, adapt: Adapt, sent: Sent | None) -> None:
    _GIVEN[:] = [(job, adapt, sent)]


def _adapt(task: _Task) -> tuple[_Arrays, tuple[int, ...]]:
    client, rows, start, given = task
    ((job, adapt, sent),) = _GIVEN
    if given is not None:
        params, state = map(_tensors, given)
        sent = Sent(params=params, state=state)
    assert sent is not None
    found = fit(job, adapt, Fitting(client, sent, rows, _tensors(start)))
    return _arrays(found.own), found.stopped


def _sent_arrays(sent: Sent) -> tuple[_Arrays, _Arrays]:
    return _arrays(sent.params), _arrays(sent.state)


def _arrays(values: Params) -> _Arrays:
    return {name: value.cpu().numpy() for name, value in values.items()}


def _tensors(values: _Arrays) -> Params:
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
