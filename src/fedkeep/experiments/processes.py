"""Processes that compute side by side: the jobs of a comparison, clients that adapt."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import torch

from fedkeep.core.allocator import is_tuned, tune_allocator
from fedkeep.core.errors import RunError


class _Process(SpawnProcess):
    """A process that an interruption at the terminal does not reach: that is for the one that started it."""

    def start(self) -> None:
        """Start it; it keeps the blocked signals of the thread that starts it, from its first moment on."""
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            super().start()
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def processes(
    count: int,
    threads: int = 1,
    *,
    begin: Callable[..., object] | None = None,
    given: tuple[Any, ...] = (),
    fresh: bool = False,
) -> Iterator[ProcessPoolExecutor]:
    """Yield an executor whose processes end when this one does, in whatever way it ends.

    After an error what runs comes to its end and what waits is not begun; after an interruption nothing is waited for.

    Args:
        count: of processes.
        threads: of each.
        begin, given: what each calls first, and with what.
        fresh: whether every task has a process of its own.

    Raises:
        RunError: one of the processes was killed.
    """
    context = _Context()
    ended, hold = context.Pipe(duplex=False)  # who waits for `ended` sees that this process let go of `hold`
    limit = 1 if fresh else None
    pool = ProcessPoolExecutor(
        count, context, _begin, (ended, threads, is_tuned(), begin, given), max_tasks_per_child=limit
    )
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        if not isinstance(error, Exception):
            hold.close()
        pool.shutdown(cancel_futures=True)
        if not isinstance(error, BrokenProcessPool):
            raise
        raise RunError(
            "A process that computed beside others ended without an answer: it was killed, perhaps because memory ran "
            "out. What is finished is kept; do the same again, with fewer workers if memory is short."
        ) from error
    finally:
        hold.close()
        ended.close()


def _begin(
    ended: Connection, threads: int, tuned: bool, begin: Callable[..., object] | None, given: tuple[Any, ...]
) -> None:
    # Else a task goes on without its parent for as long as it takes, and keeps its run's folder locked.
    threading.Thread(target=_end_with_parent, args=(ended,), name="end with parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be blocked
    torch.set_num_threads(threads)
    if tuned:
        tune_allocator()
    if begin is not None:
        begin(*given)


def _end_with_parent(ended: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([ended, parent.sentinel])
    os._exit(1)
