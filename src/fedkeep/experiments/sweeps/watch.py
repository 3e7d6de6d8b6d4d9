"""Ends the runs of trials that fall behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedkeep.core.records import Record
from fedkeep.experiments.trackers import EndRun, Facts
from fedkeep.report.wording import lower_is_better

if TYPE_CHECKING:
    import optuna


class Watch:
    """Tells a trial of the best value on ``valid`` so far, and ends a run whose trial falls behind.

    It counts the run's finished rounds, ``rounds``, also of one that breaks down.

    What is told after each evaluation is the mean of the best values with the seeds so far.

    Args:
        trial: of Optuna.
        metric: on ``valid``.
        before: the best values with earlier seeds.
        steps: how often it was evaluated with these.
    """

    name = "sweep"

    def __init__(
        self, trial: optuna.Trial, metric: str, before: Sequence[float] = (), steps: int = 0
    ) -> None:
        self.trial, self.metric, self.before, self.first = trial, metric, tuple(before), steps
        self.sign = -1.0 if lower_is_better(metric) else 1.0
        self.values: dict[int, float] = {}  # by round
        self.ended, self.rounds = False, 0
        self.known = set(trial.storage.get_trial(trial._trial_id).intermediate_values)

    @property
    def steps(self) -> int:
        """How often the trial was evaluated."""
        return self.first + len(self.values)

    def started(self, facts: Facts) -> None:
        """Take note of what a run that goes on has measured."""
        self.recorded(facts.history)

    def recorded(self, records: Sequence[Record]) -> None:
        """Take note of a round.

        Raises:
            EndRun: the trial falls behind.
        """
        self.rounds = max([self.rounds, *(r.round for r in records)])
        new = {
            r.round: r.value
            for r in records
            if (r.split, r.metric, r.client) == ("valid", self.metric, None) and r.round not in self.values
        }
        for round in sorted(new):
            self.values[round] = new[round]
            finite = [self.sign * v for v in self.values.values() if math.isfinite(v)]
            if finite and self.steps - 1 not in self.known:
                seeds = [*self.before, self.sign * max(finite)]
                self.trial.report(math.fsum(seeds) / len(seeds), self.steps - 1)
                self.known.add(self.steps - 1)
        if new and self.steps - 1 == max(self.known, default=-1) and self.trial.should_prune():
            self.ended = True
            raise EndRun

    def finished(self, how: str) -> None:
        """Do nothing: who runs the trial tells Optuna of its end."""
