"""What a method says of what leaves: what is revealed on purpose, and what uploads must not go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fedkeep.methods.terms import Term

if TYPE_CHECKING:
    from fedkeep.methods.base import Method

F = TypeVar("F", bound=Callable[..., Any])


def reveals(*patterns: str) -> Callable[[F], F]:
    """Say that what leaves under some names is made of what the client keeps, on purpose.

    It stands before a function or class that is a client's ``start`` or ``finish``, or a term of a phase's loss; a link
    of the upload chain has the attribute ``reveals``. Nothing is checked while a method runs; ``fedkeep audit`` calls
    what nobody declares a leak.

    Args:
        patterns: ``upload/NAME``, names of federated parameters; ``sent/NAME``, names of ``Client.sends``; or ``loss``,
            the mean training loss that a client tells.
    """

    def declare(function: F) -> F:
        function.reveals = patterns  # type: ignore[attr-defined]
        return function

    return declare


def revealed(method: Method) -> tuple[str, ...]:
    """Return the patterns that a method's hooks, its links and the terms of its phases declare."""
    losses = [phase.loss for phase in method.client.phases]
    parts = [method.client.start, method.client.finish, *method.upload, *losses]
    return tuple(dict.fromkeys(pattern for part in parts for pattern in _declared(part)))


def _declared(part: Any) -> Iterator[str]:
    if isinstance(part, partial):
        yield from _declared(part.func)
    elif isinstance(part, tuple):  # the terms of a sum
        for each in part:
            yield from _declared(each)
    else:
        yield from getattr(part, "reveals", ())
        if isinstance(part, Term):
            yield from _declared(tuple(v for v in vars(part).values() if isinstance(v, Term | tuple)))


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
