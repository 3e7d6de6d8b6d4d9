"""Processes that compute side by side: runs of a table, cells, clients that adapt."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch


def processes(
    count: int,
    threads: int = 1,
    *,
    begin: Callable[..., object] | None = None,
    given: tuple[Any, ...] = (),
    fresh: bool = False,
) -> ProcessPoolExecutor:
    """Return an executor whose processes end when this one does, in whatever way it ends.

    Args:
        count: of processes.
        threads: of each.
        begin, given: what each calls first, and with what.
        fresh: whether every task has a process of its own.
    """
    context = multiprocessing.get_context("spawn")
    limit = 1 if fresh else None
    return ProcessPoolExecutor(count, context, _begin, (threads, begin, given), max_tasks_per_child=limit)


def _begin(threads: int, begin: Callable[..., object] | None, given: tuple[Any, ...]) -> None:
    # Else a task goes on without its parent for as long as it takes, and keeps its run's folder locked.
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    torch.set_num_threads(threads)
    if begin is not None:
        begin(*given)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
