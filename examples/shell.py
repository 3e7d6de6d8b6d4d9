"""Commands of fedkeep, as one types them in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def fedkeep(folder: Path, words: str) -> str:
    """Run ``fedkeep WORDS`` in a folder, whose modules are found, and return what it prints."""
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run(
        [sys.executable, "-m", "fedkeep", *words.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(f"fedkeep {words}:\n{ran.stdout}{ran.stderr}")
    return ran.stdout
