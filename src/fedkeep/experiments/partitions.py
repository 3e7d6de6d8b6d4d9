"""What a run keeps of how images were divided among its clients: numbers for reports, and which image is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.core.files import write_tensors
from fedkeep.data import FederatedData, class_counts

FILE = "partition.safetensors"
MOST = 20_000
"""Numbers of clients times classes above which no plot shows them."""


def partition_counts(data: FederatedData) -> dict[str, Any] | None:
    """Return how many training examples of each class each client has, for reports.

    None where nothing was divided, or where it is more than ``MOST`` numbers.
    """
    if "partition" not in data.meta or len(data) * int(data.meta["classes"]) > MOST:
        return None
    opted = data.columns.get("opted_in")
    inside = None if opted is None else np.asarray(opted, bool)
    return {
        "clients": [str(name) for name in data.ids],
        "classes": [str(c) for c in data.meta.get("label_names") or range(int(data.meta["classes"]))],
        "counts": class_counts(data, "train").tolist(),
        "opted_out": []
        if inside is None
        else [c for c in range(len(data)) if not inside[data.split_rows("train", [c])].any()],
    }


def write_partition(folder: Path, data: FederatedData) -> None:
    """Write, where images were divided, which image of its set each row is and where clients' rows and splits lie.

    The file holds ``image`` (rows,), ``offsets`` (clients + 1,) and ``bounds`` (clients, 4), int64; one that is there
    stays.
    """
    path = folder / FILE
    if "partition" not in data.meta or "_image" not in data.columns or path.exists():
        return
    arrays = {"image": data.columns["_image"], "offsets": data.offsets, "bounds": data.bounds}
    write_tensors(path, {name: torch.from_numpy(np.array(array, np.int64)) for name, array in arrays.items()})
