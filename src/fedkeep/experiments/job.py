"""A long job that a scheduler begins on any machine: ``python -m fedkeep.experiments.job FILE``.

The file is what `places` wrote. A run that was begun before goes on; the exit status is 0 where the job is finished.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.comparing import Cell
from fedkeep.experiments.places import check_installed
from fedkeep.experiments.reproductions import Piece
from fedkeep.experiments.sweeps.trials import TrialJob

KINDS: dict[str, type[Cell | Piece | TrialJob]] = {kind.__name__: kind for kind in (Cell, Piece, TrialJob)}


def main(file: Path) -> None:
    """Compute the job of a file, as ``compute`` does, with as many threads as Slurm gives it."""
    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", "1")))
    compute(file.read_bytes(), f"The job {file.name}")


def compute(text: bytes, what: str) -> None:
    """Compute a job.

    Args:
        text: JSON, as `places` writes it.
        what: for messages.

    Raises:
        ConfigError: it was written with another fedkeep, Python or torch.
        FedkeepError: the job's own.
    """
    about = json.loads(text)
    check_installed(about.get("installed", {}), what)
    KINDS[about["kind"]].from_plain(about["job"])(alone=False, progress=False)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except FedkeepError as error:
        sys.exit(f"Error: {error}")
