"""Counts the processor cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

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
