"""The task ``multi_output``: several numbers for each example, in a row; each of them is a result.

Where labels are standardised, errors are counted in standard deviations of each output, since outputs have units of their
own; predictions are in these units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.tasks.kind import Array, Baseline, Counting
from fedkeep.tasks.regression import REGRESSION


def _check_width(label: Array, columns: Mapping[str, Any], classes: int | None) -> None:
    if classes is not None and classes != label.shape[1]:
        raise DataError(
            "Wanted {wanted} numbers for each example, as meta['classes'] says; got {got}.",
            wanted=classes,
            got=label.shape[1],
        )


def _width(label: Array) -> int:
    return int(label.shape[1])


def _mean_labels(known: Baseline) -> dict[str, Array]:
    """Return the error of each client's mean of an output, towards that of all clients."""
    total = np.bincount(known.owner, known.weight, known.clients)
    sums = np.stack([np.bincount(known.owner, known.weight * own, known.clients) for own in known.label.T], 1)
    everywhere = known.label.mean(0) if len(known.label) else 0.0
    mean = ((sums + everywhere) / (total + 1)[:, None])[known.asked]
    assert known.place is not None
    error = mean[np.arange(len(mean)), known.place] - known.true
    return {"loss": error**2, "score": error}


MULTI_OUTPUT = replace(
    REGRESSION,
    name="multi_output",
    axes=2,
    in_deviations=True,
    unlike_classes="several numbers for each example",
    size=_width,
    check_labels=_check_width,
    kept_place=True,
    counting=Counting(name="each user's mean labels", found=_mean_labels),
)
"""Several numbers for each example."""
