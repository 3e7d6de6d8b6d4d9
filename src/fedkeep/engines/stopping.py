"""Early stopping of a phase by the client's own validation loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params, clone
from fedkeep.engines.batches import Stream
from fedkeep.engines.tables.local_rows import Examples, allowed
from fedkeep.methods import EarlyStopping, Phase


def watched(
    data: Examples, valid: np.ndarray | None, phase: Phase, draws: Stream, *, trains: bool
) -> np.ndarray:
    """Return the validation examples that may stop a phase.

    A stop picks values that a federated phase may read. So opted-out examples stop phases on all examples alone: what
    these train no federated phase may read.

    Args:
        data: the data set.
        valid: the client's validation examples in it.
        phase: the phase.
        draws: names the client, for messages.
        trains: whether the phase has examples to train on; without any it is never measured.

    Raises:
        MethodError: there are none.
    """
    if valid is None or not len(valid):
        raise MethodError(
            "{who}: a phase is to stop early by the validation loss, but there is no example in the split 'valid'. "
            "Hold some out (data.split), or set early_stopping=None.",
            who=str(draws),
        )
    rows = allowed(data, valid, phase.examples)
    if trains and not len(rows):
        raise MethodError(
            "{who}: a phase on opted-in examples is to stop early by the validation loss, but no example in the split "
            "'valid' is opted in. Leave the client out, set early_stopping=None, or train what no federated phase "
            "reads with examples='all'.",
            who=str(draws),
            examples=phase.examples,
        )
    return rows


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
