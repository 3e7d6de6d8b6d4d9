"""What a run is worth in one line: the metrics at the epoch that is best on ``valid``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedkeep.core.records import Record, best_round


@dataclass(frozen=True)
class Summary:
    """A run's metrics at its best epoch.

    Attributes:
        metric: the metric that chose the epoch.
        round, epoch: when it was best on ``valid``; the last evaluation where nothing was measured there.
        valid, test: all metrics there, over all clients.
    """

    metric: str
    round: int
    epoch: float
    valid: dict[str, float]
    test: dict[str, float]

    @property
    def value(self) -> float:
        """The test metric; NaN where there is none."""
        return self.test.get(self.metric, math.nan)


def summarize(records: Iterable[Record], metric: str, lower_is_better: bool = False) -> Summary | None:
    """Return the metrics at the round whose ``valid`` is best, the earliest of equals; None if nothing was judged.

    Args:
        records: a run's history.
        metric: e.g. ``accuracy``.
        lower_is_better: as for an error.
    """
    judged = [r for r in records if r.client is None and r.split in ("valid", "test")]
    if not judged:
        return None
    valid = [r for r in judged if r.split == "valid" and r.metric == metric and math.isfinite(r.value)]
    chosen = best_round({r.round: r.value for r in valid}, lower_is_better=lower_is_better)
    best = max((r for r in judged if chosen in (None, r.round)), key=lambda r: r.round)
    found: dict[str, dict[str, float]] = {"valid": {}, "test": {}}
    for r in judged:
        if r.round == best.round:
            found[r.split][r.metric] = r.value
    return Summary(metric, best.round, best.epoch, found["valid"], found["test"])
