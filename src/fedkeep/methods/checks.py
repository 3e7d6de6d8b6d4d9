"""Checks of what methods are given: every message says what was wanted and what was got."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeep.core.errors import MethodError


def check_choice(name: str, given: object, known: Sequence[str]) -> None:
    """Raise MethodError unless an option is one of those that are known."""
    if given not in known:
        *others, last = map(repr, known)
        raise MethodError(f"{name} must be {', '.join(others)} or {last}; got {given!r}.")


def check_least(least: int, **given: float | None) -> None:
    """Raise MethodError unless every number is at least ``least``; None stands for no number."""
    if not all(value is None or value >= least for value in given.values()):
        raise MethodError(f"{' and '.join(given)} must be at least {least}; got {_values(given)}.")


def check_positive(**given: float | None) -> None:
    """Raise MethodError unless every number is positive; None stands for no number."""
    if not all(value is None or value > 0 for value in given.values()):
        raise MethodError(f"{' and '.join(given)} must be positive; got {_values(given)}.")


def _values(given: dict[str, float | None]) -> str:
    return " and ".join(map(str, given.values()))
