"""One run whose clients train on a cluster: in Ray's tasks, or in the processes of any executor.

The run is here: its folder, private values, sums and judging. What trains is the engine ``workers``, whose processes are
elsewhere. A process builds data, model and method once, from the run's folder, so all machines must see that folder and
the data. What a client was sent and kept goes to it with each order, and comes back as ``Packet``; a process holds nothing
that would be lost with it, and another one does its clients again, with the same bits.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.describe import differences
from fedkeep.core.errors import RunError, WorkerError
from fedkeep.core.packet import Packet
from fedkeep.core.params import row
from fedkeep.core.run_files import read_info
from fedkeep.core.seeds import repeatable
from fedkeep.engines.client_packets import apart, failed, obey, order_packet, result_of, together
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Job
from fedkeep.engines.device import job_of
from fedkeep.engines.workers.workers import available_cores, gpus_of, one_thread
from fedkeep.experiments.load import simulation_in
from fedkeep.experiments.places import RETRIES, RayTasks, check_installed, installed
from fedkeep.store import Default, MemoryStore

A_PROCESS = 3
"""Bundles of clients for each process in a round: so many that one that is slow is not waited for long. On a GPU one, as Ray
begins a process for each task that has one."""


@dataclass
class _Bundle:
    """Clients that one process trains, one after the other; ``future``: their results."""

    work: Sequence[ClientToTrain]
    order: bytes
    future: Future[bytes]


class ClusterWorkers:
    """Processes of other machines that train clients, each with one thread: the bits that ``sequential`` gives.

    Args:
        make: returns the executor; called again where one is broken.
        run: the run's folder, as all machines find it.
        data: the folder of its data, likewise; None: FEDKEEP_DATA says it on each machine.
        count: how many processes; None: as many as the executor says, or as there are cores here.
    """

    name = "workers"

    def __init__(
        self, make: Callable[[], Executor], run: Path, data: Path | None = None, count: int | None = None
    ) -> None:
        self._make, self._run, self._data = make, run.absolute(), data
        self._executor = executor = make()
        there = executor.slots if isinstance(executor, RayTasks) else available_cores()
        self.count = count or there

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients there, and yield what each gives, in their order.

        Raises:
            WorkerError: one bundle of clients was lost with its process four times.
            FedkeepError: a process cannot build the run; or what a client's training raised.
        """
        bundles = self.count * (1 if gpus_of(job.device) else A_PROCESS)
        if not work:
            return
        alike = all(each.sent is work[0].sent for each in work)
        about, sent = self._about(job), Packet({"alike": alike}, work[0].sent if alike else {}).to_bytes()
        shared = self._executor.hold(sent) if isinstance(self._executor, RayTasks) else sent
        kept, flying = job.kept([each.client for each in work]), deque[_Bundle]()
        places = deque(dealt([job.data.count(each.client, "train") for each in work], bundles))

        def begun() -> _Bundle:
            mine = places.popleft()
            orders = [order_packet(work[p], row(kept, p), round, progress, alike=alike) for p in mine]
            packet = together(orders).to_bytes()
            return _Bundle([work[p] for p in mine], packet, self._submit(about, shared, packet))

        try:
            while places or flying:
                while places and len(flying) < 2 * self.count:
                    flying.append(begun())
                yield from self._results(flying.popleft(), job, about, shared)
        finally:
            for bundle in flying:  # none is, unless the round was broken off
                bundle.future.cancel()

    def close(self) -> None:
        """Leave the cluster; what trains there for this run ends."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _about(self, job: Job) -> str:
        """Return what a process builds its job from."""
        return json.dumps(
            {
                "installed": installed(),
                "here": os.getcwd(),
                "run": str(self._run),
                "data": None if self._data is None else str(self._data.absolute()),
                "entropy": job.entropy,
                "device": job.device.partition(":")[0],
                "opted_out": sorted(job.net.opted_out),
            }
        )

    def _submit(self, about: str, sent: Any, order: bytes) -> Future[bytes]:
        try:
            return self._executor.submit(train, about, sent, order)
        except BrokenExecutor:
            self._executor = self._make()
            return self._executor.submit(train, about, sent, order)

    def _results(self, bundle: _Bundle, job: Job, about: str, sent: Any) -> Iterator[ClientResult]:
        for left in reversed(range(RETRIES + 1)):
            try:
                packet = Packet.from_bytes(bundle.future.result())
                break
            except BrokenExecutor as error:
                if not left:
                    raise WorkerError(
                        "Clients {first!r} to {last!r}: each process that trained them was gone before it was done: "
                        "{why}. Out of memory, most likely: let fewer run side by side. The last finished round is "
                        "kept; --resume goes on with it.",
                        first=job.data.ids[bundle.work[0].client],
                        last=job.data.ids[bundle.work[-1].client],
                        why=error,
                    ) from error
                bundle.future = self._submit(about, sent, bundle.order)
        for each, found in zip(
            bundle.work, apart(packet), strict=False
        ):  # fewer came than work: the last raises
            yield result_of(found, job.method.split, each.client)


def dealt(sizes: Sequence[int], count: int) -> list[range]:
    """Deal neighbours into at most so many bundles of about as many examples.

    Args:
        sizes: examples of each client.
        count: bundles.
    """
    before = np.cumsum([0, *(max(1, size) for size in sizes)])
    bundle = before[:-1] * min(count, len(sizes)) // before[-1]
    cuts = [0, *(np.flatnonzero(np.diff(bundle)) + 1).tolist(), len(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(cuts)]


_TURN = threading.Lock()
"""A process trains one client at a time, as a model's values lie in its module."""


def train(about: str, sent: bytes, order: bytes) -> bytes:
    """Train the clients of an order in this process, one after the other; what a client's training raises ends it.

    Args:
        about: of the run, as JSON.
        sent: a packet of what all clients were sent, if that is the same.
        order: their orders.

    Returns:
        Their results; the last may be an error in place of one.
    """
    found = list[Packet]()
    with _TURN, one_thread():
        try:
            job, common = _job(about), Packet.from_bytes(sent)
            for one in apart(Packet.from_bytes(order)):
                found.append(obey(job, one, common.tensors if common.header["alike"] else None))
        except Exception as error:  # noqa: BLE001 - raised again where the run is, when it is this client's turn
            found.append(failed(error))
        return together(found).to_bytes()


@lru_cache(maxsize=1)
def _job(about: str) -> Job:
    """Return the job of a run, built once in a process.

    Raises:
        ConfigError: this machine has another fedkeep, Python or torch.
        RunError: it does not see the folder, or the model that it builds is another one.
    """
    told, machine = json.loads(about), platform.node()
    folder = Path(told["run"])
    check_installed(told["installed"], "The run")
    if not (folder / "run.json").exists() or not Path(told["here"]).is_dir():
        raise RunError(
            "{machine} does not see {folder}, or not {here}. Run from a folder, and with --out in one, that all "
            "machines share.",
            machine=machine,
            folder=folder,
            here=told["here"],
        )
    os.chdir(told["here"])  # names in a configuration hold from there
    data = None if told["data"] is None else Path(told["data"])
    made = simulation_in(folder, data_folder=data, device=told["device"])
    repeatable(told["device"])
    ours, theirs = made.conductor.identity["model"], read_info(folder)["identity"]["model"]
    if lines := differences(ours, theirs):
        raise RunError(
            "{machine} builds another model than the run's: {lines}. Install the same packages on all machines.",
            machine=machine,
            lines=lines[:4],
        )
    made.net.opted_out = frozenset(told["opted_out"])
    return job_of(
        made.method,
        made.net,
        made.data,
        MemoryStore(Default({}), ()),
        made.conductor.seed,
        told["device"],
        entropy=told["entropy"],
    )
