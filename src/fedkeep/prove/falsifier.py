"""The falsifier: other values of what must stay, with the channels replayed, must leave what was proved as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeep.audit.bench import same
from fedkeep.audit.canaries import kept_rows, opted_out, planted, replaced
from fedkeep.core.errors import FedkeepError
from fedkeep.data import FederatedData
from fedkeep.prove.rounds import Channels, Items, Rounds, Taken, left, trained

DRAWS = ((1, 1.0), (2, 1.0), (3, 100.0))
"""Seeds and sizes of other private values."""
AGREES, CHANGES, OPT_OUT_CHANGES = "agrees", "it changes", "it changes with opted-out examples"


def falsified(made: Rounds, seed: int) -> dict[str, str]:
    """Return for each thing that leaves whether it changed; what could not be tried is not there.

    What clients keep is changed while federated gradients are replayed; then values of opted-out examples, and their
    number, while nothing is replayed.
    """
    found: dict[str, str] = {}
    job, trainable = made.job, made.job.net.trainable()
    for taken in made.taken:
        for draw, scale in DRAWS if taken.kept else ():
            other = replace(taken, kept=planted(taken.kept, taken.kept, trainable, seed + draw, scale))
            _compare(found, taken, _again(made, other, replayed=True), CHANGES)
    rows = opted_out(job.data)
    if len(rows):
        fewer = kept_rows(job.data, np.setdiff1d(np.arange(job.data.examples), rows[::2]))
        for data in (replaced(job.data, rows, seed + 1), fewer):
            for taken in made.taken:
                _compare(found, taken, _again(made, taken, data), OPT_OUT_CHANGES)
    return found


def _again(made: Rounds, taken: Taken, data: FederatedData | None = None, *, replayed: bool = False) -> Items:
    """Return what leaves when a client does the same again; nothing: training broke down."""
    job = made.job if data is None else replace(made.job, data=data)
    tap = Channels(None, replay=iter(taken.gradients) if replayed else None)
    try:
        result = trained(job, taken, tap)
    except (FedkeepError, RuntimeError):
        return {}
    return {} if result.fault is not None else left(result)


def _compare(found: dict[str, str], taken: Taken, again: Items, words: str) -> None:
    for label, value in taken.left.items() if again else ():
        if label == "status":
            continue
        if not (label in again and same(value, again[label])):
            found[label] = words
        found.setdefault(label, AGREES)
