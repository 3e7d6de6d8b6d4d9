"""Peers live in environments of their own, with fedkeep for its cases: ``benchmarks.speed --install-peers``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

TORCH = "torch==2.13.0"  # first: a plain "torch" may pull gigabytes for a GPU
PACKAGES = {"flower": "flwr[simulation]>=1.41,<1.43", "pfl": "pfl[pytorch]==0.6.0"}


def python_of(peer: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment, whether it is there or not."""
    return folder / peer / "bin" / "python"


def install(peer: str, folder: Path) -> str | None:
    """Make a peer's environment if it is not there; return what went wrong, or None."""
    done = folder / peer / "installed"
    if done.exists():
        return None
    python = str(python_of(peer, folder))
    print(f"making the environment of {peer} in {folder / peer} ...", flush=True)
    commands = (
        [sys.executable, "-m", "venv", str(folder / peer)],
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", TORCH],
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", PACKAGES[peer], str(ROOT)],
    )
    for command in commands:
        try:
            run = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if run.returncode:
            return ([line for line in run.stderr.splitlines() if line.strip()] or ["pip failed"])[-1].strip()
    done.touch()
    return None
