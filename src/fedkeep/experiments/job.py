"""A long job that a scheduler begins on any machine: ``python -m fedkeep.experiments.job FILE``.

The file is what `places` wrote. A run that was begun before goes on; the exit status is 0 where the job is finished.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.places import compute


def main(file: Path) -> None:
    """Compute the job of a file, as ``places.compute`` does, with as many threads as Slurm gives it."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    compute(file.read_bytes(), f"The job {file.name}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except FedkeepError as error:
        sys.exit(f"Error: {error}")
