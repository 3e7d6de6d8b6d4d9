"""Clients side by side: processes that live as long as the run, one thread each, parameters in shared memory.

Two threads inside one small operation are useless, two clients side by side are not. Each result is the bits that
``sequential`` gives with one thread (``torch.set_num_threads(1)``), whatever the number of workers: a client's
training depends on its own random streams alone, and results are put together in the cohort's order.

How processes start. On Linux they are forked: start-up takes some hundredths of a second, and the data set, the model
and the method are simply there, in memory that all share until somebody writes. Fork is safe here although torch may
have threads: a worker sets its number of threads to one before it computes anything, so it never waits for a thread
that the fork has left behind (tested after multi-threaded operations and backward passes), and one that was forked
while a thread drew from torch's generator, which it would find locked for ever, ends and is started again. Where an accelerator is
visible, torch's backward pass keeps threads that a fork breaks, and elsewhere (macOS, Windows) fork is unsafe or
absent; there workers are spawned: each imports torch anew (seconds), maps the data set from a temporary folder, and
receives method and model as arguments through ``multiprocessing``. That is the one place where Python objects go from
process to process; they come from this process, never from a disk or a network.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fedkeep.core.errors import ConfigError, WorkerError, check_range
from fedkeep.core.params import nbytes, row
from fedkeep.engines.client_packets import order_packet, result_of
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Job
from fedkeep.engines.workers.pool import Pool, Start, Worker

CPUS, GROUP = Path("/sys/devices/system/cpu"), Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the number of physical cores that this process may run on, at least 1.

    Two hardware threads of one core count once (Linux; elsewhere every logical processor counts), and a container's
    limit on processor time counts as that many cores.
    """
    allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return os.cpu_count() or 1
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    try:
        return (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Return a control group's limit in whole cores (cgroup v2, then v1); a huge number if there is none."""
    try:
        if (GROUP / "cpu.max").exists():
            quota, period = (GROUP / "cpu.max").read_text(encoding="ascii").split()[:2]
        else:
            quota = (GROUP / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (GROUP / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return 1 << 20 if quota in ("max", "-1") else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return 1 << 20


HELD_BYTES = 256 << 20
"""Uploads that wait for their turn may take this much before clients are trained in the cohort's order."""
WINDOW = 4
"""Clients a worker, that training may then be ahead of its turn."""
AHEAD_BYTES = 8 << 20
"""What a client gives at most where a worker has the next one's order before it is through, which takes memory for both."""


class Workers:
    """Spreads a cohort's clients over processes with shared memory, each with one thread.

    Args:
        workers: how many; by default the physical cores that this process may use, or one for each GPU.
        start: ``"fork"`` or ``"spawn"``; by default what is safe here.
    """

    name = "workers"

    def __init__(self, workers: int | None = None, start: Start | None = None) -> None:
        check_range("[1, inf]", workers=workers)
        self.asked, self.count = workers, workers or available_cores()
        self.start = start
        self._pool: Pool | None = None
        self._end: weakref.finalize[[], Workers] | None = None

    def train(
        self, job: Job, work: Sequence[ClientToTrain], round: int, progress: float
    ) -> Iterator[ClientResult]:
        """Train clients in the workers, and yield what each gives, in their order.

        Raises:
            WorkerError: a process died twice over one client, or cannot be started.
            ConfigError: the device is neither the CPU nor a GPU of NVIDIA's.
        """
        gpus = gpus_of(job.device)
        if not work:
            return
        pool = self._pool_for(job, gpus)
        pool.grow(min(self.asked or len(gpus) or self.count, len(work)))
        common = work[0].sent
        alike = all(each.sent is common for each in work)
        turns = _Turns(pool, job, work, round, progress, pool.worker_job.sent.put(common) if alike else None)
        try:
            with one_thread():  # the workers have the cores
                yield from turns
        finally:
            pool.stop_busy()  # none are, unless the round was broken off

    def _pool_for(self, job: Job, gpus: Sequence[str]) -> Pool:
        if self._pool is not None and not self._pool.serves(job):
            self.close()
        if self._pool is None:
            self._pool = Pool(job, self.start, gpus)
            self._end = weakref.finalize(self, self._pool.close)
        return self._pool

    def close(self) -> None:
        """End the processes."""
        if self._end is not None:
            self._end()
        self._pool = self._end = None


class _Turns:
    """The clients of one round: trained largest first as workers become free, given back in their order."""

    def __init__(
        self,
        pool: Pool,
        job: Job,
        work: Sequence[ClientToTrain],
        round: int,
        progress: float,
        sent: str | None,
    ) -> None:
        self.pool, self.job, self.work = pool, job, work
        self.round, self.progress, self.sent = round, progress, sent
        self.clients = clients = [each.client for each in work]
        self.kept = job.kept(clients)
        sizes = [job.data.count(client, "train") for client in clients]
        self.waiting = sorted(range(len(clients)), key=lambda place: (-sizes[place], place))
        self.done: dict[int, ClientResult | BaseException] = {}
        self.died: set[int] = set()
        self.held = 0
        self.largest: int | None = None  # of what clients gave
        self.turn = 0

    def __iter__(self) -> Iterator[ClientResult]:
        while self.turn < len(self.clients):
            self._send()
            for worker in self.pool.answering(block=self.turn not in self.done):
                self._receive(worker)
            self._send()
            if self.turn in self.done:
                result = self.done.pop(self.turn)
                self.turn += 1
                if isinstance(result, BaseException):
                    raise result
                self.held -= size(result)
                yield result

    def _send(self) -> None:
        for worker in self.pool.free(ahead=self.largest is not None and self.largest <= AHEAD_BYTES):
            place = self._next()
            # The last clients go to whoever is free first.
            if place is None or (worker.places and len(self.waiting) <= len(self.pool.workers)):
                return
            each, kept, alike = self.work[place], row(self.kept, place), self.sent is not None
            order = order_packet(each, kept, self.round, self.progress, alike=alike)
            if self.pool.order(worker, place, order, self.sent):
                self.waiting.remove(place)

    def _next(self) -> int | None:
        """Return the position of the client to train next; None: wait for those whose turn comes first."""
        if not self.waiting or self.held <= HELD_BYTES:
            return self.waiting[0] if self.waiting else None
        first = min(self.waiting)
        return first if first < self.turn + WINDOW * len(self.pool.workers) else None

    def _receive(self, worker: Worker) -> None:
        place, *rest = worker.places
        client = self.clients[place]
        reply = self.pool.reply(worker)
        if isinstance(reply, str):
            self.waiting[:0] = rest
            if place not in self.died:
                self.died.add(place)
                self.waiting.insert(0, place)  # once more, at once
                return
            self.done[place] = self._died(client, reply)
        else:
            try:
                result = result_of(reply, self.job.method.split, client)
                self.held += size(result)
                self.largest = max(self.largest or 0, size(result))
                self.done[place] = result
            except BaseException as error:  # noqa: BLE001 - raised when it is this client's turn
                self.done[place] = error
        if isinstance(self.done[place], BaseException):
            self.waiting = [p for p in self.waiting if p < place]  # the round ends there

    def _died(self, client: int, how: str) -> WorkerError:
        return WorkerError(
            "Client {client!r}, round {round}: the process that trained it {how}, and so did one before. A system "
            "that runs out of memory kills processes: use fewer workers, or a smaller batch_size. Nothing was lost: "
            "the last finished round is kept.",
            client=self.job.data.ids[client],
            round=self.round,
            how=how,
        )


def size(result: ClientResult) -> int:
    """Return how many bytes a client's upload and what it keeps take."""
    deltas = result.upload.deltas if result.upload is not None else {}
    return nbytes(deltas) + nbytes(result.kept or {})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as a worker does."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gpus_of(device: str) -> Sequence[str]:
    """Return the GPUs on which workers compute, as ``CUDA_VISIBLE_DEVICES`` names them; none: on the CPU.

    Raises:
        ConfigError: workers cannot compute there.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ()
    if kind != "cuda":
        raise ConfigError(
            "engine='workers' spreads clients over processor cores or NVIDIA's GPUs; the device is {device!r}. Use "
            "engine='vectorised' or engine='sequential' there, or device='cpu'.",
            device=device,
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    wanted = names[int(number) : int(number) + 1] if number else names
    if not wanted:
        raise ConfigError(
            "The device is {device!r}, and this process sees {count} GPUs.", device=device, count=len(names)
        )
    return wanted
