"""From what a device judged to the results of examples that a run keeps, see ``fedkeep.tasks.results``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedkeep.core.params import Params
from fedkeep.engines import Judged
from fedkeep.tasks.results import Examples, Roster, before_task


def examples_of(
    round: int,
    test: Sequence[Judged],
    valid: Sequence[Judged] = (),
    roster: Roster | None = None,
    *,
    classes: bool = False,
) -> Examples | None:
    """Return what was judged, as it is kept; None where the device's policy lets no example's result leave.

    Args:
        round: after which it was judged.
        test, valid: what was judged on either split, one for each task.
        roster: the clients.
        classes: whether labels and predicted classes are kept, for ``metrics.CLASS_METRICS``.
    """
    kept = columns_of(test, classes)
    if kept is None:
        return None
    kinds = {one.task.name: one.task.kind for one in test}
    found = columns_of(valid, classes) or {}
    return Examples(round=round, tensors=kept, kinds=kinds, valid=found, roster=roster)


def columns_of(judged: Sequence[Judged], classes: bool = False) -> Params | None:
    """Return the columns of what was judged; None where there is no example's result.

    Args:
        judged: one for each task.
        classes: as for ``examples_of``.
    """
    tensors = Params()
    for one in judged:
        if not one.examples:
            return None
        before, first = before_task(one.task.name), one.examples[0]
        columns = {"client": first.client.astype(np.int32), "row": first.row.astype(np.int64)}
        kind = one.task.kind
        if kind.kept_label:
            columns["label"] = (first.label > 0).astype(np.uint8)
        if kind.kept_place:
            columns["place"] = places_of(first.row)
        several = classes and kind.keeps_classes
        if several:
            columns["class"] = first.label.astype(np.int32)
        for model, found in zip(one.models, one.examples, strict=True):
            columns |= {
                f"{model}/loss": found.loss.astype(np.float64),
                f"{model}/score": found.score.astype(kind.kept_score),
            }
            if several:
                assert found.predicted is not None  # a simulation tells it
                columns[f"{model}/class"] = found.predicted.astype(np.int32)
        tensors |= {before + name: torch.from_numpy(column) for name, column in columns.items()}
    return tensors


def places_of(rows: np.ndarray) -> np.ndarray:
    """Return the place of each result among those of its example, int32; an example's results are neighbours."""
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    starts = np.repeat(first, np.diff(first, append=len(rows)))
    return (np.arange(len(rows)) - starts).astype(np.int32)


def roster_of(clients: Sequence[int], ids: Sequence[str], trained: np.ndarray) -> Roster:
    """Return clients by index, with their ids and numbers of training examples.

    Args:
        clients: indices in the data.
        ids: of all clients of the data.
        trained: (all clients,).
    """
    chosen = np.sort(np.asarray(clients, np.int32))
    return Roster(chosen, trained[chosen].astype(np.int64), tuple(str(ids[c]) for c in chosen.tolist()))
