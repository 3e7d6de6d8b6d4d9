"""Which clients a round asks, how long it waits, and how many must answer: one record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from fedkeep.core.errors import ConfigError, RoundError, RunError, shown

MOST_FAILURES = 3
LONGEST_PAUSE = 60.0
"""Seconds, unless a longer one is wanted."""


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """The rules of rounds across machines.

    Attributes:
        deadline: seconds until a round goes on without those that have not answered; None: it waits for all.
        minimum: clients that must have taken part for a synchronous round to count; a buffered one takes ``buffer``.
        over_selection: asks ``ceil(over_selection * cohort)`` clients and takes the first ``cohort`` answers; at
            least 1.
        mode: ``"synchronous"`` rounds, or ``"buffered"`` asynchrony (FedBuff, Nguyen et al. 2022, algorithm 1): the
            server updates whenever ``buffer`` answers are there, whatever version they were trained from.
        buffer: answers per update (K of FedBuff).
        staleness: the exponent a of the factor (1 + s)^-a on an upload that is s versions old.
        oldest: an upload that is more versions old than this is dropped; None: none is.
    """

    deadline: float | None = None
    minimum: int = 1
    over_selection: float = 1.0
    mode: Literal["synchronous", "buffered"] = "synchronous"
    buffer: int = 10
    staleness: float = 0.5
    oldest: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, wanted: str, kind: Any, fits: Callable[[Any], bool]) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
                raise ConfigError(f"{name} must be {wanted}; got {shown(value)}.")

        whole, modes = "a whole number of at least", ("synchronous", "buffered")
        check("deadline", "a positive number of seconds, or None", Real | None, lambda v: v is None or v > 0)
        check("minimum", f"{whole} 0", Integral, lambda v: v >= 0)
        check("over_selection", "a number of at least 1", Real, lambda v: 1 <= v < math.inf)
        check("mode", "'synchronous' or 'buffered'", str, lambda v: v in modes)
        check("buffer", f"{whole} 1", Integral, lambda v: v >= 1)
        check("staleness", "a number of at least 0", Real, lambda v: 0 <= v < math.inf)
        check("oldest", f"{whole} 0, or None", Integral | None, lambda v: v is None or v >= 0)


class Retries:
    """When a round that did not count is tried again.

    Args:
        pause: seconds before the first time; it doubles each time.
    """

    def __init__(self, pause: float) -> None:
        self.pause, self.round, self.tries, self.failures = pause, -1, 0, 0

    def after(self, error: RoundError, round: int) -> float:
        """Return the seconds until a round is tried again.

        Raises:
            RunError: functions of the method or the model have failed in it again and again.
        """
        if round != self.round:
            self.round, self.tries, self.failures = round, 0, 0
        self.tries += 1
        self.failures = self.failures + 1 if error.failed else 0
        if self.failures >= MOST_FAILURES:
            raise RunError(
                f"{error} It was tried {self.failures} times. Mend the method or the model on the devices, and start "
                f"the run again in the same way: it goes on at round {round}."
            ) from error
        return min(self.pause * 2.0 ** min(self.tries - 1, 20), max(self.pause, LONGEST_PAUSE))
