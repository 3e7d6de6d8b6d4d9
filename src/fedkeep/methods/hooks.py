"""What a method's functions may do: draw no random numbers, write into nothing that they are given, give what fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.params import Params, State, misfit, nonfinite
from fedkeep.core.seeds import without_draws
from fedkeep.split.halves import Frozen

T = TypeVar("T")
UPLOAD = "upload/"
"""Under which the upload chain's states stand among a method's: ``upload/0/residual`` is of the first link."""


def called(
    who: str,
    hook: Callable[[], T],
    *given: Mapping[str, Tensor],
    device: str = "cpu",
    kind: type[Any] = object,
) -> T:
    """Return what a method's function gives. What it writes through ``.data`` or ``.numpy()`` is not noticed.

    Args:
        who: the function, for messages: "finish of 'furl'".
        hook: calls it.
        given: values that it is given, which others hold too.
        device: where it computes.
        kind: of what it is to give.

    Raises:
        MethodError: it drew random numbers, wrote into what it was given, or gave something of another kind.
    """
    watched = Frozen(
        {f"{number}/{name}": v for number, values in enumerate(given) for name, v in values.items()}
    )
    found = without_draws(who, hook, device)
    if changed := watched.changed():
        raise MethodError(
            f"The {who} wrote into {changed[0].partition('/')[2]!r}, which others read too. Make a new tensor: "
            f"v * 0.5, not v.mul_(0.5)."
        )
    if not isinstance(found, kind):
        raise MethodError(f"The {who} gives {type(found).__name__}; wanted {kind.__name__}.")
    return found


def as_state(who: str, make: Callable[[], Any]) -> State:
    """Return the state that a method's function begins with: a tensor by each name.

    Raises:
        MethodError: it drew random numbers, or gave something else.
    """
    values = called(who, make, kind=Mapping)
    check_tensors(who, values)
    for name in values:
        if not isinstance(name, str) or not name or name.startswith(UPLOAD):
            raise MethodError(
                f"The {who} gives {name!r} as a name; wanted a text that does not begin with {UPLOAD!r}, which belongs "
                f"to the upload chain."
            )
    return dict(values)


def check_tensors(who: str, values: Mapping[str, Any]) -> None:
    """Raise MethodError at the first value that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise MethodError(
                f"The {who} gives {name!r} as {type(value).__name__}; wanted a tensor, such as torch.tensor(1.0)."
            )


def check_hook(who: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise MethodError unless a function gives known names of the same shapes and types."""
    check_tensors(who, given)
    for name, value in given.items():
        if name not in wanted:
            known = sorted(wanted)
            raise MethodError(f"The {who} gives {name!r}, which is not known there; known are {known}.")
        want = wanted[name]
        if value.shape != want.shape or value.dtype != want.dtype:
            raise MethodError(
                f"The {who} gives {name!r} as {tuple(value.shape)} {value.dtype}; wanted {tuple(want.shape)} "
                f"{want.dtype}, as it was."
            )


def check_whole(who: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise MethodError unless a function gives all names, of the same shapes and types."""
    check_hook(who, wanted, given)
    if fault := misfit(wanted, given):
        raise MethodError(f"The {who} does not give all: {fault}.")


def check_numbers(who: str, values: Params, known: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError where a function gives a NaN or an infinity; what is ``known`` as it is was looked at."""
    name = nonfinite({n: v for n, v in values.items() if known.get(n) is not v})
    if name is not None:
        raise NonFiniteError(f"The {who} gives {name!r}, which holds a NaN or an infinity.")
