"""The machine that an experiment ran on, and the devices it has."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep import kernels
from fedkeep.core.errors import ConfigError
from fedkeep.version import __version__


def check_device(device: str) -> None:
    """Raise ConfigError if torch doesn't know the device, or it isn't there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"The device {device!r} cannot be used: {reason}. Use device='cpu'.") from error


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what the results may depend on: versions, machine, cores, a GPU, and the commit where there is one."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    return {
        "fedkeep": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": str(kernels.status()),
        **gpu,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the short hash of the source's commit; None for an installed package, which has no history."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "src" / "fedkeep").is_dir():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
