"""What runs inside a worker process: it waits for a client's number, trains that client, and answers.

Orders and answers are packets of ``client_packets``: headers travel as JSON, tensors through shared memory. Of a header
``turn`` says in which of the worker's two arenas they lie, and ``own`` how; ``sent`` in that of an order is the layout of
what all clients are sent, or null.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedkeep.core.allocator import tune_allocator
from fedkeep.core.packet import Packet
from fedkeep.core.seeds import repeatable
from fedkeep.data import FederatedData
from fedkeep.engines.client_packets import failed, obey
from fedkeep.engines.client_step import Job
from fedkeep.engines.workers.shared_memory import Arena, SentData

READY = b"ready"
PARENT_DIED = 1  # PR_SET_PDEATHSIG of prctl(2)
LOCKED, LOCKED_SIGNAL = 1.0, getattr(signal, "SIGALRM", 0)
"""Seconds that a forked process waits for a lock which nobody else in it can release, and the signal that ends it then."""


@dataclass
class WorkerJob:
    """What a worker is started with.

    Attributes:
        common: the fields of ``Job`` but its data: the net is on the CPU, the device without a number, as a worker sees
            one GPU alone, and the store empty: private values come with every order.
        data: the data set; forked processes share its memory, others get it as ``SentData``.
        sent: where the parent puts what all clients of a round are sent.
        parent: the parent's process number.
        forked: the process is a copy of the parent, and has all that the parent has open.
        tuned: the parent keeps the memory that it frees, so the worker does.
    """

    common: Mapping[str, Any]
    data: FederatedData | SentData
    sent: Arena
    parent: int
    forked: bool
    tuned: bool

    def job(self) -> Job:
        """Return the job as a client's training sees it."""
        data = self.data.data if isinstance(self.data, SentData) else self.data
        job = Job(data=data, **self.common)
        repeatable(job.device)
        job.net.module.to(job.device)
        return job


def serve(connection: Connection, memory: tuple[Arena, Arena], given: WorkerJob, gpu: str = "") -> None:
    """Answer orders until the parent closes the connection or dies; ``gpu``: the one that it sees, by its name."""
    torch.set_num_threads(1)  # before anything is computed: threads do not survive a fork
    # Ctrl-C reaches every process of a terminal; it is the parent that ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(given.parent)
    if given.forked:
        end_if_locked()
        release_inherited(keep={connection.fileno(), given.sent.file, *(arena.file for arena in memory)})
        gc.freeze()  # the collector shall not touch, and so copy, the parent's memory
    if gpu or not given.forked:
        # Of a GPU that it sees, torch's backward pass would take some memory.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if given.tuned:
        tune_allocator()
    job = given.job()
    going_on = send_reply(connection, READY)
    while going_on:
        try:
            order = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        reply = answer(job, memory[order["turn"]], given.sent, order)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what a model prints is not lost when the process is ended
        going_on = send_reply(connection, json.dumps(reply).encode())


def send_reply(connection: Connection, content: bytes) -> bool:
    """Send something to the parent; False: it has closed the connection, and wants no more."""
    try:
        connection.send_bytes(content)
    except ConnectionError:
        return False
    return True


def end_if_locked() -> None:
    """End this process if a thread of the parent's was drawing from torch's generator as it was forked.

    That thread is not here, so the generator's lock would never be free.
    """
    signal.signal(LOCKED_SIGNAL, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {LOCKED_SIGNAL})
    signal.setitimer(signal.ITIMER_REAL, LOCKED)
    torch.default_generator.get_state()
    signal.setitimer(signal.ITIMER_REAL, 0)


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies in whatever way (Linux; else it ends at its next wait)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


def release_inherited(keep: set[int]) -> None:
    """Release the parent's files, locks and sockets, so that nobody waits for this process to release them.

    The numbers stay taken, by the null device: an object of the parent's that closes "its" file later does no harm.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != null and number not in keep:
            try:
                os.fstat(number)
            except OSError:
                continue  # the listing's own
            os.dup2(null, number, inheritable=False)


def answer(job: Job, own: Arena, common: Arena, order: Mapping[str, Any]) -> dict[str, Any]:
    """Train one client as ordered; put what it gives back into ``own``."""
    try:
        given = own.take(order["own"])
        found = obey(job, Packet(order, given), None if order["sent"] is None else common.take(order["sent"]))
        # A hook may give back what it was given, which lies where ``put`` writes.
        here = {v.untyped_storage().data_ptr() for v in given.values()}
        again = {n: v.clone() for n, v in found.tensors.items() if v.untyped_storage().data_ptr() in here}
        return {**found.header, "turn": order["turn"], "own": own.put(found.tensors | again)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised again in the parent
        return {**failed(error).header, "turn": order["turn"], "own": own.put({})}
