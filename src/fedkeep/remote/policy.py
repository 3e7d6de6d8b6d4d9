"""Which clients a round asks, how long it waits, and how many must answer: one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from fedkeep.core.errors import ConfigError, RoundError, RunError

MOST_FAILURES = 3
LONGEST_PAUSE = 60.0
"""Seconds, unless a longer one is wanted."""


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """The rules of rounds across machines.

    Attributes:
        deadline: seconds until a round goes on without those that have not answered; infinite: it waits for all. An
            hour is longer than a restart or an update, and short beside a day that one lost site may cost all others.
        minimum: clients that must have taken part for a synchronous round to count; a buffered one takes ``buffer``.
            None: more than half of a cohort, as a mean over fewer is another study's.
        over_selection: asks ``ceil(over_selection * cohort)`` clients and takes the first ``cohort`` answers; at
            least 1.
        mode: ``"synchronous"`` rounds, or ``"buffered"`` asynchrony (FedBuff, Nguyen et al. 2022, algorithm 1): the
            server updates whenever ``buffer`` answers are there, whatever version they were trained from.
        buffer: answers per update (K of FedBuff).
        staleness: the exponent a of the factor (1 + s)^-a on an upload that is s versions old.
        oldest: an upload that is more versions old than this is dropped; None: none is.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    deadline: Annotated[float, Field(gt=0)] = 3600.0
    minimum: Annotated[int, Field(ge=0)] | None = None
    over_selection: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    mode: Literal["synchronous", "buffered"] = "synchronous"
    buffer: Annotated[int, Field(ge=1)] = 10
    staleness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    oldest: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            try:
                TypeAdapter(kind).validate_python(getattr(self, name))
            except ValidationError as error:
                why = error.errors()[0]["msg"].removeprefix("Input ")
                raise ConfigError(
                    "{name} of a round's rules {why}; got {got!r}.",
                    name=name,
                    why=why,
                    got=getattr(self, name),
                ) from error

    def least(self, cohort: int) -> int:
        """Return how many of so many clients must have taken part."""
        return cohort // 2 + 1 if self.minimum is None else self.minimum


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
                "{why} It was tried {failures} times. Mend the method or the model on the devices, and start "
                "the run again in the same way: it goes on at round {round}.",
                why=error,
                failures=self.failures,
                round=round,
            ) from error
        return min(self.pause * 2.0 ** min(self.tries - 1, 20), max(self.pause, LONGEST_PAUSE))
