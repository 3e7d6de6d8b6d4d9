"""Rounds on workers, and clients whose training does something else in a worker process."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, declare, methods, sgd
from fedkeep.engines import Workers
from fedkeep.engines.workers.pool import start_method
from tests.engines.test_round import METHOD
from tests.tiny import Logits, Rounds, classes, everyone, job, pairs, same_bits

FURL = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.2, momentum=0.5)))
DATA = classes(counts=(5, 9, 3, 7, 4, 6), kind="f4")
FORK = pytest.mark.skipif(start_method() != "fork", reason="the test's own classes go to the workers by fork")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="counts processes by /proc")


def rounds(
    engine: Any, cohorts: list[list[int]], model: Callable[[], nn.Module] = Logits, **options: Any
) -> Any:
    """Return the server's parameters, everybody's private values and the reports after these cohorts."""
    work = job(model(), options.pop("method", FURL), options.pop("data", DATA), **options)
    run = Rounds(work, engine)
    reports = [run(cohort) for cohort in cohorts]
    about = [repr(dataclasses.replace(r, seconds=0, aggregate_seconds=0)) for r in reports]
    return run.server.params, everyone(work.store, len(work.data)), about


def check(found: Any, expected: Any) -> None:
    assert same_bits(found[0], expected[0])
    assert same_bits(found[1], expected[1])
    assert found[2] == expected[2]


def processes(engine: Workers) -> list[int]:
    return [w.process.pid for w in engine._pool.workers if w.process.pid is not None]


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Tell whether processes that are no children of this one have ended within some seconds."""
    until = time.monotonic() + seconds
    left = pids
    while left and time.monotonic() < until:
        left = [
            p
            for p in left
            if Path(f"/proc/{p}").exists() and " Z " not in Path(f"/proc/{p}/stat").read_text()
        ]
        time.sleep(0.005)
    return not left


class Scripted(nn.Module):
    """A linear model that does something else on an example that begins with 13, in a worker process."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.user = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.act = act
        declare(self, per_example=("user",))

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 13).any()) and multiprocessing.parent_process() is not None:
            self.act()
        return self.w * x[:, 0] + self.user


def scripted(act: Callable[[], None]) -> dict[str, Any]:
    """Return options of ``rounds``: client ``bad`` is the third of the cohort, and the largest."""
    many = [(1.0, 2.0)] * 3
    data = pairs({"a": [(1, 1)], "b": [(2, 1)], "bad": [(13.0, 1.0), *many], "d": [(2, 2), (1, 0)]})
    return {"model": lambda: Scripted(act), "method": METHOD, "data": data}


def throw(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act
