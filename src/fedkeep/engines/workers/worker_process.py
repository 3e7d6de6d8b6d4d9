"""What runs inside a worker process: it waits for a client's number, trains that client, and answers.

Messages are JSON; tensors travel through shared memory. An order is ``{client, round, progress, own, sent}``, the last
two being layouts (without ``sent``, what the client was sent stands in ``own`` too); the answer is ``{layout, loss,
weight}``, ``{fault}`` or ``{error}``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedkeep.core import errors
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.errors import FedkeepError, UploadError, WorkerError
from fedkeep.core.params import Params, under
from fedkeep.core.seeds import repeatable
from fedkeep.data import FederatedData
from fedkeep.engines.client_step import ClientResult, Job, train_client
from fedkeep.engines.workers.shared_memory import Arena, SentData
from fedkeep.split import Split

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


def serve(connection: Connection, own: Arena, given: WorkerJob, gpu: str = "") -> None:
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
        release_inherited(keep={connection.fileno(), own.file, given.sent.file})
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
        reply = answer(job, own, given.sent, order)
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
        sent = common.take(order["sent"]) if "sent" in order else under("sent:", given)
        kept = under("kept:", given)
        result = train_client(job, sent, kept, order["client"], order["round"], order["progress"])
        about, values = encode_result(result)
        # A hook may give back what it was given, which lies where ``put`` writes.
        here = {v.untyped_storage().data_ptr() for v in given.values()}
        again = {n: v.clone() for n, v in values.items() if v.untyped_storage().data_ptr() in here}
        return {"layout": own.put(values | again), **about}
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised again in the parent
        return {"error": encode_error(error)}


def decode_reply(reply: Mapping[str, Any], own: Arena, split: Split, client: int) -> ClientResult:
    """Return what a worker answered; the tensors are copied out of its memory.

    Raises:
        BaseException: what was raised in the worker.
    """
    given = own.take(reply["layout"]) if "layout" in reply else {}
    return decode_result(reply, {name: value.clone() for name, value in given.items()}, split, client)


def encode_result(result: ClientResult) -> tuple[dict[str, Any], Params]:
    """Return a client's result as plain data and tensors."""
    if result.fault is not None:
        return {"fault": encode_error(result.fault)}, {}
    assert result.upload is not None
    assert result.kept is not None
    parts = {"deltas": result.upload.deltas, "rows": result.upload.rows, "kept": result.kept}
    values = {f"{part}:{n}": v for part, tensors in parts.items() for n, v in tensors.items()}
    about = {"weight": result.upload.weight, "note": result.note, "moves": result.moves}
    return {"loss": result.loss, **about}, values


def decode_result(about: Mapping[str, Any], values: Params, split: Split, client: int) -> ClientResult:
    """Return the result that ``encode_result`` was given.

    Raises:
        BaseException: what was raised where the client was trained.
    """
    if "error" in about:
        raise decode_error(about["error"])
    if "fault" in about:
        fault: Any = decode_error(about["fault"])
        return ClientResult(client, fault=fault)
    parts: dict[str, Params] = {"deltas": {}, "rows": {}, "kept": {}}
    for name, value in values.items():
        part, _, tensor = name.partition(":")
        parts[part][tensor] = value
    try:
        upload = split.arrived(parts["deltas"], about["weight"], parts["rows"])
    except UploadError as error:
        return ClientResult(client, fault=error)
    return ClientResult(
        client, upload, parts["kept"], about["loss"], note=about["note"], moves=about["moves"]
    )


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data."""
    plain = all(isinstance(a, str | int | float | bool | None) for a in error.args)
    return {
        "module": type(error).__module__,
        "type": type(error).__qualname__,
        "args": list(error.args) if plain else None,
        "text": str(error),
        "facts": _plain(error),
        "trace": "".join(traceback.format_exception(error)),
    }


def _plain(error: BaseException) -> dict[str, Any]:
    """Return an error's facts as JSON can have them."""
    facts = error.facts if isinstance(error, FedkeepError) else {}
    return {n: v if isinstance(v, str | int | float | bool | None) else str(v) for n, v in facts.items()}


def decode_error(what: Mapping[str, Any]) -> BaseException:
    """Return the error that ``encode_error`` described: of the same type and message, where that can be made again."""
    module = errors if what["module"] == errors.__name__ else sys.modules.get(what["module"])
    kind: Any = getattr(module, what["type"], None)
    error: BaseException | None = None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            error = kind(*(what["args"] if what["args"] is not None else [what["text"]]))
        except Exception:  # noqa: BLE001 - a constructor with a mind of its own
            error = None
    if error is None or str(error) != what["text"]:
        error = WorkerError("{kind}: {why}", kind=what["type"], why=what["text"])
    elif isinstance(error, FedkeepError):
        error.facts = what["facts"]
    error.add_note(f"In the worker process:\n{what['trace']}")
    return error
