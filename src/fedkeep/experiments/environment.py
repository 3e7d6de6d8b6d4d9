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
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from fedkeep.core.errors import ConfigError, warn
from fedkeep.kernels import native
from fedkeep.version import __version__

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Kinds that people have; torch lists many that are nobody's."""


def check_device(device: str) -> None:
    """Raise ConfigError if torch doesn't know the device, or it isn't there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        if str(device).partition(":")[0] not in DEVICES:
            reason = f"the devices are {', '.join(DEVICES)}"
        raise ConfigError(
            "The device {device!r} cannot be used: {why}. Use device = 'cpu', or for NVIDIA's GPUs 'cuda' with a torch "
            "that was built for it (fedkeep doctor).",
            device=device,
            why=reason,
        ) from error


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
        "kernels": str(native.status()),
        **gpu,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the short hash of the source's commit; None for an installed package, which has no history."""
    return _commit_of(Path(__file__).resolve().parents[3])


@cache
def _commit_of(root: Path) -> str | None:
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
    kinds = {each for part in module.modules() for each in type(part).__mro__}
    hashes = {f"{kind.__module__}.{kind.__qualname__}": _hash_of(kind) for kind in kinds}
    return {name: each for name, each in hashes.items() if each is not None}


def _hash_of(kind: type) -> str | None:
    """Return a class's entry of ``code_of``, read once: finding a class in its file parses all of the file."""
    if kind not in _HASHES:
        _HASHES[kind] = _read_hash(kind)
    return _HASHES[kind]


def _read_hash(kind: type) -> str | None:
    if kind.__module__.split(".")[0] in _OTHERS:
        return None
    try:
        file = inspect.getsourcefile(kind)
        if {"site-packages", "dist-packages"} & {*Path(file or "").parts}:
            return None
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return None
    plain = ast.unparse(ast.parse(textwrap.dedent(source)))
    return hashlib.sha256(plain.encode()).hexdigest()


_HASHES: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()
_OTHERS = ("torch", "fedkeep", "fedkeep_papers")


def warn_of_changed_code(run: str, known: Mapping[str, str], module: nn.Module) -> None:
    """Warn where classes have other code than when a run was made.

    Args:
        run: which it is, in words.
        known: what ``code_of`` returned then.
        module: the model.
    """
    here = code_of(module)
    changed = sorted(name for name in known.keys() & here.keys() if known[name] != here[name])
    if changed:
        warn(
            f"The code of {', '.join(changed)} is not that of {run}: its values are used by other code, and "
            f"numbers may differ. Restore the code, or train again."
        )
