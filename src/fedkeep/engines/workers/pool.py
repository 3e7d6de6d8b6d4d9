"""The worker processes of one run: started, given orders, replaced when one dies, ended."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from fedkeep.core.allocator import is_tuned
from fedkeep.core.errors import ConfigError, WorkerError, warn
from fedkeep.core.net import Net, compiled_layer
from fedkeep.core.packet import Packet
from fedkeep.core.params import clone
from fedkeep.engines.client_step import Job
from fedkeep.engines.workers.shared_memory import Arena, SentData
from fedkeep.engines.workers.worker_process import LOCKED_SIGNAL, READY, WorkerJob, serve
from fedkeep.store import Default, MemoryStore

Start = Literal["fork", "spawn"]
PATIENCE = 10.0
"""Seconds that a process which is killed or about to end is waited for."""
SILENCE = 600.0
"""Seconds without an answer after which a word is said."""
TRIES = 30
"""How many processes of a pool may begin with a lock that another thread held, and are started again."""


def start_method() -> Start:
    """Return how workers start here: see ``engines.workers``."""
    return "fork" if sys.platform == "linux" and not torch.accelerator.is_available() else "spawn"


@dataclass(eq=False)
class Worker:
    """One process, as its parent sees it.

    Attributes:
        process, connection: its own.
        memory: where orders and answers lie; in the second, if it was given a client before it was through with another.
        gpu: the GPU that it sees; empty: none.
        ready: it has started.
        places: the clients that it was given, by position in the cohort; it trains the first.
        turn: in which memory the last one's order lies.
    """

    process: BaseProcess
    connection: Connection
    memory: tuple[Arena, Arena]
    gpu: str
    ready: bool = False
    places: deque[int] = field(default_factory=deque)
    turn: int = 0

    def ends(self) -> bool:
        """Wait for the process to end, not for ever; ``join`` may, as a forked process lets go of what that waits at."""
        until = time.monotonic() + PATIENCE
        while self.process.exitcode is None and time.monotonic() < until:
            time.sleep(0.001)
        return self.process.exitcode is not None

    def end(self) -> None:
        """Kill the process, and give back what its parent holds of it."""
        self.process.kill()
        ended = self.ends()
        self.connection.close()
        for arena in self.memory:
            arena.close()
        if ended:
            self.process.close()
        else:
            warn(
                f"The worker process {self.process.pid} was killed and has not ended after {PATIENCE:g} s: the system "
                f"still waits for something of its, e.g. a disk. It ends when that comes."
            )


class Pool:
    """The workers of one job.

    Args:
        job: what they train.
        start: ``"fork"`` or ``"spawn"``; by default what is safe here.
        gpus: of this machine, by name: a new worker gets one of those that fewest have. Empty: all compute on the CPU.

    Raises:
        ConfigError: this process may not have children, or a layer is compiled: in a forked process that never ends.
    """

    def __init__(self, job: Job, start: Start | None = None, gpus: Sequence[str] = ()) -> None:
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "This process is a daemon of multiprocessing, which may not have children, so it cannot start workers. "
                "Use engine='sequential' here, or start this process with daemon=False."
            )
        if compiled := compiled_layer(job.net.module):
            raise ConfigError(
                "Workers cannot train a model with compiled parts, and {layer} is (torch.compile). Use "
                "engine='sequential', or give the model uncompiled.",
                layer=compiled,
            )
        self.start = start or start_method()
        self.job, self.parent, self.gpus = job, os.getpid(), gpus or ("",)
        forked = self.start == "fork"
        common = {one.name: getattr(job, one.name) for one in fields(job) if one.name != "data"} | {
            "net": job.net if forked else _on_cpu(job.net),
            "store": MemoryStore(Default({}), ()),
            "device": job.device.partition(":")[0],
            "after_step": None,
        }
        data = job.data if forked else SentData(job.data)
        self.worker_job = WorkerJob(common, data, Arena(), self.parent, forked, is_tuned())
        self.workers: list[Worker] = []
        self.locked = 0

    def serves(self, job: Job) -> bool:
        """Tell whether the workers can train for this job too."""
        ours = self.job
        same = ours.net is job.net and ours.data is job.data
        return same and (ours.seed, ours.entropy, ours.method, ours.device) == (
            job.seed,
            job.entropy,
            job.method,
            job.device,
        )

    def grow(self, count: int) -> None:
        """Start workers until there are ``count``."""
        while len(self.workers) < count:
            self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(self.start)
        ours, theirs = context.Pipe()
        memory = Arena(), Arena()
        taken = [worker.gpu for worker in self.workers]
        gpu = min(self.gpus, key=taken.count)
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, memory, self.worker_job, gpu), name="fedkeep worker", daemon=True
        )
        with _undisturbed():  # until it is among the workers, which are ended whatever happens
            process.start()
            theirs.close()  # so that the process's death ends the connection
            self.workers.append(Worker(process, ours, memory, gpu))

    def free(self, ahead: bool) -> list[Worker]:
        """Return the workers that can be given an order: those that train nobody, then, if ``ahead``, those with no next."""
        ready = [w for w in self.workers if w.ready and len(w.places) < (2 if ahead else 1)]
        return sorted(ready, key=lambda w: len(w.places))

    def order(self, worker: Worker, place: int, order: Packet, sent: str | None) -> bool:
        """Let a worker that is free train a client; False: it has died meanwhile.

        Args:
            worker: who.
            place: the client's, in the round.
            order: to train it.
            sent: the layout of what all clients were sent; None: what this one was sent is in its order.
        """
        turn = 1 - worker.turn if worker.places else 0
        header = {**order.header, "sent": sent, "turn": turn, "own": worker.memory[turn].put(order.tensors)}
        try:
            worker.connection.send_bytes(json.dumps(header).encode())
        except OSError:
            if not worker.places:
                self._replace(worker)  # it died idle, which is nobody's fault
            return False
        worker.places.append(place)
        worker.turn = turn
        return True

    def answering(self, *, block: bool) -> list[Worker]:
        """Return the workers that have answered or died; wait for one if ``block``, not always without a word."""
        asked = {w.connection: w for w in self.workers if not w.ready or w.places}
        answers = wait(list(asked), SILENCE if block else 0)
        if block and not answers:
            warn(
                f"No worker has answered for {SILENCE:g} s. If no client takes that long, something that was locked "
                f"when the processes began never ends in them: stop the run, and go on with engine='sequential'."
            )
            answers = wait(list(asked))
        found = [asked[c] for c in answers]  # type: ignore[index]
        for worker in found:
            if not worker.ready:
                self._welcome(worker)
        return [w for w in found if w.places]

    def _welcome(self, worker: Worker) -> None:
        try:
            worker.ready = worker.connection.recv_bytes() == READY
        except (EOFError, OSError):
            code = self._bury(worker)
            if self.start == "fork" and code == -LOCKED_SIGNAL and self.locked < TRIES:
                self.locked += 1
                self._start()
                return
            advice = (
                " Where processes are spawned, the script that calls simulate must do so under "
                "`if __name__ == '__main__':`, and model and method must be importable; or use engine='sequential'."
                if self.start == "spawn"
                else " Use engine='sequential' to train in this process."
            )
            raise WorkerError(
                "A worker process could not start: it {how}.{advice}", how=how_ended(code), advice=advice
            ) from None

    def reply(self, worker: Worker) -> Packet | str:
        """Return a worker's answer, copied out of its memory; or how it died over its client, and another is starting."""
        try:
            header: dict[str, Any] = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return self._replace(worker)
        worker.places.popleft()
        return Packet(header, clone(worker.memory[header["turn"]].take(header["own"])))

    def _replace(self, worker: Worker) -> str:
        code = self._bury(worker)
        self._start()
        return how_ended(code)

    def _bury(self, worker: Worker) -> int | None:
        """End a process; return the code with which it had ended, if it had."""
        self.workers.remove(worker)
        worker.ends()  # its connection is at its end, so it is about to be gone, if it isn't
        code = worker.process.exitcode
        worker.end()
        return code

    def stop_busy(self) -> None:
        """End the workers that are training, e.g. because the round was broken off."""
        busy = [w for w in self.workers if w.places]
        self.workers = [w for w in self.workers if not w.places]
        for worker in busy:
            worker.end()

    def close(self) -> None:
        """End all workers; they hold nothing that would be lost."""
        if os.getpid() != self.parent:
            return  # a forked copy of this object: the workers are not its children
        for worker in self.workers:
            worker.process.kill()
        while self.workers:
            self.workers.pop().end()
        self.worker_job.sent.close()
        if isinstance(self.worker_job.data, SentData):
            self.worker_job.data.arena.close()


def how_ended(code: int | None) -> str:
    """Say what a process's exit code means."""
    if code is None or code >= 0:
        return f"ended with code {code}"
    name = next((f" ({known.name})" for known in signal.Signals if known == -code), "")
    return f"was killed by signal {-code}{name}"  # most real-time signals have no name


def _on_cpu(net: Net) -> Net:
    """Return a copy whose values lie in the CPU's memory."""
    made = copy.deepcopy(net)
    made.module.cpu()
    return made


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Start a process with Ctrl-C held back, until it can tell that it isn't meant."""
    masked = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masked else None
    try:
        with warnings.catch_warnings():
            # Python ≥ 3.12 warns of fork beside threads: see engines.workers for why it does no harm here.
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
