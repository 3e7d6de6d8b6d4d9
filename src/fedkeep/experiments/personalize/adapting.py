"""Letting clients adapt on the device that holds them, one after the other or in processes side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fedkeep.core.modes import with_gradients
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params, prefixed, under
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Adaptation, Adapted, Fitting, Job, LocalDevice, Order, fit
from fedkeep.engines.adapt import Fits, one_by_one
from fedkeep.experiments.processes import processes
from fedkeep.experiments.progress import make_progress
from fedkeep.methods import Adapt, Sent
from fedkeep.store import MemoryStore

Passes = tuple[int, ...]
"""For each phase of adaptation the pass that early stopping kept; 0 without."""


@with_gradients
def let_adapt(
    device: LocalDevice,
    orders: Iterable[Order],
    clients: SomeIds,
    adaptation: Adaptation,
    *,
    start: Mapping[str, Params] | None = None,
    progress: bool | None = None,
) -> tuple[dict[str, Params], dict[str, Passes]]:
    """Let clients adapt; return by id what is each one's own, and its passes.

    Args:
        device: holds the clients.
        orders: what the server sends each of them, in their order.
        clients: who.
        adaptation: how; nothing is judged.
        start: by client's id, values to start from instead.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to adapt.
        MethodError: the method has no adaptation, or its adaptation trains federated parameters.
    """
    with make_progress(progress, f"adapting, {device.job.method.name}", len(clients)) as bar:
        device.adapt(
            orders, replace(adaptation, split=""), start=start, done=lambda done: bar.update(done, {})
        )
    held, of = device.held(adaptation.name), dict(zip(clients, clients.positions.tolist(), strict=True))
    own = {name: {n: v[0] for n, v in held.read([client]).items()} for name, client in of.items()}
    return own, {name: device.stopped[client] for name, client in of.items()}


def fits_in(workers: int) -> Fits:
    """Return what fits clients: in so many processes, or one after the other where it is one."""
    return partial(side_by_side, workers=workers) if workers > 1 else one_by_one


def side_by_side(job: Job, adapt: Adapt, fittings: Sequence[Fitting], workers: int) -> Iterator[Adapted]:
    """Fit clients in processes; results do not depend on how many there are."""
    # The stores' files stay with this process: clients' values travel with the task, and so does what a client is sent
    # where not all are sent the same; as packets, since tensors would travel as open files.
    bare, sent = replace(job, store=MemoryStore(job.store.default, job.store.ids)), fittings[0].sent
    alike = all(each.sent is sent for each in fittings)
    given, threads = (bare, adapt, sent if alike else None), max(1, torch.get_num_threads() // workers)
    with processes(workers, threads, begin=_take, given=given) as pool:
        tasks = (
            Packet(
                {"client": each.client},
                {"rows": torch.from_numpy(each.rows)}
                | prefixed("start:", each.start)
                | prefixed("sent:", {} if alike else each.sent.flat),
            ).to_bytes()
            for each in fittings
        )
        for answer in pool.map(_fitted, tasks):
            found = Packet.from_bytes(answer)
            yield Adapted(found.tensors, tuple(found.header["stopped"]))


_GIVEN: list[Any] = []
"""Of a worker process: job, adaptation, and what every client is sent."""


def _take(*given: object) -> None:
    _GIVEN[:] = given


def _fitted(task: bytes) -> bytes:
    (job, adapt, alike), told = _GIVEN, Packet.from_bytes(task)
    sent = Sent.of(under("sent:", told.tensors)) if alike is None else alike
    rows, start = told.tensors["rows"].numpy(), under("start:", told.tensors)
    found = fit(job, adapt, Fitting(told.header["client"], sent, rows, start))
    return Packet({"stopped": found.stopped}, found.own).to_bytes()
