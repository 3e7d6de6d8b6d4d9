"""Adapting every client of a finished run, also by another method than it was trained with.

One FedAvg run serves many methods of personalisation: local training, fine-tuning, mixtures. ``rooted`` puts its
federated values under another method and model; ``adapt_clients`` runs the method's adaptation on each client, on all
of its training examples. Nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params, misfit
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Adaptation, Adapted, Fitting, Job, Judgement, first_default, first_global, fit
from fedkeep.engines.adapt import kept_values, one_by_one
from fedkeep.experiments.personalize import numpy_seed
from fedkeep.experiments.processes import processes
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run import Run
from fedkeep.methods import Adapt, Method, Sent
from fedkeep.nn.accelerate import swaps_of
from fedkeep.store import MemoryStore, PrivateStore


@dataclass(frozen=True)
class AdaptedClients:
    """Clients after adaptation.

    Attributes:
        run: the run whose federated values they adapted from.
        clients: their ids.
        store: what is each client's own now.
        stopped: by client's id, the pass that each phase with early stopping kept (0: none).
    """

    run: Run
    clients: SomeIds
    store: PrivateStore
    stopped: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def judge(self, split: str = "test") -> list[Judgement]:
        """Return a judgement for each task, of the clients' own models on their own examples of a split."""
        device = self.run.local_device()
        device.hold("adapted", self.store)
        judged = device.judge(self.run.orders(self.clients), split, ("adapted",))
        return [one.of("adapted") for one in judged]

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """Return metrics over all examples; ``accuracy_user_mean`` is the unweighted mean over clients."""
        return {name: value for judged in self.judge(split) for name, value in judged.metrics().items()}

    def accuracies(self, split: str = "test") -> list[float]:
        """Return each client's accuracy on the first task (RMSE for regression), NaN without examples."""
        own = self.judge(split)[0].per_client()
        return [own[c][0] if c in own else float("nan") for c in self.clients.positions.tolist()]

    def own(self, client: str | int) -> Params:
        """Return what is one client's own, given its id."""
        return {name: value[0] for name, value in self.store.read([self.run.data.index(client)]).items()}


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
    default = first_default(method, net, numpy_seed(run))
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
    start: Mapping[str, Params] | Mapping[int, Params] | None = None,
    workers: int = 1,
    progress: bool | None = None,
) -> AdaptedClients:
    """Adapt clients on all of their training examples, each from its own values.

    A client that took part in federation starts from its kept private values (from default ones, if the method's start
    anew in every round), and whatever is its own while it adapts beyond these from what it is sent.

    Args:
        run: a finished run; nothing of it is changed.
        clients: their ids; by default of all of the data.
        start: by client's id, values to start from instead.
        workers: processes side by side; results don't depend on it.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to adapt.
        DataError: there is no such client.
        MethodError: the method has no adaptation.
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
            Adaptation(split=""),
            start=given,
            done=lambda done: bar.update(done, {}),
        )
    stopped = {str(run.data.ids[c]): passes for c, passes in device.stopped.items()}
    return AdaptedClients(run, chosen, device.held("adapted"), stopped)


def kept(run: Run, client: str | int) -> Params:
    """Return a client's private values from federation, given its id; none, if it or the method keeps none."""
    return kept_values(run.job, run.data.index(client))


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
