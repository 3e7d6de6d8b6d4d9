"""Which clients a round asks, how long it waits, and how many must answer: one record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedkeep.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """The rules of rounds across machines.

    Attributes:
        deadline: seconds until a round goes on without those that have not answered; None: it waits for all.
        minimum: clients that must have taken part for a round to count.
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
        def check(name: str, wanted: str, fine: bool) -> None:
            if not fine:
                raise ConfigError(f"{name} must be {wanted}; got {getattr(self, name)!r}.")

        check("deadline", "a positive number of seconds, or None", self.deadline is None or self.deadline > 0)
        check("minimum", "at least 0", self.minimum >= 0)
        check("over_selection", "at least 1", 1 <= self.over_selection < math.inf)
        check("mode", "'synchronous' or 'buffered'", self.mode in ("synchronous", "buffered"))
        check("buffer", "at least 1", self.buffer >= 1)
        check("staleness", "at least 0", 0 <= self.staleness < math.inf)
        check("oldest", "at least 0, or None", self.oldest is None or self.oldest >= 0)
