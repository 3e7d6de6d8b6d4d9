"""The machine that an experiment ran on, and the devices it has."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import platform
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep import kernels
from fedkeep.core.errors import ConfigError, warn
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


def code_of(module: nn.Module) -> dict[str, str]:
    """Return a hash of the code of each class of a module that is the user's own, by its name.

    Comments and layout don't count. Installed packages' classes have versions instead; what was typed at a prompt has no
    file, and is left out.
    """
    found = {}
    for kind in {each for part in module.modules() for each in type(part).__mro__}:
        try:
            file, source = inspect.getsourcefile(kind), inspect.getsource(kind)
        except (OSError, TypeError):
            continue
        places = Path(file or "").parts
        if kind.__module__.split(".")[0] in _OTHERS or {"site-packages", "dist-packages"} & {*places}:
            continue
        plain = ast.unparse(ast.parse(textwrap.dedent(source)))
        found[f"{kind.__module__}.{kind.__qualname__}"] = hashlib.sha256(plain.encode()).hexdigest()
    return found


_OTHERS = ("torch", "fedkeep", "fedkeep_papers")


def warn_of_changed_code(folder: Path, known: Mapping[str, str], module: nn.Module) -> None:
    """Warn where classes have other code than when a run's folder was written.

    Args:
        folder: the run's.
        known: what ``code_of`` returned then.
        module: the model.
    """
    here = code_of(module)
    changed = sorted(name for name in known.keys() & here.keys() if known[name] != here[name])
    if changed:
        warn(
            f"The code of {', '.join(changed)} is not that of the run in {folder}: its values are used by other code, and "
            f"numbers may differ. Restore the code, or train again."
        )
