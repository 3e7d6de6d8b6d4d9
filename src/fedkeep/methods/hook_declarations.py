"""What a method says of its hooks: what is revealed on purpose, what uploads must not go through, whom `send` serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from fedkeep.methods.terms import Term

F = TypeVar("F", bound=Callable[..., Any])


GRADIENTS = "gradients"
"""Stands among sources for what reaches a thing through steps of federated parameters alone, and is no copy."""


@dataclass(frozen=True)
class Reveal:
    """A declaration: what leaves under some names is made of some sources, on purpose.

    Attributes:
        leaves: a pattern: ``upload/NAME``, names of federated parameters; ``sent/NAME``, names of ``Client.sends``; or
            ``loss``, the mean training loss that a client tells.
        of: patterns of its sources: ``private NAME``, a private parameter or buffer; ``kept NAME``, the client's state;
            ``examples``, its training examples; or ``gradients``.
    """

    leaves: str
    of: tuple[str, ...]

    def covers(
        self, label: str, sources: Iterable[str], *, copied: bool = False, direct: bool = True
    ) -> bool:
        """Tell whether it declares that something is made of all these sources.

        Args:
            label: what leaves.
            sources: of what it tells, as in ``of``; none: nobody knows, and nothing is declared.
            copied: whether it is a copy.
            direct: whether it tells of them too where no federated parameter is moved.
        """
        known = list(sources)
        whole = GRADIENTS in self.of and not copied and not direct
        each = whole or all(any(fnmatchcase(one, pattern) for pattern in self.of) for one in known)
        return bool(known) and fnmatchcase(label, self.leaves) and each


def reveals(*leaves: str, of: tuple[str, ...]) -> Callable[[F], F]:
    """Say that what leaves under some names is made of some of what the client has, on purpose.

    It stands before a function or class that is a client's ``start`` or ``finish``, or a term of a phase's loss; a link
    of the upload chain has the attribute ``reveals``, patterns of what is made of its own state. Nothing is checked while a method runs; ``fedkeep audit`` calls
    what nobody declares a leak, and a copy of anything but the sources that are named.

    Args:
        leaves, of: see ``Reveal``.
    """

    def declare(function: F) -> F:
        function.reveals = tuple(Reveal(pattern, of) for pattern in leaves)  # type: ignore[attr-defined]
        return function

    return declare


class Declaring(Protocol):
    """What of a method declares what leaves: its client's hooks and losses, and its links."""

    @property
    def client(self) -> Any:
        """Its client."""

    @property
    def upload(self) -> Any:
        """Its upload chain."""


def revealed(method: Declaring) -> tuple[Reveal, ...]:
    """Return what a method's hooks, its links and the terms of its phases declare."""
    parts = [method.client.start, method.client.finish, *(phase.loss for phase in method.client.phases)]
    found = [one for part in parts for one in _declared(part)]
    for number, link in enumerate(method.upload):
        found += [Reveal(pattern, (f"kept upload/{number}/*",)) for pattern in link.reveals]
    return tuple(dict.fromkeys(found))


def _declared(part: Any) -> Iterator[Reveal]:
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


def sends_to(whom: Literal["all", "members"]) -> Callable[[F], F]:
    """Say of a server's ``send`` whose it is; it stands before the function or class.

    Args:
        whom: ``"all"``: everybody gets the same, people who come later too; ``"members"``: each client that trains has a
            part of its own on the server, and nobody else has one. A ``send`` that says neither may give each client
            something else, and is asked for people who come later when there are some.
    """

    def declare(function: F) -> F:
        function.sends_to = whom  # type: ignore[attr-defined]
        return function

    return declare


def sent_to(send: Callable[..., Any] | None) -> str:
    """Return whose a server's ``send`` is, as ``sends_to`` has said it; empty: it was not said."""
    return "all" if send is None else str(getattr(send, "sends_to", ""))
