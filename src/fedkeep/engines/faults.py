"""What a round does about clients that break down, send something malformed, or are never heard of again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeep.core.errors import (
    DroppedError,
    FailedError,
    LostError,
    NonFiniteError,
    RoundError,
    UploadError,
    check_choice,
    check_range,
    refused_upload,
)

Policy = Literal["stop", "skip"]
Fault = NonFiniteError | UploadError | LostError


def say_nothing(client: str, fault: Fault) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a round does about each kind of fault, and which uploads it takes at all.

    Attributes:
        broken: a client's training became NaN: ``"stop"`` the run with an error, or ``"skip"`` the client's round.
        malformed: a client's upload has wrong names, shapes, types, values or weight.
        lost: a client did not answer.
        minimum: clients that must have taken part for the round to count.
        heaviest: the largest weight of an upload, in examples: a client that claims more would outweigh all others.
        tell: hears of every client whose upload is found to be faulty when it is looked at.
    """

    broken: Policy = "stop"
    malformed: Policy = "stop"
    lost: Policy = "skip"
    minimum: int = 1
    heaviest: float = 1e9
    tell: Callable[[str, Fault], None] = say_nothing

    def __post_init__(self) -> None:
        for name in ("broken", "malformed", "lost"):
            check_choice(f"{name} must be", getattr(self, name), ("stop", "skip"))
        check_range("[0, inf]", minimum=self.minimum)
        check_range("(0, inf]", heaviest=self.heaviest)

    def policy(self, fault: Fault) -> Policy:
        """Return what to do about a fault."""
        if isinstance(fault, LostError):
            return self.lost
        return self.broken if isinstance(fault, NonFiniteError) else self.malformed

    def check_weight(self, weight: float, client: str) -> None:
        """Raise UploadError if an upload weighs more than any client can."""
        if weight > self.heaviest:
            raise refused_upload(
                client,
                "its weight is {weight:g}; at most {heaviest:g} examples are taken.",
                weight=weight,
                heaviest=self.heaviest,
            )

    def check_enough(self, round: int, taken: int, asked: int, faults: Sequence[Fault]) -> None:
        """Raise RoundError if too few clients took part for a round to count."""
        gone = sum(isinstance(fault, DroppedError) for fault in faults)
        wanted = min(self.minimum, asked - gone)
        if taken >= wanted:
            return
        first = f" The first fault: {faults[0]}" if faults else ""
        raise RoundError(
            "Round {round} does not count: {taken} of {asked} clients took part, and at least {wanted} must. "
            "Nothing was lost: the last finished round is kept.{first}",
            round=round,
            taken=taken,
            asked=asked,
            wanted=wanted,
            first=first,
            failed=bool(faults) and all(isinstance(fault, FailedError) for fault in faults),
        )
