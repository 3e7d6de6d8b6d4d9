"""Early stopping of a phase by the client's own validation loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedkeep.core.params import Params, clone
from fedkeep.methods import EarlyStopping


class Stopper:
    """Early stopping: measures the validation loss after some passes and keeps the best values.

    Args:
        rule: when to measure and when to stop.
        measure: returns the loss.
        params: the values to keep, changed in place by training.
    """

    def __init__(self, rule: EarlyStopping, measure: Callable[[], float], params: Params) -> None:
        self.rule, self.measure, self.params = rule, measure, params
        self.best, self.epoch, self.waited = float("inf"), 0, 0
        self.kept: Params = {}

    def done(self, epoch: int) -> bool:
        """Tell, after a pass (counted from 1), whether training should stop."""
        if (epoch - 1) % self.rule.every:
            return False
        loss = self.measure()
        if not self.kept or loss < self.best - self.rule.min_improvement:
            self.best = loss if np.isfinite(loss) else float("inf")
            self.epoch, self.waited = epoch, 0
            self.kept = clone(self.params)
        else:
            self.waited += 1
        return self.waited >= self.rule.patience

    def restore(self) -> int:
        """Put the best values back; return the pass that they are from (0: none was measured)."""
        with torch.no_grad():
            for name, value in self.kept.items():
                self.params[name].copy_(value)
        return self.epoch
