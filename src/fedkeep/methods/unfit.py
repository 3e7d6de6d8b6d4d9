"""What a method's uploads must not go through: the method's own word for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def unfit(*, clipping: str = "", noise: str = "") -> Callable[[F], F]:
    """Say of a server's ``update`` why a round's result must not be made of clipped uploads, or have noise.

    It stands before the function or class. Differential privacy clips and adds noise; secure sums clip.

    Args:
        clipping: why not clipped ones, e.g. as clients keep what they sent unclipped; empty: they may be.
        noise: why no noise; empty: there may be some.
    """

    def declare(function: F) -> F:
        function.unfit_for_clipping, function.unfit_for_noise = clipping, noise  # type: ignore[attr-defined]
        return function

    return declare


def why_unfit(update: Callable[..., Any], what: str) -> str:
    """Return why an update is unfit for ``clipping`` or ``noise``; empty: it is not."""
    return str(getattr(update, f"unfit_for_{what}", ""))
