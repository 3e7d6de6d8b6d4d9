"""Timing side by side: contenders take turns, ratios are taken within one turn, medians are reported."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent.parent / "results"


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    turns: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds of each contender by a clock, turn by turn; the order is reversed at every other turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-warm_up, turns):
        names = list(contenders)
        for name in names if turn % 2 else reversed(names):
            began = clock()
            contenders[name]()
            if turn >= 0:
                seconds[name].append(clock() - began)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Return the median, lowest and highest ratio of two contenders' times within a turn."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def write(name: str, content: Mapping[str, Any], page: str | None = None, folder: Path | None = None) -> None:
    """Write a benchmark's numbers to ``results/NAME.json``, with the machine they come from, and a page beside it."""
    from fedkeep.experiments.environment import environment

    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processor": processor(), **environment(), "threads": torch.get_num_threads()}
    text = json.dumps({**content, "environment": machine}, indent=1) + "\n"
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if page is not None:
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
    else:
        print(text)


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
